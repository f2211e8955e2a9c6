"""The ways to a convolution's kernels and norms: each equal to the truth, each chosen where it pays."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import oracles
from gredp.gradient.convolution import Correlation, correlation, grouped, kernels
from gredp.gradient.convolution.cost import Geometry, cheapest_split, prefer_gram
from gredp.gradient.convolution.gram import gram_energy, gram_norm
from gredp.gradient.convolution.grouped import quick_in_groups
from gredp.gradient.factored import Outer
from gredp.gradient.norms import squares
from gredp.gradient.per_sample import Products
from gredp.spectrum import grid_energy

GEOMETRY = ((3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1))


def canceling(records: int, channels: int, outputs: int, size: int, left: float) -> Correlation:
    """Inputs nearly constant over positions against output gradients that nearly sum to zero there."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(records, channels, 1, 1, generator=generator).expand(-1, -1, size, size)
    x = x + left * torch.randn(records, channels, size, size, generator=generator)
    sign = torch.ones(size, size)
    sign[:, ::2] = -1
    g = torch.randn(records, outputs, 1, 1, generator=generator) * sign
    g = g + left * torch.randn(records, outputs, size, size, generator=generator)
    return Correlation(x * 1e4, g * 1e-3, *GEOMETRY)


def exact(correlation: Correlation) -> torch.Tensor:
    double = Correlation(correlation.x.double(), correlation.gradient.double(), *GEOMETRY)
    return double.dense().flatten(1).square().sum(1)


