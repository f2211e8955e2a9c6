"""Several processes of one machine joined by gloo, forked so that they start at once and keep every patch."""

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: seconds that a world may take
PATIENCE = 60


def in_world(world: int, action: Callable[[], Any]) -> list[Any]:
    """What `action` gives in each of `world` processes that train together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_fork(folder, world, rank, action) for rank in range(world)]
        deadline = time.monotonic() + PATIENCE
        statuses = [wait(child, deadline - time.monotonic()) for child in children]
        errors = [p.read_text() for p in sorted(folder.glob("*.error"))]
        assert not any(statuses), f"statuses {statuses}\n" + "\n".join(errors)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


def _fork(folder: Path, world: int, rank: int, action: Callable[[], Any]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        torch.set_num_threads(1)
        if world > 1:
            meeting = f"file://{folder}/meeting"
            wait_for = timedelta(seconds=20)
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=world, timeout=wait_for
            )
        (folder / str(rank)).write_bytes(pickle.dumps(action()))
        status = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def wait(child: int, seconds: float) -> int:
    """The exit status, negative for a signal; a child that takes longer is killed, and fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
