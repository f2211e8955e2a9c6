"""The transforms, groups and bands that the mechanisms are written in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gredp.privacy.certificate import Block
from gredp.spectrum import (
    BlockView,
    distance,
    fft,
    frequency_groups,
    half_fft,
    half_ifft,
    low_band,
    mirror,
    whole_energy,
)
from oracles import dft, inverse_dft

quick = settings(max_examples=60, deadline=None, derandomize=True)
grids = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
lead = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def reals(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------ transforms


@quick
@given(lead, grids)
def test_fft_is_the_dense_unitary_dft(lead, grid):
    x = reals(*lead, *grid)
    torch.testing.assert_close(fft(x, len(grid)), dft(x, len(grid)), rtol=1e-10, atol=1e-10)


@quick
@given(lead, grids)
def test_the_half_spectrum_is_the_beginning_of_the_whole(lead, grid):
    x = reals(*lead, *grid)
    whole, half = dft(x, len(grid)), half_fft(x, len(grid))
    torch.testing.assert_close(half, whole[..., : grid[-1] // 2 + 1], rtol=1e-10, atol=1e-10)
    energies = whole_energy(half.abs().square().reshape(-1, *half.shape[len(lead) :]), grid)
    torch.testing.assert_close(energies, whole.abs().square().reshape(-1, *grid), rtol=1e-10, atol=1e-10)


@quick
@given(lead, grids)
def test_the_half_inverse_is_the_real_part_of_the_whole_inverse(lead, grid):
    # Of any spectrum, conjugate or not: what the real part sees of τ is (τ_k + conj τ_−k)/2.
    whole = torch.complex(reals(*lead, *grid), reals(*lead, *grid, seed=2))
    flat = whole.flatten(len(lead))
    seen = ((flat + flat[..., mirror(grid)].conj()) / 2).reshape(whole.shape)
    # Coefficients that have both k and −k in the half may stay as they are; the inverse averages them.
    last = torch.arange(grid[-1])
    seen[..., last == -last % grid[-1]] = whole[..., last == -last % grid[-1]]
    found = half_ifft(seen[..., : grid[-1] // 2 + 1], len(grid), grid[-1])
    torch.testing.assert_close(found, inverse_dft(whole, len(grid)).real, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "result"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)]
)
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_fft_keeps_the_precision(dtype, result, axes):
    x = torch.ones(2, 3, dtype=dtype)
    assert fft(x, axes).dtype == result
    assert half_fft(x, axes).dtype == result
    assert half_ifft(half_fft(x, axes), axes, 3 if axes else 1).dtype == dtype


def test_no_axes_means_no_transform():
    x = reals(3, 4)
    assert torch.equal(fft(x, 0).real, x)
    assert torch.equal(half_ifft(half_fft(x, 0), 0, 1), x)


@pytest.mark.parametrize("shape", [(0, 4), (0, 2, 3, 3)])
def test_nothing_has_an_empty_spectrum(shape):
    # An empty Poisson draw must pass every stage; some FFT libraries refuse a batch of no vectors.
    axes = len(shape) - 1 if len(shape) == 2 else 2
    assert fft(torch.zeros(shape), axes).shape == shape
    assert half_ifft(half_fft(torch.zeros(shape), axes), axes, shape[-1]).shape == shape


# ------------------------------------------------------------------ frequencies


def negative(index: int, grid: tuple[int, ...]) -> int:
    """−k by its definition, axis by axis."""
    strides = [math.prod(grid[a + 1 :]) for a in range(len(grid))]
    return sum((-(index // s) % n) * s for s, n in zip(strides, grid))


@quick
@given(grids)
def test_mirror_gives_minus_k(grid):
    assert mirror(grid).tolist() == [negative(k, grid) for k in range(math.prod(grid))]


@quick
@given(grids)
def test_spectra_of_real_blocks_are_conjugate_at_the_mirror(grid):
    spectrum = fft(reals(*grid), len(grid)).flatten()
    torch.testing.assert_close(spectrum[mirror(grid)], spectrum.conj().resolve_conj())


@quick
@given(grids)
def test_distance_is_zero_at_zero_alike_at_the_mirror_and_one_at_an_axis_end(grid):
    far = distance(grid).flatten()
    assert far[0] == 0
    assert (far[1:] > 0).all()
    assert torch.equal(far, far[mirror(grid)])
    along_last = distance(grid).reshape(-1, grid[-1])[0]
    assert along_last.max() == (1 if grid[-1] > 1 else 0)


@quick
@given(grids, st.integers(1, 20))
def test_frequency_groups_partition_the_pairs(grid, bands):
    groups = frequency_groups(grid, bands)
    pairs = {frozenset((k, negative(k, grid))) for k in range(math.prod(grid))}
    assert torch.equal(groups, groups[mirror(grid)])  # k and −k alike
    assert groups.unique().tolist() == list(range(min(bands, len(pairs))))  # non-empty, numbered on
    assert groups[0] == 0


@quick
@given(grids, st.integers(1, 20))
def test_frequency_groups_go_from_low_to_high_in_nearly_equal_runs(grid, bands):
    groups, far = frequency_groups(grid, bands), distance(grid).flatten()
    for low in range(int(groups.max())):
        assert far[groups == low].max() <= far[groups == low + 1].min()
    # counted in pairs {k, −k}
    first = torch.arange(len(groups)) <= mirror(grid)
    sizes = torch.bincount(groups[first])
    assert sizes.max() - sizes.min() <= 1


@quick
@given(grids, st.floats(0.01, 1.0))
def test_low_band_is_symmetric_and_keeps_its_share_of_the_lowest_with_none_to_spare(grid, ratio):
    kept, far = low_band(grid, ratio), distance(grid).flatten()
    share = ratio * math.prod(grid)
    assert kept.dtype == torch.bool
    assert kept[0]
    assert torch.equal(kept, kept[mirror(grid)])
    assert kept.sum() >= share - 1e-6
    if not kept.all():
        assert far[kept].max() < far[~kept].min()
    fewer = far < far[kept].max()
    assert fewer.sum() <= 1 or fewer.sum() < share


@quick
@given(grids)
def test_a_ratio_of_one_keeps_everything(grid):
    assert low_band(grid, 1.0).all()


@pytest.mark.parametrize(
    ("length", "ratio", "highest"),
    [(8, 0.5, 2), (8, 0.1, 1), (8, 0.7, 3), (5, 0.6, 1), (2, 0.5, 1), (1, 0.5, 0)],
)
def test_low_band_of_a_line(length, ratio, highest):
    assert low_band((length,), ratio).tolist() == [min(k, length - k) <= highest for k in range(length)]


def test_low_band_of_a_kernel_prefers_no_axis():
    kept = low_band((3, 3), 0.5).view(3, 3)
    assert torch.equal(kept, kept.T)
    assert kept.sum() == 5


# ------------------------------------------------------------------ views of a block

BLOCKS = [
    Block.whole("w", "l", (3, 5), 1),
    Block.whole("w", "l", (2, 2, 3, 4), 2),
    Block.whole("b", "l", (6,), 1),
]
every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: str(b.shape))


@every_block
def test_gather_sums_energies_by_group_and_spread_goes_back(block):
    groups = frequency_groups(block.grid, 3)
    view = BlockView(block, groups=groups)
    energy = reals(4, *block.grid).square()
    gathered = view.gather(energy)
    assert gathered.shape == (4, view.group_count)
    for group in range(view.group_count):
        truth = energy.flatten(1)[:, groups == group].sum(1)
        torch.testing.assert_close(gathered[:, group], truth)
    values = reals(4, *block.grid)
    torch.testing.assert_close(
        view.group_energy(values), view.gather(dft(values, len(block.grid)).abs().square())
    )
    tiny = view.group_energy(values.float() * 1e-30)  # whose squares are no numbers in single precision
    torch.testing.assert_close(tiny.sum(1), values.flatten(1).square().sum(1) * 1e-60, rtol=1e-5, atol=0)
    weights = torch.arange(1.0, view.group_count + 1)
    assert torch.equal(view.spread(weights), weights[groups].view(block.grid)[..., : block.grid[-1] // 2 + 1])


@every_block
def test_a_view_without_groups_is_one_group(block):
    view = BlockView(block)
    energy = reals(4, *block.grid).square()
    assert view.group_count == 1
    torch.testing.assert_close(view.gather(energy)[:, 0], energy.flatten(1).sum(1))
    assert torch.equal(torch.ones(block.grid) * view.spread(torch.tensor([3.0])), torch.full(block.grid, 3.0))
    assert view.group_sizes.tolist() == [math.prod(block.shape)]


@every_block
def test_group_sizes_count_every_coefficient_of_the_block(block):
    view = BlockView(block, groups=frequency_groups(block.grid, 3))
    channels = math.prod(block.shape) // math.prod(block.grid)
    assert view.group_sizes.tolist() == [
        channels * int((view.groups == k).sum()) for k in range(view.group_count)
    ]


@every_block
def test_spectrum_and_real_part_are_inverse(block):
    view, x = BlockView(block), reals(*block.shape)
    torch.testing.assert_close(view.real_part(view.spectrum(x)), x)
    assert view.real_part(view.spectrum(x)).dtype == torch.float64


@every_block
def test_weights_of_one_group_touch_that_band_only(block):
    view = BlockView(block, groups=frequency_groups(block.grid, 3))
    weights = torch.zeros(view.group_count, dtype=torch.float64)
    weights[0] = 1
    x = reals(*block.shape)
    spectrum = view.spectrum(x) * view.spread(weights)
    # symmetric weights on a real block's spectrum leave a real block: nothing is lost with the imaginary part
    whole = dft(x, view.axes) * weights[view.groups].view(block.grid)
    assert inverse_dft(whole, view.axes).imag.abs().max() < 1e-12
    torch.testing.assert_close(view.real_part(spectrum), inverse_dft(whole, view.axes).real)
    torch.testing.assert_close(view.spectrum(view.real_part(spectrum)), spectrum)


def test_padded_views_crop_the_released_indices():
    # a 2×2 kernel with dilation (2, 3) inside a 5×6 padded input
    block = Block("w", "l", (3, 2, 2, 2), (5, 6), ((0, 2), (0, 3)))
    view = BlockView(block, padded=True)
    values = reals(3, 2, 5, 6)
    spectrum = half_fft(values, 2)
    assert view.spectrum(spectrum) is spectrum  # a padded sum is a spectrum already
    torch.testing.assert_close(view.real_part(spectrum), values[..., [0, 2], :][..., [0, 3]])


def test_a_scalar_has_one_frequency():
    view = BlockView(Block.whole("t", "l", (), 0))
    x = torch.tensor(2.5)
    assert view.real_part(view.spectrum(x)) == x
    assert view.gather(torch.tensor([4.0, 9.0])).tolist() == [[4.0], [9.0]]
    assert view.group_sizes.tolist() == [1]
