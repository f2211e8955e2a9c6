"""docs/reliability.md, from the records of injected faults, of noise, and of several processes."""

import math
import statistics
from typing import Any

from gredp.distributed import TIMEOUT
from values import load


def values() -> dict[str, Any]:
    faults, noise, ranks = load("faults"), load("noise"), load("all_reduce")
    return {
        "faults": faults,
        "cases": [(case["case"], f"{case['injected']:,}", case["outcome"]) for case in faults["cases"]],
        "noise": noise,
        "cost": [
            (kind, f"{row['keystream_ms']:.1f} ms", f"{row['torch_ms']:.1f} ms", f"{row['ratio']:.2f}")
            for kind, row in noise["cost"].items()
        ],
        "timeout": TIMEOUT,
        "ranks": ranks,
        **_accuracy(ranks["digits"]),
        **_step_time(ranks["processes"]),
    }


def _accuracy(digits: dict[str, Any]) -> dict[str, Any]:
    means = {n: statistics.mean(run["accuracies"]) for n, run in digits.items()}
    spread = {n: statistics.variance(run["accuracies"]) / len(run["accuracies"]) for n, run in digits.items()}
    rows = [
        (
            n,
            f"{100 * means[n]:.2f} %",
            ", ".join(f"{100 * a:.1f}" for a in run["accuracies"]),
            f"{run['proven_epsilon']:.4f}",
            f"{statistics.median(run['seconds']):.1f}",
        )
        for n, run in digits.items()
    ]
    return {
        "runs": len(digits["1"]["accuracies"]),
        "digits": rows,
        "difference": 100 * (means["2"] - means["1"]),
        "error": 100 * math.sqrt(spread["1"] + spread["2"]),
    }


def _step_time(found: dict[str, Any]) -> dict[str, Any]:
    """The model of step time, fitted to two processes, beside what was measured."""
    latency, speed = _fitted(found["2"]["exchange_ms"])

    def exchange(n: int, parameters: int) -> float:
        return latency * _rounds(n) + _volume(n, parameters) / speed if n > 1 else 0.0

    def measured(n: int, size: str) -> str:
        return f"{found[str(n)]['exchange_ms'][size]:.2f}"

    one, parameters = found["1"], found["1"]["parameters"]
    shared = one["step_ms"] - one["empty_step_ms"]
    steps = []
    for n in (1, 2, 4, 8, 16, 32, 64):
        told = shared / n + one["empty_step_ms"] + latency * 2 * (n - 1) + exchange(n, parameters)
        shown = f"{found[str(n)]['step_ms']:.0f}" if str(n) in found else "–"
        steps.append((str(n), f"{told:.0f}", shown, f"{one['step_ms'] / told:.1f}×"))
    return {
        "latency": latency,
        "bandwidth": speed / 1e6,
        "one": one,
        "exchange": [
            (
                f"{int(size):,}",
                *(c for n in (2, 4) for c in (measured(n, size), f"{exchange(n, int(size)):.2f}")),
            )
            for size in found["2"]["exchange_ms"]
        ],
        "steps": steps,
    }


def _rounds(n: int) -> int:
    return 2 * (n - 1) + math.ceil(math.log2(n))


def _volume(n: int, parameters: int) -> float:
    """Bytes that one process sends or waits for."""
    return 4 * parameters * (2 * (n - 1) / n + math.ceil(math.log2(n)))


def _fitted(times: dict[str, float]) -> tuple[float, float]:
    """(latency in ms, bytes in a ms) from two processes: the smallest message, then the largest one."""
    sizes = sorted(map(int, times))
    small, large = sizes[0], sizes[-1]
    slope = (times[str(large)] - times[str(small)]) / (_volume(2, large) - _volume(2, small))
    latency = max(0.0, times[str(small)] - slope * _volume(2, small)) / _rounds(2)
    return latency, 1 / slope
