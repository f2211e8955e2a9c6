"""Places in autograd's graph for the outputs of layers whose parameters ask for no gradient, and its runs."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gredp.errors import GredpError

#: the function whose frame holds what is being differentiated; without it nothing of that is seen
_RUNNING = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


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


def moments(out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Means and inverse deviations by which a group normalization made `out`, if autograd keeps them.

    `[b, groups]` in single precision at least. Not where saved tensors are packed away: that of a checkpoint
    would run the forward again.
    """
    node: Any = out.grad_fn
    packing = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: "not known")
    if node is None or node.name() != "NativeGroupNormBackward0" or packing(True) is not None:
        return None
    mean, scale = node._saved_result1, node._saved_result2
    return None if mean.dtype in (torch.float16, torch.bfloat16) else (mean.detach(), scale.detach())


def in_backward() -> bool:
    """A forward in it is that of a checkpoint, run again."""
    return bool(torch._C._current_graph_task_id() != -1)


def runs() -> Iterator[dict[str, Any]]:
    """What is being differentiated now, as arguments of autograd; this thread's own if it has one.

    On a GPU hooks run in a thread of the engine: there those of all threads.
    """
    here: FrameType = sys._getframe()
    for frame in (here, *(f for f in sys._current_frames().values() if f is not here)):
        within: FrameType | None = frame
        while within is not None and within.f_code is not _RUNNING:
            within = within.f_back
        if within is not None:
            yield within.f_locals
            if frame is here:
                return


def reaches_weights() -> bool:
    """Whether the gradients that are being computed are for weights: `torch.autograd.grad` asks for others.

    Rejects graphs of gradients: what is differentiated through them goes past all hooks.
    """
    if torch.is_grad_enabled():
        raise GredpError(
            "gradients of gradients (create_graph=True, as in a gradient penalty) go past the layers' hooks, "
            "no clip would see them; leave the penalty out (a critic's weights may be clamped after a step)"
        )
    found = [(run["kwargs"].get("accumulate_grad", True), run["args"][3:4]) for run in runs()]
    return not found or any(into_leaves and not any(inputs) for into_leaves, inputs in found)


def frees_graph() -> bool:
    """Whether what is differentiated now is gone afterwards: nothing asks for its inputs again."""
    found = [run["args"][1:2] for run in runs()]
    return bool(found) and not any(any(retained) for retained in found)
