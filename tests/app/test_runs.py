"""Runs that are interrupted and go on: nothing is lost that can be kept, and nothing spent is forgotten."""

import json
import math
import os
import shlex
import shutil
import signal
import time

import pytest
import torch

from gredp import GredpError, PrivacyEngine
from gredp.app.cli import main
from gredp.app.settings import TrainSettings
from gredp.privacy.accountant import epsilon
from gredp.storage.files import read_document, write_document
from gredp.storage.ledger_file import read_ledger
from gredp.storage.record import header, plain_numbers
from gredp.storage.run_folder import RunFolder
from gredp.storage.spent import spent
from worlds import MECHANISMS, batches, one_step, records, roll_back, small_model, weights, world

DELTA = 1e-5


@pytest.mark.parametrize(
    "mechanism", ["dpsgd", "spectral-dp", "gredp", "gredp preconditioned", "dpsgd automatic"]
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_without_noise_a_resumed_run_equals_an_uninterrupted_one(tmp_path, mechanism, optimizer):
    options = MECHANISMS[mechanism]
    model, private, engine = world(optimizer, **options)
    for x, y in batches(7):
        one_step(model, private, x, y)
    whole = weights(model)

    model, private, engine = world(optimizer, **options)
    for x, y in batches(7)[:3]:
        one_step(model, private, x, y)
    engine.save(tmp_path / "run", {"epoch": 3})
    engine.detach()
    model, private, engine = world(optimizer, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)  # what a new process starts with does not matter
    assert engine.load(tmp_path / "run") == {"epoch": 3}
    for x, y in batches(7)[3:]:
        one_step(model, private, x, y)
    assert torch.equal(weights(model), whole)
    assert engine.ledger.steps == 7
    engine.detach()


def test_steps_after_the_last_checkpoint_stay_charged(tmp_path):
    model, private, engine = world(noise_multiplier=1.0)
    one_step(model, private, *batches(1)[0])  # before the folder: taken over by its ledger
    engine.save(tmp_path / "run")
    saved = weights(model)
    for x, y in batches(4):
        one_step(model, private, x, y)
    spent = engine.get_epsilon(DELTA)
    engine.detach()  # and the last four updates are lost
    model, private, engine = world(noise_multiplier=1.0)
    engine.load(tmp_path / "run")
    assert torch.equal(weights(model), saved)
    assert engine.ledger.steps == 5
    assert engine.get_epsilon(DELTA) == spent
    one_step(model, private, *batches(1)[0])
    assert engine.get_epsilon(DELTA) > spent
    written = read_ledger(tmp_path / "run" / "ledger")
    assert (written.incarnations, written.steps, written.inherited) == (2, 6, 1)
    assert epsilon(written.entries, DELTA) == engine.get_epsilon(DELTA)
    engine.detach()


@pytest.mark.fault("damaged ledger")
@pytest.mark.parametrize("newest_gone", [False, True])
def test_a_ledger_that_was_shortened_is_not_loaded(tmp_path, newest_gone):
    """14 steps, checkpoints at 5 and 11; cut behind the newer, or behind the older with the newer deleted."""
    model, private, engine = world(noise_multiplier=1.0)
    for step, (x, y) in enumerate(batches(14)):
        if step in (5, 11):
            engine.save(tmp_path / "run")
        one_step(model, private, x, y)
    engine.detach()
    run = tmp_path / "run"
    older, newer = sorted(run.glob("checkpoint-*.json"))
    lines = read_document(older if newest_gone else newer)["ledger"]["lines"]
    if newest_gone:
        newer.unlink()
        newer.with_suffix(".safetensors").unlink()
    whole = (run / "ledger").read_bytes()
    (run / "ledger").write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
    _, _, engine = world(noise_multiplier=1.0)
    with pytest.raises(GredpError, match="lacks lines that were there at 14 steps"):
        engine.load(run)
    assert engine.ledger.steps == 0
    (run / "ledger").write_bytes(whole)
    engine.load(run)
    assert engine.ledger.steps == 14
    engine.detach()


@pytest.mark.fault("damaged ledger")
def test_a_checkpoint_shows_that_ledger_and_mark_were_shortened(tmp_path):
    model, private, engine = world(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    for x, y in batches(5):
        one_step(model, private, x, y)
    engine.save(tmp_path / "run")
    engine.detach()
    roll_back(tmp_path / "run", 4)
    _, _, engine = world(noise_multiplier=1.0)
    for read in (spent, engine.load, PrivacyEngine().fork):
        with pytest.raises(GredpError, match="lacks lines that were there at 5 steps"):
            read(tmp_path / "run")


@pytest.mark.fault("changed settings")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": 1.1}, r"another noise_multiplier \(1.0\) than now \(1.1"),
        ({"max_grad_norm": 0.4}, r"another max_grad_norm \(0.5\) than now \(0.4\)"),
        ({"sample_rate": 0.5}, r"another sample_rate \(1.0\) than now \(0.5\)"),
        ({"method": "gredp"}, "another plan"),
        ({"loss_reduction": "sum"}, "another loss_reduction"),
    ],
)
def test_changed_settings_are_refused_with_both_values(tmp_path, change, words):
    _, _, engine = world(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    engine.detach()
    _, _, engine = world(**({"noise_multiplier": 1.0} | change))
    with pytest.raises(GredpError, match=words) as error:
        engine.load(tmp_path / "run")
    assert "\n" not in str(error.value)
    _, _, engine = world(noise_multiplier=1.0)
    engine.load(tmp_path / "run")  # and the lock was let go
    engine.detach()


@pytest.mark.fault("changed settings")
def test_a_number_of_processes_that_changed_is_refused(tmp_path, monkeypatch):
    _, _, engine = world(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    engine.detach()
    monkeypatch.setattr("gredp.storage.checkpoint.world_size", lambda: 4)
    _, _, engine = world(noise_multiplier=1.0)
    with pytest.raises(GredpError, match=r"another processes \(1\) than now \(4\)"):
        engine.load(tmp_path / "run")


def test_a_fork_begins_with_what_its_parent_spent(tmp_path):
    model, private, engine = world(noise_multiplier=1.0)
    one_step(model, private, *batches(1)[0])
    engine.save(tmp_path / "run")
    engine.detach()
    child = PrivacyEngine(accountant="rdp")
    kept = child.fork(tmp_path / "run")
    assert torch.equal(kept["5.weight"], model[5].weight)
    assert child.ledger.entries == engine.ledger.entries
    spent = child.get_epsilon(DELTA)
    fresh = small_model()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records(12)), batch_size=6)
    with pytest.raises(GredpError, match=r"cannot be reached .* after what was spent before"):
        child.make_private_with_epsilon(
            module=fresh,
            optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1),
            data_loader=loader,
            target_epsilon=spent * 0.9,
            target_delta=DELTA,
            epochs=1,
            max_grad_norm=1.0,
        )
    fresh, optimizer, loader = child.make_private_with_epsilon(
        module=fresh,
        optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1),
        data_loader=loader,
        target_epsilon=spent + 1,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        one_step(fresh, optimizer, x, y)
    assert spent < child.get_epsilon(DELTA) <= spent + 1
    with pytest.raises(GredpError, match="before make_private"):
        child.fork(tmp_path / "run")


