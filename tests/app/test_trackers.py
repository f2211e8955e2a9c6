"""Trackers, each against the library it speaks to and offline: what is read back is what was released."""

import csv
import io
import json
import math
import time
import warnings
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.progress import Task
from rich.text import Text

from gredp import GredpError
from gredp.app.cli import main
from gredp.app.console import Bar, Throughput
from gredp.app.settings import TrainSettings
from gredp.app.trackers import JsonLines, TrackerGroup, check_trackers, make_trackers
from gredp.app.train import train
from worlds import make_private, one_step, records, small_model

GUARANTEE = {"proven_epsilon": math.inf, "delta": 1e-5}
RECORD = {"guarantee": {"proven_epsilon": 1.5, "delta": 1e-5}, "settings": {}}


def follow(name: str, folder) -> None:
    """A small run as the loop tells it."""
    (tracker,) = make_trackers([name, name], folder)
    tracker.start({"model": "lenet", "clip_norm": 1.0}, GUARANTEE)
    tracker.log(8, {"epoch": 1, "proven_epsilon": 0.7, "test_accuracy": 0.5})
    tracker.log(16, {"epoch": 2, "proven_epsilon": 1.5, "test_accuracy": 0.75})
    tracker.finish(RECORD)


def test_lines_of_json_are_read_back(tmp_path):
    follow("jsonl", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "log", "log", "finish"]
    assert lines[0]["settings"]["model"] == "lenet"
    assert lines[0]["guarantee"]["proven_epsilon"] == "inf"
    assert lines[2] == {"event": "log", "step": 16, "epoch": 2, "proven_epsilon": 1.5, "test_accuracy": 0.75}
    assert lines[3]["guarantee"]["proven_epsilon"] == 1.5


