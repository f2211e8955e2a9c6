"""Many trainings: each a `gredp train` process, one for each core, and their records. No torch.

A job that has a record is not run again; one that was interrupted is resumed from its run folder, with all
that it had spent. A folder of the same name with a run of other settings is refused.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gredp.app.merge_settings import resolved
from gredp.app.settings import FILE, TrainSettings, saved_settings
from gredp.errors import GredpError
from gredp.storage.files import cannot, make_folder
from gredp.storage.record import load, save

#: what a job's record keeps of its run's
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
    "ledger",
)
JUDGED_BY = ("test_accuracy", "validation_accuracy")


class Job(Protocol):
    """One training: the `arguments` of `gredp train` without folders, under a `name` of its own."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> list[str]: ...

    @property
    def epochs(self) -> int: ...

    @property
    def work(self) -> float:
        """Seconds of one thread, roughly: for the time left."""

    @property
    def transferred(self) -> bool:
        """Whether it needs pretrained weights."""

    @property
    def facts(self) -> dict[str, str]:
        """What its record holds beside its run's."""


class Watcher(Protocol):
    """What is told while jobs run: of how much work how much is done, and which jobs run."""

    def __call__(self, done: float, total: float, finished: int, running: Sequence[str]) -> None: ...


def record_file(out: Path, job: Job) -> Path:
    return out / f"{job.name}.json"


def read_record(out: Path, job: Job) -> dict[str, Any] | None:
    """The record of a job, if it has been run."""
    path = record_file(out, job)
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GredpError(f"{path} cannot be read: {error}") from None
    return record


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    runs: Path,
    workers: int,
    places: dict[str, str],
    watch: Watcher,
    timed: bool = False,
) -> None:
    """Run all jobs that have no record yet; a job that fails stops the others after a checkpoint.

    `places` are options of `gredp train` that name files of this machine; they stay out of the records. So
    does how long a job took, which follows what it drew: it is `timed` where the data are public.
    """
    waiting = [job for job in jobs if not record_file(out, job).exists()]
    for job in waiting:
        _refuse_another(job, runs / job.name)
    make_folder(out)
    make_folder(runs)
    total, finished, done = sum(job.work for job in waiting), len(jobs) - len(waiting), 0.0
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    begun: dict[str, float] = {}
    with _stopped_at_the_end(running):
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                begun[job.name] = time.monotonic()
                running.append((job, _start(job, runs / job.name, places, workers)))
            for job, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((job, process))
                took = {"seconds": round(time.monotonic() - begun[job.name], 2)} if timed else {}
                _collect(job, process.returncode, out, runs / job.name, took)
                done, finished = done + job.work, finished + 1
            partly = sum(job.work * _share(runs / job.name, job) for job, _ in running)
            watch(done + partly, total, finished, [job.name for job, _ in running])
            time.sleep(0.2)


def _refuse_another(job: Job, folder: Path) -> None:
    """A run that was told something else, to be resumed or collected under the name of this one."""
    if (folder / FILE).exists():
        wanted = resolved(TrainSettings, "train", job.arguments)
        changed = wanted.changed(saved_settings(str(folder)))
        if changed is not None:
            raise GredpError(f"{folder} was started with {changed}: choose another place for the runs")


def command(job: Job) -> str:
    """The one that repeats it, without the folders of the machine it runs on."""
    weights = ["--pretrained", "WEIGHTS"] if job.transferred else []
    return shlex.join(["gredp", "train", *job.arguments, *weights])


def _start(job: Job, folder: Path, places: dict[str, str], workers: int) -> "subprocess.Popen[bytes]":
    if (folder / FILE).exists():
        told = [] if (folder / "record.json").exists() else ["--resume", str(folder)]
    else:  # a folder without settings is one whose making was interrupted: nothing has been charged
        shutil.rmtree(folder, ignore_errors=True)
        told = [*job.arguments, "--out", str(folder)]
    if not told:
        return subprocess.Popen([sys.executable, "-c", ""])
    for option, path in places.items():
        if option != "pretrained" or job.transferred:
            told += [f"--{option}", path]
    threads = {} if workers == 1 else {"OMP_NUM_THREADS": "1"}
    log = folder.parent / f"{job.name}.log"
    words = [sys.executable, "-m", "gredp", "train", *told, "--json"]
    try:
        with log.open("ab") as to:
            return subprocess.Popen(words, stdout=to, stderr=to, env={**os.environ, **threads})
    except OSError as error:
        raise cannot(log, "written", error) from None


def _collect(job: Job, status: int, out: Path, folder: Path, took: dict[str, float]) -> None:
    log = folder.parent / f"{job.name}.log"
    if status:
        lines = log.read_text(errors="replace").strip().splitlines() or [f"status {status}"]
        raise GredpError(f"{job.name} failed: {lines[-1]} (log: {log})")
    found = load(folder)
    kept = {key: found[key] for key in (*KEPT, *JUDGED_BY) if key in found}
    kept["command"] = command(job)
    kept["settings"] = {k: v for k, v in kept["settings"].items() if k not in ("data_dir", "pretrained")}
    save(record_file(out, job), kept | took | job.facts)


def _share(folder: Path, job: Job) -> float:
    try:
        return len(json.loads((folder / "metrics.json").read_text())["metrics"]) / job.epochs
    except (OSError, ValueError, KeyError):
        return 0.0


@contextmanager
def _stopped_at_the_end(running: list[tuple[Job, "subprocess.Popen[bytes]"]]) -> Iterator[None]:
    """Whatever ends the block, no process goes on alone; each writes a checkpoint first."""
    try:
        yield
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()


class Bar:
    """A bar over the work of all jobs, with the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("runs", total=None, status="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __call__(self, done: float, total: float, finished: int, running: Sequence[str]) -> None:
        status = f"{finished} done; {', '.join(running)}"
        self._progress.update(self._task, completed=done, total=total, status=status)

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
