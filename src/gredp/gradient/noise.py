"""Stage 6, noise: the only place where the gradient path draws random numbers.

Formal guarantee. Given a `BoundedSum`, the result is distributed as the plan's certificate says: one
independent draw for each step and block, from an explicit source that has no default seed.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.summation import BoundedSum, empty_sum
from gredp.randomness import Secret, unit_interval
from gredp.spectrum import BlockView

#: normal numbers drawn at a time
AT_ONCE = 1 << 20
#: parts that threads share, at least: with fewer they lose more than they gain, waiting for each other
#: between numpy's calls
SHARED_PARTS = 4
#: the same on devices other than the CPU, where few large operations are quickest: 64 MiB of key stream
AT_ONCE_ELSEWHERE = 1 << 24
#: numbers of blocks that share a draw, at most
SHARED = 1 << 17
#: numbers that are worked on at a time on the CPU
IN_CACHE = 1 << 17


class NoiseSource(Protocol):
    """Draws standard normal numbers."""

    def begin(self, step: int) -> None:
        """The draws that follow belong to this step of the ledger."""

    def normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor: ...


class SecretSource:
    """A keystream for each (incarnation, step, block), made normal by the Box–Muller transform.

    Radii come from 53 random bits in double precision and from 32 in single, where those that are all zero
    get 53 more: tails reach beyond 8.5 deviations in both. No (step, block) can be drawn twice: steps
    only rise.
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
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        values = torch.empty(math.prod(shape), dtype=dtype, device=like.device)
        at_once = AT_ONCE if values.is_cpu else AT_ONCE_ELSEWHERE
        parts = [(values[start : start + at_once], start) for start in range(0, len(values), at_once)]
        threads = torch.get_num_threads() if values.is_cpu and len(parts) >= SHARED_PARTS else 1
        if threads > 1:
            with ThreadPoolExecutor(min(threads, len(parts))) as pool:
                list(pool.map(lambda part: self._fill(*part), parts))
        else:
            for part in parts:
                self._fill(*part)
        return values.view(shape).to(like.dtype)

    def _fill(self, values: Tensor, start: int) -> None:
        place = (self._step, self._block)
        of_pair = 4 if values.dtype == torch.float64 else 2
        pieces = values.split(IN_CACHE) if values.is_cpu else (values,)
        counts = [of_pair * ((len(piece) + 1) // 2) for piece in pieces]
        if values.is_cpu:  # numpy takes half of torch's time
            drawn = self.secret.words_in_turn(counts, "noise", *place, start)
            for piece, words in zip(pieces, drawn):
                self._transform(np, np.ndarray.astype, piece.numpy(), words, *place, start)
                start += len(piece)
        else:
            words = self.secret.words(counts[0], values.device, "noise", *place, start)
            self._transform(torch, Tensor.to, values, words, *place, start)

    def _transform(self, xp: Any, cast: Any, values: Any, words: Any, *place: int) -> None:
        """By Box and Muller, with numpy or torch."""
        half = (len(values) + 1) // 2
        double = len(words) == 4 * half
        if double:
            words = words.view(xp.int64)
            radius = unit_interval(words[:half], cast, values.dtype)
        else:
            unsigned = words[:half].view(np.uint32) if xp is np else words[:half].long() & 0xFFFFFFFF
            radius = cast(unsigned, values.dtype)
            if not radius.min():  # the tail: once in 2³² draws
                smallest = xp.where(radius == 0)
                tail = self.secret.uniform(len(smallest[0]), "tail", *place)
                radius[smallest] = tail.numpy() if xp is np else tail.to(radius)
            radius *= 2.0**-32
        xp.log(radius, out=radius)
        radius *= -2
        xp.sqrt(radius, out=radius)
        angle = cast(words[half:], values.dtype)
        angle *= math.pi / 2.0 ** (63 if double else 31)
        first, second = values[:half], values[half:]
        xp.cos(angle, out=first)
        xp.sin(angle[: len(second)], out=second)
        first *= radius
        second *= radius[: len(second)]


class GeneratorSource:
    """A generator of the caller's. Anyone who knows its seed knows the noise."""

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
    #: real where nothing is left to undo, else complex spectra over the half grid, or its first columns
    values: dict[str, Tensor]
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
    for block, draw in _drawn(list(_noised_blocks(bounded, parameters)), source):
        view, total, std = block.view, block.total, block.noise_std
        if block.white:
            values[block.name] = total
            if draw is not None:  # white in the weighted domain too
                std *= (plan.white_part or 0.0) / math.sqrt(float(squared_weights[block.name]))
                values[block.name] = total.add_(draw, alpha=std)
            continue
        assert draw is not None
        real = total.real if total.is_complex() else total
        weights = view.spread(squared_weights[block.name].to(real).sqrt())[..., None]
        # Real white noise has the spectrum of a = b = 1, and nothing of it goes to imaginary parts.
        parts = (view.noise_parts(*(plan.noise_parts or (1.0, 1.0))) * std).to(real)
        if not view.padded and (plan.keeps_sums or plan.keep_ratio is not None):
            values[block.name] = _transformed(block, draw, parts, weights, plan.keeps_sums)
            continue
        # A band has weights 1, and 0 outside of it, where what is dropped stays zero.
        draw.mul_(parts if plan.keep_ratio is None else parts * weights)
        draw.addcmul_(torch.view_as_real(view.spectrum(total)), weights)
        values[block.name] = torch.view_as_complex(draw)
    shares = bounded.shares
    if plan.query_std is not None:
        if shares is None:
            of_groups = sum(v.group_count for v in bounded.block_views.values())
            shares = torch.zeros(of_groups if plan.quantile is None else len(plan.groups))
        shares = shares + plan.query_std * source.normal(tuple(shares.shape), shares)
    return NoisySum(bounded, values, shares)


def _transformed(block: "_Noised", draw: Tensor, parts: Tensor, weights: Tensor, keeps: bool) -> Tensor:
    """F⁻¹ of the noisy spectrum, a few rows at a time, which stay in cache; in the place of a real sum.

    There and back a sum that `keeps` its weights is what it was: F⁻¹((w ⊙ F v + τ)/w) = v + F⁻¹(τ/w). A band
    has weights 1, and 0 outside of it.
    """
    view, total = block.view, block.total.contiguous()
    released = total.real.new_empty(view.block.shape) if total.is_complex() else total
    rows = math.prod(view.half_shape[: len(view.half_shape) - view.axes])
    draws = draw.view(rows, *draw.shape[draw.dim() - view.axes - 1 :])
    if view.columns is not None:
        parts, weights = parts[: view.columns], weights[..., : view.columns, :]
    parts = parts / weights if keeps else parts * weights
    few = max(1, IN_CACHE * rows // max(1, draws.numel()) if draws.is_cpu else rows)
    sums = total.view(rows, *total.shape[total.dim() - view.axes :]).split(few)
    places = released.view(rows, *view.block.grid).split(few)
    for place, some, noise in zip(places, sums, draws.split(few)):
        noise.mul_(parts)
        if not keeps:
            spectrum = some if some.is_complex() else view.spectrum(some)
            noise.addcmul_(torch.view_as_real(spectrum), weights)
        values = view.inverse(torch.view_as_complex(noise))
        place.add_(values) if keeps else place.copy_(values)
    return released


class _Noised(NamedTuple):
    """A block of the sum, and the law of its noise."""

    name: str
    view: BlockView
    total: Tensor
    noise_std: float
    white: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its draw; of none where nothing is added."""
        if not self.white:
            return (*self.view.kept_shape, 2)
        return self.view.block.shape if self.noise_std else (0,)


def _noised_blocks(bounded: BoundedSum, parameters: Mapping[str, Tensor]) -> Iterator[_Noised]:
    for group in bounded.plan.groups:
        for name in group.blocks:
            view, total = bounded.block_views[name], bounded.totals.get(name)
            total = empty_sum(view, parameters[name]) if total is None else total
            white = bounded.plan.white_part is not None and view.groups is None and not view.padded
            yield _Noised(name, view, total, group.noise_std, white)


def _drawn(blocks: list[_Noised], source: NoiseSource) -> Iterator[tuple[_Noised, Tensor | None]]:
    """Each block with its draw. Small ones that follow each other share one: a draw has its price."""
    while blocks:
        like, sizes = blocks[0].total, [_even(blocks[0])]
        for block in blocks[1:]:
            size, total = _even(block), block.total
            alike = (total.dtype, total.device) == (like.dtype, like.device)
            if not alike or sum(sizes) + size > SHARED:
                break
            sizes.append(size)
        draws = source.normal((sum(sizes),), like.real if like.is_complex() else like).split(sizes)
        for block, draw in zip(blocks, draws):
            yield block, draw[: math.prod(block.shape)].view(block.shape) if len(draw) else None
        blocks = blocks[len(sizes) :]


def _even(block: _Noised) -> int:
    """Numbers to draw for it: pairs, so that those of the next block can be seen as complex ones."""
    size = math.prod(block.shape)
    return size + size % 2
