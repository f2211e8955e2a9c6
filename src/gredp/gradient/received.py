"""Stage 1, backward: what a backward brought, as per-sample gradients, until a step takes it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gredp.errors import GredpError
from gredp.gradient.norms import full_precision
from gredp.gradient.per_sample import PerSampleGradient, PerSampleSpectra, Products, add
from gredp.gradient.reduction import LossReduction
from gredp.gradient.rules import TAKE_HALF, TAKE_HALF_FOR_PRODUCTS, Call, Gradients, exact, generic
from gredp.gradient.units import Unit
from gredp.mechanisms.plan import Needs
from gredp.storage.files import one_line


@dataclass(eq=False)
class Forward:
    """One run of the model: the batches that were handed out by then, None if none was, and its inputs."""

    handed_out: int | None = None
    inputs: list[StorageWeakRef] = field(default_factory=list)

    def shares_a_draw_with(self, other: "Forward") -> bool:
        """No batch came in between, so that both are on the records of one draw."""
        return self is other or (self.handed_out is not None and self.handed_out == other.handed_out)


class Received:
    """The gradients of all forwards on one draw. `take` hands them over, once.

    Row i of each forward is that of record i: its gradient is the sum over forwards, clipped once.
    `needs` is what the step will ask of a layer, which decides what to keep until then. `views` is the number
    of inputs that belong to each record, side by side in every batch: a record's gradient is that of its mean
    loss over them, one vector that is clipped once. `grid_axes` has each
    parameter's number of axes of its Fourier grid; `rounded` is that of `Products`.
    """

    def __init__(
        self,
        loss_reduction: str,
        needs: Needs,
        views: int,
        grid_axes: Mapping[str, int],
        rounded: bool = False,
    ) -> None:
        self.loss_reduction = loss_reduction
        self.reduction = LossReduction(loss_reduction)
        self.needs = needs
        self.views = views
        self.rounded = rounded
        self._products = Products(rounded)
        self._grid_axes = grid_axes
        #: the batches that were handed out so far; None before the first
        self.handed_out: Callable[[], int | None] = lambda: None
        #: how often per-sample gradients were given away, outside of ε
        self.exposed = 0
        #: the last one that began
        self._forward = Forward()
        #: while it is set, forwards are ours and not the user's
        self._paused = False
        self.drop()

    def drop(self) -> None:
        """Forget what backwards have brought."""
        self._products.free()
        self._pending: dict[str, PerSampleGradient] = {}
        #: that they have come through
        self.forwards: list[Forward] = []
        self._batch: int | None = None

    def pending(self) -> PerSampleSpectra | None:
        """What backwards have brought, valid until the next; None if there was none."""
        if self._batch is None:
            return None
        records = self._batch // self.views
        scale = float(records) if self.loss_reduction == "mean" else 1.0 / self.views
        return PerSampleSpectra(self._pending, records, scale)

    def take(self) -> PerSampleSpectra | None:
        """The same, once."""
        spectra = self.pending()
        self.drop()
        return spectra

    def take_nothing(self) -> None:
        """The next step is on no records, for models that cannot run on an empty batch."""
        self.drop()
        self._batch = 0

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _receive(
        self, unit: Unit, forward: Forward, x: Tensor, g: Tensor, call: Call, known: dict[str, Any]
    ) -> None:
        """`known` is what the unit's rule takes of the forward beside its input."""
        if forward not in self.forwards:
            self._reject_other_draw(forward)
            self.reduction.look(unit.name, g)
            self.forwards.append(forward)
        if self._batch is None:
            self._batch = g.shape[0]
        if g.shape[0] != self._batch:
            raise GredpError(
                f"{unit.name} saw {g.shape[0]} records, another layer or forward {self._batch}: the first "
                "dimension must be the batch, and row i of every forward in a step that of record i"
            )
        if g.shape[0] % self.views:
            raise GredpError(
                f"{g.shape[0]} inputs are no whole number of records with {self.views} views each: "
                "train on the batches of the loader that make_private returned"
            )
        if self.loss_reduction == "mean" and full_precision(g) is not g:
            raise GredpError(
                f"{unit.name}: gradients of a mean loss in {str(g.dtype).removeprefix('torch.')} are rounded "
                "after the division by the batch, which couples its records: use loss_reduction='sum', the "
                "sum of the records' losses and a learning rate divided by the batch size, or float32"
            )
        if not self._takes_half(unit, x, g):
            x, g = full_precision(x), full_precision(g)
        with exact(g.device):
            gradients = self._gradients(unit, x, g, call, known)
        unit.check(gradients, self._batch // self.views)
        for name, gradient in gradients.items():
            full = unit.parameters.get(name)
            if full is None or not unit.layer.get_parameter(name).requires_grad:
                continue  # absent (no bias), or frozen by now
            held = self._pending.get(full)
            self._pending[full] = gradient if held is None else add(held, gradient, self._grid_axes[full])

    def _takes_half(self, unit: Unit, x: Tensor, g: Tensor) -> bool:
        """Whether the unit's rule has no need of copies in single precision."""
        kept_rounded = self.rounded and self.needs != "inputs"
        taking = unit.rule in TAKE_HALF or (kept_rounded and unit.rule in TAKE_HALF_FOR_PRODUCTS)
        return taking and torch.float16 not in (x.dtype, g.dtype)

    def _reject_other_draw(self, forward: Forward) -> None:
        if all(forward.shares_a_draw_with(other) for other in self.forwards[:1]):
            return
        if forward.handed_out is None:
            raise GredpError(
                "a second forward in a step on batches of your own: nothing tells if both are of one draw; "
                "use the loader that make_private returned, or call optimizer.zero_grad() in between"
            )
        raise GredpError(
            "gradients of an earlier batch are still there, and a step covers one draw of records: call "
            "optimizer.step() or zero_grad() before the next batch (a loss that passes through the model, as "
            "a generator's does, leaves some too); for batches too large for memory use BatchMemoryManager"
        )

    def _gradients(self, unit: Unit, x: Tensor, g: Tensor, call: Call, known: dict[str, Any]) -> Gradients:
        """By the unit's rule, or the generic one; errors name the layer."""
        try:
            if unit.rule is None:
                with self._pause():  # the generic rule runs the layer again
                    gradients = generic(unit.layer, list(unit.parameters), g, call)
            else:
                with torch.no_grad():
                    gradients = unit.rule(unit.layer, x, g, **known)
        except GredpError as error:
            raise GredpError(f"{unit.name}: {error}") from None
        except (RuntimeError, TypeError) as error:
            if unit.rule is not None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise GredpError(
                f"{unit.name} ({type(unit.layer).__name__}) has no rule of its own, and torch.func cannot "
                f"differentiate it record by record ({one_line(error)}): build it from torch's own layers"
            ) from error
        with torch.no_grad():
            if self.views > 1:  # before any norm is taken, or each view would be clipped
                gradients = {name: v.merge_views(self.views) for name, v in gradients.items()}
            if self.needs == "inputs":
                return gradients
            spectral = self.needs == "spectra"
            return {n: v.compact(spectral, self._products) for n, v in gradients.items()}
