"""Tables that records share: of positions, or of distances between them, without a batch dimension.

The network computes what it did, but every record has a copy of the output, whose gradient is its own.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gredp.errors import GredpError

#: of its shape or type
READ = re.compile("__len__|__repr__|dim|get_device|is_floating_point|ndimension|nelement|numel|size|stride")
#: what is done to each copy alike
MOVE = re.compile(
    "T|mT|__getitem__|clone|contiguous|double|dropout|expand|expand_as|flatten|float|movedim|permute|repeat|"
    "reshape|squeeze|swapaxes|to|transpose|type|type_as|unflatten|unsqueeze|view|view_as"
)
#: operands of any shape, broadcast
ELEMENTWISE = re.compile(
    "__i?(add|sub|mul)__|__r(add|sub|mul)__|__truediv__|(add|sub|mul)_?|div|masked_fill|where"
)
#: of the last dimensions, those before broadcast
PRODUCT = re.compile("__matmul__|matmul|scaled_dot_product_attention")


def is_shared(layer: nn.Module, x: Tensor) -> bool:
    """Whether these ids are of positions, `[t]` or `[1, t]`, or of distances between them, `[q, k]`.

    Only ids that are consecutive, or the same along each diagonal, are: others might come from records, whose
    gradients would depend on one another.
    """
    if not isinstance(layer, nn.Embedding) or x.dim() not in (1, 2):
        return False
    if x.dim() == 2 and x.shape[0] != 1:
        return torch.equal(x[1:, 1:], x[:-1, :-1])
    ids = x.flatten()
    return torch.equal(ids, ids[:1] + torch.arange(len(ids), device=ids.device))


class Shared(Tensor):
    """What the records share. Where it meets them, each has its own of the `copies`, `[b, *shape]`.

    Operands with b rows in a dimension that this lacks, or has of size 1 or b, are records. Constants may
    have as many rows by coincidence: `beside` has the operations in which others were met, as on zeros.
    """

    copies: Tensor
    beside: set[tuple[str, int, int]]

    @staticmethod
    def of(copies: Tensor, beside: set[tuple[str, int, int]]) -> "Shared":
        # torch.compile compiles what lies around it
        torch._dynamo.config.nontraceable_tensor_subclasses.add(Shared)
        one = copies.detach()[0] if len(copies) else copies.new_zeros(copies.shape[1:])
        shared = one.as_subclass(Shared)
        shared.copies, shared.beside = copies, beside
        return shared

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if READ.fullmatch(name):
                return func(*args, **kwargs)
            if name in ("__get__", "__set__"):
                value = func(*args, **kwargs)
                if not isinstance(value, Tensor):
                    return value
                name = func.__self__.__name__  # type: ignore[attr-defined]
            return _of_copies(name, func, (tuple(args), kwargs))


def _of_copies(name: str, func: Callable[..., Any], call: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    first, *_ = ours = [t for t in tensors if isinstance(t, Shared)]
    records, most = len(first.copies), max(t.dim() for t in tensors)
    rows = {t.shape[0] for t in tensors if t.dim() == most > 0 and not isinstance(t, Shared)}
    own = {t.shape[0] for t in ours if t.dim() == most}
    elementwise = ELEMENTWISE.fullmatch(name)
    fits = own <= {1, records} if elementwise else own <= {1} and PRODUCT.fullmatch(name)
    operation = name, max(t.dim() for t in ours), most
    if records in rows and fits and operation not in first.beside:
        args, kwargs = tree_map(lambda leaf: _met(leaf, most) if isinstance(leaf, Shared) else leaf, call)
        return func(*args, **kwargs)
    if not (elementwise or MOVE.fullmatch(name)):
        raise GredpError(
            f"{name} of a table that records share (its ids have no batch dimension): nothing tells which "
            "record has which part in it; give the table ids [batch, ...] (ids.expand(len(x), -1))"
        )
    if elementwise and rows - {1}:
        first.beside.add(operation)

    def alike(copies: list[Tensor]) -> Any:
        copy = iter(copies)
        args, kwargs = tree_map(lambda leaf: next(copy) if isinstance(leaf, Shared) else leaf, call)
        return func(*args, **kwargs)

    copies = torch.func.vmap(alike, randomness="same")([t.copies for t in ours])
    return Shared.of(copies, first.beside)


def _met(shared: Shared, dims: int) -> Tensor:
    """Copy i of what record i meets, of as many dimensions, the first that of the records."""
    copies = shared.copies
    if shared.dim() < dims:
        return copies.reshape(len(copies), *[1] * (dims - shared.dim() - 1), *shared.shape)
    if shared.shape[0] == 1:
        return copies.squeeze(1)
    return copies.diagonal().movedim(-1, 0)
