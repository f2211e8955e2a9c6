"""Files that were truncated, flipped, edited or crafted, and disks that are full or read-only."""

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from children import assert_nothing_was_forgotten, error, run, small_data, train_arguments

from gredp import PrivacyEngine
from gredp.app.cli import main
from gredp.app.data import load
from gredp.errors import GredpError
from gredp.storage.checkpoint import tensor_groups
from gredp.storage.files import read_document, seal, write, write_document
from gredp.storage.ledger_file import LedgerFile
from gredp.storage.run_folder import RunFolder
from worlds import roll_back


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    small_data(folder)
    main(train_arguments(folder))
    return folder / "run"


@pytest.fixture(scope="module")
def interrupted(finished, tmp_path_factory) -> Path:
    """A run with two checkpoints and steps charged after the second, never finished."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    shutil.copytree(finished, run)
    (run / "record.json").unlink()
    return run


@pytest.fixture
def copy(interrupted, tmp_path) -> Path:
    shutil.copytree(interrupted, tmp_path / "run")
    return tmp_path / "run"


def newest(path: Path) -> dict:
    held = RunFolder.open(path)
    try:
        return held.newest().facts
    finally:
        held.close()


def checkpoints(path: Path) -> list[Path]:
    """The two kept, the newer one last; each as its JSON file."""
    found = sorted(path.glob("checkpoint-*.json"))
    assert len(found) == 2
    return found


def damaged_versions(content: bytes) -> dict[str, bytes]:
    """Cut at every fiftieth of the length, emptied, and with single bits flipped."""
    rng = random.Random(1)
    versions = {f"cut to {n}/50": content[: len(content) * n // 50] for n in range(50)}
    for place in rng.sample(range(8 * len(content)), 100):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        versions[f"bit {place}"] = bytes(flipped)
    return versions


@pytest.mark.fault("damaged checkpoint")
def test_every_damaged_checkpoint_is_passed_over_with_a_warning(copy, record_property):
    older, newer = checkpoints(copy)
    expected = read_document(older)
    injected = 0
    for path in (newer, newer.with_suffix(".safetensors")):
        content = path.read_bytes()
        for name, version in damaged_versions(content).items():
            path.write_bytes(version)
            with pytest.warns(UserWarning, match="the checkpoint before it is used"):
                assert newest(copy) == expected, name
            injected += 1
        path.write_bytes(content)
    assert injected == 300
    record_property("injected", injected)
    assert newest(copy) == read_document(newer)


@pytest.mark.fault("no checkpoint")
def test_without_a_whole_checkpoint_the_run_is_refused(copy):
    for path in checkpoints(copy):
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(GredpError, match="has no whole checkpoint"),
    ):
        newest(copy)


@pytest.mark.fault("edited")
def test_an_edited_epsilon_is_detected(copy, capsys):
    settings = copy / "settings.json"
    content = settings.read_bytes()
    settings.write_bytes(content.replace(b'"epsilon": 3.0', b'"epsilon": 9.0'))
    assert settings.read_bytes() != content
    assert "settings.json is damaged: its seal does not match" in refused(capsys, copy)
    settings.write_bytes(content)
    newer = checkpoints(copy)[-1]
    text = newer.read_text()
    newer.write_text(text.replace('"proven_epsilon": 2', '"proven_epsilon": 1'))
    assert newer.read_text() != text
    with pytest.warns(UserWarning, match="seal does not match"):
        newest(copy)
    newer.write_text(text)
    ledger = copy / "ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b'"noise_multiplier": 1', b'"noise_multiplier": 2'))
    assert "ledger is damaged at line 3: its seal does not match" in refused(capsys, copy)
    with pytest.raises(SystemExit):
        main(["ledger", str(copy)])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.fault("damaged ledger")
def test_a_ledger_shorter_than_its_checkpoint_is_refused(copy, capsys):
    ledger = copy / "ledger"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-3]))
    assert "lacks lines that were there at 10 steps, by checkpoint-" in refused(capsys, copy)
    ledger.unlink()
    assert "has no ledger" in refused(capsys, copy)


@pytest.mark.fault("damaged ledger")
@pytest.mark.parametrize("left", ["checkpoint-*", "record.json", "metrics.json", "ledger.mark"])
def test_whatever_a_folder_still_holds_shows_that_its_ledger_was_shortened(finished, tmp_path, capsys, left):
    """Everything but one file rolled back by three lines; each command reads it in the same place."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    lines, kept = (run / "ledger").read_bytes().count(b"\n"), (run / "ledger.mark").read_bytes()
    roll_back(run, lines - 3, *({"checkpoint-*", "record.json", "metrics.json"} - {left}))
    if left == "ledger.mark":
        (run / left).write_bytes(kept)
    words = f"ledger lacks lines that were there at 10 steps, by {left[:10]}"
    commands = [["ledger"], ["report"], *([["train", "--resume"]] if left != "record.json" else [])]
    for command in commands:
        message = refused(capsys, run, command)
        assert words in message
        assert "what was spent is unknown" in message
    with pytest.raises(GredpError, match=words):
        RunFolder.open(run)
    with pytest.raises(GredpError, match=words):
        PrivacyEngine().fork(run)


