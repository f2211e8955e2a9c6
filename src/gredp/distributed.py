"""Several processes that train together: one sum, one noise, one ledger.

Formal guarantee. Record i belongs to process i mod N and is clipped there. The clipped sums are added up over
all processes; the first one alone charges the ledger, on the disk before its part of the sum is given away,
draws the noise and broadcasts the noisy gradient. So what every process applies is the release that one
process with all the records would have made, and no process has it before it is charged.

Every exchange begins with the same small all-reduce, which tells what the exchange is for: a step by model,
number and plan, others by their purpose. Tensors travel only if all processes came to the same one, and a
process that fails within one joins no later one. So no two processes ever add up, or broadcast, different
things, whatever the order in which their programs step: all of them reject it in one line.

With one process every function here is the identity.
"""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from gredp.errors import GredpError, OutOfStep, PeerFailed

T = TypeVar("T")

#: seconds after which a silent process is given up; the first one evaluates and writes while others wait
TIMEOUT = 300.0

#: larger than any number that processes compare: one of them has rejected
_REJECTED = 2**62

#: the exchange that this process has begun and not finished
_unfinished = ""

_models = itertools.count(1)
#: those that this process has joined: a program may train several times
_groups = itertools.count(1)


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process; the first one is 0."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that `torchrun` started, if it did; any other start is one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    seconds = os.environ.get("GREDP_TIMEOUT_SECONDS", str(TIMEOUT))
    try:
        timeout = timedelta(seconds=float(seconds))
    except (ValueError, OverflowError):
        raise GredpError(f"GREDP_TIMEOUT_SECONDS must be a number of seconds, not {seconds!r}") from None
    try:
        store, number, world = next(iter(rendezvous("env://", timeout=timeout)))
        # torchrun's store keeps the addresses of processes that are gone, and of groups that were left.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start {start}, group {next(_groups)}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise GredpError(f"the processes could not join: {_first_line(error)}") from None
    finish()
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        who = f"process {dist.get_rank()} of {dist.get_world_size()}"
        raise OutOfStep(f"{who} lost contact with others ({_first_line(error)}): restart all") from None


def _first_line(error: Exception) -> str:
    """Of a library's error, without the place in its source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0][:200]


def begin(what: str, number: int = 0) -> int:
    """Begin an exchange; gives the largest of all processes' numbers, if all have come to `what`.

    Otherwise all reject. One small all-reduce, the same for every purpose: whatever two processes have come
    to, they meet here. Tensors may travel then, until `finish`; a process that fails before it is out.
    """
    global _unfinished
    if world_size() == 1:
        return number
    if _unfinished:
        raise OutOfStep(f"process {rank()} failed within {_unfinished}: all must start again")
    _unfinished, tag = what, _tag(what)
    held = torch.tensor([number, tag, -tag], device=_device())
    with _contact():
        dist.all_reduce(held, dist.ReduceOp.MAX)
    most, high, low = held.tolist()
    if most == _REJECTED:  # every process that rejected says why, and continues to raise it
        reasons = _from_all(what if number == _REJECTED else "")
        finish()
        if number != _REJECTED:
            first = next(i for i, reason in enumerate(reasons) if reason)
            raise PeerFailed(f"process {first} stopped, and so all do: {reasons[first]}")
    elif high != -low:
        places = _from_all(what)
        finish()
        other = next(i for i, place in enumerate(places) if place != places[0])
        apart = f"process {other} came to {places[other]}, the first process to {places[0]}"
        raise OutOfStep(f"{apart}: all processes must step the same models in the same order")
    return most


def finish() -> None:
    """The other end of `begin`."""
    global _unfinished
    _unfinished = ""


def all_reduce_max(number: int, what: str) -> int:
    """The largest of all processes' numbers: an exchange of nothing else."""
    most = begin(what, number)
    finish()
    return most


def rejected_by_all(action: Callable[..., T]) -> Callable[..., T]:
    """What one process rejects before an exchange, all reject: the others would wait for it in vain."""

    @functools.wraps(action)
    def telling(*args: Any, **kwargs: Any) -> T:
        try:
            return action(*args, **kwargs)
        except (PeerFailed, OutOfStep):
            raise
        except GredpError as error:
            if not _unfinished:
                with suppress(OutOfStep):
                    all_reduce_max(_REJECTED, str(error))
            raise

    return telling


