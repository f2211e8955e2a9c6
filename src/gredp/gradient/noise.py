"""Stage 4, and the only place where rail A draws random numbers.

Formal guarantee. Given a `BoundedSum`, the result is distributed as the plan's certificate says: one
independent draw for each step and block, from an explicit source that has no default seed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.summation import BoundedSum, empty_sum
from gredp.randomness import Secret, unit_interval

#: normal numbers drawn at a time; more of them would leave the processor's cache and take twice as long
IN_CACHE = 1 << 17


class NoiseSource(Protocol):
    """Draws standard normal numbers."""

    def begin(self, step: int) -> None:
        """The draws that follow belong to this step of the ledger."""

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor: ...


class SecretSource:
    """A keystream for each (incarnation, step, block), made normal by the Box–Muller transform.

    Radii have 53 random bits whatever the precision, so that tails reach 8.5 deviations. No (step, block)
    can be drawn twice: steps only rise.
    """

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self._step = self._block = 0

    def begin(self, step: int) -> None:
        if step <= self._step:
            raise GredpError(f"noise of step {step} was drawn already: a step is noised once")
        self._step, self._block = step, 0

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        self._block += 1
        n = math.prod(shape)
        parts = [
            self._part(min(IN_CACHE, n - start), like.dtype == torch.float64, start)
            for start in range(0, n, IN_CACHE)
        ]
        values = torch.cat(parts) if parts else torch.zeros(0)
        return values.view(shape).to(device=like.device, dtype=like.dtype)

    def _part(self, n: int, double: bool, start: int) -> Tensor:
        half = (n + 1) // 2
        kind, real = (torch.int64, torch.float64) if double else (torch.int32, torch.float32)
        stream = self.secret.keystream((8 + kind.itemsize) * half, "noise", self._step, self._block, start)
        radius = unit_interval(stream, half).log_().mul_(-2).sqrt_().to(real)
        turns = torch.frombuffer(stream, dtype=kind, count=half, offset=8 * half).to(real)
        angle = turns.mul_(math.pi / 2.0 ** (8 * kind.itemsize - 1))
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


class GeneratorSource:
    """A generator of the caller's; whoever knows its seed knows the noise."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def begin(self, step: int) -> None:
        pass

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._generator.device.type != like.device.type:
            raise GredpError(
                f"the noise generator lives on {self._generator.device}, the gradients on {like.device}"
            )
        return torch.randn(shape, generator=self._generator, device=like.device, dtype=like.dtype)


@dataclass
class NoisySum:
    """The released value of one step, in the domain where it was noised. Safe to publish."""

    bounded: BoundedSum
    values: dict[str, Tensor]  # real without a transform, else complex spectra
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
                total = empty_sum(view, parameters[name])
            real = total.real if total.is_complex() else total
            if plan.transform == "none":
                values[name] = total
                if group.noise_std:
                    values[name] = total + group.noise_std * source.normal(view.block.shape, real)
                continue
            weights = view.spread(squared_weights[name].to(real).sqrt())
            spectrum = view.spectrum(total) * weights
            if plan.noise_parts is None:
                # A real draw carried through the transform is Hermitian: nothing goes to imaginary parts.
                noise = view.spectrum(source.normal(view.block.shape, real))
            else:
                a, b = plan.noise_parts
                shape = tuple(spectrum.shape)
                noise = torch.complex(a * source.normal(shape, real), b * source.normal(shape, real))
                if plan.keep_ratio is not None:
                    noise = noise * weights  # 1 in the kept band, 0 outside: what is dropped stays zero
            values[name] = spectrum + group.noise_std * noise
    shares = bounded.shares
    if plan.shaping is not None:
        if shares is None:
            shares = torch.zeros(sum(v.group_count for v in bounded.views.values()))
        shares = shares + plan.energy_std * source.normal(tuple(shares.shape), shares)
    return NoisySum(bounded, values, shares)
