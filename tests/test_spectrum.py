"""The transforms, groups and bands that the mechanisms are written in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView, distance, fft, frequency_groups, ifft, low_band, mirror
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
def test_fft_keeps_the_norm_and_ifft_undoes_it(lead, grid):
    x = reals(*lead, *grid)
    spectrum = fft(x, len(grid))
    assert math.isclose(spectrum.abs().square().sum(), x.square().sum(), rel_tol=1e-10)
    torch.testing.assert_close(ifft(spectrum, len(grid)), x.to(torch.complex128), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ifft(spectrum, len(grid)), inverse_dft(spectrum, len(grid)))


@pytest.mark.parametrize(
    ("dtype", "result"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)]
)
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_fft_keeps_the_precision(dtype, result, axes):
    x = torch.ones(2, 3, dtype=dtype)
    assert fft(x, axes).dtype == result
    assert ifft(fft(x, axes), axes).dtype == result


def test_no_axes_means_no_transform():
    x = reals(3, 4)
    assert torch.equal(fft(x, 0).real, x)
    assert torch.equal(ifft(fft(x, 0), 0).real, x)


@pytest.mark.parametrize("shape", [(0, 4), (0, 2, 3, 3)])
def test_nothing_has_an_empty_spectrum(shape):
    # An empty Poisson draw must pass every stage; some FFT libraries refuse a batch of no vectors.
    axes = len(shape) - 1 if len(shape) == 2 else 2
    assert fft(torch.zeros(shape), axes).shape == shape
    assert ifft(torch.zeros(shape, dtype=torch.complex64), axes).shape == shape


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
def test_low_band_is_symmetric_holds_zero_and_keeps_at_most_its_share(grid, ratio):
    kept = low_band(grid, ratio)
    n = math.prod(grid)
    assert kept.dtype == torch.bool
    assert kept[0]
    assert torch.equal(kept, kept[mirror(grid)])
    assert kept.sum() <= ratio * n + 1e-6 or kept.sum() == 1
    far = distance(grid).flatten()
    if not kept.all():
        assert far[kept].max() <= far[~kept].min()
        # no room was wasted: the next pair would have been too much
        following = (~kept).nonzero().flatten()[far[~kept].argmin()]
        assert kept.sum() + len({int(following), negative(int(following), grid)}) > ratio * n - 1e-6


@quick
@given(grids)
def test_a_ratio_of_one_keeps_everything(grid):
    assert low_band(grid, 1.0).all()


def test_low_band_of_a_line():
    assert low_band((8,), 0.5).tolist() == [True, True, False, False, False, False, False, True]
    assert low_band((8,), 0.1).tolist() == [True] + [False] * 7
    assert low_band((5,), 0.6).tolist() == [True, True, False, False, True]


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
    weights = torch.arange(1.0, view.group_count + 1)
    assert view.spread(weights).shape == block.grid
    assert torch.equal(view.spread(weights).flatten(), weights[groups])


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
    spectrum = view.spectrum(reals(*block.shape)) * view.spread(weights)
    # symmetric weights on a real block's spectrum leave a real block: no imaginary part is lost
    assert ifft(spectrum, view.axes).imag.abs().max() < 1e-12
    again = view.spectrum(view.real_part(spectrum))
    torch.testing.assert_close(again, spectrum)


def test_padded_views_crop_the_released_indices():
    # a 2×2 kernel with dilation (2, 3) inside a 5×6 padded input
    block = Block("w", "l", (3, 2, 2, 2), (5, 6), ((0, 2), (0, 3)))
    view = BlockView(block, padded=True)
    values = reals(3, 2, 5, 6)
    spectrum = fft(values, 2)
    assert view.spectrum(spectrum) is spectrum  # a padded sum is a spectrum already
    torch.testing.assert_close(view.real_part(spectrum), values[..., [0, 2], :][..., [0, 3]])


def test_a_scalar_has_one_frequency():
    view = BlockView(Block.whole("t", "l", (), 0))
    x = torch.tensor(2.5)
    assert view.real_part(view.spectrum(x)) == x
    assert view.gather(torch.tensor([4.0, 9.0])).tolist() == [[4.0], [9.0]]
    assert view.group_sizes.tolist() == [1]
