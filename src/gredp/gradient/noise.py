"""Stage 4, and the only place where rail A draws random numbers.

Formal guarantee. Given a `BoundedSum`, the result is distributed as the plan's certificate says: one
independent draw for each step and block, from an explicit source that has no default seed.
"""

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.summation import BoundedSum
from gredp.spectrum import BlockView


class NoiseSource(Protocol):
    """Draws standard normal numbers."""

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor: ...


class GeneratorSource:
    """torch's generator of the tensor's device, seeded from the operating system unless one is given."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._generator is None or self._generator.device.type != like.device.type:
            if self._generator is not None:
                raise GredpError(
                    f"the noise generator lives on {self._generator.device}, the gradients on {like.device}"
                )
            self._generator = torch.Generator(like.device).manual_seed(secrets.randbits(63))
        return torch.randn(shape, generator=self._generator, device=like.device, dtype=like.dtype)


class OperatingSystemSource:
    """Every number from the operating system's cryptographic generator, by the Box–Muller transform.

    Slower than `GeneratorSource`; `secure_mode=True` of the engine selects it.
    """

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        n = math.prod(shape)
        half = (n + 1) // 2
        bits = np.frombuffer(os.urandom(16 * half), dtype=np.uint64) >> np.uint64(11)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # strictly between 0 and 1
        radius = np.sqrt(-2 * np.log(uniform[:half]))
        angle = 2 * np.pi * uniform[half:]
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
        return torch.from_numpy(values).view(shape).to(device=like.device, dtype=like.dtype)


@dataclass
class NoisySum:
    """The released value of one step, in the domain where it was noised. Safe to publish."""

    bounded: BoundedSum
    values: dict[str, Tensor]  # real without a transform, else complex spectra over the half grid
    shares: Tensor | None


def add_noise(
    bounded: BoundedSum,
    parameters: Mapping[str, Tensor],
    squared_weights: Mapping[str, Tensor],
    source: NoiseSource,
) -> NoisySum:
    """Spend the step: `bounded` must already be charged, and must not be used again."""
    if not isinstance(bounded, BoundedSum):
        raise TypeError(f"only a BoundedSum can be noised, not {type(bounded).__name__}")
    if bounded.spent:
        raise GredpError("this sum was noised already: a second draw on it would be a second release")
    bounded.spent = True
    plan = bounded.plan
    values: dict[str, Tensor] = {}
    for group in plan.groups:
        for name in group.blocks:
            view = bounded.views[name]
            total = bounded.totals.get(name)
            if total is None:
                total = _empty_sum(view, parameters[name])
            if plan.transform == "none":
                values[name] = total
                if group.noise_std:
                    draw = source.normal(view.block.shape, total)
                    values[name] = draw.mul_(group.noise_std).add_(total)
                continue
            real = total.real if total.is_complex() else total
            weights = view.spread(squared_weights[name].to(real).sqrt())
            spectrum = view.spectrum(total) * weights
            # Real white noise has the spectrum of a = b = 1, and nothing of it goes to imaginary parts.
            parts = view.noise_parts(*(plan.noise_parts or (1.0, 1.0))) * group.noise_std
            draw = source.normal((*spectrum.shape, 2), real).mul_(parts.to(real))
            noise = torch.view_as_complex(draw)
            if plan.keep_ratio is not None:
                noise *= weights  # 1 in the kept band, 0 outside: what is dropped stays zero
            values[name] = noise.add_(spectrum)
    shares = bounded.shares
    if plan.shaping is not None:
        if shares is None:
            shares = torch.zeros(sum(v.group_count for v in bounded.views.values()))
        shares = shares + plan.energy_std * source.normal(tuple(shares.shape), shares)
    return NoisySum(bounded, values, shares)


def _empty_sum(view: BlockView, like: Tensor) -> Tensor:
    """The sum over no records, in the domain and precision of a sum over some."""
    double = like.dtype == torch.float64
    if not view.padded:
        dtype = torch.float64 if double else torch.float32
        return torch.zeros(view.block.shape, dtype=dtype, device=like.device)
    lead = like.shape[: like.dim() - view.axes]
    dtype = torch.complex128 if double else torch.complex64
    half = (*view.block.grid[:-1], view.length // 2 + 1)
    return torch.zeros(*lead, *half, dtype=dtype, device=like.device)
