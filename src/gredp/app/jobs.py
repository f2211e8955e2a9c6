"""Many trainings: each a `gredp train` process, one for each core, and their records. No torch.

A job that has a record is not run again; one that was interrupted is resumed from its run folder, with all
that it had spent. A folder of the same name with a run of other settings is rejected.
"""

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
from gredp.storage.files import cannot, make_folder, read_json
from gredp.storage.record import load, save

#: what a job's record leaves out of its run's
LEFT_OUT = ("processes", "certificate", "normalisation", "insecure", "weights", "spectrum", "judged_on")


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
        """What its record adds to its run's."""


def record_file(out: Path, job: Job) -> Path:
    return out / f"{job.name}.json"


def read_record(out: Path, job: Job) -> dict[str, Any] | None:
    """The record of a job, if it has been run."""
    return read_json(record_file(out, job)) or None


def run_jobs(
    jobs: Sequence[Job], out: Path, runs: Path, workers: int, places: dict[str, str], timed: bool = False
) -> None:
    """Run all jobs that have no record yet; a job that fails stops the others after a checkpoint.

    `places` are options of `gredp train` that name files of this machine; they stay out of the records. So
    does the time a job took, which depends on what it drew: set `timed` only if the data are public.
    """
    from rich.progress import TimeElapsedColumn

    from gredp.app.console import progress_bar

    waiting = [job for job in jobs if not record_file(out, job).exists()]
    for job in waiting:
        _reject_another(job, runs / job.name)
    make_folder(out)
    make_folder(runs)
    done = 0.0
    running: dict[str, tuple[Job, subprocess.Popen[bytes], float]] = {}
    with progress_bar(TimeElapsedColumn()) as bar, _terminated(running):
        task = bar.add_task("runs", total=sum(job.work for job in waiting), status="")
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                process = _start(job, runs / job.name, places, workers)
                running[job.name] = job, process, time.monotonic()
            for job, process, begun in list(running.values()):
                if process.poll() is not None:
                    del running[job.name]
                    took = {"seconds": round(time.monotonic() - begun, 2)} if timed else {}
                    _collect(job, process.returncode, out, runs / job.name, took)
                    done += job.work
            partly = sum(job.work * _share(runs / job.name, job) for job, *_ in running.values())
            status = f"{len(jobs) - len(waiting) - len(running)} done; {', '.join(running)}"
            bar.update(task, completed=done + partly, status=status)
            time.sleep(0.2)


def _reject_another(job: Job, folder: Path) -> None:
    """A run of other settings must not be resumed or collected under the name of this job."""
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
    if (folder / "record.json").exists():
        return subprocess.Popen([sys.executable, "-c", ""])
    if (folder / FILE).exists():
        options = ["--resume", str(folder)]
    else:  # without settings: its creation was interrupted, and nothing has been charged
        shutil.rmtree(folder, ignore_errors=True)
        options = [*job.arguments, "--out", str(folder)]
    for option, path in places.items():
        if option != "pretrained" or job.transferred:
            options += [f"--{option}", path]
    threads = {} if workers == 1 else {"OMP_NUM_THREADS": "1"}
    log = folder.parent / f"{job.name}.log"
    words = [sys.executable, "-m", "gredp", "train", *options, "--json"]
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
    kept = {key: value for key, value in load(folder).items() if key not in LEFT_OUT}
    kept["command"] = command(job)
    kept["settings"] = {k: v for k, v in kept["settings"].items() if k not in ("data_dir", "pretrained")}
    save(record_file(out, job), kept | took | job.facts)


def _share(folder: Path, job: Job) -> float:
    return len(read_json(folder / "metrics.json").get("metrics", [])) / job.epochs


@contextmanager
def _terminated(running: dict[str, tuple[Job, "subprocess.Popen[bytes]", float]]) -> Iterator[None]:
    """However the block ends, no process is left; each writes a checkpoint first."""
    try:
        yield
    finally:
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()
