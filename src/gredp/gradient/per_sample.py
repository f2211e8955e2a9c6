"""Stage 3, factors: per-sample gradients stored as factors, materialized only where nothing else serves.

Each kind answers two questions: how much energy has record i at each frequency, and what is the sum of
all records' gradients with given factors. `dense` is the slow, obvious answer to both.

Letters: b record, o output, i input, t position, k frequency, p and q blocks, c channel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, Self

import torch
from torch import Tensor

from gredp.gradient.norms import squares
from gredp.spectrum import SMALL, BlockView, grid_energy


class Products:
    """How products that are kept are taken: as they are, or `rounded`.

    Then those of single precision are of factors rounded to bfloat16, and rounded to bfloat16 themselves.

    Formal guarantee. K and z are those without. Let r(g_i) be the product that is kept for record i: r is a
    function of that record's factors alone, its norm is taken of the kept numbers, and the sum adds the kept
    numbers times their factor. So the record moves the sum by r(g_i)·min(1, C/‖r(g_i)‖), of norm at most C,
    however far r(g_i) is from g_i: no allowance for this rounding is needed, and the noise is what it was.
    Gradients that are not kept (Gram matrices, single positions) stay in single precision in norm and sum.
    """

    def __init__(self, rounded: bool = False) -> None:
        self.rounded = rounded
        self._made: tuple[Any, Any] | None = None

    def free(self) -> None:
        self._made = None

    def reuse(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made under the same key last: layers of one shape follow each other."""
        if self._made is None or self._made[0] != key:
            self.free()  # for what is made next
            self._made = key, make()
        return self._made[1]

    def multiply(self, left: Tensor, right: Tensor, kept: Tensor | None, more: bool = False) -> Tensor:
        """The batched product, in `kept` if it is; with `more`, added to what is there."""
        if kept is not None and self.rounds(kept.dtype):
            product = torch.bmm(left.bfloat16(), right.bfloat16())
            return kept.add_(product) if more else kept.copy_(product)
        if more and kept is not None:
            return kept.baddbmm_(left, right)
        return torch.bmm(left, right, out=kept)

    def rounds(self, dtype: torch.dtype) -> bool:
        return self.rounded and dtype == torch.float32


class PerSampleGradient(ABC):
    """One parameter's gradient for each record of a physical batch."""

    #: trailing axes of the parameter that are its Fourier grid
    grid_axes: int

    @abstractmethod
    def dense(self) -> Tensor:
        """`[b, *shape]`."""

    def tensors(self) -> dict[str, Tensor]:
        """What it is stored as, by the names of its fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @cached_property
    def batch(self) -> int:
        """Number of records."""
        return next(iter(self.tensors().values())).shape[0]

    @cached_property
    def like(self) -> Tensor:
        """A tensor of its precision and device."""
        return next(t for t in self.tensors().values() if t.is_floating_point())

    def map_records(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with each tensor of one row per record replaced by `change` of it."""
        rows = {n: change(t) for n, t in self.tensors().items() if t.dim() and t.shape[0] == self.batch}
        return replace(self, **rows)  # type: ignore[type-var]

    def compact(self, spectral: bool, products: Products | None = None) -> "PerSampleGradient":
        """The form in which to keep it until the step: itself, or something smaller.

        `spectral` says that energies by frequency will be needed, not norms alone.
        """
        return self

    def joined(self, other: "PerSampleGradient") -> "PerSampleGradient | None":
        """The sum of both as factors, or None where only the materialized ones can be added."""
        return None

    def squared_norm(self) -> Tensor:
        """`[b]`, in double precision."""
        return squares(self.dense())

    def grid_energy(self) -> Tensor:
        """`[b, *grid]`: energy of each coefficient of the unitary spectrum, leading axes summed."""
        return grid_energy(self.dense(), self.grid_axes)

    def energy_in(self, view: BlockView) -> Tensor:
        """`[b, group_count]`: the same by groups of the view, whose axes may be others if layers share it."""
        own = view.axes == self.grid_axes
        return view.gather(self.grid_energy() if own else grid_energy(self.dense(), view.axes))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """`[*shape]`: Σ_b factors_b · gradient_b."""
        return torch.tensordot(factors, self.dense(), 1)

    def band_sum(self, factors: Tensor, view: BlockView) -> Tensor:
        """The spectrum of `weighted_sum` over the columns that the view keeps."""
        return view.kept_spectrum(self.weighted_sum(factors))

    def stored_sum(self, factors: Tensor) -> Tensor:
        """`weighted_sum` in the domain that it is stored in, of which `restored` gives the gradient."""
        return self.weighted_sum(factors)

    def restored(self, total: Tensor) -> Tensor:
        return total

    def norm_bound(self) -> Tensor | None:
        """`[b]`: a bound on the square of what `weighted_sum` adds up for a record before its terms cancel.

        None where they have canceled already, because the gradient is materialized.
        """
        return None

    def allowance(self, transforms: int, size: int) -> float:
        """By how much a record may be longer in the sum than its norm says, relative to its whole norm.

        The norm may be taken of the product of as many `transforms` of `size` numbers, or of none. In units
        of the rounding u, 2⁻²⁴ in single precision: the sum of a piece's squares is right to 64 in whatever
        order it is added up, its root to 33, a product of two such norms to 66; the record's factor and
        its product with the gradient are rounded by 1 each. A transform is right to 7·log₂ n (FFT) or n·√n
        (a matrix). Sums in double precision add less than 1e-10. Terms that cancel within a record have
        allowances of their own, `norm_bound` and GRAM_ROUNDING.
        """
        transform = size * math.sqrt(size) if size <= SMALL else 7 * math.log2(size)
        return torch.finfo(self.like.dtype).eps / 2 * (72 + transforms * transform) + 1e-10

    def merge_views(self, views: int) -> "PerSampleGradient":
        """Rows of `views` inputs that are one record's become one row, their sum: views first, clip after."""
        return Dense(self.dense().unflatten(0, (-1, views)).sum(1), self.grid_axes)

    def zero_unless(self, mask: Tensor) -> "PerSampleGradient":
        """The same with the records outside `mask` set to zero, infinities and NaN included."""
        return self.map_records(lambda t: t.masked_fill(~mask.view(-1, *[1] * (t.dim() - 1)), 0))


