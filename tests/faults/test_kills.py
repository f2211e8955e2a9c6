"""kill -9 at every point of a step and of a checkpoint, at random times, and signals that ask politely."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from children import (
    POINTS,
    STEPS,
    TARGET,
    assert_nothing_was_forgotten,
    error,
    kill_at,
    run,
    slowly,
    small_data,
    spent_and_charged,
    start,
    train_arguments,
    wait,
)

from gredp.app.cli import main
from gredp.storage.ledger_file import read_ledger
from gredp.storage.run_folder import RunFolder

EVERY_STEP = ("--checkpoint-seconds", "0")
WHEN = ("before", "after")
#: calls that a run makes while it begins
BEFORE_THE_FIRST_STEP = {"fsync": 11, "rename": 5, "unlink": 5, "write": 4, "mark": 2}


def resume(folder: Path, *more: str, prepare=lambda: None) -> int:
    return run(folder, ["train", "--resume", str(folder / "run"), "--json", *more], prepare)


def finished(folder: Path) -> dict:
    record = json.loads((folder / "run" / "record.json").read_text())
    assert sum(entry["steps"] for entry in record["ledger"]) == STEPS
    assert record["guarantee"]["proven_epsilon"] <= TARGET
    return record


def newest(folder: Path) -> dict:
    """I3: the newest whole checkpoint, or the one before it with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = RunFolder.open(folder / "run")
        facts = held.newest().facts
        held.close()
    assert len(caught) <= 1
    return facts


@pytest.mark.fault("kill points")
@pytest.mark.parametrize("when_and_where", ["within write", *(f"{w} {p}" for p in POINTS for w in WHEN)])
@pytest.mark.parametrize("nth", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_loses_at_most_the_steps_since_the_checkpoint(
    folder, monkeypatch, when_and_where, nth
):
    point = when_and_where.split()[1]
    monkeypatch.setenv("GREDP_TEST_KILL", f"{when_and_where} {nth + BEFORE_THE_FIRST_STEP.get(point, 0)}")
    often = EVERY_STEP if point in ("rename", "unlink", "fsync") else ()
    status = run(folder, train_arguments(folder, *often), lambda: kill_at(os.environ["GREDP_TEST_KILL"]))
    assert status == -signal.SIGKILL
    assert_nothing_was_forgotten(folder)
    facts, charged = newest(folder), spent_and_charged(folder)[1]
    lost = charged - facts["progress"]["updates"]
    assert 0 <= lost <= (2 if often else 5)
    assert resume(folder) == 0, error(folder)
    assert_nothing_was_forgotten(folder)
    record = finished(folder)
    assert record["starts"] == 2
    assert record["steps_lost"] == lost


@pytest.mark.fault("kill points")
@pytest.mark.parametrize("method", ["--method plain", "--noise shaped", "--method spectral_dp --claim paper"])
def test_every_method_goes_on(folder, method):
    arguments = train_arguments(folder, *method.split())
    assert run(folder, arguments, lambda: kill_at("before update 8")) == -signal.SIGKILL
    assert_nothing_was_forgotten(folder)
    assert resume(folder, "--max-physical-batch-size", "3") == 0, error(folder)
    assert "3 of 8 steps were lost with an interruption; they stay charged, and 2 are left" in error(folder)
    record = json.loads((folder / "run" / "record.json").read_text())
    assert (record["guarantee"]["steps"], record["steps_lost"]) == (STEPS, 3)


@pytest.mark.fault("kill at start")
@pytest.mark.parametrize("nth", range(1, 12))
def test_a_kill_while_the_run_begins_leaves_nothing_half_done(folder, nth):
    assert run(folder, train_arguments(folder), lambda: kill_at(f"before fsync {nth}")) == -signal.SIGKILL
    status = resume(folder)
    if status:
        assert status == 2
        assert error(folder).count("\n") == 1
        assert spent_and_charged(folder) == (0, 0)
    else:
        assert finished(folder)["starts"] >= 1


@pytest.mark.fault("kill again")
def test_a_run_that_is_killed_again_and_again_ends_within_its_budget(folder, record_property):
    status = run(folder, train_arguments(folder), lambda: kill_at("after noise 2"))
    starts = 1
    while status:
        assert status == -signal.SIGKILL
        assert_nothing_was_forgotten(folder)
        status, starts = resume(folder, prepare=lambda: kill_at("after noise 2")), starts + 1
    record = finished(folder)
    assert record["starts"] == starts >= 5
    record_property("injected", starts - 1)
    assert record["steps_lost"] == 9  # all but the one that a checkpoint at the end of an epoch caught
    assert_nothing_was_forgotten(folder)


def await_steps(folder: Path, count: int, seconds: float = 30) -> None:
    ledger, deadline = folder / "run" / "ledger", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ledger.exists() and ledger.read_bytes().count(b'"line": "step"') >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"fewer than {count} steps in {seconds} s")


