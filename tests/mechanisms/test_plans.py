"""The certificate of every plan, held against the noise that its step really releases.

The oracle takes nothing from the certificate. It feeds unit vectors through the stages that noise a sum
and carry it back, so it has the matrix M from standard normal numbers to released coordinates, Σ = M Mᵀ.
With A the map from a clip group's ball to the same coordinates, rule 1 of docs/theory.md reads

    1/z² = Σ_groups c²·λ_max(Aᵀ Σ⁺ A),   or z = 0 where A leaves the range of Σ.
"""

import math
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch

from gredp.errors import GredpError
from gredp.gradient.inverse import invert
from gredp.gradient.noise import GeneratorSource, add_noise
from gredp.gradient.step import PrivateStep
from gredp.gradient.summation import BoundedSum
from gredp.mechanisms import METHODS, Shaping, mechanism
from gredp.mechanisms.dpsgd import DPSGD
from gredp.mechanisms.gredp import HALVES, GReDP
from gredp.mechanisms.plain import Plain
from gredp.mechanisms.plan import Quantile, clip_groups
from gredp.mechanisms.registry import noise_scale
from gredp.mechanisms.shaped import ShapedGReDP
from gredp.mechanisms.spectral_dp import SpectralDP
from gredp.privacy.certificate import Block

SIGMA, NORM, BATCH = 0.8, 1.3, 16.0
HALF = math.sqrt(0.5)

# Two layers and three parameters: 1-D and 2-D grids, odd and even lengths.
WHOLE = (
    Block.whole("conv.weight", "conv", (2, 3, 4), 2),
    Block.whole("conv.bias", "conv", (2,), 1),
    Block.whole("linear.weight", "linear", (2, 5), 1),
)
# Grids that are transformed by an FFT, and a bias as long.
LARGE = (
    Block.whole("conv.weight", "conv", (1, 9, 8), 2),
    Block.whole("conv.bias", "conv", (65,), 1),
    Block.whole("linear.weight", "linear", (2, 70), 1),
)
# A kernel cropped out of a padded grid, beside a whole block. Only (0, 0) is its own mirror image.
PADDED = (Block("conv.weight", "conv", (2, 3, 2), (6, 5), ((0, 1, 2), (0, 1))), WHOLE[2])
# Crops that hold mirrored pairs as well: (5, 4) ↔ (1, 1).
MIRRORED = (Block("conv.weight", "conv", (3, 3), (6, 5), ((5, 0, 1), (4, 0, 2))),)
# A crop in which no index is or has its mirror image.
ALONE = (Block("conv.weight", "conv", (2, 2), (6, 5), ((1, 2), (1, 2))),)


# --- the oracle


class UnitSource:
    """Standard normal numbers replaced by a unit vector, laid out over the calls in their order."""

    def __init__(self, hot: int) -> None:
        self.hot = hot
        self.drawn = 0

    def normal(self, shape, like):
        values = torch.zeros(math.prod(shape), dtype=like.dtype)
        if 0 <= self.hot - self.drawn < len(values):
            values[self.hot - self.drawn] = 1
        self.drawn += len(values)
        return values.view(shape)


def parameters(blocks) -> dict[str, torch.Tensor]:
    return {block.name: torch.zeros(block.shape, dtype=torch.float64) for block in blocks}


def two_stages(step: PrivateStep, source) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """What a step without records releases: its gradient and its energy shares."""
    weights = step.squared_weights
    ones = {name: torch.ones(1) for name in step.block_views}
    preconditioner = step.learned.preconditioner if step.learned is not None else ones
    noisy = add_noise(BoundedSum(step.plan, step.block_views), parameters(step.plan.blocks), weights, source)
    return invert(noisy, weights, preconditioner), noisy.shares


def noise_map(step: PrivateStep) -> np.ndarray:
    """M: `[released coordinates, normal numbers drawn]`, blocks in the plan's order, energy shares last."""

    def released(source: UnitSource) -> np.ndarray:
        gradients, shares = two_stages(step, source)
        parts = [gradients[block.name].flatten() for block in step.plan.blocks]
        return torch.cat(parts if shares is None else [*parts, shares.double()]).numpy()

    silent = UnitSource(-1)
    assert not released(silent).any()  # no records and no noise: nothing
    return np.stack([released(UnitSource(i)) for i in range(silent.drawn)], axis=1)


