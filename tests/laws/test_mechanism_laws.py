"""The laws that every mechanism must pass: V, N, R of the fault list, through the real engine."""

import math

import pytest
import torch
from torch import nn

from gredp import BlockCirculantLinear, SpectralConv2d
from gredp.gradient.adaptive import AdaptedNorms
from gredp.gradient.noise import GeneratorSource, SecretSource
from gredp.randomness import Secret
from oracles import dft
from worlds import MECHANISMS, flat, make_private, no_gradient_step, one_step, records, small_model

Z, C = 1.7, 0.8
#: six standard errors of a variance from 10⁵ draws
V_TOLERANCE = 0.027
V_DRAWS = 100_000


def noise_draws(layer: nn.Module, x: torch.Tensor, draws: int, **options) -> torch.Tensor:
    """At least `draws` released noise coordinates of the layer's weight, `[steps, size]`."""
    model = nn.Sequential(layer, nn.Flatten())
    model, optimizer, _, _ = make_private(
        model, (x, torch.zeros(len(x))), noise_multiplier=Z, clip=C, **options
    )
    if optimizer.private_step.learned is not None:
        fix_weights(optimizer)
    return draw_noise(model, optimizer, x, draws)


def draw_noise(model, optimizer, x, draws: int, block: str = "0.weight") -> torch.Tensor:
    steps = -(-draws // model.get_parameter(block).numel())
    return torch.stack([no_gradient_step(model, optimizer, x)[block].flatten() for _ in range(steps)])


def whole_weights(view, weights: torch.Tensor) -> torch.Tensor:
    """`[group_count]` → `[*grid]`."""
    groups = torch.zeros(math.prod(view.block.grid), dtype=torch.long) if view.groups is None else view.groups
    return weights[groups].view(view.block.grid)


def fix_weights(optimizer, weights: torch.Tensor | None = None) -> None:
    """Hold the learned shape still, white unless given, so that many draws share one covariance."""
    shape = optimizer.private_step.learned
    shape.learn = lambda *_: None
    if weights is not None and isinstance(shape, AdaptedNorms):
        shape.log_ratio = -weights.log() / 2
    elif weights is not None:
        shape._squared = weights


LAYERS = {  # large, so that few steps make up the draws
    "linear 64": (lambda: nn.Linear(64, 500), (2, 64)),
    "linear 45": (lambda: nn.Linear(45, 331), (2, 45)),
    "circulant 8": (lambda: BlockCirculantLinear(256, 512, 8), (2, 256)),
    "circulant 7": (lambda: BlockCirculantLinear(253, 509, 7), (2, 253)),
    "conv 3x3": (lambda: SpectralConv2d(32, 48, 3, padding=1), (2, 32, 5, 5)),
    "conv 4x2": (lambda: nn.Conv2d(32, 48, (4, 2)), (2, 32, 6, 5)),
    "conv1d": (lambda: nn.Conv1d(40, 64, 5), (2, 40, 9)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "mechanism", ["dpsgd", "gredp", "gredp padded", "gredp per-sample noise", "gredp shaped"]
)
def test_noise_has_the_variance_of_the_certificate(layer, mechanism):
    """V: white noise of z·C on every coordinate, whatever transform it went through."""
    build, shape = LAYERS[layer]
    options = MECHANISMS[mechanism]
    draws = noise_draws(build(), torch.ones(shape), V_DRAWS, **options)
    # The energy query of shaped noise takes its part of the budget from the gradient's.
    gradient_z = Z * math.sqrt(1 + 1 / 100) if mechanism == "gredp shaped" else Z
    assert abs(float(draws.square().mean()) / (gradient_z * C) ** 2 - 1) <= V_TOLERANCE


@pytest.mark.parametrize("layer", LAYERS)
def test_shaped_noise_keeps_its_variance_in_both_spaces(layer):
    """V with random weights w: white in the weighted domain, 1/w² over frequencies in parameter space."""
    build, shape = LAYERS[layer]
    x = torch.ones(shape)
    model = nn.Sequential(build(), nn.Flatten())
    model, optimizer, _, _ = make_private(
        model, (x, torch.zeros(len(x))), noise_multiplier=Z, clip=C, **MECHANISMS["gredp shaped"]
    )
    step = optimizer.private_step
    generator = torch.Generator().manual_seed(5)
    fix_weights(optimizer, 0.2 + 3 * torch.rand(len(step.learned._squared), generator=generator).double())
    draws = draw_noise(model, optimizer, x, V_DRAWS)
    view = step.block_views["0.weight"]
    weights = whole_weights(view, step.squared_weights["0.weight"])
    variance = (optimizer.sigma * C) ** 2
    spectra = dft(draws.view(-1, *view.block.shape), view.axes)
    assert abs(float((spectra.abs().square() * weights).mean()) / variance - 1) <= V_TOLERANCE
    # Unequal variances widen the error of their mean by at most the ratio of their moments.
    inverse = 1 / weights
    widening = float(inverse.square().mean().sqrt() / inverse.mean())
    ratio = float(draws.square().mean()) / (variance * float(inverse.mean()))
    assert abs(ratio - 1) <= V_TOLERANCE * widening


@pytest.mark.parametrize("mechanism", ["gredp shaped", "spectral-dp"])
def test_blocks_of_one_weight_have_white_noise_of_that_weight(mechanism):
    """V for a bias, which has no frequencies: one real draw has the law of noise on its coefficients."""
    x = torch.ones(2, 3)
    model, optimizer, _, _ = make_private(
        nn.Sequential(nn.Linear(3, 501)),
        (x, torch.zeros(2)),
        noise_multiplier=Z,
        clip=C,
        **MECHANISMS[mechanism],
    )
    step, weight = optimizer.private_step, 1.0
    if mechanism == "gredp shaped":
        weight = 0.4
        fix_weights(optimizer, torch.full((len(step.learned._squared),), weight).double())
    draws = draw_noise(model, optimizer, x, V_DRAWS, "0.bias")
    a, b = step.plan.noise_parts or (1.0, 1.0)
    assert a == b
    spectra = dft(draws, 1)
    for coefficients in (draws, spectra.real * math.sqrt(2), spectra.imag * math.sqrt(2)):
        ratio = float(coefficients.square().mean()) * weight / (a * optimizer.sigma * C) ** 2
        assert abs(ratio - 1) <= 2 * V_TOLERANCE


@pytest.mark.parametrize("layer", ["linear 45", "circulant 8", "conv 3x3"])
def test_a_preconditioner_scales_what_was_released_and_nothing_else(layer):
    """V with random w and P: over frequencies (P/w)² times what the certificate counts, so z stays."""
    build, shape = LAYERS[layer]
    x = torch.ones(shape)
    model = nn.Sequential(build(), nn.Flatten())
    options = MECHANISMS["gredp shaped"] | {"preconditioner": 0.5}
    model, optimizer, _, _ = make_private(
        model, (x, torch.zeros(len(x))), noise_multiplier=Z, clip=C, **options
    )
    step = optimizer.private_step
    generator = torch.Generator().manual_seed(5)
    random = [0.2 + 3 * torch.rand(len(step.learned._squared), generator=generator).double() for _ in "wP"]
    fix_weights(optimizer, random[0])
    step.learned._precondition = random[1]
    draws = draw_noise(model, optimizer, x, V_DRAWS)
    view = step.block_views["0.weight"]
    w2, p = (whole_weights(view, t["0.weight"]) for t in (step.squared_weights, step.learned.preconditioner))
    spectra = dft(draws.view(-1, *view.block.shape), view.axes)
    ratio = float((spectra.abs().square() * w2 / p.square()).mean()) / (optimizer.sigma * C) ** 2
    assert abs(ratio - 1) <= V_TOLERANCE
    assert abs(optimizer.noise_multiplier - Z) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_secret_noise_is_standard_normal(dtype):
    """V for the keystream's source, its higher moments, and its two halves, which share their radii."""
    x = SecretSource(Secret()).normal((300, 1001), torch.zeros(1, dtype=dtype)).double()
    halves = x.flatten()[: x.numel() // 2 * 2].view(2, -1)
    assert abs(float((halves[0] * halves[1]).mean())) <= 6 / math.sqrt(halves[0].numel())
    assert abs(float(x.square().mean()) - 1) <= V_TOLERANCE
    assert abs(float(x.mean())) <= 6 / math.sqrt(x.numel())
    assert abs(float(x.pow(4).mean()) - 3) <= 6 * math.sqrt(96 / x.numel())


def block_noise(length: int, count: int, **options) -> torch.Tensor:
    """`[count, length]`: independent draws of the noise on one circulant block, many blocks at once."""
    rows = 20
    layer = BlockCirculantLinear(length * rows, length * (count // rows), length, bias=False)
    return noise_draws(layer, torch.ones(2, length * rows), 1, **options).view(count, length).double()


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "spectral" not in m])
def test_no_direction_is_left_without_noise(mechanism):
    """Smallest eigenvalue of the noise covariance on a block of 16: at least 0.6 of what is certified."""
    draws = block_noise(16, 2000, **MECHANISMS[mechanism])
    assert float(torch.linalg.eigvalsh(draws.T @ draws / 2000)[0]) >= 0.6 * (Z * C) ** 2


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "spectral" in m])
def test_every_kept_coefficient_is_noised_and_no_other(mechanism):
    """Spectral-DP: within the band the certified variance in each direction, outside of it nothing."""
    draws = block_noise(16, 2000, **MECHANISMS[mechanism])
    values = torch.linalg.eigvalsh(draws.T @ draws / 2000)
    kept = values[values > 1e-6]
    assert len(kept) == 9  # zero and four pairs: the fewest that make half of 16 coefficients
    assert float(kept[0]) >= 0.6 * (Z * C) ** 2


def test_unequal_noise_parts_have_the_even_and_odd_variances():
    """a² on even and b² on odd directions, so that z = σ·min(a, b)."""
    a, b, n = 0.6, 0.8, 15
    draws = block_noise(n, 6000, method="gredp", noise_parts=(a, b))
    sigma = Z / a
    mirrored = draws[:, [-j % n for j in range(n)]]
    for part, directions in ((a, draws + mirrored), (b, draws - mirrored)):
        directions = directions[:, 1 : n // 2 + 1] / math.sqrt(2)
        tolerance = 6 * math.sqrt(2 / directions.numel())
        assert abs(float(directions.square().mean()) / (part * sigma * C) ** 2 - 1) <= tolerance


def test_noise_of_two_steps_is_independent():
    """I2: no draw is used twice."""
    first, second = noise_draws(nn.Linear(300, 200), torch.ones(2, 300), 120_000)
    assert abs(float((first * second).mean() / (first.std() * second.std()))) <= 6 / math.sqrt(60_000)


def test_two_engines_never_share_noise():
    """Without a generator the noise comes from a secret of the engine, not from torch's global seed."""

    def draw() -> torch.Tensor:
        torch.manual_seed(0)
        return noise_draws(nn.Linear(10, 10), torch.ones(2, 10), 100, seed=None)

    assert not torch.equal(draw(), draw())


def test_a_generator_of_the_callers_repeats_and_refuses_another_device():
    sources = [GeneratorSource(torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*[s.normal((5,), torch.zeros(1)) for s in sources])
    with pytest.raises(ValueError, match="noise generator lives on cpu"):
        sources[0].normal((5,), torch.zeros(1, device="meta"))


# ------------------------------------------------------------------ N: what one record can move

ADVERSARIAL = {
    "ordinary": 1.0,
    "huge": 1e6,
    "tiny": 1e-12,
    "zero": 0.0,
    "overflowing": 1e38,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "not a number": math.nan,
}


def clipped_norms(optimizer, delta: dict[str, torch.Tensor]) -> list[tuple[float, float]]:
    """Norm of `delta` in the clip domain and its bound, for each clip group."""
    plan, step = optimizer.private_step.plan, optimizer.private_step
    rows = []
    for group in plan.groups:
        square = 0.0
        for name in group.blocks:
            view = step.block_views[name]
            if step.learned is not None:
                energy = dft(delta[name].double(), view.axes).abs().square()
                square += float((energy * whole_weights(view, step.squared_weights[name])).sum())
            else:
                square += float(delta[name].double().square().sum())
        rows.append((math.sqrt(square), group.clip_norm))
    return rows


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(mechanism):
    """N: 64 pairs of neighbors over the kinds of record, noise off, everything else alike."""
    x, y = records(6)
    model = small_model()
    options = MECHANISMS[mechanism]
    model, optimizer, _, _ = make_private(model, (x, y), clip=C, batch_size=6, **options)
    if optimizer.private_step.learned is not None:
        learned = optimizer.private_step.learned
        count = len(learned.norms) if isinstance(learned, AdaptedNorms) else len(learned._squared)
        fix_weights(optimizer, torch.rand(count, dtype=torch.float64) * 3 + 0.1)
    base = one_step(model, optimizer, x, y)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        for scale in ADVERSARIAL.values():
            extra = torch.randn(1, 1, 5, 5, generator=generator)
            extra = extra * scale if math.isfinite(scale) else torch.full_like(extra, scale)
            label = torch.randint(0, 4, (1,), generator=generator)
            moved = one_step(model, optimizer, torch.cat([x, extra]), torch.cat([y, label]))
            # Both have been divided by the expected batch, not by six and seven records.
            delta = {name: moved[name] - base[name] for name in base}
            assert torch.isfinite(flat(delta)).all()
            for norm, bound in clipped_norms(optimizer, delta):
                assert norm <= bound * (1 + 1e-6)


def test_records_that_are_not_finite_contribute_nothing():
    """A linear model, whose gradient grows with the record: 1e38 is finite, its square is not."""
    x, y = records(6)
    model = nn.Sequential(nn.Flatten(), BlockCirculantLinear(25, 6, 5), nn.Linear(6, 4))
    model, optimizer, _, engine = make_private(model, (x, y), clip=C)
    base = flat(one_step(model, optimizer, x, y))
    for value in (math.nan, math.inf, -math.inf, 1e38):
        bad = torch.cat([x, torch.full((1, 1, 5, 5), value)])
        moved = flat(one_step(model, optimizer, bad, torch.cat([y, y[:1]])))
        torch.testing.assert_close(moved, base, rtol=1e-5, atol=1e-6)
    assert engine.ledger.steps == 5  # charged like any other step: no data-dependent abort


def test_clipping_to_nothing_moves_nothing():
    """With noise 0 and C → 0 no parameter may move: one that does has escaped the clip."""
    x, y = records(6)
    model, optimizer, _, _ = make_private(small_model(), (x, y), clip=1e-20, lr=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    one_step(model, optimizer, x, y)
    for name, p in model.named_parameters():
        assert float((p.detach() - before[name]).abs().max()) <= 1e-12


# ------------------------------------------------------------------ R: constants do not follow the data


def constants(optimizer, loader):
    return (
        optimizer.private_step.plan,
        optimizer.certificate,
        optimizer.sigma,
        optimizer.sample_rate,
        optimizer.expected_batch_size,
        len(loader),
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_constant_is_the_same_on_neighbors(mechanism):
    """R: σ, C, q, divisor, steps and shapes on D and on D with one record more or less."""
    x, y = records(21)
    seen = []
    for count in (19, 20, 21):
        _, optimizer, loader, _ = make_private(
            small_model(),
            (x[:count], y[:count]),
            noise_multiplier=Z,
            batch_size=4,
            sample_rate=0.2,
            **MECHANISMS[mechanism],
        )
        seen.append(constants(optimizer, loader))
    assert seen[0] == seen[1] == seen[2]


def test_sums_are_divided_by_the_expected_batch_whatever_was_drawn():
    x, y = records(12)
    model, optimizer, _, _ = make_private(small_model(), (x, y), clip=1e9, batch_size=4)
    for drawn in (1, 4, 12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:drawn]), y[:drawn]).backward()
        optimizer.step()
        fresh = small_model()
        nn.functional.cross_entropy(fresh(x[:drawn]), y[:drawn], reduction="sum").backward()
        for p, q in zip(model.parameters(), fresh.parameters()):
            torch.testing.assert_close(p.grad, q.grad / 4, rtol=1e-4, atol=1e-6)
