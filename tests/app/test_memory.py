"""Pages that are asked for again are not fetched again."""

import os
import platform
import subprocess
import sys

import pytest

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
    for told in ({}, {"MALLOC_MMAP_THRESHOLD_": "131072"}):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | told
        said = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, check=True).stdout
        faults[bool(told)] = int(said)
    assert faults[False] * 100 < faults[True]