def inverse_dft(grid) -> np.ndarray:
    def axis(n: int) -> np.ndarray:
        return np.exp(2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n) / math.sqrt(n)

    return reduce(np.kron, [axis(n) for n in grid], np.ones((1, 1)))


def ball_map(step: PrivateStep, block: Block) -> np.ndarray:
    """A of one block: a real vector on its grid, in the domain where it is clipped → released coordinates."""
    view = step.block_views[block.name]
    factor = np.ones(math.prod(block.grid))
    if step.plan.keep_ratio is not None and view.groups is not None:
        factor = view.groups.double().numpy()  # 1 in the band, 0 outside
    if step.learned is not None:
        by_group = (
            step.learned.preconditioner[block.name].double()
            / step.squared_weights[block.name].double().sqrt()
        )
        factor = (
            by_group[view.groups].numpy()
            if view.groups is not None
            else by_group.expand(factor.shape).numpy()
        )
    inverse = inverse_dft(block.grid)
    filtered = inverse @ np.diag(factor) @ inverse.conj().T
    assert np.abs(filtered.imag).max() < 1e-12  # k and −k are treated alike
    flat = np.arange(math.prod(block.grid)).reshape(block.grid)
    one_channel = filtered.real[flat[np.ix_(*block.released)].ravel()]
    lead = math.prod(block.shape[: len(block.shape) - len(block.grid)])
    return np.kron(np.eye(lead), one_channel)


def oracle(step: PrivateStep) -> float:
    """z by rule 1, from the covariance of what is released."""
    noise = noise_map(step)
    covariance = noise @ noise.T
    inverse = np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)
    outside = np.eye(len(covariance)) - covariance @ inverse
    where, start = {}, 0
    for block in step.plan.blocks:
        where[block.name] = slice(start, start + math.prod(block.shape))
        start += math.prod(block.shape)
    balls = []
    for group in step.plan.groups:
        maps = []
        for block in step.plan.blocks:
            if block.name in group.blocks:
                rows = ball_map(step, block)
                maps.append(np.zeros((len(covariance), rows.shape[1])))
                maps[-1][where[block.name]] = rows
        balls.append((group.clip_norm, np.concatenate(maps, axis=1)))
    if step.plan.query_std is not None:  # the shares of a record have norm at most 1, its counts ½ each
        most = 1.0 if step.plan.quantile is None else math.sqrt(len(step.plan.groups)) / 2
        balls.append((most, np.eye(len(covariance))[:, start:]))
    total = 0.0
    for i, (norm, ball) in enumerate(balls):
        for _, other in balls[:i]:  # groups add up only where their noises are independent
            assert np.abs(ball.T @ inverse @ other).max() < 1e-9
        if np.abs(outside @ ball).max() > 1e-6:
            return 0.0
        total += norm**2 * np.linalg.eigvalsh(ball.T @ inverse @ ball)[-1]
    return 1 / math.sqrt(total)


def certified(built, blocks, norm=NORM, sigma=SIGMA) -> float:
    return built.plan(blocks, norm, sigma, BATCH).certificate().noise_multiplier


# --- each mechanism and option: (mechanism, blocks, clipping norm, z/σ by hand)