def refused(capsys, path: Path, command: Sequence[str] = ("train", "--json", "--resume")) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, str(path)])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


@pytest.mark.fault("changed settings")
def test_changed_data_are_refused_with_the_numbers(copy, capsys, tmp_path):
    data = read_document(copy / "settings.json")["settings"]["dataset"]
    kept = Path(data).read_bytes()
    try:
        with np.load(data) as archive:
            arrays = dict(archive)
        np.savez(data, **arrays | {k: arrays[k][:39] for k in ("x_train", "y_train")})
        assert "the data have changed: records was 40 and is 39" in refused(capsys, copy)
        np.savez(data, **arrays | {k: arrays[k][:, :7] for k in ("x_train", "x_test")})
        assert "input_shape was [1, 8, 8] and is [1, 7, 8]" in refused(capsys, copy)
    finally:
        Path(data).write_bytes(kept)


# ------------------------------------------------------------------ crafted files


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/gredp-was-here",)


def crafted_tensors() -> dict[str, bytes]:
    header = json.dumps(
        {"model/0.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    )
    nested = b'{"a":' * 50_000
    return {
        "pickle": pickle.dumps(Bomb()),
        "torch archive": b"PK\x03\x04" + pickle.dumps(Bomb()),
        "oversized header": struct.pack("<Q", 1 << 62) + b"{}",
        "header beyond its file": struct.pack("<Q", 5000) + b"{}",
        "shapes beyond the file": struct.pack("<Q", len(header)) + header.encode(),
        "nested header": struct.pack("<Q", len(nested)) + nested,
    }


@pytest.mark.fault("crafted checkpoint")
@pytest.mark.parametrize("kind", crafted_tensors())
def test_crafted_tensors_are_refused_and_nothing_runs(copy, kind):
    newer, content = checkpoints(copy)[-1], crafted_tensors()[kind]
    newer.with_suffix(".safetensors").write_bytes(content)
    facts = read_document(newer)
    facts["tensors"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_document(newer, facts)  # as someone would who knows the format
    held = RunFolder.open(copy)
    with pytest.raises(GredpError, match="cannot be read"):
        tensor_groups(held.newest())
    held.close()
    assert not Path("/tmp/gredp-was-here").exists()


@pytest.mark.fault("crafted checkpoint")
def test_crafted_documents_are_refused(copy, tmp_path):
    newer = checkpoints(copy)[-1]
    (tmp_path / "elsewhere").write_bytes(newer.read_bytes())
    for content in (
        pickle.dumps(Bomb()),
        b"[" * 200_000,
        seal("[" * 100_000)[0].encode(),
        seal("7")[0].encode(),
    ):
        newer.write_bytes(content)
        with pytest.warns(UserWarning, match="the checkpoint before it is used"):
            newest(copy)
    newer.unlink()
    newer.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cannot be read: Too many levels of symbolic links"):
        newest(copy)
    newer.unlink()
    os.mkfifo(newer)
    with pytest.warns(UserWarning, match="not a plain file"):
        newest(copy)
    newer.unlink()
    with open(newer, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.warns(UserWarning, match="more than"):
        newest(copy)


@pytest.mark.fault("crafted checkpoint")
def test_links_planted_in_a_run_folder_are_not_followed(copy, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    for name in ("checkpoint-000099.json.part", "lock", "ledger"):
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(outside)
    with pytest.raises(GredpError):
        RunFolder.open(copy)
    with pytest.raises(GredpError):
        LedgerFile.open(copy / "ledger")
    write(copy / "checkpoint-000099.json", b"x")
    assert outside.read_text() == "untouched"


def archive_with(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for array in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{array}.npy" if array != "x_train" else name, content)
    return path


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


CRAFTED = {
    "path with ../": ("../../x_train.npy", npy_header("(3,)") + bytes(3)),
    "absolute path": ("/tmp/gredp-was-here", npy_header("(3,)") + bytes(3)),
    "pickle": ("x_train.npy", pickle.dumps(Bomb())),
    "shape beyond memory": ("x_train.npy", npy_header("(1000000000000000,)") + bytes(100)),
    "negative shape": ("x_train.npy", npy_header("(-3,)") + bytes(3)),
    "code in the header": ("x_train.npy", npy_header("__import__('os').system('touch /tmp/gredp-was-here')")),
    "nested header": ("x_train.npy", npy_header("(" * 60 + ")" * 50)),
}


@pytest.mark.fault("crafted data")
@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_archives_are_refused(tmp_path, kind):
    path = archive_with(tmp_path / "mine.npz", *CRAFTED[kind])
    with pytest.raises(GredpError) as refusal:
        load(str(path))
    assert "\n" not in str(refusal.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.npz"]
    assert not Path("/tmp/gredp-was-here").exists()


@pytest.mark.fault("crafted data")
def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gredp.app.data.datasets.LARGEST_FILE", 1 << 20)
    path = archive_with(tmp_path / "mine.npz", "x_train.npy", bytes(1 << 20))
    assert path.stat().st_size < 10_000
    with pytest.raises(GredpError, match="unpacks to 4194304 bytes, more than 1048576"):
        load(str(path))


@pytest.mark.fault("crafted data")
def test_flipped_bits_in_an_archive_are_refused_or_change_nothing(tmp_path, record_property):
    path = small_data(tmp_path)
    content, whole = path.read_bytes(), load(str(path))
    places = random.Random(2).sample(range(8 * len(content)), 300)
    record_property("injected", len(places))
    for place in places:
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = load(str(path))
        except GredpError:
            continue
        assert torch.equal(found.x_train, whole.x_train)
        assert torch.equal(found.y_train, whole.y_train)


# ------------------------------------------------------------------ disks


def limit_after(steps: int, room: int):
    """From that step on no file may grow beyond the ledger's size and `room` bytes more."""

    def prepare() -> None:
        honest = LedgerFile.append

        def limited(self, entry):
            if self.written.steps == steps:
                size = self.path.stat().st_size + room
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            honest(self, entry)

        LedgerFile.append = limited

    return prepare


def resumed(folder: Path) -> dict:
    assert run(folder, ["train", "--resume", str(folder / "run"), "--json"]) == 0, error(folder)
    assert_nothing_was_forgotten(folder)
    return json.loads((folder / "run" / "record.json").read_text())


@pytest.mark.fault("disk full")
@pytest.mark.parametrize("room", [0, 30, 10_000])
def test_a_full_disk_stops_the_run_in_one_line_and_it_goes_on_later(tmp_path, room):
    small_data(tmp_path)
    status = run(tmp_path, train_arguments(tmp_path), limit_after(7, room))
    assert status == 2
    assert error(tmp_path).count("\n") == 1
    assert "cannot be written: File too large" in error(tmp_path)
    assert_nothing_was_forgotten(tmp_path)
    assert newest(tmp_path / "run")["progress"]["updates"] == 5
    assert resumed(tmp_path)["guarantee"]["steps"] == 10


@pytest.mark.fault("disk full")
def test_a_small_file_system_that_fills_up(tmp_path):
    """The old checkpoint stays whole; with room again the run goes on."""
    small_data(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=128k none {disk} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        command = train_arguments(tmp_path, "--out", str(disk / "run"))

        def fill_up() -> None:
            honest = LedgerFile.append

            def filled(self, entry):
                if self.written.steps == 6:
                    (disk / "filler").write_bytes(bytes(max(0, free(disk))))
                honest(self, entry)

            LedgerFile.append = filled

        assert run(tmp_path, command, fill_up) == 2
        assert "cannot be written: No space left on device" in error(tmp_path)
        assert newest(disk / "run")["progress"]["updates"] == 5
        (disk / "filler").unlink()
        assert run(tmp_path, ["train", "--resume", str(disk / "run"), "--json"]) == 0, error(tmp_path)
    finally:
        os.system(f"umount {disk}")


def free(disk: Path) -> int:
    state = os.statvfs(disk)
    return state.f_bavail * state.f_bsize


@pytest.mark.fault("read-only")
def test_a_read_only_folder_is_found_before_training():
    """As somebody who is not root, to whom modes mean something."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small_data(folder)
        closed = folder / "closed"
        closed.mkdir()
        os.chmod(folder, 0o777)
        os.chmod(closed, 0o500)

        def somebody() -> None:
            if os.geteuid() == 0:
                os.chown(closed, 65534, 65534)
                os.seteuid(65534)

        command = train_arguments(folder, "--out", str(closed / "run"))
        assert run(folder, command, somebody) == 2
        assert error(folder) == f"gredp: {closed / 'run'} cannot be written: Permission denied\n"
        assert "step" not in (folder / "draws").read_text()
