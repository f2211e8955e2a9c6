"""A private choice: what it keeps, what it forgets, and the ε it says."""

import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import gredp
from gredp.app import tune as module
from gredp.app.choice import UNRELEASED, Choice
from gredp.app.cli import main
from gredp.app.report.command import write_report
from gredp.app.settings import saved_settings
from gredp.app.signals import Stopped
from gredp.app.tune import TuneSettings, tune
from gredp.errors import GredpError
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.selection import selected_epsilon
from gredp.storage.spent import spent

QUICK = {"epochs": 1, "batch_size": 300, "trials": 2.0, "lrs": (1e-6, 0.3), "epsilon": 8.0}


@pytest.fixture
def three_trials(monkeypatch):
    """K is 3, and every training is noted."""
    import gredp.app.train as loop

    trained = []
    right = loop.train

    def noted(settings, data):
        trained.append((settings, right(settings, data=data)))
        return trained[-1][1]

    monkeypatch.setattr(module, "draw_trials", lambda *_: 3)
    monkeypatch.setattr(loop, "train", noted)
    return trained


def test_the_best_trial_is_kept_and_the_epsilon_is_that_of_the_choice(tmp_path, three_trials, monkeypatch):
    scores = iter([100, 900, 500])
    monkeypatch.setattr("gredp.app.evaluate.score", lambda run, data: next(scores))
    run = tune(TuneSettings(**QUICK, out=str(tmp_path / "best")))
    record = json.loads((tmp_path / "best" / "record.json").read_text())
    chosen = three_trials[1][0]
    assert record["tuning"]["chosen"] == {"lr": chosen.lr, "momentum": chosen.momentum}
    assert record["settings"]["lr"] == chosen.lr
    assert abs(record["tuning"]["noisy_score"] - 900) < 50
    guarantee = record["guarantee"]
    entry = Entry(guarantee["noise_multiplier"], guarantee["sample_rate"], guarantee["steps"])
    total = selected_epsilon([entry, Entry(5.0, 1.0, 1)], 2.0, 1e-5)
    assert guarantee["proven_epsilon"] == pytest.approx(total)
    assert total <= 8.0
    assert epsilon([entry], 1e-5, "rdp") < total
    assert "covers the choice" in record["selection"]
    left = {"record.json", "model.safetensors", "settings.json", "ledger", "ledger.mark", "lock"}
    assert {p.name for p in run.folder.iterdir()} == left
    found = spent(run.folder)
    assert found.proven_epsilon == guarantee["proven_epsilon"]
    assert record["ledger"] == [asdict(e) for e in found.written.entries]
    assert gredp.load(run.folder).guarantee.proven_epsilon == guarantee["proven_epsilon"], "of the choice"
    assert "Does not agree" not in write_report([run.folder]).read_text()
    with pytest.raises(GredpError, match="is a choice of gredp tune"):
        saved_settings(str(run.folder))
    for _, trial in three_trials:
        assert not trial.folder.exists()


@pytest.mark.slow
def test_neither_the_number_of_trials_nor_a_loser_is_in_the_record(tmp_path, three_trials):
    run = tune(TuneSettings(**QUICK, out=str(tmp_path / "best")))
    text = json.dumps(run.record)
    losers = {t.record["test_accuracy"] for _, t in three_trials} - {run.record["test_accuracy"]}
    assert not any(f"{loser!r}" in text for loser in losers)
    assert len(run.record["metrics"]) == 1
    sizes = {t.record["data"]["records"] for _, t in three_trials}
    assert len(sizes) == 1
    assert 0.7 * 1438 < sizes.pop() < 0.9 * 1438, "validation records are not trained on"


@pytest.mark.slow
def test_a_trial_that_spends_more_than_promised_releases_nothing(tmp_path, monkeypatch):
    import gredp.app.train as loop

    right = loop.train

    def cheaper(settings, data):
        run = right(settings, data=data)
        run.record["ledger"][0]["noise_multiplier"] *= 0.9
        return run

    monkeypatch.setattr(loop, "train", cheaper)
    with pytest.raises(GredpError, match="nothing is released"):
        tune(TuneSettings(**QUICK, out=str(tmp_path / "best")))
    assert not (tmp_path / "best").exists()


def test_a_place_that_cannot_be_made_is_found_before_the_first_trial(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "_run_trials", lambda *_: pytest.fail("a trial was begun"))
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--out", str(tmp_path / "file" / "best")])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert "cannot be written: Not a directory" in message
    assert message.count("\n") == 1