CASES = {
    "dpsgd flat": (DPSGD(), WHOLE, NORM, 1),
    "dpsgd automatic": (DPSGD("automatic"), WHOLE, NORM, 1),
    "dpsgd per layer": (DPSGD("per_layer"), WHOLE, NORM, 1),
    "dpsgd per layer, a norm for each layer": (DPSGD("per_layer"), WHOLE, [0.5, 2.0], 1),
    "dpsgd per layer, a norm for each parameter": (DPSGD("per_layer"), WHOLE, [0.5, 2.0, 0.1], 1),
    "dpsgd layer-wise": (DPSGD("layer_wise"), WHOLE, NORM, 1 / math.sqrt(2)),
    "dpsgd layer-wise, a norm for each layer": (DPSGD("layer_wise"), WHOLE, [0.5, 2.0], 1 / math.sqrt(2)),
    "dpsgd layer-wise, a norm for each parameter": (
        DPSGD("layer_wise"),
        WHOLE,
        [0.5, 2.0, 0.1],
        1 / math.sqrt(3),
    ),
    "gredp white": (GReDP(), WHOLE, NORM, HALF),
    "gredp white, automatic": (GReDP(clipping="automatic"), WHOLE, NORM, HALF),
    "gredp white, layer-wise": (GReDP(clipping="layer_wise"), WHOLE, NORM, 0.5),
    "gredp white, per layer": (GReDP(clipping="per_layer"), WHOLE, [0.5, 2.0], HALF),
    "gredp white, noise for each sample": (GReDP(per_sample_noise=True), WHOLE, NORM, HALF * 4),
    "gredp full parts": (GReDP((1.0, 1.0)), WHOLE, NORM, 1),
    "gredp more imaginary": (GReDP((0.6, 0.8)), WHOLE, NORM, 0.6),
    "gredp more real": (GReDP((0.8, 0.6)), WHOLE, NORM, 0.6),
    "gredp real": (GReDP((1.0, 0.0)), WHOLE, NORM, 0),
    "gredp imaginary": (GReDP((0.0, 1.0)), WHOLE, NORM, 0),
    # Of length 1 or 2 a block has no odd direction, and real noise covers all of it.
    "gredp real on a short block": (GReDP((1.0, 0.0)), WHOLE[1:2], NORM, 1),
    "gredp imaginary on a short block": (GReDP((0.0, 1.0)), WHOLE[1:2], NORM, 0),
    # Layer by layer, each with the least of its own blocks: 1/z² = 1/0.8² + 1/0.6².
    "gredp layer-wise on a short and a long block": (
        GReDP((0.8, 0.6), clipping="layer_wise"),
        WHOLE[1:],
        NORM,
        1 / math.hypot(1 / 0.8, 1 / 0.6),
    ),
    "gredp padded white": (GReDP(grid="padded"), PADDED, NORM, HALF),
    "gredp padded more imaginary": (GReDP((0.6, 0.8), grid="padded"), PADDED, NORM, 0.6),
    # Of the crop alone: (0, 0) carries a², all others (a² + b²)/2.
    "gredp padded more real": (GReDP((0.8, 0.6), grid="padded"), PADDED[:1], NORM, HALF),
    "gredp padded real": (GReDP((1.0, 0.0), grid="padded"), PADDED[:1], NORM, HALF),
    "gredp padded imaginary": (GReDP((0.0, 1.0), grid="padded"), PADDED[:1], NORM, 0),
    "gredp padded imaginary, nothing mirrored": (GReDP((0.0, 1.0), grid="padded"), ALONE, NORM, HALF),
    "gredp padded more real, mirrored": (GReDP((0.8, 0.6), grid="padded"), MIRRORED, NORM, 0.6),
    "gredp padded real, mirrored": (GReDP((1.0, 0.0), grid="padded"), MIRRORED, NORM, 0),
    "gredp padded layer-wise": (GReDP(clipping="layer_wise", grid="padded"), PADDED, [0.5, 2.0], 0.5),
    "gredp padded, noise for each sample": (
        GReDP((0.6, 0.8), grid="padded", per_sample_noise=True),
        PADDED,
        NORM,
        0.6 * 4,
    ),
    "spectral-dp nothing but the mean": (SpectralDP(1e-6), WHOLE, NORM, HALF),
    "spectral-dp 0.3": (SpectralDP(0.3), WHOLE, NORM, HALF),
    "spectral-dp 0.5": (SpectralDP(0.5), WHOLE, NORM, HALF),
    "spectral-dp all": (SpectralDP(1.0), WHOLE, NORM, HALF),
    "spectral-dp layer-wise": (SpectralDP(0.5, "layer_wise"), WHOLE, NORM, 0.5),
    "spectral-dp per layer": (SpectralDP(0.5, "per_layer"), WHOLE, [0.5, 2.0], HALF),
    "spectral-dp large": (SpectralDP(0.5), LARGE, NORM, HALF),
    "spectral-dp large, nothing but the mean": (SpectralDP(1e-6), LARGE, NORM, HALF),
    "spectral-dp padded 0.2": (SpectralDP(0.2, grid="padded"), PADDED, NORM, HALF),
    "spectral-dp padded 0.7": (SpectralDP(0.7, grid="padded"), PADDED, NORM, HALF),
    "spectral-dp padded, mirrored": (SpectralDP(0.5, grid="padded"), MIRRORED, NORM, HALF),
}