def _tag(what: str) -> int:
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:7])


def _from_all(text: str, width: int = 400) -> list[str]:
    """What each process has to say, cut to `width` bytes."""
    held = torch.frombuffer(bytearray(text.encode()[:width].ljust(width)), dtype=torch.uint8).to(_device())
    all_held = [torch.empty_like(held) for _ in range(world_size())]
    with _contact():
        dist.all_gather(all_held, held)
    return [bytes(each.tolist()).decode(errors="ignore").rstrip() for each in all_held]


def _together(tensors: Mapping[str, Tensor], collective: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """A collective on all tensors of a type at once, since each call costs a round trip."""
    assert _unfinished, "tensors travel within an exchange that all processes have agreed on"
    done: dict[str, Tensor] = {}
    for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
        names = sorted(name for name, t in tensors.items() if t.dtype == dtype)
        flat = torch.cat([tensors[name].detach().flatten() for name in names])
        with _contact():
            collective(torch.view_as_real(flat) if flat.is_complex() else flat)
        parts = flat.split([tensors[name].numel() for name in names])
        done |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts)}
    return done


def all_reduce_sum(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all processes; every process brings the same names, shapes and types."""
    return dict(tensors) if world_size() == 1 else _together(tensors, dist.all_reduce)


def broadcast(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first process' values, bit for bit; the others bring tensors of the same names, shapes, types."""
    return dict(tensors) if world_size() == 1 else _together(tensors, lambda flat: dist.broadcast(flat, 0))


def run_on_rank_zero(action: Callable[[], tuple[Any, bytes]], what: str) -> tuple[Any, bytes]:
    """What `action` gives in the first process, the only one to call it: (JSON, bytes), or its error."""
    if world_size() == 1:
        return action()
    value, content, error = None, b"", None
    if rank() == 0:
        try:
            value, content = action()
        except GredpError as caught:
            error = caught
    head = json.dumps([value, len(content), None if error is None else str(error)]).encode()
    length = begin(what, len(head) if rank() == 0 else 0)
    value, size, message = json.loads(_bytes_from_rank_zero(head, length))
    content = _bytes_from_rank_zero(content, size)
    finish()
    if error is not None:
        raise error
    if message is not None:
        raise PeerFailed(message)
    return value, content


def _bytes_from_rank_zero(content: bytes, size: int) -> bytes:
    """Bytes and not objects, which would travel as pickles."""
    if not size:
        return b""
    held = torch.zeros(size, dtype=torch.uint8, device=_device())
    if rank() == 0:
        held.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    with _contact():
        dist.broadcast(held, 0)
    return held.cpu().numpy().tobytes()


def model_number() -> int:
    """A number for one more private model, the same in all processes."""
    return run_on_rank_zero(lambda: (next(_models), b""), "make_private")[0]


def _device() -> torch.device:
    """Where messages lie: nccl carries what is on a GPU only."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def reject_differences(facts: Mapping[str, Any]) -> None:
    """Processes with different settings would not train one model: name the first difference."""
    if world_size() == 1:
        return
    own = json.loads(json.dumps(facts))
    what = "a comparison of settings"
    first, _ = run_on_rank_zero(lambda: (own, b""), what)
    key = next((k for k in {**first, **own} if first.get(k) != own.get(k)), None)
    differing = all_reduce_max(rank() if key is not None else 0, what)
    if key is not None:
        there, here = (json.dumps(x.get(key))[:200] for x in (first, own))
        raise GredpError(f"process {rank()} has another {key} ({here}) than the first process ({there})")
    if differing:
        raise PeerFailed(f"process {differing} has other settings than the first process")


def share_weights(module: nn.Module) -> None:
    """All processes begin with the first one's parameters and buffers."""
    if world_size() == 1:
        return
    state = {name: t for name, t in module.state_dict().items() if t.numel()}
    reject_differences({"shape of " + name: [*t.shape, str(t.dtype)] for name, t in state.items()})
    begin("the first weights")
    with torch.no_grad():
        for name, value in broadcast(state).items():
            state[name].copy_(value)
    finish()


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """The name under which Opacus' examples wrap a model for `torchrun`: shares the first weights.

    `make_private` does that too, and all the rest: the wrapper is not needed here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        share_weights(model)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