def test_a_table_goes_on_where_it_was_left(tmp_path):
    follow("csv", tmp_path)
    (again,) = make_trackers(["csv"], tmp_path)
    again.start({}, {})
    again.log(24, {"proven_epsilon": 2.0, "epoch": 3, "more": 1.0})
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["8", "16", "24"]
    assert rows[1]["test_accuracy"] == "0.75"
    assert rows[2] == {"step": "24", "epoch": "3", "proven_epsilon": "2.0", "test_accuracy": ""}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_its_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("test_accuracy")] == [(8, 0.5), (16, 0.75)]
    assert events.Scalars("proven_epsilon")[-1].value == 1.5
    assert "guarantee/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_mlflow_reads_back_its_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    from mlflow.tracking import MlflowClient

    follow("mlflow", tmp_path)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("gredp").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "lenet"
    assert run.data.tags["proven_epsilon"] == "1.5"
    assert not {"mlflow.user", "mlflow.source.name"} & run.data.tags.keys()
    history = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert [(m.step, m.value) for m in history] == [(8, 0.5), (16, 0.75)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_wandb_reads_back_its_file_and_holds_nothing_else(tmp_path, monkeypatch):
    """Offline, from its own transaction log: the figures are there, the machine and the user are not."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb.proto import wandb_internal_pb2

    follow("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found: list = []
    deadline = time.monotonic() + 20
    while "exit" not in [r.WhichOneof("record_type") for r in found] and time.monotonic() < deadline:
        time.sleep(0.05)  # its own process writes the file, and may lag behind
        found = [wandb_internal_pb2.Record.FromString(data) for data in wandb_log(file.read_bytes())]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert [h["test_accuracy"] for h in history] == [0.5, 0.75]
    assert [h["_step"] for h in history] == [8, 16]
    kinds = {r.WhichOneof("record_type") for r in found}
    assert not kinds & {"stats", "output", "output_raw", "environment"}
    assert {r.run.host for r in found if r.HasField("run")} == {"-"}


def wandb_log(content: bytes) -> Iterator[bytes]:
    """The entries of its file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    place, entry = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        entry += content[place + 7 : place + 7 + length]
        place += 7 + length
        if place <= len(content) and kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def test_what_is_unknown_or_missing_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    with pytest.raises(GredpError, match="unknown tracker 'paper'"):
        check_trackers(["paper"])
    monkeypatch.setattr("gredp.app.trackers.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow", "wandb"):
        with pytest.raises(SystemExit):
            main(["train", "--track", "csv", name, "--out", str(tmp_path / "run")])
        said = capsys.readouterr().err
        assert said == f"gredp: {name} is not installed: pip install 'gredp[{name}]'\n"
    assert not (tmp_path / "run").exists()


class Own:
    """A user's tracker."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.heard: list = []
        self.breaks_at = breaks_at

    def start(self, settings, guarantee):
        self.heard.append(("start", dict(guarantee)))

    def log(self, step, values):
        if step == self.breaks_at:
            raise ConnectionError("the service is away")
        self.heard.append((step, dict(values)))

    def finish(self, record):
        self.heard.append(("finish", dict(record)))


class Watcher:
    """A progress that notes, at each step, what it is shown and what was truly spent."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, float]] = []

    def begin(self, steps, done, batch, what):
        self.steps = (steps, done, batch)

    def step(self, done, epsilon):
        self.shown.append((done, epsilon))

    def update(self, epsilon, accuracy, name):
        self.last = epsilon


def test_a_run_tells_released_values_and_never_too_small_an_epsilon(tmp_path):
    from gredp.privacy.accountant import epsilon
    from gredp.privacy.ledger import Entry

    own, breaking, watcher = Own(), Own(breaks_at=8), Watcher()
    told = TrainSettings(epochs=2, accountant="rdp", out=str(tmp_path / "run"), track=("csv", "jsonl"))
    with pytest.warns(UserWarning, match=r"Own has failed \(the service is away\)"):
        run = train(told, watcher, [own, breaking])
    start, *logs, finish = own.heard
    assert start[1] == run.record["guarantee"], "what the run would cost is what it did"
    assert [step for step, _ in logs] == [8, 16]
    told = {"epoch", "proven_epsilon", "test_accuracy", "test_balanced_accuracy", "test_loss"}
    assert all(set(v) == told for _, v in logs), "nothing else is told"
    assert finish == ("finish", run.record)
    assert len(breaking.heard) == 1
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert "track" not in run.record["settings"]

    assert watcher.steps == (16, 0, 192)
    assert [done for done, _ in watcher.shown] == list(range(1, 17))
    guarantee = run.record["guarantee"]
    for done, shown in watcher.shown:
        truth = epsilon([Entry(guarantee["noise_multiplier"], guarantee["sample_rate"], done)], 1e-5, "rdp")
        assert truth <= shown <= guarantee["proven_epsilon"]
    assert watcher.shown[-1][1] == watcher.last == guarantee["proven_epsilon"]


def test_the_bar_shows_steps_speed_and_an_epsilon_rounded_up():
    console = Console(record=True, width=200, force_terminal=True)
    with Bar(console) as bar:
        bar.begin(steps=10, done=4, batch=100)
        bar.step(5, 1.23401)
        bar.step(10, 1.23401)
        assert bar._progress.tasks[0].fields["status"].startswith("ε ≤ 1.235")
        bar.update(1.23401, 0.5)
    text = console.export_text()
    assert "10/10" in text
    assert "ε 1.235" in text
    assert "accuracy 0.500" in text
    task = Task(0, "", 10, 5, _get_time=lambda: 1.0, fields={"batch": 100})  # type: ignore[arg-type]
    task.finished_speed = 7.0
    assert str(Throughput().render(task)) == "700 records/s"


def test_trackers_serve_a_loop_of_ones_own(tmp_path):
    model, optimizer, _, engine = make_private(small_model(), records(8), noise_multiplier=1.0, seed=None)
    tracker = JsonLines(tmp_path)
    tracker.start({"lr": 0.1}, engine.guarantee(1e-5, further_steps=2))
    for _ in range(2):
        one_step(model, optimizer, *records(8))
        tracker.log(engine.ledger.steps, {"proven_epsilon": engine.get_epsilon(1e-5)})
    tracker.finish({"guarantee": engine.guarantee(1e-5)})
    first, *_, last = [json.loads(line) for line in tracker.path.read_text().splitlines()]
    assert first["guarantee"] == last["guarantee"]
    assert last["guarantee"]["steps"] == 2


def test_a_tracker_that_fails_is_left_out():
    breaking = Own(breaks_at=1)
    several = TrackerGroup([breaking])
    several.start({}, {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        several.log(1, {})
        several.log(1, {})
        several.finish({})
    assert len(said) == 1
    assert not several.trackers


def test_the_bar_fits_into_80_columns(monkeypatch):
    """With the longest figures that a run of a day has."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Bar(console) as bar:
        bar.begin(12345, 12000, 192)
        monkeypatch.setattr(Throughput, "render", lambda *_: Text("12,345 records/s"))
        bar.step(12001, 12.3456)
        bar.update(12.3456, 0.98765)
        bar.step(12002, 12.3456)
        lines = console.render_lines(bar._progress.get_renderable(), pad=False)
    (line,) = ("".join(part.text for part in parts) for parts in lines)
    assert len(line) <= 80
    assert line.endswith("ε ≤ 12.346  accuracy 0.988")
    assert "12002/12345" in line
    assert "12,345 records/s" in line