@pytest.mark.parametrize("name", CASES)
def test_certificate_is_what_the_released_noise_gives(name):
    built, blocks, norm, factor = CASES[name]
    step = PrivateStep(built.plan(blocks, norm, SIGMA, BATCH), UnitSource(-1), BATCH)
    z = certified(built, blocks, norm)
    assert z == pytest.approx(oracle(step), rel=1e-9, abs=1e-12)
    assert z == pytest.approx(factor * SIGMA, rel=1e-12)


@pytest.mark.parametrize(
    ("shaping", "clipping"),
    [
        (Shaping(), "flat"),
        (Shaping(bands=2), "flat"),
        (Shaping(energy_noise=0.7, bands=3), "flat"),
        (Shaping(energy_noise=3.0), "automatic"),
    ],
)
@pytest.mark.parametrize("precondition", [False, True])
def test_shaped_certificate_holds_for_any_weights(shaping, clipping, precondition):
    built = ShapedGReDP(replace(shaping, preconditioner=0.5 * precondition), clipping)
    step = PrivateStep(built.plan(WHOLE, NORM, SIGMA, BATCH), UnitSource(-1), BATCH)
    generator = torch.Generator().manual_seed(5)
    random = torch.randn(2, len(step.learned.sizes), generator=generator, dtype=torch.float64).exp()
    assert random[0].min() < 0.9 < 1.1 < random[0].max()  # both sides of white
    step.learned._squared = random[0]
    if precondition:
        step.learned._precondition = random[1]
    assert sum(len(w) for w in step.squared_weights.values()) > len(WHOLE)  # bands, not blocks alone
    z = certified(built, WHOLE)
    # The weights and the energy shares are float32, hence no tighter.
    assert z == pytest.approx(oracle(step), rel=1e-5)
    # 1/z² = 1/z_g² + 1/z_e² with z_g = σ and z_e = energy_noise·σ.
    assert z == pytest.approx(SIGMA / math.sqrt(1 + shaping.energy_noise**-2), rel=1e-12)


@pytest.mark.parametrize(
    ("built", "blocks", "norm", "gradient"),
    [
        (DPSGD("adaptive", quantile=Quantile()), WHOLE, NORM, 1),
        (DPSGD("adaptive_per_layer", quantile=Quantile(count_noise=0.7)), WHOLE, NORM, 1),
        (DPSGD("adaptive_per_layer", quantile=Quantile(count_noise=2.0)), WHOLE, [0.5, 2.0, 0.1], 1),
        (GReDP(clipping="adaptive", quantile=Quantile(count_noise=3.0)), WHOLE, NORM, HALF),
        (GReDP(clipping="adaptive", grid="padded", quantile=Quantile()), PADDED, NORM, HALF),
    ],
    ids=repr,
)
def test_adaptive_certificate_holds_for_any_norms(built, blocks, norm, gradient):
    """1/z² = 1/z_g² + 1/(2 z_b)², with z_b the deviation of a count, √L of them for L layers."""
    step = PrivateStep(built.plan(blocks, norm, SIGMA, BATCH), UnitSource(-1), BATCH)
    learned = step.learned
    learned.log_ratio = torch.randn(len(learned.norms), dtype=torch.float64) + 1
    z = certified(built, blocks, norm)
    assert z == pytest.approx(oracle(step), rel=1e-5)  # weights and counts are float32
    counts = 2 * step.plan.count_std / math.sqrt(len(step.plan.groups))
    assert z == pytest.approx(((gradient * SIGMA) ** -2 + counts**-2) ** -0.5, rel=1e-12)
    assert counts == pytest.approx(built.quantile.count_noise * SIGMA)