@pytest.mark.fault("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("after", "physical"), [(1, "3"), (5, "512"), (8, "3")])
def test_a_signal_ends_in_a_checkpoint_that_loses_nothing(folder, number, after, physical):
    child = start(folder, train_arguments(folder, "--max-physical-batch-size", physical), slowly)
    await_steps(folder, after)
    os.kill(child, number)
    assert wait(child) == 128 + number
    assert f"stopped by {number.name} after" in error(folder)
    assert f"gredp train --resume {folder / 'run'}" in error(folder)
    assert error(folder).count("\n") == 1
    assert newest(folder)["progress"]["updates"] == spent_and_charged(folder)[1]
    assert resume(folder) == 0
    assert finished(folder)["steps_lost"] == 0
    assert_nothing_was_forgotten(folder)


@pytest.mark.fault("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_ends_at_once(folder, number, monkeypatch):
    def told() -> None:
        import gredp.app.dataset as reading

        reading.load = lambda *rest: os.kill(os.getpid(), number)

    assert run(folder, train_arguments(folder), told) == 128 + number
    assert error(folder) == f"gredp: stopped by {number.name}\n"
    assert not (folder / "run").exists()


@pytest.mark.fault("one lock")
def test_of_twenty_starts_exactly_one_trains(folder, record_property):
    assert run(folder, train_arguments(folder), lambda: kill_at("after charge 2")) == -signal.SIGKILL
    places = []
    for n in range(20):
        place = folder / f"start{n}"
        place.mkdir()
        places.append(place)
    command = ["train", "--resume", str(folder / "run"), "--json"]
    children = [start(place, command, lambda: slowly(0.2)) for place in places]
    statuses = [wait(child) for child in children]
    assert sorted(statuses) == [0] + [2] * 19
    record_property("injected", len(statuses))
    for place, status in zip(places, statuses):
        if status:
            # One that began late, on a busy machine, may find the winner gone.
            assert any(words in error(place) for words in ("in use by process", "has finished"))
            assert error(place).count("\n") == 1
    winner = statuses.index(0)
    noised = (places[winner] / "draws").read_text().count("step\n")
    assert sum((place / "draws").read_text().count("step\n") for place in places) == noised
    assert finished(folder)["starts"] == 2


@pytest.mark.fault("kill user")
@pytest.mark.slow
def test_train_kill_resume_as_a_user_would(folder, capsys):
    program = [sys.executable, "-m", "gredp"]
    arguments = train_arguments(folder, "--epochs", "4000", "--checkpoint-seconds", "0.05")
    arguments.remove("--json")
    with subprocess.Popen([*program, *arguments], stderr=subprocess.DEVNULL) as training:
        await_steps(folder, 30, 60)
        training.kill()
    charged = read_ledger(folder / "run" / "ledger").steps
    assert charged >= 30
    again = ["train", "--resume", str(folder / "run")]
    with pytest.raises(SystemExit, match="2"):
        main([*again, "--epsilon", "4"])
    assert f"was started with --epsilon {TARGET}, not 4.0" in capsys.readouterr().err
    with subprocess.Popen([*program, *again], stderr=subprocess.PIPE, text=True) as training:
        await_steps(folder, charged + 10, 60)
        training.send_signal(signal.SIGINT)
        _, message = training.communicate()
    assert training.returncode == 130
    assert "of 20000 steps; resume with: gredp train --resume" in message
    main(["ledger", str(folder / "run")])
    assert "lines verified" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.fault("kill random")
def test_two_hundred_random_kills(tmp_path, everything_loaded, record_property):
    rng, kills, runs = random.Random(), 0, 0
    while kills < 200:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        small_data(folder)
        runs += 1
        command = train_arguments(folder, "--checkpoint-seconds", "0.01")
        while not (folder / "run" / "record.json").exists():
            child = start(folder, command)
            time.sleep(rng.uniform(0.02, 0.3))
            os.kill(child, signal.SIGKILL)
            status = wait(child)
            assert_nothing_was_forgotten(folder)
            assert status in (0, -signal.SIGKILL), error(folder)
            kills += status != 0
            if (folder / "run" / "settings.json").exists():
                assert newest(folder)["progress"]["updates"] <= spent_and_charged(folder)[1]
                command = ["train", "--resume", str(folder / "run"), "--json"]
            elif (folder / "run").exists():  # killed before anything was charged: begin elsewhere
                assert spent_and_charged(folder) == (0, 0)
                break
        else:
            finished(folder)
    record_property("injected", kills)
