"""How time and memory grow: step time with the batch and with the width, circulant layers with their size.

And where the time of a step goes.

python benchmarks/scaling.py --out results/scaling.json [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_time import Worker
from torch import nn
from worker import stepper

from gredp import BlockCirculantLinear
from gredp.storage.record import header, save

BATCHES, PHYSICAL = (64, 128, 256, 512, 1024, 4096), 128
WIDTHS = (256, 512, 1024, 2048, 4096)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
VARIANTS = ("plain", "dpsgd", "gredp shaped")
#: whose steps are taken apart
PROFILED = ("lenet5", "resnet20", "mlp", "transformer")


def grown(network: str, batch: int, threads: int, rounds: int, *physical: int) -> dict:
    """Median seconds and peak bytes of each variant, taking turns."""
    workers = [Worker(network, variant, batch, threads, *physical) for variant in VARIANTS]
    for _ in range(rounds):
        for worker in workers:
            worker.step("one" if batch > 512 else "turn")
    for worker in workers:
        worker.close()
    return {w.variant: {"seconds": statistics.median(w.seconds), "peak_bytes": w.peak} for w in workers}


def forward_and_backward(layer: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        layer.zero_grad()
        x.grad = None
        start = time.perf_counter()
        layer(x).sum().backward()
        return time.perf_counter() - start

    return run


def circulant(size: int, rounds: int) -> dict[str, float]:
    """Seconds of one forward and backward of 128 records, by kind of layer, taking turns."""
    x = torch.randn(128, size, requires_grad=True)
    layers = {
        "dense": nn.Linear(size, size),
        "blocks of 8": BlockCirculantLinear(size, size, block=8),
        "blocks of 64": BlockCirculantLinear(size, size, block=64),
        "one block": BlockCirculantLinear(size, size, block=size),
    }
    runs = {name: forward_and_backward(layer, x) for name, layer in layers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            seconds = run()
            if turn:  # the first one warms up
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def profiled(network: str, variant: str, top: int = 9) -> dict[str, float]:
    """Milliseconds by operator in one step, its own time only, the largest first."""
    step = stepper(network, variant, None)
    step(), step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    times = {event.key: event.self_cpu_time_total / 1e3 for event in profile.key_averages()}
    largest = sorted(times, key=times.__getitem__, reverse=True)
    shown = {name.removeprefix("aten::").split(":")[0]: 0.0 for name in largest[:top]}
    for name in largest[:top]:
        shown[name.removeprefix("aten::").split(":")[0]] += times[name]
    return shown | {"all others": sum(times[name] for name in largest[top:])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Growth of a private step with batch, width and block size.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    threads, rounds = arguments.threads, arguments.rounds
    record = header() | {
        "command": f"python benchmarks/scaling.py --threads {threads} --rounds {rounds}",
        "threads": threads,
        "rounds": rounds,
        "physical_batch": PHYSICAL,
        # plain first: from the first private step on, the process keeps what steps free
        "profile": {v: {name: profiled(name, v) for name in PROFILED} for v in VARIANTS},
        "circulant": {str(n): circulant(n, 3 * rounds) for n in SIZES},
        "width": {str(n): grown(f"mlp{n}", 500, threads, rounds) for n in WIDTHS},
        "batch": {
            str(n): grown("resnet20", n, threads, rounds if n <= 512 else 1, PHYSICAL) for n in BATCHES
        },
    }
    save(arguments.out, record)


if __name__ == "__main__":
    main()
