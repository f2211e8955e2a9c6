"""Which draw a step is on: every batch that the loader hands out has an identity.

Formal guarantee. A draw pays for one step at the sampling rate. A step on a batch that was stepped before is
recognized, and so is a step on more or fewer rows than the records that were drawn:

| the model's input | how its draw is found |
|---|---|
| memory of a batch that was handed out, or a view of it | by that memory |
| anything else (moved to a device, transformed) | by order and size among the draws that no step has used |
| nothing was handed out yet: batches of the caller's own | not at all: the caller's word |

By order and size, a second step on one batch passes for the first on another only if that one was handed out,
never used, and has as many records. Where every batch is used, the charges are right whatever the order.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from gredp.errors import GredpError


@dataclass(eq=False)
class Draw:
    """One logical batch: its records in this process, and the step it was drawn for."""

    records: int
    turn: int = 0
    used: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """What the loader hands out: a draw, or so many of its records."""

    draw: Draw
    records: int
    last: bool = True


def memory_of(batch: Any) -> list[StorageWeakRef]:
    """Where its tensors lie; a view lies where its base does."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.layout is strided)
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


class HandedOut:
    """The draws that a loader has handed out, shared by the loader and the optimizers that step on them."""

    def __init__(self) -> None:
        #: draws that no step has used, in order, none of them before one that was used; None before the first
        self.unused: deque[Draw] | None = None
        #: loops so far
        self.passes = 0
        #: gives the number of the step that comes next, where records take turns
        self.next_turn: Callable[[], int] = lambda: 0
        #: in a loop over parts: the part that must be stepped before the next one is handed out
        self.waiting: Part | None = None
        self.in_parts = False
        self._sizes: set[int] = set()  # of those that were used or skipped
        #: batches, or parts of them, so far
        self.count = 0
        self._in_memory: list[tuple[Part, list[StorageWeakRef]]] = []

    def begin(self, in_parts: bool = False) -> int:
        """A new pass; its number. Of an older one, only the last batch may still be on its way."""
        self.unused = deque([*(self.unused or ())][-1:])
        self.in_parts, self.waiting = in_parts, None
        self.passes += 1
        return self.passes

    def add(self, part: Part, batch: Any = None) -> None:
        """`part` is handed out as `batch`."""
        assert self.unused is not None
        if self.waiting is not None:
            raise GredpError(
                "a batch, or part of one, was taken before optimizer.step() was called for the previous one: "
                "call step() for each in turn, and prefetch none"
            )
        if self.in_parts:
            self.waiting = part
        self.count += 1
        alive = [(p, places) for p, places in self._in_memory if not all(at.expired() for at in places)]
        self._in_memory = [*alive, (part, memory_of(batch))]
        if not self.unused or self.unused[-1] is not part.draw:
            self.unused.append(part.draw)

    def find(self, records: int, inputs: Iterable[StorageWeakRef] = ()) -> Draw | None:
        """The draw of a step on so many records; None where nothing was handed out."""
        if self.unused is None:
            return None
        draw = self.by_memory(inputs)
        if draw is None:
            draw = next((d for d in self.unused if d.records == records), None)
        if draw is None and records in self._sizes:
            draw = Draw(records, used=True)
        if draw is None:  # whichever it is, it has another number of records
            draw = next(iter(self.unused), Draw(max(self._sizes, default=0), used=True))
        self.check(records, draw.records)
        return draw

    @staticmethod
    def check(inputs: int, drawn: int) -> None:
        """Reject a model run on another number of inputs than records were drawn."""
        if inputs != drawn:
            raise GredpError(
                f"the model was run on {inputs} inputs, but {drawn} records were drawn: use whole batches of "
                "the loader, and for several inputs of a record make_private(views=…)"
            )

    def of_one_batch(self, forwards: list[list[StorageWeakRef]]) -> list[StorageWeakRef]:
        """The inputs of all forwards of a step, which are rejected if they may be of several batches."""
        inputs = [place for forward in forwards for place in forward]
        self.by_memory(inputs)  # not of several that are known
        known = self.waiting is not None or all(self.by_memory(forward) for forward in forwards)
        if len(forwards) > 1 and not known and len(self.unused or ()) > 1:
            raise GredpError(
                "several forwards in a step, and more than one batch that no step was on: take the next one "
                "after the step, and skip none, so that all forwards are known to be on one draw"
            )
        return inputs

    def by_memory(self, inputs: Iterable[StorageWeakRef]) -> Draw | None:
        """The draw whose memory the inputs are; None where none, or more than one, has it."""
        parts = set()
        for place in inputs:
            found = {part for part, places in self._in_memory if place in places}
            parts |= found if len(found) == 1 else set()
        if len(parts) > 1 or (parts and self.waiting and self.waiting not in parts):
            raise GredpError(
                "these inputs are of more than one batch, and a record may be in several: let every forward "
                "of a step be on the batch that the loader handed out last"
            )
        return next((part.draw for part in parts), None)

    def use(self, draw: Draw) -> None:
        """It has paid for a step; those before it were skipped."""
        draw.used = True
        self._sizes.add(draw.records)
        if self.unused and draw in self.unused:
            while (passed := self.unused.popleft()) is not draw:
                self._sizes.add(passed.records)