def test_a_folder_belongs_to_one_run(tmp_path):
    _, _, engine = world()
    engine.save(tmp_path / "run")
    with pytest.raises(GredpError, match="is kept in"):
        engine.save(tmp_path / "other")
    _, _, other = world()
    with pytest.raises(GredpError, match="exists already"):
        other.save(tmp_path / "run")
    with pytest.raises(GredpError, match="in use by process"):
        other.load(tmp_path / "run")
    with pytest.raises(GredpError, match="no ledger"):
        other.load(tmp_path / "nothing")
    with pytest.raises(GredpError, match="call make_private first"):
        PrivacyEngine().save(tmp_path / "x")
    engine.detach()


@pytest.mark.fault("copied folder")
def test_a_copied_folder_charges_both_branches(tmp_path):
    model, private, engine = world(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    one_step(model, private, *batches(1)[0])
    engine.detach()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name in ("run", "copy"):
        model, private, engine = world(noise_multiplier=1.0)
        engine.load(tmp_path / name)
        one_step(model, private, *batches(1)[0])
        engine.detach()
        assert read_ledger(tmp_path / name / "ledger").steps == 2


def test_a_lock_does_not_pass_to_forked_workers(tmp_path):
    """Workers outlive a killed process for a while; the run must not wait for them."""
    held = RunFolder.create(tmp_path / "run")
    ready, done = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(done, b"x")  # it runs, and what runs after a fork has run
        time.sleep(60)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(GredpError, match=f"in use by process {os.getpid()}"):
        RunFolder.open(tmp_path / "run")
    held.close()
    RunFolder.open(tmp_path / "run").close()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def test_a_generator_that_could_repeat_its_noise_is_refused(tmp_path):
    _, _, engine = world(noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    engine.detach()
    _, _, engine = world(noise_multiplier=1.0, noise_generator=torch.Generator())
    with pytest.raises(GredpError, match="without a noise_generator"):
        engine.load(tmp_path / "run")


def test_the_last_two_checkpoints_are_kept(tmp_path):
    _, _, engine = world()
    for _ in range(5):
        engine.save(tmp_path / "run")
    engine.detach()
    found = sorted(p.name for p in (tmp_path / "run").glob("checkpoint*"))
    assert found == [f"checkpoint-00000{n}.{kind}" for n in (4, 5) for kind in ("json", "safetensors")]


# ------------------------------------------------------------------ the command line


SMALL = ["--epochs", "1", "--accountant", "rdp", "--json"]


def test_a_fork_does_not_hide_noise_that_is_known(capsys, tmp_path):
    (tmp_path / "a").mkdir()
    write_document(tmp_path / "a" / "settings.json", {"settings": TrainSettings(insecure_seed=1).kept()})
    with pytest.raises(SystemExit) as stop:
        main(
            ["train", "--fork", str(tmp_path / "a"), "--insecure-seed", "None", "--out", str(tmp_path / "b")]
        )
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "comes from --insecure-seed, and a fork of it protects nobody either" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()
    TrainSettings(fork=str(tmp_path / "a"), insecure_seed=2).check()


@pytest.mark.pages
def test_a_run_that_diverges_ends_with_its_record(capsys, tmp_path):
    out = tmp_path / "a b"
    main(["train", *SMALL, "--method", "dpsgd", "--lr", "1e12", "--track", "jsonl", "--out", str(out)])
    record = json.loads((out / "record.json").read_text())
    assert record["metrics"][-1]["test_loss"] == "nan"
    assert (out / "report.html").exists()
    assert plain_numbers([-math.inf, math.inf, 1.0]) == ["-inf", "inf", 1.0]


def test_commands_on_record_can_be_typed_again():
    words = ["train", "--out", "a b/[c]; d"]
    assert shlex.split(header(words)["command"]) == ["gredp", *words]


@pytest.mark.parametrize("option", ["out", "dataset", "data-dir"])
def test_names_that_no_record_could_hold_are_refused_before_anything_is_spent(capsys, tmp_path, option):
    with pytest.raises(SystemExit) as stop:
        main(["train", *SMALL, f"--{option}", os.fsdecode(bytes(tmp_path / "r") + b"\xff")])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"--{option} is " in error
    assert "which is not UTF-8" in error
    assert os.listdir(tmp_path) == []


@pytest.mark.fault("changed settings")
def test_a_fork_of_the_command_line_composes(capsys, tmp_path):
    main(["train", *SMALL, "--out", str(tmp_path / "a")])
    main(["train", "--fork", str(tmp_path / "a"), "--epsilon", "3", "--json", "--out", str(tmp_path / "b")])
    parent, child = map(json.loads, capsys.readouterr().out.strip().replace("}\n{", "}\0{").split("\0"))
    assert parent["steps"] == 8
    assert child["steps"] == 16
    assert parent["proven_epsilon"] <= 2 < child["proven_epsilon"] <= 3
    record = json.loads((tmp_path / "b" / "record.json").read_text())
    assert [entry["steps"] for entry in record["ledger"]] == [8, 8]
    main(["ledger", str(tmp_path / "b"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["proven_epsilon"] == child["proven_epsilon"]
    assert (printed["steps"], printed["inherited_steps"], printed["starts"]) == (16, 8, 1)
    main(["ledger", str(tmp_path / "b")])
    assert "lines verified" in capsys.readouterr().out