def reaches(step: PrivateStep) -> np.ndarray:
    """All blocks' ball maps side by side: the released directions that a record can move."""
    sizes = [math.prod(block.shape) for block in step.plan.blocks]
    maps = [ball_map(step, block) for block in step.plan.blocks]
    out = np.zeros((sum(sizes), sum(m.shape[1] for m in maps)))
    row = column = 0
    for size, m in zip(sizes, maps):
        out[row : row + size, column : column + m.shape[1]] = m
        row, column = row + size, column + m.shape[1]
    return out


@pytest.mark.parametrize("blocks", [WHOLE, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("ratio", [1e-6, 0.3, 0.5])
def test_spectral_dp_puts_no_noise_outside_its_band(ratio, blocks):
    # It would not be less private, only noisier: the certificate alone cannot see it.
    step = PrivateStep(SpectralDP(ratio).plan(blocks, NORM, SIGMA, BATCH), UnitSource(-1), BATCH)
    band, noise = reaches(step), noise_map(step)
    assert np.linalg.matrix_rank(band) < len(band)  # something is dropped
    np.testing.assert_allclose(band @ noise, noise, atol=1e-12)  # `band` is a projector


@pytest.mark.parametrize("name", [*CASES, "shaped"])
def test_without_noise_a_sum_comes_back_as_the_map_of_the_ball_says(name):
    # The A of the oracle is the A of the program: same band, same crop, weights undone.
    built, blocks, norm, _ = CASES.get(name, (ShapedGReDP(), WHOLE, NORM, 1))
    step = PrivateStep(built.plan(blocks, norm, SIGMA, BATCH), UnitSource(-1), BATCH)
    generator = torch.Generator().manual_seed(6)
    if step.learned is not None:
        step.learned._squared = torch.randn(len(step.learned.sizes), generator=generator).double().exp()
    bounded, expected = BoundedSum(step.plan, step.block_views), {}
    for block in blocks:
        lead = block.shape[: len(block.shape) - len(block.grid)]
        on_grid = torch.randn(*lead, *block.grid, generator=generator, dtype=torch.float64)
        view = step.block_views[block.name]
        total, axes = on_grid, tuple(range(-len(block.grid), 0))
        if view.padded or view.columns is not None:
            total = torch.fft.rfftn(on_grid, dim=axes, norm="ortho")[..., : view.columns]
        bounded.totals[block.name] = total
        # Shaped sums are kept as they are, and weighted only while the noise joins them.
        released = on_grid if step.learned is not None else ball_map(step, block) @ on_grid.flatten().numpy()
        expected[block.name] = np.asarray(released).reshape(block.shape)
    weights = step.squared_weights
    ones = {n: torch.ones(1) for n in step.block_views}
    found = invert(add_noise(bounded, parameters(blocks), weights, UnitSource(-1)), weights, ones)
    for block in blocks:
        tolerance = 1e-5 if step.learned is not None else 1e-12
        np.testing.assert_allclose(found[block.name].numpy(), expected[block.name], atol=tolerance)


@pytest.mark.parametrize("part", [HALF, 1.0])
def test_equal_parts_on_a_spectrum_are_one_real_draw_for_each_coordinate(part):
    """Without a transform, of the covariance that the paper's steps have when they are taken one by one."""
    white, spectral = (
        noise_map(PrivateStep(GReDP((part, part), grid=grid).plan(WHOLE, NORM, SIGMA, BATCH), None, BATCH))
        for grid in ("kernel", "padded")
    )
    np.testing.assert_allclose(white, part * SIGMA * NORM * np.eye(len(white)), rtol=1e-12)
    assert spectral.shape[1] > white.shape[1]  # real and imaginary parts are drawn
    np.testing.assert_allclose(spectral @ spectral.T, white @ white.T, atol=1e-12)


def test_the_oracle_can_tell_a_wrong_plan():
    # Guard of the guard: a step whose noise is a hundredth smaller than the certificate's is seen.
    plan = GReDP().plan(WHOLE, NORM, SIGMA, BATCH)
    weaker = PrivateStep(GReDP().plan(WHOLE, NORM, 0.99 * SIGMA, BATCH), UnitSource(-1), BATCH)
    assert oracle(weaker) == pytest.approx(0.99 * plan.certificate().noise_multiplier, rel=1e-9)


@pytest.mark.parametrize("built", [DPSGD(), GReDP(grid="padded"), SpectralDP(0.5), ShapedGReDP()], ids=repr)
def test_release_is_the_two_stages_that_the_oracle_looked_at(built):
    blocks = PADDED if built.grid == "padded" else WHOLE
    plan = built.plan(blocks, NORM, SIGMA, BATCH)
    step = PrivateStep(plan, GeneratorSource(torch.Generator().manual_seed(3)), BATCH)
    expected, _ = two_stages(step, GeneratorSource(torch.Generator().manual_seed(3)))
    found = step.release(parameters(blocks), 1)
    assert set(found) == {block.name for block in blocks}
    for name, value in found.items():
        assert value.abs().max() > 0
        assert torch.equal(value, expected[name])


def test_plain_training_is_certified_as_not_private():
    assert certified(Plain(), WHOLE) == 0
    source = UnitSource(-1)
    two_stages(PrivateStep(Plain().plan(WHOLE, NORM, SIGMA, BATCH), source, BATCH), source)
    assert source.drawn == 0


# --- σ and z


LINEAR = [
    DPSGD(),
    DPSGD("per_layer"),
    GReDP(),
    GReDP((0.6, 0.8), "layer_wise", per_sample_noise=True),
    GReDP((1.0, 0.0)),
    SpectralDP(0.3),
    ShapedGReDP(Shaping(energy_noise=2.0)),
]


@pytest.mark.parametrize("built", LINEAR, ids=repr)
@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 25.0])
def test_the_certificate_is_linear_in_sigma(built, sigma):
    unit = built.unit_multiplier(WHOLE, NORM, BATCH)
    assert certified(built, WHOLE, sigma=sigma) == pytest.approx(sigma * unit, rel=1e-12)