@dataclass(frozen=True)
class Dense(PerSampleGradient):
    """Materialized: biases, normalization layers, sums over several uses of one parameter."""

    values: Tensor  # [b, *shape]
    grid_axes: int = 1
    # What is asked of them first, where it was taken while they were in cache:
    norms: Tensor | None = None  # [b], squared
    energies: Tensor | None = None  # [b, *grid]

    def dense(self) -> Tensor:
        return self.values

    def squared_norm(self) -> Tensor:
        return super().squared_norm() if self.norms is None else self.norms

    def grid_energy(self) -> Tensor:
        return super().grid_energy() if self.energies is None else self.energies

    def energy_in(self, view: BlockView) -> Tensor:
        if 0 < view.axes == self.values.dim() - 1 and view.groups is not None:  # all of the block is its grid
            return view.group_energy(self.values)
        return super().energy_in(view)


@dataclass(frozen=True)
class InPieces(PerSampleGradient):
    """Materialized, some records in each array: small ones find room where the backward has freed inputs.

    One large array finds none between them, and a step would need the memory of both.
    """

    pieces: tuple[PerSampleGradient, ...]

    @staticmethod
    def of(pieces: Iterable[PerSampleGradient]) -> PerSampleGradient:
        """These, of consecutive records; at least one."""
        made = tuple(pieces)
        return made[0] if len(made) == 1 else InPieces(made)

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return self.pieces[0].grid_axes

    @property
    def sizes(self) -> list[int]:
        return [piece.batch for piece in self.pieces]

    def tensors(self) -> dict[str, Tensor]:
        numbered = enumerate(self.pieces)
        return {f"{name} {number}": t for number, piece in numbered for name, t in piece.tensors().items()}

    @property
    def batch(self) -> int:
        return sum(self.sizes)

    def dense(self) -> Tensor:
        return torch.cat([piece.dense() for piece in self.pieces])

    def squared_norm(self) -> Tensor:
        return torch.cat([piece.squared_norm() for piece in self.pieces])

    def grid_energy(self) -> Tensor:
        return torch.cat([piece.grid_energy() for piece in self.pieces])

    def energy_in(self, view: BlockView) -> Tensor:
        return torch.cat([piece.energy_in(view) for piece in self.pieces])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        parts = zip(self.pieces, factors.split(self.sizes))
        total = reduce(Tensor.add_, [piece.stored_sum(part) for piece, part in parts])
        return self.pieces[0].restored(total)

    def zero_unless(self, mask: Tensor) -> "InPieces":
        return InPieces(tuple(p.zero_unless(part) for p, part in zip(self.pieces, mask.split(self.sizes))))


def add(first: PerSampleGradient, second: PerSampleGradient, grid_axes: int) -> PerSampleGradient:
    """The gradient of a parameter that is used twice: both uses count before the norm is taken."""
    joined = first.joined(second)
    return Dense(first.dense() + second.dense(), grid_axes) if joined is None else joined


@dataclass(frozen=True)
class PerSampleSpectra:
    """One physical batch, every block of every record, not yet clipped.

    `scale` turns the stored gradients into those of each record's own loss, the mean over its views (the
    number of records where the loss was a mean over all inputs).
    """

    gradients: Mapping[str, PerSampleGradient]
    batch: int
    scale: float
