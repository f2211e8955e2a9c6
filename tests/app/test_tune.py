"""A private choice: what it keeps, what it forgets, and the ε it says."""

import json
from pathlib import Path

import pytest

from gredp.app import tune as module
from gredp.app.cli import main
from gredp.app.signals import Stopped
from gredp.app.train import Run
from gredp.app.tune import TuneSettings, tune
from gredp.errors import GredpError
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.selection import selected_epsilon

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
    assert {p.name for p in run.folder.iterdir()} == {"record.json", "model.safetensors"}
    for _, trial in three_trials:
        assert not trial.folder.exists()


@pytest.mark.slow
def test_neither_the_number_of_trials_nor_a_loser_is_in_the_record(tmp_path, three_trials):
    run = tune(TuneSettings(**QUICK, out=str(tmp_path / "best")))
    text = json.dumps(run.record)
    losers = {t.record["test_accuracy"] for _, t in three_trials} - {run.record["test_accuracy"]}
    assert not any(f"{loser!r}" in text for loser in losers)
    assert "ledger" not in run.record
    assert "metrics" not in run.record
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
    monkeypatch.setattr(module, "_best", lambda *_: pytest.fail("a trial was begun"))
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--out", str(tmp_path / "file" / "best")])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert "cannot be made: Not a directory" in message
    assert message.count("\n") == 1


def test_the_record_says_that_a_held_out_test_is_not_covered():
    record = {"guarantee": {}, "settings": {}, "selection": "x"}
    record |= dict.fromkeys(("ledger", "starts", "steps_lost", "metrics"))
    best = module.Trial(1.0, {"lr": 0.1}, Run(Path(), record))
    spent = (Entry(1.0, 0.1, 10), Entry(5.0, 1.0, 1))
    said = module._record(TuneSettings(dataset="x.csv", holdout=0.2), spent, best)["selection"]
    assert said.endswith(
        "covers the choice; the test accuracy is measured on held-out records, which ε does not cover"
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
    with pytest.raises(Stopped, match="SIGTERM; nothing was released") as stop:
        tune(TuneSettings(**QUICK, out=str(tmp_path / "best")))
    assert stop.value.status == 143
    assert not (tmp_path / "best").exists()


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
