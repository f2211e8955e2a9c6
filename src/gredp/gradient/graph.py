"""Places in autograd's graph for the outputs of layers whose parameters ask for no gradient."""

from typing import Any

import torch
from torch import Tensor


def in_graph(out: Tensor, reads_output: bool) -> Tensor:
    """A tensor with the values of `out` that a hook can be put on, and whose gradient is computed.

    `reads_output` says that the layer's own backward may read its output, so that it must be copied where
    it is a view: an in-place layer behind it would rewrite the history past the hook.
    """
    if out._is_view():
        out = out.clone() if reads_output else _Fresh.apply(out)  # type: ignore[no-untyped-call]  # torch's own
    if not out.requires_grad:
        out = _Anchor.apply(out, torch.zeros((), device=out.device, requires_grad=True))  # type: ignore[no-untyped-call]
    return out


class _Anchor(torch.autograd.Function):
    """Gives a tensor without history a place in the graph, so that its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)  # the same tensor goes on: no copy, and in-place layers may follow
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Fresh(torch.autograd.Function):
    """The same memory as a tensor that is no view, for layers whose backward does not read their output."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
