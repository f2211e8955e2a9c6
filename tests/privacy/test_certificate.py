"""From clip sets and covariances to the multiplier, against dense linear algebra done by hand."""

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gredp.errors import GredpError
from gredp.privacy.certificate import Block, Certificate, Release, real_part_variances


def inverse_dft(n: int) -> np.ndarray:
    """The unitary inverse DFT matrix, written out rather than taken from an FFT library."""
    k = np.arange(n)
    return np.exp(2j * np.pi * np.outer(k, k) / n) / math.sqrt(n)


def dense_covariance(block: Block, a: float, b: float) -> np.ndarray:
    """Covariance of Re F⁻¹(a·x + i·b·y) on the released indices, for standard normal x and y."""
    inverse = reduce(np.kron, [inverse_dft(n) for n in block.grid], np.ones((1, 1)))
    flat = np.arange(math.prod(block.grid)).reshape(block.grid)
    kept = flat[np.ix_(*block.released)].ravel()
    even, odd = inverse.real[kept], inverse.imag[kept]
    return a * a * even @ even.T + b * b * odd @ odd.T


def assert_same_set(found, expected) -> None:
    """Equal as sets of numbers, up to rounding: each has a partner on the other side."""
    gaps = np.abs(np.subtract.outer(np.array(found), np.array(expected)))
    assert gaps.size
    assert gaps.min(axis=0).max() < 1e-12, (found, expected)
    assert gaps.min(axis=1).max() < 1e-12, (found, expected)


def check(block: Block, a: float, b: float) -> None:
    assert_same_set(real_part_variances(block, a, b), np.linalg.eigvalsh(dense_covariance(block, a, b)))


def crop(grid: tuple[int, ...], released: tuple[tuple[int, ...], ...]) -> Block:
    return Block("w", "w", tuple(len(axis) for axis in released), grid, released)


def whole(*grid: int) -> Block:
    return Block.whole("w", "w", grid, len(grid))


part = st.floats(0, 2, allow_subnormal=False).map(lambda x: round(x, 3))


@st.composite
def blocks(draw) -> Block:
    """Any grid of one to three axes, any non-empty choice of indices on each."""
    grid = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    axes = (
        draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(tuple)) for n in grid
    )
    return crop(grid, tuple(axes))


@settings(max_examples=150, deadline=None)
@given(blocks(), part, part)
def test_variances_are_the_eigenvalues_of_the_dense_covariance_on_any_crop(block, a, b):
    check(block, a, b)


