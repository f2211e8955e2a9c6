"""What a model holds besides the parameters that are trained: buffers and frozen parameters.

Formal guarantee. When a step is released, all of them hold what they held in `make_private`, or what the
caller has loaded since by `load_state_dict`, which is the caller's word that it follows no private record.
So nothing reaches `state_dict` past the noise, whatever wrote it: a forward, a backward hook, or the loop.

Trained parameters move by releases alone, as far as can be seen: a forward that writes to one is rejected,
but a loop may clamp or average weights between two steps, which follows from what was released.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gredp.errors import GredpError

#: what is remembered of a tensor: a buffer's values, a frozen parameter's shape, type and sum of its bits
Fingerprint = Tensor | tuple[Any, ...]


class UntrainedState:
    """The state of one model that must stay as it is, and a look at whether it did."""

    def __init__(self, module: nn.Module, trained: Collection[str]) -> None:
        self.module, self.trained = module, frozenset(trained)
        self._kept: dict[str, Fingerprint] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self.remember()

    def remember(self) -> None:
        """As it is now, it follows no private record."""
        self._kept = {name: _fingerprint(tensor) for name, tensor in (*self._buffers(), *self._frozen())}

    def attach(self, hook: Callable[..., Any]) -> list[Any]:
        """Remember whatever is loaded, into the model or into a part of it."""
        return [
            part.register_load_state_dict_post_hook(hook(self._loaded(part, f"{name}." if name else "")))
            for name, part in self.module.named_modules()
        ]

    def _loaded(self, part: nn.Module, prefix: str) -> Callable[..., None]:
        def remember(loaded: nn.Module, _: Any) -> None:
            own = (*part.named_buffers(recurse=False), *part.named_parameters(recurse=False))
            if loaded is part:  # and not a copy of it
                kept = {prefix + name: _fingerprint(tensor) for name, tensor in own}
                self._kept |= {name: value for name, value in kept.items() if name not in self.trained}

        return remember

    def begin_forward(self) -> None:
        self._versions = self._written()

    def end_forward(self) -> None:
        """Reject what this forward has written, as far as that is seen at once."""
        self._reject(self._buffers())
        for name, version in self._written().items():
            if self._versions.get(name, version) != version:
                raise GredpError(
                    f"parameter {name} was changed by a training forward: what follows the data would be "
                    "released without noise; use layers that keep nothing of their inputs"
                )

    def reject_changes(self) -> None:
        """Before anything is released or kept."""
        self._reject((*self._buffers(), *self._frozen()))

    def _reject(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name not in self._kept or not _unchanged(self._kept[name], tensor):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise GredpError(
                    f"{kind} {name} was changed after make_private: what follows the data would be released "
                    "without noise; use layers that keep nothing of their inputs (see gredp.fix); load "
                    "public values by load_state_dict, keep counters in attributes"
                )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers()

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, p) for n, p in self.module.named_parameters() if n not in self.trained)

    def _written(self) -> dict[str, tuple[int, int]]:
        """Of every parameter: which tensor it is, and how often it was written to."""
        return {name: (id(p), p._version) for name, p in self.module.named_parameters()}


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Buffers by value. Frozen networks are large: of their bits, read as whole numbers, the sum is kept."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    rest = raw.numel() // 8 * 8
    return (tensor.shape, tensor.dtype, int(raw[:rest].view(torch.int64).sum()), raw[rest:].tolist())


def _unchanged(kept: Fingerprint, tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or not isinstance(kept, Tensor):
        return not isinstance(kept, Tensor) and _fingerprint(tensor) == kept
    if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        return False
    kept = kept.to(tensor.device)
    return bool(((kept == tensor) | (kept.isnan() & tensor.isnan())).all())
