"""Runs cells as `gredp train` processes, one for each core, and keeps their records. No torch.

A cell that has a record is not run again; one that was interrupted is resumed from its run folder, with all
that it had spent.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gredp.errors import GredpError
from gredp.reproduce.cells import Cell
from gredp.training.record import save
from gredp.training.settings import FILE

#: what a cell's record keeps of its run's
KEPT = (
    "format",
    "version",
    "created",
    "command",
    "versions",
    "settings",
    "data",
    "parameters",
    "guarantee",
    "starts",
    "steps_lost",
    "metrics",
    "selection",
    "seconds",
)
JUDGED_BY = ("test_accuracy", "validation_accuracy")


class Watcher(Protocol):
    """What is told while cells run: of how much work how much is done, and which cells run."""

    def __call__(self, done: float, total: float, finished: int, running: Sequence[str]) -> None: ...


def record_file(out: Path, cell: Cell) -> Path:
    return out / f"{cell.name}.json"


def read_record(out: Path, cell: Cell) -> dict[str, Any] | None:
    """The record of a cell, if it has been run."""
    path = record_file(out, cell)
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GredpError(f"{path} cannot be read: {error}") from None
    return record


def run_cells(
    cells: Sequence[Cell], out: Path, runs: Path, workers: int, places: dict[str, str], watch: Watcher
) -> None:
    """Run all cells that have no record yet; a cell that fails stops the others after a checkpoint.

    `places` are options of `gredp train` that name files of this machine; they stay out of the records.
    """
    waiting = [cell for cell in cells if not record_file(out, cell).exists()]
    total, finished = sum(cell.work for cell in waiting), len(cells) - len(waiting)
    done = 0.0
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    with _stopped_at_the_end(running):
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop(0)
                running[cell] = _start(cell, runs / cell.name, places, workers)
            for cell, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[cell]
                _collect(cell, process.returncode, out, runs / cell.name)
                done, finished = done + cell.work, finished + 1
            partly = sum(cell.work * _share(runs / cell.name, cell) for cell in running)
            watch(done + partly, total, finished, [cell.name for cell in running])
            time.sleep(0.2)


def _start(cell: Cell, folder: Path, places: dict[str, str], workers: int) -> "subprocess.Popen[bytes]":
    if (folder / FILE).exists():
        told = [] if (folder / "record.json").exists() else ["--resume", str(folder)]
    else:  # a folder without settings is one whose making was interrupted: nothing has been charged
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        told = [*cell.arguments, "--out", str(folder)]
    if not told:
        return subprocess.Popen([sys.executable, "-c", ""])
    for option, path in places.items():
        if option != "pretrained" or cell.transferred:
            told += [f"--{option}", path]
    threads = {} if workers == 1 else {"OMP_NUM_THREADS": "1"}
    log = folder.parent / f"{cell.name}.log"
    with log.open("ab") as to:
        command = [sys.executable, "-m", "gredp", "train", *told, "--json"]
        return subprocess.Popen(command, stdout=to, stderr=to, env={**os.environ, **threads})


def _collect(cell: Cell, status: int, out: Path, folder: Path) -> None:
    log = folder.parent / f"{cell.name}.log"
    if status:
        lines = log.read_text(errors="replace").strip().splitlines() or [f"status {status}"]
        raise GredpError(f"{cell.name} failed: {lines[-1]} (log: {log})")
    found = json.loads((folder / "record.json").read_text())
    kept = {key: found[key] for key in (*KEPT, *JUDGED_BY) if key in found}
    # The command that repeats the cell, without the folders of the machine it ran on.
    weights = ["--pretrained", "WEIGHTS"] if cell.transferred else []
    kept["command"] = " ".join(["gredp train", *cell.arguments, *weights])
    kept["settings"] = {k: v for k, v in kept["settings"].items() if k not in ("data_dir", "pretrained")}
    save(record_file(out, cell), kept | {"cell": cell.name, "row": cell.row})


def _share(folder: Path, cell: Cell) -> float:
    try:
        return len(json.loads((folder / "metrics.json").read_text())["metrics"]) / cell.epochs
    except (OSError, ValueError, KeyError):
        return 0.0


@contextmanager
def _stopped_at_the_end(running: dict[Cell, "subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Whatever ends the block, no process goes on alone; each writes a checkpoint first."""
    try:
        yield
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
