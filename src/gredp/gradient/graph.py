"""Places in autograd's graph for the outputs of layers whose parameters ask for no gradient."""

from typing import Any

import torch
from torch import Tensor


def in_graph(out: Tensor, reads_output: bool) -> Tensor:
    """A tensor with the values of `out` that a hook can be put on, and whose gradient is computed.

    `reads_output` says that the layer's own backward may read its output, so that it must be copied where
    it is a view: an in-place layer behind it would rewrite the history past the hook.
    """
    if out._is_view() and reads_output:
        out = out.clone()
    if out._is_view() or not out.requires_grad:
        anchor = torch.zeros((), device=out.device, requires_grad=True)
        out = _Fresh.apply(out, anchor)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Fresh(torch.autograd.Function):
    """The same memory as a tensor that is not a view, with a place in the graph even without history.

    For layers whose backward does not read their output: no copy is made, and in-place layers may follow.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        return out.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
