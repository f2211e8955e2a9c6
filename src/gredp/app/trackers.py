"""Trackers: log a run while it trains, to files or to the usual services.

A tracker receives released values only: settings, the guarantee, and metrics that ε covers or that come from
public test records. It never sees the time or size of a single batch: both depend on the secret draw. A
service sees when it receives something, and so how long an epoch took.
"""

import csv
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from gredp.errors import GredpError
from gredp.storage.files import one_line
from gredp.storage.record import plain_numbers

TrackerName = Literal["csv", "jsonl", "tensorboard", "mlflow", "wandb"]
Values = Mapping[str, float]


class Tracker(Protocol):
    """Your own tracker needs these three methods."""

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        """A run starts or resumes. `guarantee` is what will hold at its end (`PrivacyEngine.guarantee`)."""

    def log(self, step: int, values: Values) -> None:
        """Released metrics after `step` steps of the run."""

    def finish(self, record: Mapping[str, Any]) -> None:
        """The run's record; empty if it was interrupted."""


class JsonLines(Tracker):
    """metrics.jsonl: one object a line, first the start, then the figures, last the guarantee that holds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        self._append({"event": "start", "settings": settings, "guarantee": guarantee})

    def log(self, step: int, values: Values) -> None:
        self._append({"event": "log", "step": step, **values})

    def finish(self, record: Mapping[str, Any]) -> None:
        self._append({"event": "finish", "guarantee": record.get("guarantee")})

    def _append(self, line: dict[str, Any]) -> None:
        _append(self.path, json.dumps(plain_numbers(line), ensure_ascii=False, allow_nan=False, default=dict))


class Csv(Tracker):
    """metrics.csv: a row for each `log`; the first one names the columns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        self._columns: list[str] = []
        with suppress(FileNotFoundError), self.path.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])  # a resumed run keeps its columns

    def log(self, step: int, values: Values) -> None:
        row = {"step": step, **values}
        if not self._columns:
            self._columns = list(row)
            _append(self.path, _csv_line(self._columns))
        _append(self.path, _csv_line([row.get(name, "") for name in self._columns]))


class TensorBoard(Tracker):
    """Event files in the folder, for `tensorboard --logdir`, all of the time at which the run began."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._began = SummaryWriter(str(folder / "tensorboard")), time.time()

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        for name, facts in (("settings", settings), ("guarantee", guarantee)):
            rows = "\n".join(f"    {key}: {value}" for key, value in facts.items())  # indented: shown as text
            self._writer.add_text(name, rows, 0, self._began)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, self._began)
        self._writer.flush()

    def finish(self, record: Mapping[str, Any]) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of the experiment "gredp" at MLFLOW_TRACKING_URI, all of the time at which it began.

    Through the client, not `mlflow.start_run`: that would note the user's name and script, and change what
    the caller's own mlflow calls do.
    """

    def __init__(self, folder: Path) -> None:
        self._name, self._began = folder.name, int(1000 * time.time())

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name("gredp")
        experiment = known.experiment_id if known else self._client.create_experiment("gredp")
        self._run = self._client.create_run(experiment, run_name=self._name).info.run_id
        for key, value in {**settings, **{f"guarantee.{k}": v for k, v in guarantee.items()}}.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, self._began, step)

    def finish(self, record: Mapping[str, Any]) -> None:
        for name, value in record.get("guarantee", {}).items():
            self._client.set_tag(self._run, name, str(value))
        self._client.set_terminated(self._run, "FINISHED" if record else "KILLED", self._began)


class WandB(Tracker):
    """A run of the project "gredp"; WANDB_MODE=offline keeps it in the folder.

    It sends what it is given and nothing else: no console, no code, no git state, no figures of the machine,
    whose load follows the size of every batch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        import wandb

        quiet = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="-",
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        config = plain_numbers({**settings, "guarantee": dict(guarantee)})
        name, folder = self._folder.name, str(self._folder)
        self._run = wandb.init(project="gredp", name=name, dir=folder, config=config, settings=quiet)

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, record: Mapping[str, Any]) -> None:
        self._run.summary.update(plain_numbers(dict(record.get("guarantee", {}))))
        self._run.finish(exit_code=0 if record else 1)


TRACKERS: dict[str, Any] = dict(zip(get_args(TrackerName), (Csv, JsonLines, TensorBoard, MLflow, WandB)))


def check_trackers(names: Sequence[str]) -> None:
    """Reject trackers that are unknown or not installed, before anything is trained."""
    for name in names:
        if name not in TRACKERS:
            raise GredpError(f"unknown tracker {name!r}: choose from {', '.join(TRACKERS)}")
        if name not in ("csv", "jsonl") and find_spec(name) is None:
            raise GredpError(f"{name} is not installed: pip install 'gredp[{name}]'")


def make_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    return [TRACKERS[name](folder) for name in dict.fromkeys(names)]


class TrackerGroup(Tracker):
    """Trackers as one. One that fails to start stops the run; one that fails later is dropped with a warning.

    By then the run has spent its ε, which an unreachable service must not cost.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def start(self, settings: Mapping[str, Any], guarantee: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            try:
                tracker.start(settings, guarantee)
            except Exception as error:
                name = type(tracker).__name__
                raise GredpError(f"{name} cannot start: {one_line(error)}") from None

    def log(self, step: int, values: Values) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def finish(self, record: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.finish(record))

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                action(tracker)
            except Exception as error:
                self.trackers.remove(tracker)
                name = type(tracker).__name__
                warnings.warn(
                    f"{name} has failed ({one_line(error)}): the run continues without it", stacklevel=2
                )


def _append(path: Path, text: str) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _csv_line(cells: Sequence[Any]) -> str:
    line = StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()
