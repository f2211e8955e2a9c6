import os
from collections.abc import Iterator

# For the processes that tests start, and before torch reads it: two threads against a busy core are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _one_thread_and_no_process_group() -> Iterator[None]:
    """Programs around a test may change either; a test that forks would hang in the child, or inherit it."""
    torch.set_num_threads(1)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
