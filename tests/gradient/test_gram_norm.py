"""The Gram path of a convolution's norm: chosen where it pays, and never short where its sum cancels."""

import pytest
import torch

from gredp.gradient.convolution import Correlation, _prefer_gram
from gredp.spectrum import grid_energy

GEOMETRY = ((3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1))


def cancelling(records: int, channels: int, outputs: int, size: int, left: float) -> Correlation:
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
    correlation = cancelling(6, channels, outputs, size, left)
    found, truth = correlation._gram_norm(), exact(correlation)
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
    torch.testing.assert_close(correlation._gram_energy(), truth, rtol=1e-9, atol=1e-9)
    total = truth.flatten(1).sum(1)
    torch.testing.assert_close(correlation._gram_norm(), total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("left", [1.0, 1e-3])
def test_no_frequency_falls_short_where_the_sums_cancel(left):
    correlation = cancelling(6, 128, 128, 8, left)
    truth = grid_energy(
        Correlation(correlation.x.double(), correlation.gradient.double(), *GEOMETRY).dense(), 2
    )
    found = correlation._gram_energy()
    assert (found >= truth * (1 - 2e-6)).all()
    if left == 1.0:
        assert (found <= truth * (1 + 2e-3)).all()


def test_small_maps_with_large_kernels_take_the_gram_path():
    """(kernel, channels in, out, padded positions, positions)"""
    assert _prefer_gram((9, 128, 128, 100, 64))
    assert _prefer_gram((9, 512, 512, 25, 9))
    assert not _prefer_gram((9, 32, 32, 34 * 34, 32 * 32))
    assert not _prefer_gram((25, 1, 6, 32 * 32, 28 * 28))
