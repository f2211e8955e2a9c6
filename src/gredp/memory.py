"""What a step frees, kept for the next one."""

import ctypes
import os
import platform
from functools import cache

#: parameters of glibc's mallopt(3)
TRIM_THRESHOLD, MMAP_MAX = -1, -4


@cache
def keep_freed_memory() -> None:
    """From the first `make_private` on: the peak may grow, steps take less time (docs/performance.md).

    glibc hands large arrays back to the system as they are freed. Every step asks for the same ones again,
    and the system clears and maps each of their pages anew. Other C libraries are left alone, and so are
    users who tune theirs by its environment variables, or set GREDP_KEEP_MEMORY=0.
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or tuned or os.environ.get("GREDP_KEEP_MEMORY") == "0":
        return
    library = ctypes.CDLL(None)
    library.mallopt(MMAP_MAX, 0)
    library.mallopt(TRIM_THRESHOLD, -1)