@pytest.mark.parametrize("built", LINEAR, ids=repr)
@pytest.mark.parametrize("norm", [1e-3, 50.0])
def test_the_certificate_does_not_depend_on_the_clipping_norm(built, norm):
    assert certified(built, WHOLE, norm) == pytest.approx(certified(built, WHOLE, 1.0), rel=1e-12)


def test_noise_scale_gives_the_multiplier_that_was_asked_for():
    for built in (DPSGD(), GReDP(), GReDP(clipping="layer_wise"), SpectralDP(), ShapedGReDP()):
        sigma = noise_scale(1.1, built.unit_multiplier(WHOLE, NORM, BATCH), "proven")
        assert certified(built, WHOLE, sigma=sigma) == pytest.approx(1.1, rel=1e-12)
    assert noise_scale(1.1, HALF, "paper") == 1.1  # the paper's own σ, whatever is proven of it


def test_proven_refuses_real_noise_on_whole_blocks_and_names_the_way_out():
    unit = mechanism("gredp", noise="real").unit_multiplier(WHOLE, NORM, BATCH)
    assert unit == 0
    with pytest.raises(GredpError, match="claim='paper'") as caught:
        noise_scale(1.0, unit, "proven")
    assert "\n" not in str(caught.value)
    assert noise_scale(1.0, unit, "paper") == 1.0
    # Where the crop keeps no mirrored pair the same noise is proven, at the same price as white noise.
    alone = mechanism("gredp", noise="real", grid="padded").unit_multiplier(ALONE, NORM, BATCH)
    assert noise_scale(1.0, alone, "proven") == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("claim", ["proven", "paper"])
