"""`gredp reproduce`: what is run, that nothing is run twice or lost, and that a claim never stands alone."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import tyro

from gredp import GredpError
from gredp.app.jobs import record_file, run_jobs
from gredp.app.settings import TrainSettings
from gredp.paper import audits
from gredp.paper.cells import (
    BASELINE,
    EPOCHS,
    EPSILONS,
    LARGE,
    PAPER,
    ROWS,
    SHORTER,
    TUNING,
    Cell,
    cells,
)
from gredp.paper.command import ReproduceSettings, run_reproduce
from gredp.paper.paper import CLIPPING, FROM_SCRATCH, HEADLINE
from gredp.paper.tables import HEADER, lines, paper_figure
from gredp.storage.record import save

RECORDS = Path(__file__).parents[2] / "results" / "paper"
TARGETS = (
    "table1",
    "tuning",
    "table3",
    "figure-epsilon",
    "figure-dynamics",
    "ablation-batch",
    "ablation-lr",
    "all",
)


@pytest.mark.parametrize("scale", ["smoke", "full"])
def test_every_cell_is_a_command_that_train_takes(scale):
    found = {target: cells(target, scale) for target in TARGETS}
    for part in found.values():
        assert len({cell.name for cell in part}) == len(part) > 0
    assert {c.name for c in found["all"]} == {c.name for part in found.values() for c in part}
    kinds = {(c.row, c.model, tuple(c.settings)): c for c in found["all"]}  # each parse takes a while
    for cell in kinds.values():
        weights = ["--pretrained", "weights.safetensors"] if cell.transferred else []
        settings = tyro.cli(TrainSettings, args=[*cell.arguments, *weights])
        settings.check()
        assert (settings.epsilon, settings.epochs, settings.seed) == (cell.epsilon, cell.epochs, cell.seed)


def test_table_1_has_every_network_row_and_seed():
    found = cells("table1", "full")
    wanted = set(product(HEADLINE.items(), ROWS, range(1)))
    wanted |= {(("lenet5", 1.0), row, seed) for row in ROWS for seed in (1, 2)}
    assert {((c.model, c.epsilon), c.row, c.seed) for c in found} == wanted
    assert {c.seed for c in cells("table1", "full", 2, ("model3",))} == {0, 1}
    assert {c.epsilon for c in cells("figure-epsilon", "full", only=("lenet5",))} == set(EPSILONS)
    assert {c.row for c in cells("table1", "full", only=("lenet5", "dpsgd", "gredp"))} == {"dpsgd", "gredp"}


def test_the_baseline_is_also_trained_by_sgd():
    found = [cell for cell in cells("table1", "full") if cell.changed == BASELINE]
    assert [(cell.model, cell.row) for cell in found] == [(network, "dpsgd") for network in HEADLINE]
    assert [paper_figure(cell) for cell in found] == [
        FROM_SCRATCH[network]["dpsgd"][epsilon] for network, epsilon in HEADLINE.items()
    ]
    assert not [cell for cell in cells("table1", "smoke") if cell.changed == BASELINE]


def test_runs_that_take_hours_are_few():
    found = [cell for cell in cells("table3", "full") if cell.model in LARGE]
    assert {cell.row for cell in found} == {"gredp-claimed"}
    short = [(cell.epsilon, cell.settings["clip_norm"]) for cell in found if cell.model == "resnet20"]
    assert sorted(short) == [(0.5, 0.1), (0.5, 1.0), (2.0, 0.1), (2.0, 1.0)]
    for target in ("table3", "ablation-batch", "ablation-lr"):
        epochs = {cell.epochs for cell in cells(target, "full", only=("resnet20",))}
        assert epochs == {SHORTER["resnet20"]}


def test_names_tell_settings_apart():
    cell = Cell("mnist", "lenet5", "gredp", 1.0, 30)
    others = [
        replace(cell, settings={"lr": 0.1}),
        replace(cell, settings={"clip_norm": 0.1}),
        replace(cell, seed=1),
    ]
    assert len({c.name for c in [cell, *others]}) == 4
    assert replace(cell, settings={"lr": 0.001}).name == cell.name  # the paper's own
    assert replace(cell, seed=1).group == cell.group


def test_a_run_in_single_precision_stands_for_one_in_half(tmp_path):
    cell = next(c for c in cells("table1", "full", only=("model3", "dpsgd")))
    assert cell.settings["precision"] == "bf16"
    assert cell.in_single_precision.name != cell.name
    assert lines([cell], tmp_path) == []
    for precision, shown in (("single", "DP-SGD (single precision)"), ("bf16", "DP-SGD")):
        run = cell if precision == "bf16" else cell.in_single_precision
        guarantee = {"proven_epsilon": 2.0, "claimed_epsilon": 2.2}
        save(
            record_file(tmp_path, run),
            {"settings": {"precision": precision}, "guarantee": guarantee, "test_accuracy": 0.5},
        )
        (line,) = lines([cell], tmp_path)
        assert line.shown()[0] == shown  # its own precision is preferred


def test_the_papers_figures_stand_beside_the_right_cells():
    for network, epsilon in HEADLINE.items():
        for row in ("plain", "dpsgd", "spectral-dp", "gredp-claimed"):
            wanted = FROM_SCRATCH[network][row][0 if row == "plain" else epsilon]
            assert paper_figure(Cell("x", network, row, epsilon, 30)) == wanted
    assert paper_figure(Cell("mnist", "lenet5", "shaped", 1.0, 30)) == 96.5  # what its method claims
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30, 0, {"clip_norm": 0.1})) == 96.4
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30, 0, {"batch_size": 2048})) == 93.51
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30, 0, {"lr": 0.1})) == 80.18
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30, 0, {"lr": 0.01})) == 96.66
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30)) == 96.73
    half = Cell("cifar10", "model3", "gredp-claimed", 2.0, 20, 0, {"precision": "bf16", "augment": 1})
    assert paper_figure(half) == 67.87  # it says nothing of either
    assert paper_figure(Cell("mnist", "lenet5", "gredp", 2.0, 30, 0, {"lr": 0.1, "batch_size": 64})) is None
    transferred = Cell("cifar10", "resnet18-1conv", "gredp", 2.0, 3)
    assert paper_figure(transferred) == 76.83
    assert paper_figure(replace(transferred, settings={"batch_size": 2000})) is None
    # The paper's own margins (section 5.2.3) and tables agree.
    model3 = FROM_SCRATCH["model3"]
    margins = [model3["gredp-claimed"][e] - model3["spectral-dp"][e] for e in EPSILONS]
    assert margins == pytest.approx([5.62, 3.78, 4.11, 4.67])
    assert CLIPPING["model3"][1.0] == model3["gredp-claimed"]


SOME = ("gredp-claimed",)


@pytest.mark.slow
@pytest.mark.parametrize("only", [SOME, ()])
def test_smoke_runs_once_and_shows_claimed_beside_proven(only, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if only:
        monkeypatch.setitem(EPOCHS, "lenet-small", 2)
        play = audits.audited_lower_bound
        monkeypatch.setattr(audits, "audited_lower_bound", lambda **run: play(**run | {"plays": 80}))
    run_reproduce(ReproduceSettings("table1", only=only, workers=2))
    found = lines(cells("table1", "smoke"), Path("reproduction"))
    assert [line.cell.row for line in found] == list(only or ROWS)
    by_row = {line.cell.row: line for line in found}
    if not only:
        assert by_row["plain"].mean > 90
        assert by_row["gredp"].proven <= 2.0
    assert by_row["gredp-claimed"].proven > 2.0
    assert by_row["gredp-claimed"].claimed == pytest.approx(2.0, abs=1e-3)
    for line in found:
        shown = dict(zip(HEADER, line.shown()))
        assert shown["proven ε"]
        assert shown["claimed ε"] == "–" or float(shown["proven ε"]) > 0
        if line.cell.row != "plain":
            bound = line.records[0]["audit"]["audited_epsilon_lower"]
            assert 0 < bound <= line.proven
    assert "GReDP" in capsys.readouterr().out
    records = sorted(Path("reproduction").glob("*.json"))
    assert len(records) == len(only or ROWS)
    for path in records:
        text = path.read_text()
        assert str(tmp_path) not in text
        assert "loss" not in text.replace("steps_lost", "").replace("test_loss", ""), "of training"
        assert json.loads(text)["command"].startswith("gredp train --dataset digits")
    before = [path.stat().st_mtime_ns for path in records]
    run_reproduce(ReproduceSettings("table1", only=only, workers=2))
    assert [path.stat().st_mtime_ns for path in records] == before


@pytest.mark.slow
def test_an_interrupted_cell_goes_on_with_its_charges(tmp_path):
    """SIGTERM to the whole command: the cell's process is stopped after a checkpoint and resumed later."""
    told = ["reproduce", "table1", "--only", "gredp", "--out", "r", "--runs", "w", "--workers", "1"]
    command = [sys.executable, "-m", "gredp", *told]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    cell = cells("table1", "smoke", only=("gredp",))[0]
    metrics = tmp_path / "w" / cell.name / "metrics.json"
    while process.poll() is None and not metrics.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    folder = tmp_path / "w" / cell.name
    interrupted = not (folder / "record.json").exists()  # it may have been quicker than the signal
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    record = json.loads(record_file(tmp_path / "r", cell).read_text())
    assert record["guarantee"]["steps"] == 80
    assert record["guarantee"]["proven_epsilon"] <= 2.0
    if interrupted:
        assert process.returncode == 143
        assert record["starts"] == 2


