"""Noise correlated over steps, against dense matrices; what is certified, by trying all patterns of steps."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from gredp import GredpError
from gredp.gradient.correlated import CorrelatedSource
from gredp.gradient.noise import GeneratorSource
from gredp.mechanisms import mechanism
from gredp.mechanisms.banded import check_bands, coefficients
from gredp.privacy.accountant import deltas
from gredp.privacy.certificate import Block
from gredp.privacy.ledger import Entry
from oracles import band_matrix, dft, largest_sensitivity, participations
from worlds import MECHANISMS, make_private, records

Z, C = 1.7, 0.8
BLOCK = Block.whole("weight", "layer", (8,), 1)


@pytest.mark.parametrize("bands", [1, 2, 3, 8, 64])
def test_the_column_is_that_of_the_definition_and_has_norm_one(bands):
    column = torch.tensor(coefficients(bands), dtype=torch.float64)
    torch.testing.assert_close(column, band_matrix(bands, bands)[:, 0], rtol=1e-13, atol=0)
    assert abs(float(column.norm()) - 1) <= 1e-15 * bands


@pytest.mark.parametrize(("bands", "steps"), [(1, 6), (2, 9), (3, 10), (4, 10), (5, 4)])
def test_no_allowed_pattern_of_steps_moves_the_release_further_than_certified(bands, steps):
    """Brute force over all sets of steps at least b apart; with one step less between them it fails."""
    matrix = band_matrix(bands, steps)
    assert largest_sensitivity(matrix, participations(steps, bands)) <= 1 + 1e-9
    if 1 < bands < steps:
        assert largest_sensitivity(matrix, participations(steps, bands - 1)) > 1 + 1e-3


@pytest.mark.parametrize("begin", range(1, 9))
def test_a_sequence_begun_anew_is_no_less_private(begin):
    """C cut at a restart: columns are shorter or as they were, so nothing more is paid."""
    assert largest_sensitivity(band_matrix(3, 9, [begin]), participations(9, 3)) <= 1 + 1e-9


def test_noise_taken_back_again_after_a_restart_would_be_less_private():
    """What `load` must not do: go on from a checkpoint's noise, which lost steps have taken back before."""
    matrix = band_matrix(3, 7)
    matrix[5:, 3:5] = 0  # steps 3 and 4 were charged and lost; steps 5 and 6 follow on steps 1 and 2
    matrix[5, 1:3] = matrix[2, :2]
    matrix[6, 2] = matrix[2, 0]
    assert largest_sensitivity(matrix, participations(7, 3)) > 1 + 1e-3