def test_a_noise_multiplier_that_is_no_such_thing_is_refused(z, claim):
    with pytest.raises(GredpError, match=f"noise multiplier .*not {z}$"):
        noise_scale(z, 1.0, claim)


# --- clip groups


def test_groups_of_each_clipping_by_hand():
    def shown(clipping, norm):
        return [(g.name, g.blocks, g.clip_norm, g.noise_std) for g in clip_groups(clipping, WHOLE, norm, 2.0)]

    names = tuple(block.name for block in WHOLE)
    assert shown("flat", 3.0) == shown("automatic", 3.0) == [("all", names, 3.0, 6.0)]
    assert shown("per_layer", 3.0) == [
        ("conv", names[:2], 3.0 / math.sqrt(2), 6.0),
        ("linear", names[2:], 3.0 / math.sqrt(2), 6.0),
    ]
    assert shown("per_layer", [3, 4]) == [("conv", names[:2], 3, 10.0), ("linear", names[2:], 4, 10.0)]
    assert shown("layer_wise", 3.0) == [("conv", names[:2], 3.0, 6.0), ("linear", names[2:], 3.0, 6.0)]
    assert shown("layer_wise", [3, 4]) == [("conv", names[:2], 3, 6.0), ("linear", names[2:], 4, 8.0)]
    assert shown("layer_wise", [1, 2, 3]) == [(n, (n,), c, 2.0 * c) for n, c in zip(names, (1, 2, 3))]


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer", "layer_wise"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_norms_and_noise_scales_are_refused(clipping, bad):
    with pytest.raises(GredpError, match=f"clipping norm .*not {bad}$"):
        clip_groups(clipping, WHOLE, bad, 1.0)
    if clipping in ("per_layer", "layer_wise"):
        with pytest.raises(GredpError, match=f"clipping norm .*not {bad}$"):
            clip_groups(clipping, WHOLE, [1.0, bad], 1.0)
    if bad != 0:  # no noise at all is certified as 0, not refused
        with pytest.raises(GredpError, match=f"noise scale .*not {bad}$"):
            clip_groups(clipping, WHOLE, 1.0, bad)


def test_a_wrong_number_of_norms_is_refused_with_the_numbers():
    for clipping in ("flat", "automatic"):
        with pytest.raises(GredpError, match=f"{clipping} clipping takes one norm, not 2"):
            clip_groups(clipping, WHOLE, [1.0, 2.0], 1.0)
    for clipping in ("per_layer", "layer_wise"):
        with pytest.raises(GredpError, match="4 clipping norms given for 2 layers with 3 parameters"):
            clip_groups(clipping, WHOLE, [1.0] * 4, 1.0)


# --- from words to a mechanism


