"""The paper's reading: the spectrum over the whole padded input, of which the kernel is a crop."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from gredp.gradient.convolution.correlation import Correlation
from gredp.spectrum import fft


def _spectra(correlation: Correlation) -> tuple[Tensor, Tensor]:
    """Spectra of the input and of the output gradient spread to its strides, by group of channels."""
    n = correlation.grid_axes
    spread = correlation.gradient.new_zeros(*correlation.gradient.shape[:2], *correlation.padded_grid)
    at = tuple(
        slice(0, s * (m - 1) + 1, s) for s, m in zip(correlation.stride, correlation.gradient.shape[2:])
    )
    spread[(slice(None), slice(None), *at)] = correlation.gradient
    split = (correlation.groups, -1)
    return fft(correlation.padded, n).unflatten(1, split), fft(spread, n).conj().unflatten(1, split)


def padded_energy(correlation: Correlation) -> Tensor:
    """`[b, *padded]`: energy of each padded coefficient, from two products instead of o·c of them."""
    x, g = (m.abs().double().square().sum(2) for m in _spectra(correlation))
    return (x * g).sum(1) * math.prod(correlation.padded_grid)


def padded_dense(correlation: Correlation) -> Tensor:
    """`[b, o, c, *padded]`: each record's spectrum."""
    return _product(correlation, "bgc...,bgo...->bgoc...").flatten(1, 2)


def padded_sum(correlation: Correlation, factors: Tensor) -> Tensor:
    """`[o, c, *half]`: Σ_b factors_b · spectrum_b, over the half of the padded grid that says it all."""
    scaled = replace(correlation, gradient=correlation.scaled(factors))
    total = _product(scaled, "bgc...,bgo...->goc...").flatten(0, 1)
    return total[..., : correlation.padded_grid[-1] // 2 + 1]


def _product(correlation: Correlation, equation: str) -> Tensor:
    x, g = _spectra(correlation)
    return torch.einsum(equation, x, g) * math.sqrt(math.prod(correlation.padded_grid))