@pytest.mark.parametrize("parts", [(0.6, 0.8), (1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize(
    "grid", [(1,), (2,), (3,), (4,), (7,), (8,), (1, 1), (2, 2), (1, 5), (2, 3), (4, 4), (5, 5), (4, 3)]
)
def test_variances_of_whole_blocks_match_the_dense_covariance(grid, parts):
    check(whole(*grid), *parts)


@pytest.mark.parametrize(
    ("grid", "released", "expected"),
    [
        # length 1 and 2: every index is its own mirror image, so the imaginary noise is all lost
        ((1,), ((0,),), [0.36]),
        ((2,), ((0, 1),), [0.36]),
        ((2, 2), ((0, 1), (0, 1)), [0.36]),
        # from length 3 on there is an odd direction
        ((3,), ((0, 1, 2),), [0.36, 0.64]),
        # 0 is its own mirror, 1 and 2 lost theirs (5 and 4)
        ((6,), ((0, 1, 2),), [0.36, 0.5]),
        # 1 without 0: no index is its own mirror
        ((6,), ((1, 2),), [0.5]),
        # 1 and 5 are a pair, 2 is alone
        ((6,), ((1, 2, 5),), [0.36, 0.5, 0.64]),
        # the Nyquist frequency of an even length is its own mirror
        ((6,), ((3,),), [0.36]),
        # in 2-D both axes must come back: (1, 1) ↔ (5, 4), here only row 5 does
        ((6, 5), ((1, 5), (1,)), [0.5]),
        ((6, 5), ((1, 5), (1, 4)), [0.36, 0.64]),
        ((6, 5), ((0, 1, 2), (0, 1)), [0.36, 0.5]),
        # no axes: a bias transformed as it stands
        ((), (), [0.36]),
    ],
)
def test_variances_of_crops_by_hand(grid, released, expected):
    block = crop(grid, released)
    assert_same_set(real_part_variances(block, 0.6, 0.8), expected)
    check(block, 0.6, 0.8)


def test_real_noise_alone_leaves_an_odd_direction_without_noise():
    assert min(real_part_variances(whole(3), 1.0, 0.0)) == 0
    odd = np.array([0, 1, -1]) / math.sqrt(2)
    assert odd @ dense_covariance(whole(3), 1.0, 0.0) @ odd == pytest.approx(0, abs=1e-15)


def test_equal_parts_are_white_noise_on_any_crop():
    for block in (whole(5), whole(4, 6), crop((6, 5), ((0, 1, 2), (0, 1))), crop((6,), ((1, 2, 5),))):
        assert real_part_variances(block, 0.5, 0.5) == (0.25,)
        np.testing.assert_allclose(
            dense_covariance(block, 0.5, 0.5), 0.25 * np.eye(math.prod(block.shape)), atol=1e-14
        )


def test_whole_block_takes_its_trailing_axes_as_the_grid():
    block = Block.whole("w", "conv", (8, 3, 5, 4), 2)
    assert block.grid == (5, 4)
    assert block.released == ((0, 1, 2, 3, 4), (0, 1, 2, 3))
    assert Block.whole("b", "conv", (8,), 0).grid == ()


# The rows of Certificate's table, with σ = 0.7, C = 3 (or c = 3) and L = 5.


def multiplier(*balls: tuple[float, float]) -> float:
    return Certificate(tuple(Release(str(i), c, s) for i, (c, s) in enumerate(balls))).noise_multiplier


def test_one_ball_of_radius_C_and_noise_sigma_C_gives_sigma():
    assert multiplier((3.0, 0.7 * 3.0)) == pytest.approx(0.7, rel=1e-14)


def test_L_balls_of_radius_c_and_noise_sigma_c_give_sigma_over_root_L():
    assert multiplier(*[(3.0, 0.7 * 3.0)] * 5) == pytest.approx(0.7 / math.sqrt(5), rel=1e-14)


def test_L_balls_of_radius_C_over_root_L_and_noise_sigma_C_give_sigma():
    assert multiplier(*[(3.0 / math.sqrt(5), 0.7 * 3.0)] * 5) == pytest.approx(0.7, rel=1e-14)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_any_direction_released_without_noise_gives_0(position):
    balls = [(1.0, 1.0), (2.0, 5.0), (0.1, 9.0)]
    assert multiplier(*balls) > 0
    balls[position] = (balls[position][0], 0.0)
    assert multiplier(*balls) == 0


def test_no_release_at_all_gives_infinity():
    assert multiplier() == math.inf


def test_an_unbounded_record_gives_0_however_much_noise():
    assert multiplier((math.inf, 1e6)) == 0


def test_infinite_noise_tells_nothing():
    assert multiplier((1.0, math.inf)) == math.inf
    assert multiplier((1.0, math.inf), (1.0, 2.0)) == 2.0


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=6))
def test_releases_compose_as_the_sum_of_squared_sensitivities_in_any_order(balls):
    expected = 1 / math.sqrt(sum((c / s) ** 2 for c, s in balls))
    assert multiplier(*balls) == pytest.approx(expected, rel=1e-12)
    assert multiplier(*reversed(balls)) == multiplier(*balls)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_sensitivity_is_how_many_deviations_one_record_moves_the_release(clip_norm, noise_std):
    assert Release("r", clip_norm, noise_std).sensitivity == clip_norm / noise_std


def test_sensitivity_without_noise_is_infinite():
    assert Release("r", 1e-9, 0.0).sensitivity == math.inf


@pytest.mark.parametrize("z", [1e-200, 1e200])
def test_extreme_ratios_neither_overflow_nor_vanish(z):
    # 1e200 must not come out as infinity: that would be an ε of 0 for something that was released.
    assert multiplier((1.0, z)) == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("clip_norm", [0.0, -1.5, math.nan, -math.inf])
def test_a_clipping_norm_that_is_not_above_0_is_refused(clip_norm):
    with pytest.raises(GredpError, match=f"^layer7: .*clipping norm.* not {clip_norm}$"):
        Release("layer7", clip_norm, 1.0)


@pytest.mark.parametrize("noise_std", [-1e-9, -2.5, math.nan, -math.inf])
def test_negative_noise_is_refused(noise_std):
    with pytest.raises(GredpError, match=f"^layer7: .*noise.* is {noise_std}$"):
        Release("layer7", 1.0, noise_std)