def test_the_record_says_that_a_held_out_test_is_not_covered():
    record = {"guarantee": {}, "settings": {}, "selection": "x", "metrics": []}
    best = Choice(Path(), 1, 1, {"score": 1.0, "candidate": {"lr": 0.1}, "record": record})
    spent = (Entry(1.0, 0.1, 10), Entry(5.0, 1.0, 1))
    said = module._record(TuneSettings(dataset="x.csv", holdout=0.2), spent, best)["selection"]
    assert said.endswith(
        "covers the choice; test figures are measured on held-out records, which ε does not cover"
    )
    assert module._record(TuneSettings(), spent, best)["selection"].endswith("covers the choice")


def test_several_processes_and_signals_release_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GredpError, match="runs in one process"):
        TuneSettings().check()
    monkeypatch.delenv("WORLD_SIZE")

    def stopped(*_, **__):
        raise Stopped(15, " after 3 of 8 steps; resume with: gredp train --resume somewhere")

    monkeypatch.setattr("gredp.app.train.train", stopped)
    out = tmp_path / "best"
    with pytest.raises(Stopped, match="SIGTERM; nothing is released") as stop:
        tune(TuneSettings(**QUICK, out=str(out)))
    assert stop.value.status == 143
    assert str(stop.value).endswith(f"resume with: gredp tune --out {out}")
    assert not (out / "record.json").exists()


def test_a_choice_that_was_stopped_keeps_its_trials_and_their_number(tmp_path, monkeypatch, capsys):
    """As if nothing had happened: five trials in all, drawn once, the best of all of them."""
    import gredp.app.train as loop

    right, begun, numbers = loop.train, [], iter([5])
    monkeypatch.setattr(module, "draw_trials", lambda *_: next(numbers))
    scores = iter([500, 900, 100, 200, 300])
    monkeypatch.setattr("gredp.app.evaluate.score", lambda run, data: next(scores))

    def third_is_stopped(settings, data):
        begun.append(settings)
        if len(begun) == 3:
            raise Stopped(2)
        return right(settings, data=data)

    monkeypatch.setattr(loop, "train", third_is_stopped)
    out = tmp_path / "best"
    settings = TuneSettings(**QUICK, out=str(out))
    with pytest.raises(Stopped) as stop:
        tune(settings)
    assert not any(char.isdigit() for char in str(stop.value).replace(str(out), "")), "it tells a number"
    assert (out / UNRELEASED).stat().st_mode & 0o077 == 0
    charged = spent(out).proven_epsilon
    with pytest.raises(GredpError, match="other settings or data"):
        tune(replace(settings, lrs=(0.1,)))
    run = tune(settings)
    assert len(begun) == 6, "five, and the one that was stopped"
    assert abs(run.record["tuning"]["noisy_score"] - 900) < 50
    assert run.record["tuning"]["chosen"]["lr"] == begun[1].lr
    assert run.record["guarantee"]["proven_epsilon"] == charged == spent(out).proven_epsilon
    assert run.record["starts"] == 2
    assert not (out / UNRELEASED).exists()
    with pytest.raises(GredpError, match="exists already"):
        tune(settings)


@pytest.mark.slow
def test_a_signal_to_the_command_says_how_to_resume(tmp_path):
    words = shlex.split(f"tune --epochs 1 --batch-size 300 --trials 30 --epsilon 8 --out {tmp_path}/best")
    process = subprocess.Popen([sys.executable, "-m", "gredp", *words], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "best" / UNRELEASED).exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 143
    assert message.rstrip().endswith(shlex.join(["resume with: gredp", *words]).replace("'", ""))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trials", "0.5"], "mean number of trials must be at least 1"),
        (["--score-noise", "0"], "--score-noise must be a positive number"),
        (["--score-share", "1"], "--score-share must lie strictly between 0 and 1"),
        (["--validation", "100"], "no --validation"),
        (["--claim", "paper"], "needs private trials"),
        (["--method", "plain"], "needs private trials"),
        (["--lrs", "0.1", "-1"], "--lr must be a positive number, not -1"),
        (["--resume", "x"], "no --resume"),
        (["--insecure-seed", "1"], "no --insecure-seed"),
        (["--batch-size", "1400"], "larger than the"),
        (["--noise-schedule", "0.5"], "no --noise-schedule"),
        (["--correlation-bands", "2"], "no --correlation-bands"),
        (["--track", "csv"], "losing trials and their number must stay unseen"),
    ],
)
def test_wrong_choices_are_refused_in_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
