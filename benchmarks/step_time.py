"""Step time and peak memory of every method, of Opacus and of plain PyTorch, as ratios of one run.

Every variant lives in a process of its own; they take turns, three steps each of which the first is not
counted, so that whatever else the machine does falls on all of them alike; medians are compared. Each runs as
its users get it by default; "plain kept" is plain training in a process that keeps the memory its steps free.

    python benchmarks/step_time.py --out results/step_time.json [--quick] [--threads 2]

Ratios differ from processor to processor, so the record names its own.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from networks import BATCH, NETWORKS, facts
from worker import VARIANTS

from gredp.storage.record import header, save

HERE = Path(__file__).parent
QUICK_NETWORKS = ("lenet5", "model3", "resnet20")
#: seconds of plain steps over which chance evens out, and the rounds that it may take to have them
ENOUGH, MOST_ROUNDS = 0.5, 15
QUICK_VARIANTS = ("plain", "plain kept", "dpsgd", "gredp", "gredp shaped", "opacus hooks", "opacus ghost")


class Worker:
    """A process that steps when told to; a variant that fails says why and takes no part."""

    def __init__(self, network: str, variant: str, batch: int, threads: int, *physical: int) -> None:
        self.variant, self.seconds, self.peak, self.error = variant, [], 0, ""
        sizes = map(str, (batch, threads, *physical))
        command = [sys.executable, str(HERE / "worker.py"), network, variant, *sizes]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            lines = self.process.stderr.read().strip().splitlines()
            self.error = lines[-1] if lines else "ended without a word"
            return {}
        return json.loads(line)

    def step(self, turn: str = "turn") -> None:
        """A turn of three steps, or "one" alone."""
        if self.error:
            return
        self.process.stdin.write(turn + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer:
            self.seconds.append(answer["seconds"])
            self.peak = answer["peak"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait()


def measure(network: str, variants: tuple[str, ...], rounds: int, threads: int, batch: int = 0) -> dict:
    """Median seconds, peak bytes and their ratios to plain, by variant; more rounds where steps are short."""
    workers = [Worker(network, variant, batch, threads) for variant in variants]
    taken = 0
    while taken < max(rounds, min(MOST_ROUNDS, ENOUGH / max(workers[0].seconds, default=ENOUGH))):
        for worker in workers:
            worker.step()
        taken += 1
    for worker in workers:
        worker.close()
    rows = {}
    for worker in workers:
        if worker.error or not worker.seconds:
            rows[worker.variant] = {"error": worker.error}
            continue
        rows[worker.variant] = {"seconds": statistics.median(worker.seconds), "peak_bytes": worker.peak}
    base = rows["plain"]
    for row in rows.values():
        if "seconds" in row:
            row["time_ratio"] = row["seconds"] / base["seconds"]
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
    return rows


def processor() -> str:
    """Its name, as the system has it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time and peak memory, relative to plain PyTorch.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="three networks and fewer variants")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="networks; others keep what the record has of them")
    arguments = parser.parse_args()
    networks, variants = (QUICK_NETWORKS, QUICK_VARIANTS) if arguments.quick else (NETWORKS, VARIANTS)
    networks = arguments.only or networks
    rounds = 5 if arguments.quick else arguments.rounds
    kept = (
        json.loads(arguments.out.read_text())["networks"] if arguments.only and arguments.out.exists() else {}
    )
    results = dict(kept)
    for network in networks:
        results[network] = {
            "batch": BATCH.get(network, 128),
            **facts(network),
            "variants": measure(network, variants, rounds, arguments.threads),
        }
        for variant, row in results[network]["variants"].items():
            shown = row.get("error") or f"time {row['time_ratio']:.2f}, memory {row['memory_ratio']:.2f}"
            print(f"{network:16} {variant:16} {shown}", flush=True)
    command = f"python benchmarks/step_time.py --threads {arguments.threads} --rounds {rounds}"
    record = header() | {"command": command, "threads": arguments.threads, "rounds": rounds}
    record["processor"] = processor()
    record["networks"] = results
    save(arguments.out, record)


if __name__ == "__main__":
    main()