@pytest.mark.parametrize("left", [1.0, 1e-2, 1e-4, 0.0])
@pytest.mark.parametrize(("channels", "outputs", "size"), [(128, 128, 8), (64, 256, 4), (512, 512, 2)])
def test_norm_is_not_short_where_the_sum_cancels(channels, outputs, size, left):
    """A norm that comes out too small lets a record pass the clip; too large by a little is harmless."""
    correlation = canceling(6, channels, outputs, size, left)
    found, truth = gram_norm(correlation), exact(correlation)
    assert (found >= truth * (1 - 2e-6)).all()
    if left == 1.0:  # an ordinary record is not clipped noticeably harder
        assert (found <= truth * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "groups", "pads", "shape"),
    [
        ((3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1), (4, 4)),
        ((3, 2), (2, 1), (1, 2), 2, (0, 1, 2, 2), (5, 6)),
        ((4,), (1,), (1,), 1, (0, 0), (7,)),
        ((2, 1, 3), (1, 1, 1), (1, 1, 1), 1, (0,) * 6, (3, 2, 4)),
        ((1, 1), (1, 1), (1, 1), 1, (0,) * 4, (3, 3)),
    ],
    ids=str,
)
def test_energies_by_frequency_equal_those_of_the_kernels(kernel, stride, dilation, groups, pads, shape):
    torch.manual_seed(0)
    x = torch.randn(3, 4, *shape, dtype=torch.float64)
    padded = [n + a + b for n, a, b in zip(shape, pads[-2::-2], pads[::-2])]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(padded, dilation, kernel, stride)]
    g = torch.randn(3, 6, *out, dtype=torch.float64)
    correlation = Correlation(x, g, kernel, stride, dilation, groups, pads)
    truth = grid_energy(correlation.dense(), len(kernel))
    torch.testing.assert_close(gram_energy(correlation), truth, rtol=1e-9, atol=1e-9)
    total = truth.flatten(1).sum(1)
    torch.testing.assert_close(gram_norm(correlation), total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("left", [1.0, 1e-3])
def test_no_frequency_falls_short_where_the_sums_cancel(left):
    correlation = canceling(6, 128, 128, 8, left)
    truth = grid_energy(
        Correlation(correlation.x.double(), correlation.gradient.double(), *GEOMETRY).dense(), 2
    )
    found = gram_energy(correlation)
    assert (found >= truth * (1 - 2e-6)).all()
    if left == 1.0:
        assert (found <= truth * (1 + 2e-3)).all()


def square(kernel: int, channels: int, outputs: int, size: int, out: int) -> Geometry:
    pads = out + kernel - 1 - size
    return Geometry(channels, outputs, ((kernel, 1, size),) * 2, (out, out), (size + pads) ** 2)


def test_small_maps_with_large_kernels_take_the_gram_path():
    assert prefer_gram(square(3, 128, 128, 8, 8))
    assert prefer_gram(square(3, 128, 128, 8, 8), spectral=True)
    assert prefer_gram(square(3, 512, 512, 3, 3))
    assert not prefer_gram(square(3, 32, 32, 32, 32))
    assert not prefer_gram(square(3, 64, 64, 16, 16), spectral=True)
    assert not prefer_gram(square(5, 1, 6, 28, 28))


def test_offsets_shift_the_side_that_is_cheaper_to_copy():
    assert cheapest_split(square(3, 3, 16, 32, 32)) == (False, False)
    assert sum(cheapest_split(square(3, 16, 16, 32, 32))) == 1
    assert cheapest_split(square(3, 64, 4, 32, 32)) == (True, True)
    strided = Geometry(16, 16, ((3, 2, 32),) * 2, (16, 16), 34**2)
    assert cheapest_split(strided) == (False, False)  # κ_δ = Σ g_{p−δ} x_p needs a stride of 1


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "groups", "pads", "shape", "mode"),
    [
        ((3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1), (4, 5), "constant"),
        ((3, 2), (2, 1), (1, 2), 2, (0, 1, 2, 2), (5, 6), "constant"),
        ((2, 3), (1, 1), (2, 1), 2, (3, 0, 1, 4), (5, 4), "constant"),
        ((3, 3), (1, 1), (1, 1), 1, (1, 1, 2, 1), (4, 5), "reflect"),
        ((3, 3), (1, 1), (1, 1), 2, (0, 0, 0, 0), (3, 4), "constant"),
        ((5, 5), (1, 1), (1, 1), 1, (4, 4, 4, 4), (2, 1), "constant"),
        ((3,), (3,), (2,), 1, (2, 2), (8,), "constant"),
        ((2, 1, 3), (1, 1, 1), (1, 1, 1), 1, (0, 1, 0, 0, 1, 1), (3, 2, 4), "constant"),
        ((2, 2, 3), (1, 1, 2), (1, 2, 1), 2, (1, 0, 2, 1, 0, 1), (3, 4, 5), "constant"),
        ((2, 3), (3, 3), (1, 1), 1, (0,) * 4, (7, 9), "constant"),  # positions that no window reaches
        ((2, 2), (2, 2), (1, 1), 1, (1,) * 4, (4, 6), "reflect"),
        ((1, 1), (2, 2), (1, 1), 1, (0,) * 4, (3, 4), "constant"),
        ((1, 1), (1, 1), (1, 1), 1, (1,) * 4, (3, 4), "constant"),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_split_of_the_offsets_gives_the_kernels(
    kernel, stride, dilation, groups, pads, shape, mode, channels_last, monkeypatch
):
    torch.manual_seed(0)
    x = torch.randn(5, 4, *shape, dtype=torch.float64)
    padded = F.pad(x, pads, mode=mode)
    out = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(padded.shape[2:], dilation, kernel, stride)]
    g = torch.randn(5, 6, *out, dtype=torch.float64)
    weight = torch.zeros(6, 4 // groups, *kernel, dtype=torch.float64, requires_grad=True)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]

    def gradient(i: int) -> torch.Tensor:
        y = convolve(padded[i : i + 1], weight, None, stride, 0, dilation, groups)
        return torch.autograd.grad(y, weight, g[i : i + 1])[0]

    truth = torch.stack([gradient(i) for i in range(5)])
    if channels_last:
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    for split in product(*[(False, True) if s == 1 else (False,) for s in stride]):
        for chunk in (1, 1 << 20):  # one record at a time, and all at once
            monkeypatch.setattr(kernels, "CHUNK", chunk)
            monkeypatch.setattr(correlation, "cheapest_split", lambda geometry, split=split: split)
            found = Correlation(x, g, kernel, stride, dilation, groups, pads, mode)._materialized()
            torch.testing.assert_close(found.dense(), truth, rtol=1e-9, atol=1e-9)
            energies = oracles.grid_energy(truth, len(kernel))
            torch.testing.assert_close(found.grid_energy(), energies, rtol=1e-9, atol=1e-9)
            factors = torch.arange(5.0, dtype=torch.float64)
            torch.testing.assert_close(found.weighted_sum(factors), torch.tensordot(factors, truth, 1))


def test_layers_of_one_shape_may_lie_in_memory_in_different_ways():
    """Buffers are reused by the next layer of the same shape, but not by one that is laid out otherwise."""
    generator, products = torch.Generator().manual_seed(5), Products()
    x, g = (torch.randn(6, c, 12, 12, generator=generator, dtype=torch.float64) for c in (4, 8))
    formats = (torch.contiguous_format, torch.channels_last)
    for here, there in product(formats, formats):
        maps = x.contiguous(memory_format=here), g.contiguous(memory_format=there)
        gradient = Correlation(*maps, (3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1))
        torch.testing.assert_close(gradient.compact(False, products).dense(), gradient.dense())


@pytest.mark.parametrize("views", [1, 3])
def test_of_rounded_products_the_kept_ones_are_measured_and_summed(views):
    """bf16: norm, energies and sum are of one and the same numbers, which are near the exact ones."""
    generator = torch.Generator().manual_seed(4)
    x, g = (torch.randn(6 * views, c, 12, 12, generator=generator) for c in (4, 8))
    exact = Correlation(x, g, (3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1), views=views)
    sequence = Outer(*(torch.randn(6, 40, n, generator=generator) for n in (16, 24)))
    for gradient in (exact, sequence):
        for spectral in (False, True):
            kept = gradient.compact(spectral, Products(rounded=True))
            values = kept.dense()
            error = (values - gradient.dense()).flatten(1).norm(dim=1) / values.flatten(1).norm(dim=1)
            assert error.min() > 1e-4
            assert error.max() < 1e-2
            torch.testing.assert_close(kept.squared_norm(), squares(values), rtol=1e-6, atol=0)
            energies = grid_energy(values.double(), gradient.grid_axes)
            torch.testing.assert_close(kept.grid_energy(), energies, rtol=1e-4, atol=1e-6)
            for record, one in enumerate(torch.eye(6)):
                assert torch.equal(kept.weighted_sum(one), values[record])
    double = Correlation(x.double(), g.double(), (3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1), views=views)
    assert torch.equal(double.compact(False, Products(rounded=True)).dense(), double.compact(False).dense())


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "groups"),
    [
        ((3, 3), (1, 1), (1, 1, 1, 1), 1),
        ((2, 3), (2, 1), (1, 1, 0, 0), 2),
        ((3, 1), (2, 3), (0, 0, 2, 2), 1),  # inputs at the far end that no window reaches
    ],
    ids=str,
)
def test_records_side_by_side_as_groups_give_the_kernels(
    kernel, stride, pads, groups, channels_last, views, monkeypatch
):
    torch.manual_seed(0)
    x = torch.randn(5 * views, 4, 6, 7, dtype=torch.float64)
    weight = torch.zeros(6, 4 // groups, *kernel, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x, weight, None, stride, pads[::-2], 1, groups)
    g = torch.randn_like(y)

    def gradient(record: slice) -> torch.Tensor:
        y = F.conv2d(x[record], weight, None, stride, pads[::-2], 1, groups)
        return torch.autograd.grad(y, weight, g[record])[0]

    truth = torch.stack([gradient(slice(i, i + views)) for i in range(0, len(x), views)])
    if channels_last:
        x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
    monkeypatch.setattr(correlation, "quick_in_groups", lambda *_: True)
    energies, factors = oracles.grid_energy(truth, 2), torch.arange(5.0, dtype=torch.float64)
    for chunk in (1, 1 << 20):  # one record at a time, and all at once
        monkeypatch.setattr(grouped, "CHUNK", chunk)
        maps = Correlation(x, g, kernel, stride, (1, 1), groups, pads, views=views)
        torch.testing.assert_close(maps.dense(), truth, rtol=1e-9, atol=1e-9)
        kept, spectral = maps._materialized(), maps._materialized(spectral=True)
        norms = truth.flatten(1).square().sum(1)
        torch.testing.assert_close(kept.squared_norm(), norms, rtol=1e-9, atol=0)
        torch.testing.assert_close(spectral.grid_energy(), energies, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kept.weighted_sum(factors), torch.tensordot(factors, truth, 1))
        one = kept.zero_unless(torch.tensor([False, True, False, False, False]))
        torch.testing.assert_close(one.dense()[1], truth[1])


def test_groups_are_taken_where_they_are_quick(monkeypatch):
    """In single precision on a processor with AVX-512, with channels that fill its registers."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    x, g = torch.randn(4, 16, 8, 8), torch.randn(4, 32, 8, 8)
    assert quick_in_groups(Correlation(x, g, *GEOMETRY)) == torch.backends.mkldnn.is_available()
    mirrored = Correlation(x, g, *GEOMETRY, "reflect")
    for other in (
        Correlation(x.double(), g.double(), *GEOMETRY),
        Correlation(x.bfloat16(), g.bfloat16(), *GEOMETRY),
        Correlation(x[:, :3], g, *GEOMETRY),
        Correlation(x, g[:, :24], *GEOMETRY),
        Correlation(x, g, (3, 3), (1, 1), (1, 1), 2, (1, 1, 1, 1)),  # 8 channels in each of its groups
        Correlation(x, g, (1, 1), (1, 1), (1, 1), 1, (0,) * 4),
        Correlation(x, g, (3, 3), (1, 1), (2, 2), 1, (2,) * 4),
        Correlation(x, g, (2, 2), (1, 1), (1, 1), 1, (0, 1, 0, 1)),
        Correlation(x[:0], g[:0], *GEOMETRY),
        Correlation(x.to("meta"), g.to("meta"), *GEOMETRY),
        mirrored,
    ):
        assert not quick_in_groups(other)
    assert not quick_in_groups(Correlation(x, g, *GEOMETRY), Products(rounded=True))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not quick_in_groups(Correlation(x, g, *GEOMETRY))
