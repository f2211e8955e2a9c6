"""The learning rate over a run: a function of the step, so that the ledger alone says where to resume."""

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal["constant", "cosine"]


def rate_factor(schedule: Schedule, warmup: int, steps: int) -> Callable[[int], float]:
    """Step (from 0) → share of the learning rate: a linear rise over `warmup` steps, then the schedule.

    The cosine falls from 1 to 0 at the end of `steps`.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - warmup)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2

    return factor