def test_the_mixture_over_samples_is_within_the_accountants_curve():
    """δ(ε) of T = 4 steps, b = 2, from densities with a dense covariance: both ways, 10⁵ draws.

    The record is in the part that comes first, so it may take part in steps 0 and 2: ⌈4/2⌉ mechanisms.
    """
    rate, z, eps, count = 0.4, 0.8, 1.0, 100_000
    root = z * torch.linalg.inv(band_matrix(2, 4))
    precision = torch.linalg.inv(root @ root.T)
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[a, 0.0, b, 0.0] for a, b in product((0, 1), repeat=2)], dtype=torch.float64)
    chances = torch.tensor([math.prod(rate if d else 1 - rate for d in m[::2]) for m in means.tolist()])

    def log_density(y: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return -((y - mean) @ precision * (y - mean)).sum(1) / 2

    def with_record(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([log_density(y, m) + p.log() for m, p in zip(means, chances)]).logsumexp(0)

    noise = torch.randn(count, 4, dtype=torch.float64, generator=generator) @ root.T
    drawn = means[torch.multinomial(chances, count, replacement=True, generator=generator)]
    (proven,) = deltas([Entry(z, rate, 4, None, 2, "s")], [eps])
    for y, sign in ((noise + drawn, 1), (noise, -1)):
        loss = sign * (with_record(y) - log_density(y, means[0]))
        excess = (1 - torch.exp(eps - loss)).clamp(min=0)
        error = 5 * float(excess.std()) / math.sqrt(count)
        assert float(excess.mean()) <= proven + error
        if sign == 1:
            assert float(excess.mean()) >= proven - error - 1e-3  # and no claim below it would hold


def streamed(bands: int, numbers, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, ξ), each `[steps, 2·size]`, of two blocks; `numbers` are those of the steps in the ledger."""
    source = CorrelatedSource(GeneratorSource(torch.Generator().manual_seed(3)), coefficients(bands))
    same = GeneratorSource(torch.Generator().manual_seed(3))
    like, noise, white = torch.zeros(1, dtype=torch.float64), [], []
    for number in numbers:
        source.begin(number)
        for kept, drawn_from in ((noise, source), (white, same)):
            parts = [drawn_from.normal((size,), like) for _ in range(2)]
            kept.append(torch.cat(parts))
            parts[0].mul_(1e6)  # a caller may scale what it was given
    return torch.stack(noise), torch.stack(white)


@pytest.mark.parametrize("bands", [1, 2, 5, 16])
def test_the_stream_solves_the_dense_system(bands):
    noise, white = streamed(bands, range(1, 13))
    torch.testing.assert_close(band_matrix(bands, 12) @ noise, white, rtol=1e-12, atol=1e-12)


def test_a_step_without_noise_is_left_out_of_the_matrix():
    """Numbers 4 and 7 were charged, and the process failed before they were noised."""
    numbers = [1, 2, 3, 5, 6, 8, 9]
    noise, white = streamed(4, numbers)
    rows = [n - 1 for n in numbers]
    matrix = band_matrix(4, 9)[rows][:, rows]
    torch.testing.assert_close(matrix @ noise, white, rtol=1e-12, atol=1e-12)
    assert float(matrix.square().sum(0).max()) <= 1 + 1e-12


def test_a_step_is_noised_once_and_rounding_does_not_grow():
    source = CorrelatedSource(GeneratorSource(torch.Generator().manual_seed(0)), coefficients(8))
    exact = CorrelatedSource(GeneratorSource(torch.Generator().manual_seed(0)), coefficients(8))
    rounded = GeneratorSource(torch.Generator().manual_seed(1))
    like = torch.zeros(1, dtype=torch.float64)
    for step in range(1, 3001):
        draw = rounded.normal((5,), like)
        for each, dtype in ((source, torch.float32), (exact, torch.float64)):
            each.source.normal = lambda shape, like, dtype=dtype, draw=draw: draw.to(dtype)
            each.begin(step)
        single, double = source.normal((5,), like), exact.normal((5,), like)
        assert float((single.double() - double).abs().max()) <= 1e-5
    with pytest.raises(GredpError, match="a step is noised once"):
        source.begin(3000)


def by_turns(loader, steps: int):
    """Batches of the loader until `steps` of them have come."""
    done = 0
    while done < steps:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def released_noise(steps: int, bands: int, layer: nn.Module, mechanism_name: str, **options) -> torch.Tensor:
    """`[steps, size]` of noise on the layer's weight, released by the engine on records without gradient."""
    x, y = records(40)
    x = x.flatten(1)[:, :20]
    model, optimizer, loader, _ = make_private(
        nn.Sequential(layer), (x, y), noise_multiplier=Z, clip=C, batch_size=4, sample_rate=0.1,
        correlation_bands=bands, **MECHANISMS[mechanism_name], **options,
    )  # fmt: skip
    if optimizer.private_step.learned is not None:
        optimizer.private_step.learned.learn = lambda *_: None
    found = []
    for a, _ in by_turns(loader, steps):
        optimizer.zero_grad()
        (model(a).sum() * 0).backward()
        optimizer.step()
        found.append(layer.weight.grad.detach().flatten().double() * optimizer.expected_batch_size)
    return torch.stack(found)


def assert_white(noise: torch.Tensor, matrix: torch.Tensor, deviation: float) -> None:
    """C·n is white with this deviation, over steps and coordinates: six standard errors."""
    white = matrix @ noise / deviation
    gram = white @ white.T / noise.shape[1]
    bound = 6 / math.sqrt(noise.shape[1])
    assert float((gram - torch.diag(gram.diag())).abs().max()) <= bound
    assert float((gram.diag() - 1).abs().max()) <= bound * math.sqrt(2)


@pytest.mark.parametrize(
    "mechanism_name", ["dpsgd", "dpsgd per layer", "gredp", "gredp per-sample noise", "gredp shaped"]
)
def test_released_noise_has_the_covariance_over_steps_that_is_certified(mechanism_name):
    """V over steps, through engine, transform and inverse."""
    noise = released_noise(9, 4, nn.Linear(20, 1000, bias=False), mechanism_name)
    gradient_z = Z * math.sqrt(1 + 1 / 100) if mechanism_name == "gredp shaped" else Z
    assert_white(noise, band_matrix(4, 9), gradient_z * C)


def test_spectral_dp_correlates_the_band_it_keeps():
    layer = nn.Linear(20, 1000, bias=False)
    noise = released_noise(6, 3, layer, "spectral-dp")
    spectra = dft(noise.view(6, 1000, 20), 1)
    kept = spectra.abs().square().mean((0, 1)) > 1e-9
    assert 5 <= int(kept.sum()) <= 11
    inside = torch.cat([spectra[..., kept].real, spectra[..., kept].imag], -1)
    white = band_matrix(3, 6) @ inside.flatten(1)
    gram = white @ white.T
    assert float((gram / gram.diag().mean() - torch.eye(6)).abs().max()) <= 0.1


def test_weights_learned_in_between_are_applied_outside_of_the_correlation():
    """Shaped noise, weights that change at every step: in the weighted domain C·n is white all the same."""
    x, y = records(40)
    layer = nn.Linear(20, 800, bias=False)
    model, optimizer, loader, _ = make_private(
        nn.Sequential(layer), (x.flatten(1)[:, :20], y), noise_multiplier=Z, clip=C, batch_size=4,
        sample_rate=0.25, correlation_bands=3, **MECHANISMS["gredp shaped"],
    )  # fmt: skip
    step = optimizer.private_step
    view, found, seen = step.block_views["0.weight"], [], []
    for t, (a, _) in enumerate(by_turns(loader, 8)):
        weights = step.squared_weights["0.weight"].double()
        seen.append(weights)
        optimizer.zero_grad()
        (model(a).sum() * 0).backward()
        optimizer.step()
        spectrum = dft(layer.weight.grad.double() * optimizer.expected_batch_size, 1)
        groups = weights[view.groups].view(view.block.grid)
        found.append(torch.view_as_real(spectrum * groups.sqrt()).flatten())
        step.learned.learn(torch.linspace(1, 1 + t, len(step.learned.sizes)), 0.0)
    assert not torch.allclose(seen[1], seen[5])
    noise = torch.stack(found)
    # Real and imaginary parts of conjugate pairs say the same twice: half as many are independent.
    white = band_matrix(3, 8) @ noise / (optimizer.sigma * C)
    gram = 2 * white @ white.T / noise.shape[1]
    assert float((gram - torch.eye(8)).abs().max()) <= 6 * math.sqrt(2 / (noise.shape[1] / 2))


def test_certificates_are_those_of_the_method():
    for name, options in MECHANISMS.items():
        for sigma in (0.5, 2.0):
            alone, banded = (
                mechanism(correlation_bands=b, **options).plan([BLOCK], C, sigma, 16).certificate()
                for b in (1, 5)
            )
            assert math.isclose(alone.noise_multiplier, banded.noise_multiplier, rel_tol=1e-12), name


def test_longer_columns_would_be_certified_as_such():
    plan = mechanism("dpsgd", correlation_bands=2).plan([BLOCK], C, 1.0, 16)
    longer = replace(plan, correlation=(3.0, 4.0))
    assert math.isclose(longer.certificate().noise_multiplier, plan.certificate().noise_multiplier / 5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mechanism("gredp", claim="paper", correlation_bands=2), "paper makes no claim about corr"),
        (lambda: mechanism("plain", correlation_bands=2), "no noise"),
        (lambda: mechanism("dpsgd", correlation_bands=0), "positive whole number, not 0"),
        (lambda: mechanism("dpsgd", correlation_bands=-3), "positive whole number, not -3"),
        (lambda: check_bands(4, 0.3), r"4 correlation bands .* 0.3 .* 1.2: take at most 3 bands"),
    ],
)
def test_what_has_no_certificate_is_refused(call, words):
    with pytest.raises(GredpError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
