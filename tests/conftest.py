from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Programs around a test may open one; tests that fork would inherit it."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