def test_a_cell_that_fails_is_named_in_one_line(tmp_path):
    cell = Cell("mnist", "lenet5", "dpsgd", 1.0, 1)
    with pytest.raises(
        GredpError, match=r"mnist-lenet5-dpsgd-eps1-1epochs-seed0 failed: gredp: .*is not there"
    ):
        run_jobs([cell], tmp_path / "r", tmp_path / "w", 1, {"data-dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ReproduceSettings("table1", only=("vgg",)), "--only takes"),
        (ReproduceSettings("table1", seeds=0), "--seeds must be at least 1"),
        (ReproduceSettings("table1", workers=0), "--workers must be at least 1"),
        (ReproduceSettings("table2"), "no smoke scale"),
        (ReproduceSettings("table2", scale="full"), "needs --pretrained"),
    ],
)
def test_mistakes_are_refused(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GredpError, match=message):
        run_reproduce(settings)
    assert os.listdir(tmp_path) == []


def test_every_record_is_of_a_cell_and_says_which():
    known = {cell.name: cell for cell in cells("all", "full")}
    for path in RECORDS.glob("*-seed*.json"):
        record = json.loads(path.read_text())
        cell = known[path.stem]
        assert (record["cell"], record["row"]) == (cell.name, cell.row)
        run = {"optimizer": "sgd", **record["settings"]}  # the only one, once
        given = {**PAPER, **cell.settings, "epochs": cell.epochs, "model": cell.model}
        assert {key: run[key] for key in given} == given


@pytest.mark.parametrize(
    ("network", "row"), [(n, row) for n, t in TUNING.items() for row in t.rows if t.best]
)
def test_tuned_settings_are_the_best_of_those_tried(network, row):
    tried = lines(cells("tuning", "full", only=(network, row)), RECORDS)
    best = max(tried, key=lambda line: line.mean)
    assert len(tried) == math.prod(map(len, TUNING[network].tried.values()))
    chosen = TUNING[network].best[row]
    assert {key: best.cell.settings[key] for key in chosen} == chosen
