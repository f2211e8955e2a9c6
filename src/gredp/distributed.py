"""Wrapper for several processes. So far one process only; more are refused rather than trained wrongly."""

from typing import Any

import torch
from torch import nn

from gredp.errors import GredpError


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """The name under which Opacus' examples wrap a model for `torchrun`; a plain pass-through here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        refuse_many_processes()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def world_size() -> int:
    """How many processes train together."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def refuse_many_processes() -> None:
    """Each process would add noise of its own and charge a ledger of its own: neither would be right."""
    world = world_size()
    if world > 1:
        raise GredpError(f"{world} processes: training on more than one process is not supported yet")
