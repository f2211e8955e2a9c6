import os
import shutil
from collections.abc import Iterator

# For the processes that tests start, and before torch reads it: two threads against a busy core are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist

from gredp.app import cli

# Every step of a run is synced to the disk; a folder in memory, where there is room, does not wait for it.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**31:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


@pytest.fixture(autouse=True)
def _one_thread_and_no_process_group() -> Iterator[None]:
    """Programs around a test may change either; a test that forks would hang in the child, or inherit it."""
    torch.set_num_threads(1)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _pages_where_they_are_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of a page take longer than a short run: drawn where a mark or a module's fixture asks."""
    if request.node.get_closest_marker("pages") is None:
        monkeypatch.setattr(cli, "_try_report", lambda run: None)
