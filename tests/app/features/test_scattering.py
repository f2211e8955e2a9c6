"""The scattering front against its definition, as loops in space, and the properties it is chosen for."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F

from gredp import GredpError
from gredp.app.features import scattering
from gredp.app.features.scattering import Scattering, mirrored, phi, wavelets
from gredp.app.models.features import Mirrored

FRONT = Scattering()
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64)


# ------------------------------------------------------------------ the oracle: loops in space


def wavelet(height, width, scale, angle):
    """{(row, column): value}: envelope × (wave − constant), wrapped around the grid."""
    envelope, wave = {}, {}
    for y in range(-2 * height, 2 * height):
        for x in range(-2 * width, 2 * width):
            along = x * math.cos(angle) + y * math.sin(angle)
            across = -x * math.sin(angle) + y * math.cos(angle)
            weight = math.exp(-(along**2 + (across / 2) ** 2) / (2 * (0.8 * scale) ** 2)) / scale**2
            place = (y % height, x % width)
            envelope[place] = envelope.get(place, 0.0) + weight
            wave[place] = wave.get(place, 0.0) + weight * cmath.exp(0.75j * math.pi / scale * along)
    constant = sum(wave.values()) / sum(envelope.values())
    return torch.tensor(
        [[wave[y, x] - constant * envelope[y, x] for x in range(width)] for y in range(height)],
        dtype=torch.complex128,
    )


def convolved(image, kernel):
    """Periodic convolution by its definition."""
    height, width = image.shape
    out = torch.zeros(height, width, dtype=torch.complex128)
    for y in range(height):
        for x in range(width):
            out += kernel[y, x] * torch.roll(image, (y, x), (0, 1))
    return out


def averaged(u, step, height, width):
    """φ around the middle of every cell of the image, over every `step`-th pixel of the padded one."""
    out = torch.zeros(height // 4, width // 4, dtype=torch.float64)
    for i in range(height // 4):
        for j in range(width // 4):
            total = weights = 0.0
            for y in range(0, u.shape[0], step):
                for x in range(0, u.shape[1], step):
                    far = (y - 4 - (4 * i + 1.5)) ** 2 + (x - 4 - (4 * j + 1.5)) ** 2
                    weight = math.exp(-far / (2 * 1.6**2))
                    total, weights = total + weight * u[y, x].item(), weights + weight
            out[i, j] = total / weights
    return out


def oracle(image):
    """`[h, w]` → `[81, h/4, w/4]`, orders 0, 1, 2."""
    h, w = image.shape
    x = F.pad(image[None, None], (4, 4 + w % 2, 4, 4 + h % 2), "reflect")[0, 0]
    bank = [[wavelet(*x.shape, 2**j, math.pi * k / 8) for k in range(8)] for j in range(2)]
    spectra = [torch.fft.fft2(kernel) for row in bank for kernel in row]
    gain = max(
        (
            sum(s[y, x_].abs() ** 2 + s[-y, -x_].abs() ** 2 for s in spectra)
            / 2
            / (1 - gauss(x.shape, y, x_) ** 2)
        ).item()
        for y in range(x.shape[0])
        for x_ in range(x.shape[1])
        if (y, x_) != (0, 0)
    )
    bank = [[kernel / math.sqrt(gain) for kernel in row] for row in bank]
    fine = [convolved(x, kernel).abs() for kernel in bank[0]]
    out = [averaged(x, 1, h, w)]
    out += [averaged(u, 1, h, w) for u in fine]
    out += [averaged(convolved(x, kernel).abs(), 2, h, w) for kernel in bank[1]]
    out += [averaged(convolved(u, kernel).abs(), 2, h, w) for u in fine for kernel in bank[1]]
    return torch.stack([u * g for u, g in zip(out, [1.0] + 16 * [20.0] + 64 * [200.0])])


def gauss(shape, y, x):
    """The spectrum of the window at index (y, x)."""
    frequencies = [min(k, n - k) / n for k, n in zip((y, x), shape)]
    return math.exp(-sum((2 * math.pi * f) ** 2 for f in frequencies) * 1.6**2 / 2)


# ------------------------------------------------------------------ comparison


@pytest.mark.parametrize("size", [(6, 8), (9, 8)])
def test_it_is_the_definition(size):
    image = random(*size)
    got = FRONT(image[None, None])[0]
    assert got.shape == (81, size[0] // 4, size[1] // 4)
    torch.testing.assert_close(got, oracle(image), rtol=1e-9, atol=1e-12)


def test_single_precision_is_close_to_double():
    x = random(4, 3, 32, 32)
    got = FRONT(x.float())
    assert got.shape == (4, 243, 8, 8)
    torch.testing.assert_close(got.double(), FRONT(x), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ properties


def test_colors_and_records_go_their_own_ways():
    x = random(3, 3, 16, 16)
    whole = FRONT(x).view(3, 3, 81, 4, 4)
    for i in range(3):
        for c in range(3):
            torch.testing.assert_close(whole[i, c], FRONT(x[i : i + 1, c : c + 1])[0], rtol=1e-10, atol=1e-13)


def test_order_0_is_linear_and_the_others_do_not_see_a_constant():
    x, y = random(2, 1, 1, 32, 32)
    torch.testing.assert_close(FRONT(2 * x - 3 * y)[:, 0], 2 * FRONT(x)[:, 0] - 3 * FRONT(y)[:, 0])
    flat = FRONT(torch.full((1, 1, 32, 32), 0.7, dtype=torch.float64))[0]
    torch.testing.assert_close(flat[0], torch.full((8, 8), 0.7, dtype=torch.float64))
    assert flat[1:].abs().max() < 1e-9
    torch.testing.assert_close(FRONT(x + 5)[:, 1:], FRONT(x)[:, 1:])
    torch.testing.assert_close(FRONT(-3 * x)[:, 1:], 3 * FRONT(x)[:, 1:])


def test_filters_share_out_the_energy_and_never_more_than_there_is():
    """|φ̂|² + Σ|ψ̂|² ≤ 1, reached: then wavelets and moduli enlarge no distance."""
    shares = wavelets(40, 36).abs().square().sum((0, 1))
    mirrored = torch.roll(shares.flip(0, 1), (1, 1), (0, 1))
    total = phi(40, 36).square() + (shares + mirrored) / 2
    assert total.flatten()[1:].max().item() == pytest.approx(1, abs=1e-12)
    assert wavelets(40, 36)[..., 0, 0].abs().max() < 1e-12


def test_it_does_not_enlarge_distances():
    x = random(8, 1, 32, 32)
    for y in (random(8, 1, 32, 32), x + 0.01 * random(8, 1, 32, 32), 1 - x):
        padded = F.pad(x - y, (4, 4, 4, 4), "reflect").flatten(1).norm(dim=1)
        gains = torch.tensor([1.0] + 16 * [20.0] + 64 * [200.0])[:, None, None]
        moved = ((FRONT(x) - FRONT(y)) / gains).flatten(1).norm(dim=1)
        assert (moved <= padded).all()


def test_a_small_shift_moves_it_less_than_the_image():
    """Stability: smooth noise shifted by one pixel of 32; changes relative to its own variation."""
    noise = random(16, 1, 40, 40)
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64) / 9
    smooth = F.conv2d(noise, kernel)
    x, y = smooth[..., :32, :32], smooth[..., :32, 1:33]

    def change(a, b):
        spread = (a - a.mean((2, 3), keepdim=True)).norm()
        return ((a - b).norm() / spread).item()

    assert change(FRONT(x), FRONT(y)) < 0.7 * change(x, y)


def test_a_mirrored_image_has_mirrored_features():
    """Angles turn into their mirror images: k → −k. At scale 2 up to the choice of every second pixel."""
    x = random(4, 3, 32, 32)
    whole = Mirrored(243)(FRONT(x))
    average = (FRONT(x) + FRONT(x.flip(-1))) / 2
    average = (average + average.flip(-1)[:, mirrored(243)]) / 2
    assert (whole - average).norm() < 0.05 * average.norm()
    torch.testing.assert_close(Mirrored(243)(whole), whole)
    with pytest.raises(GredpError, match="512 channels are not scattering features"):
        mirrored(512)
    a, b = FRONT(x)[0], FRONT(x.flip(-1))[0].flip(-1)
    turn = [(-k) % 8 for k in range(8)]
    torch.testing.assert_close(b[0], a[0])
    torch.testing.assert_close(b[1:9], a[1:9][turn])
    pairs = a[17:81].view(8, 8, 8, 8)[turn][:, turn].reshape(64, 8, 8)
    for got, want in ((b[9:17], a[9:17][turn]), (b[17:81], pairs)):
        assert (got - want).norm() < 0.05 * want.norm()


def test_images_too_small_are_refused():
    with pytest.raises(GredpError, match="at least 6×6, not 5×5"):
        FRONT(torch.zeros(1, 1, 5, 5))


def test_its_identity_names_its_options():
    options = {"scales": 2, "angles": 8, "padding": "reflect", "gains": [1, 20, 200]}
    assert FRONT.identity() == {"name": "scattering", **options}
    assert (scattering.CHANNELS, scattering.CELL) == (81, 4)
