"""Which dimension of a layer's input is the batch, learned from one forward on zeros.

A table of positions, or a layer that has time before records, may have as many rows as the batch by
coincidence: rows that are no records would be clipped in place of records. With another number of records
such a layer still has the same rows, and is known by that.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils._pytree import tree_leaves, tree_map

from gredp.gradient.units import noting


class RowsOnZeros:
    """Runs each part of a model on zeros once, as far as layers in it have not been run by then."""

    def __init__(self, module: nn.Module, layers: set[nn.Module]) -> None:
        below = {part: layers & set(part.modules()) for part in module.modules() if part not in layers}
        #: parts of the model, and the layers in them that were not run on zeros through them yet
        self.parts = {part: held for part, held in below.items() if held}
        #: layers that ran on zeros, and their rows if those are as many with any batch
        self.fixed: dict[nn.Module, int | None] = {}

    def run(self, part: nn.Module, args: Any, kwargs: Any, batch: int) -> None:
        if self.parts[part] <= self.fixed.keys():
            return
        layers, self.parts[part] = self.parts[part], set()
        rows = rows_of_zeros(part, layers, args, kwargs, batch)
        self.fixed |= {layer: batch if batch in seen else None for layer, seen in rows.items()}


def rows_of_zeros(
    module: nn.Module, layers: Iterable[nn.Module], args: Any, kwargs: Any, batch: int
) -> dict[nn.Module, set[int]]:
    """How many rows those of `layers` have that run, with another batch; the arguments hold `batch` records.

    The model is run on two records of zeros, or three, of the shapes that it is called with: on no private
    value. Buffers and random numbers are as before. A model that cannot be run on zeros is left alone: its
    layers are compared with the batch at every step, where the coincidence ends with the first batch of
    another size.
    """
    rows: dict[nn.Module, set[int]] = {}

    def note(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        tensors = (leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor))
        rows.setdefault(layer, set()).update(t.shape[0] for t in tensors if t.dim())

    try:
        few = 3 if batch == 2 else 2
        args, kwargs = tree_map(lambda leaf: _zeros(leaf, batch, few), (args, kwargs))
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        cuda = {p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"}
        with noting(layers, note), torch.no_grad(), fork_rng(sorted(cuda)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.func.functional_call(module, buffers, args, kwargs)
    except Exception:  # whatever zeros may do to it
        return {}
    return rows


def _zeros(leaf: Any, batch: int, few: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    follows = leaf.dim() and leaf.shape[0] == batch
    return leaf.new_zeros((few, *leaf.shape[1:]) if follows else leaf.shape)
