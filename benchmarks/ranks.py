"""What several processes cost and bring: the exchange of gradients, whole steps, and the digits example.

python benchmarks/ranks.py --out results/all_reduce.json      # this machine, 1, 2 and 4 processes
torchrun … benchmarks/ranks.py --worker                       # a cluster: prints the times of its processes
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.models import build
from gredp.app.settings import TrainSettings
from gredp.app.train import train
from gredp.distributed import all_reduce_sum, begin, broadcast, finish, process_group, rank, world_size
from gredp.storage.record import header

SIZES, ROUNDS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000), 15
NETWORK, BATCH, STEPS = "resnet20", 128, 7
RUNS = 20


def milliseconds(action: Callable[[], object], rounds: int, tensors: bool = False) -> float:
    """Median without the first; the processes begin every round together. `tensors`: that is all they do."""
    times = []
    for _ in range(rounds + 1):
        begin("a round")
        if not tensors:
            finish()
        started = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - started))
        finish()
    return round(statistics.median(times[1:]), 3)


def exchange(parameters: int) -> float:
    """What a step sends for so many parameters: sums to all, the noisy gradient from the first."""
    values = {"all": torch.zeros(parameters)}
    return milliseconds(lambda: broadcast(all_reduce_sum(values)), ROUNDS, tensors=True)


def step(records: int) -> tuple[float, int]:
    """(milliseconds of a private step over `records` in all, parameters)."""
    torch.manual_seed(0)
    model = build(NETWORK, (3, 32, 32), 10, 8)
    data = TensorDataset(torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="gredp",
    )
    x, y = data.tensors
    mine = slice(rank(), records, world_size())

    def once() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()

    return milliseconds(once, STEPS), sum(p.numel() for p in model.parameters())


def worker() -> None:
    torch.set_num_threads(1)
    with process_group():
        whole, parameters = step(BATCH)
        sent = {str(size): exchange(size) for size in SIZES if world_size() > 1}
        found = {"step_ms": whole, "empty_step_ms": step(0)[0], "parameters": parameters, "exchange_ms": sent}
        if rank() == 0:
            print(json.dumps(found))


def launched(processes: int, *arguments: str) -> Any:
    """The JSON that the first of so many processes prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={processes}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def example() -> None:
    """`gredp train` without options, a few times over."""
    torch.set_num_threads(1)
    runs = []
    for number in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            record = train(TrainSettings(out=f"{folder}/{number}")).record
            took = time.perf_counter() - begun
        if record:
            runs.append((record["test_accuracy"], record["guarantee"]["proven_epsilon"], took))
    if runs:
        accuracies, epsilons, seconds = zip(*runs)
        print(json.dumps({"accuracies": accuracies, "proven_epsilon": max(epsilons), "seconds": seconds}))


def main() -> None:
    if "--worker" in sys.argv:
        worker()
    elif "--example" in sys.argv:
        example()
    else:
        measure()


def measure() -> None:
    times = {str(n): launched(n, __file__, "--worker") for n in (1, 2, 4)}
    runs = {str(n): launched(n, __file__, "--example") for n in (1, 2)}
    facts = {"command": "python benchmarks/ranks.py", "cores": len(os.sched_getaffinity(0)), "threads": 1}
    more = {"rounds": ROUNDS, "network": NETWORK, "batch": BATCH, "backend": "gloo"}
    record = {**header(), **facts, **more, "processes": times, "digits": runs}
    print(json.dumps({"processes": times, "digits": runs}, indent=2))
    if "--out" in sys.argv:
        Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
