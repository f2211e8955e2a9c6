"""Which dimension of a layer's input is the batch, learned from one forward on zeros.

A table of positions, or a layer that has time before records, may have as many rows as the batch by
coincidence: rows that are no records would be clipped in place of records. With another number of records
such a layer still has the same rows, and is known by that.
"""

import warnings
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils._pytree import tree_leaves, tree_map

from gredp.errors import GredpError
from gredp.gradient.shared import Shared, is_shared
from gredp.gradient.units import noting

#: of a layer's inputs and outputs, in the first dimension and in the second
Sizes = tuple[set[int], set[int]]


class RowsOnZeros:
    """Runs each part of a model on zeros once, as far as layers in it have not been run by then."""

    def __init__(self, module: nn.Module, layers: set[nn.Module], axis: int = 0) -> None:
        #: that of the batch in what the model is called with
        self.axis = axis
        self._sizes = {size for parameter in module.parameters() for size in parameter.shape}
        below = {part: layers & set(part.modules()) for part in module.modules() if part not in layers}
        #: parts of the model, and the layers in them that were not run on zeros through them yet
        self.parts = {part: held for part, held in below.items() if held}
        #: layers that ran on zeros, with their sizes there in the first dimension, and in the second
        self.seen: dict[nn.Module, Sizes] = {}
        self._few = 0
        #: what tables that records share met that were no records
        self.beside: set[tuple[str, int, int]] = set()

    def run(self, part: nn.Module, args: Any, kwargs: Any, batch: int) -> None:
        if self.parts[part] <= self.seen.keys():
            return
        layers, self.parts[part] = self.parts[part], set()
        self._few = self._few or _another(args, kwargs, batch, self._sizes)
        zeros = rows_of_zeros(part, layers, args, kwargs, batch, self._few, self.axis, self.beside)
        self.seen |= zeros or rows_of_zeros(part, layers, args, kwargs, batch, self._few, self.axis)

    def axis_of(self, layer: nn.Module) -> int:
        """The dimension of the batch: in models that have it second, the one that follows it on zeros."""
        if not self.axis:
            return 0
        if layer not in self.seen:
            raise GredpError(
                f"batch_first=False, and a {type(layer).__name__} that did not run on zeros: nothing tells "
                "which of its dimensions follows the batch; put the batch first"
            )
        first, second = self.seen[layer]
        return int(self._few in second and self._few not in first)

    def constant(self, layer: nn.Module, rows: int, axis: int = 0) -> bool:
        """Whether the layer has so many rows with any batch, or does not follow the batch at all."""
        seen = self.seen[layer][axis] if layer in self.seen else {self._few}
        return self._few not in seen or (rows in seen and rows != self._few)


def _another(args: Any, kwargs: Any, batch: int, sizes: set[int]) -> int:
    """A number of records that no other dimension of the arguments has, nor any of these."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    taken = {batch, *sizes, *(size for tensor in tensors for size in tensor.shape)}
    return next(few for few in count(2) if few not in taken)


def rows_of_zeros(
    module: nn.Module,
    layers: Iterable[nn.Module],
    args: Any,
    kwargs: Any,
    batch: int,
    few: int,
    axis: int,
    beside: set[tuple[str, int, int]] | None = None,
) -> dict[nn.Module, Sizes]:
    """How many rows those of `layers` have that run, with another batch; the arguments hold `batch` records.

    The model is run on `few` records of zeros, of the shapes that it is called with: on no private
    value. Buffers and random numbers are as before. A model that cannot be run on zeros is left alone: its
    layers are compared with the batch at every step, where the coincidence ends with the first batch of
    another size. With `beside`, tables that records share meet them as they will in training.
    """
    rows: dict[nn.Module, Sizes] = {}

    def note(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        # ids of bags are as many as they are, in no dimension of their own
        looked_at = out if isinstance(layer, nn.EmbeddingBag) else (args, kwargs, out)
        for tensor in (leaf for leaf in tree_leaves(looked_at) if isinstance(leaf, Tensor)):
            for sizes, size in zip(rows.setdefault(layer, (set(), set())), tensor.shape):
                sizes.add(size)
        if beside is not None and not axis and rows[layer][0] and few not in rows[layer][0]:
            (x, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return Shared.of(out.expand(few, *out.shape), beside) if is_shared(layer, x) else None
        return None

    try:
        args, kwargs = tree_map(lambda leaf: _zeros(leaf, batch, few, axis), (args, kwargs))
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        cuda = {p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"}
        with noting(layers, note), torch.no_grad(), fork_rng(sorted(cuda)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.func.functional_call(module, buffers, args, kwargs)
    except Exception:  # whatever zeros may do to it
        return {}
    return rows


def _zeros(leaf: Any, batch: int, few: int, axis: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shape = list(leaf.shape)
    axis = axis if leaf.dim() > axis else 0
    if leaf.dim() and shape[axis] == batch:
        shape[axis] = few
    return leaf.new_zeros(shape)