def spoken(value) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"method": "plain"}, Plain()),
        ({"method": "dpsgd"}, DPSGD("flat")),
        ({"method": "dpsgd", "claim": "paper"}, DPSGD("flat")),
        ({"method": "dpsgd", "clipping": "automatic"}, DPSGD("automatic")),
        ({"method": "gredp"}, GReDP((HALF, HALF), "flat", "kernel", False)),
        ({"method": "gredp", "claim": "paper"}, GReDP(clipping="layer_wise")),
        ({"method": "gredp", "claim": "paper", "clipping": "flat"}, GReDP(clipping="flat")),
        ({"method": "gredp", "noise": "real"}, GReDP((1.0, 0.0))),
        ({"method": "gredp", "noise_parts": (0.6, 0.8)}, GReDP((0.6, 0.8))),
        (
            {"method": "gredp", "grid": "padded", "per_sample_noise": True},
            GReDP(HALVES, "flat", "padded", True),
        ),
        ({"method": "gredp", "noise": "shaped"}, ShapedGReDP(Shaping(0.5, 0.0, 10.0, 16), "flat")),
        ({"method": "gredp", "noise": "shaped", "bands": 3}, ShapedGReDP(Shaping(bands=3))),
        ({"method": "gredp", "noise": "shaped", "shaping": Shaping(bands=3)}, ShapedGReDP(Shaping(bands=3))),
        ({"method": "spectral_dp"}, SpectralDP(0.5, "flat", "kernel")),
        ({"method": "spectral_dp", "filter_ratio": 0.2}, SpectralDP(0.2)),
        ({"method": "spectral_dp", "claim": "paper"}, SpectralDP(clipping="layer_wise")),
    ],
    ids=spoken,
)
def test_words_select_the_mechanism_and_its_defaults(words, expected):
    assert mechanism(**words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"method": "dp-sgd"}, "unknown method 'dp-sgd': choose one of dpsgd, gredp, plain, spectral_dp"),
        ({"method": "gredp", "noise": "pink"}, "unknown noise 'pink': choose one of white, real, shaped"),
        ({"method": "gredp", "claim": "hoped"}, "unknown claim 'hoped': choose one of proven, paper"),
        ({"method": "dpsgd", "clipping": "ghost"}, "unknown clipping 'ghost'"),
        ({"method": "dpsgd", "noise": "real"}, "noise 'real' belongs to method 'gredp', not to 'dpsgd'"),
        ({"method": "spectral_dp", "noise": "shaped"}, "noise 'shaped' belongs to method 'gredp'"),
        ({"method": "gredp", "noise": "shaped", "claim": "paper"}, "no claim about shaped noise"),
        ({"method": "gredp", "noise": "shaped", "clipping": "per_layer"}, "not 'per_layer'"),
        ({"method": "plain", "bands": 3}, "plain has no option bands"),
        ({"method": "dpsgd", "filter_ratio": 0.5, "bands": 3}, "dpsgd has no option bands, filter_ratio"),
        ({"method": "gredp", "bands": 3}, "gredp has no option bands"),
        ({"method": "gredp", "noise": "shaped", "grid": "padded"}, "shaped noise has no option grid"),
        ({"method": "spectral_dp", "noise_parts": (1, 1)}, "spectral_dp has no option noise_parts"),
        ({"method": "spectral_dp", "filter_ratio": 0.0}, "filter ratio .*not 0.0"),
        ({"method": "spectral_dp", "filter_ratio": 1.5}, "filter ratio .*not 1.5"),
        ({"method": "spectral_dp", "filter_ratio": math.nan}, "filter ratio .*not nan"),
        ({"method": "gredp", "grid": "none"}, "unknown grid 'none'"),
        ({"method": "spectral_dp", "grid": "none"}, "unknown grid 'none'"),
        ({"method": "gredp", "noise_parts": (0.0, 0.0)}, "noise parts .*0.0 and 0.0"),
        ({"method": "gredp", "noise_parts": (-1.0, 1.0)}, "noise parts .*-1.0 and 1.0"),
        ({"method": "gredp", "noise_parts": (math.nan, 1.0)}, "noise parts .*nan and 1.0"),
        ({"method": "gredp", "noise": "shaped", "energy_noise": 0.0}, "energy_noise .*not 0.0"),
        ({"method": "gredp", "noise": "shaped", "energy_noise": math.inf}, "energy_noise .*not inf"),
        ({"method": "gredp", "noise": "shaped", "bands": 0}, "bands .* 0"),
        ({"method": "gredp", "noise": "shaped", "bands": 2.5}, r"bands .* 2\.5"),
        ({"method": "gredp", "noise": "shaped", "window": math.inf}, "window .*not inf"),
        ({"method": "gredp", "noise_parts": (0.5, 0.5, 0.5)}, "two numbers, .*not 3"),
        ({"method": "gredp", "noise": "shaped", "exponent": 1.5}, "exponents .*1.5"),
    ],
    ids=spoken,
)
def test_what_a_mechanism_does_not_have_is_refused_by_name(words, message):
    with pytest.raises(GredpError, match=message) as caught:
        mechanism(**words)
    assert "\n" not in str(caught.value)


def test_only_the_papers_methods_and_dpsgd_carry_a_claim():
    claims = {name: mechanism(name).claimed_by_paper for name in METHODS}
    assert claims == {"plain": False, "dpsgd": True, "spectral_dp": True, "gredp": True}
    assert not mechanism("gredp", noise="shaped").claimed_by_paper
