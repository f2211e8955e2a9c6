"""Pages that are asked for again are not fetched again."""

import os
import platform
import subprocess
import sys
import weakref

import pytest
import torch

import gredp.engine
from worlds import make_private

#: faults of 20 turns with 64 MiB, after some in which the heap finds its size
CODE = """
import resource
import numpy as np
from gredp.memory import keep_freed_memory
keep_freed_memory()
def faults():
    np.ones(8 * 2**20).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    first = faults()
for _ in range(20):
    last = faults()
print(last - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    faults = {}
    for name, given in {
        "kept": {},
        "tuned": {"MALLOC_MMAP_THRESHOLD_": "131072"},
        "told": {"GREDP_KEEP_MEMORY": "0"},
    }.items():
        env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")} | given
        said = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, check=True).stdout
        faults[name] = int(said)
    assert faults["kept"] * 100 < faults["tuned"]
    assert faults["kept"] * 100 < faults["told"]


def test_make_private_keeps_it_for_everyone(monkeypatch):
    called = []
    monkeypatch.setattr(gredp.engine, "keep_freed_memory", lambda: called.append(True))
    make_private(torch.nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4)))
    assert called


@pytest.mark.parametrize("retained", [False, True])
def test_a_backward_frees_what_layers_were_given(retained):
    """Though the loss, and with it every hook, lives on; unless another backward is to follow."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    given: list[weakref.ref[torch.Tensor]] = []
    model[2].register_forward_pre_hook(lambda layer, inputs: given.append(weakref.ref(inputs[0])))
    model, *_ = make_private(model, (torch.ones(4, 2), torch.zeros(4)))
    loss = model(torch.ones(4, 2)).square().sum(1).mean()
    loss.backward(retain_graph=retained)
    assert (given[-1]() is not None) == retained  # the others were probes
    if retained:
        loss.backward()
        assert given[-1]() is None


def test_a_second_backward_that_autograd_would_allow_is_rejected():
    model, *_ = make_private(torch.nn.Linear(2, 2), (torch.ones(4, 2), torch.zeros(4)))
    loss = model(torch.ones(4, 2)).sum(1).mean()
    loss.backward()
    with pytest.raises((RuntimeError, gredp.GredpError), match="retain_graph=True"):
        loss.backward()
