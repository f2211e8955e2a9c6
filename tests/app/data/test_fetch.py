"""Known data sets are fetched whole or not at all, and verified. No network: `datasets` is a fake."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from gredp.app.cli import main
from gredp.app.data import KNOWN, load
from gredp.app.data.fetch import digest, get, in_order, listing, state
from gredp.app.known_data import KnownData, fetchable, usual_model
from gredp.errors import GredpError

SOURCES = {name: KNOWN[name] for name in fetchable()}
RNG = np.random.default_rng(0)


def arrays_of(shape: tuple[int, ...], train: int, classes: int) -> dict[str, np.ndarray]:
    return {
        "x_train": RNG.integers(0, 256, (train, *shape), dtype=np.uint8),
        "y_train": (np.arange(train) % classes).astype(np.uint8),
        "x_test": RNG.integers(0, 256, (20, *shape), dtype=np.uint8),
        "y_test": (np.arange(20) % classes).astype(np.uint8),
    }


@pytest.fixture
def small(monkeypatch):
    """Sources as they are, but of few records with their own checksums; gives the arrays."""
    found = {}
    for name, source in SOURCES.items():
        arrays = found[name] = arrays_of(source.shape, 40, 20 if name == "cifar100" else 10)
        parts = tuple(digest(arrays["x_train"][i : i + 8]) for i in range(0, 40, 8)) if source.parts else ()
        sums = tuple(digest(a) for a in arrays.values()) if source.sums else ()
        few = dataclasses.replace(source, train=40, test=20, sums=sums, parts=parts)
        monkeypatch.setitem(KNOWN, name, few)
    return found


@pytest.fixture
def hub(monkeypatch, small):
    """A fake `datasets` that serves `small`; changes to the dictionary change what it serves."""

    def load_dataset(repository: str, *, split: str) -> dict[str, list]:
        name = next(n for n, s in KNOWN.items() if s.repository == repository)
        source, arrays = KNOWN[name], small[name]
        return {source.image: list(arrays[f"x_{split}"]), source.label: arrays[f"y_{split}"].tolist()}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize("name", list(SOURCES))
def test_what_is_fetched_is_written_as_it_is(hub, small, tmp_path, name):
    path, words = get(name, str(tmp_path / "new" / "folder"))
    assert words.startswith("whole")
    assert ("no checksum" in words) == (name == "fashion-mnist")
    with np.load(path, allow_pickle=False) as got:
        for key, array in small[name].items():
            np.testing.assert_array_equal(got[key], array)
            assert got[key].dtype == np.uint8
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_whole_is_not_fetched_again_and_a_damaged_one_is(hub, small, tmp_path):
    path, _ = get("mnist", str(tmp_path))
    before = path.stat().st_mtime_ns
    get("mnist", str(tmp_path))
    assert path.stat().st_mtime_ns == before
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    assert state("mnist", str(tmp_path))[0] is False
    get("mnist", str(tmp_path))
    assert state("mnist", str(tmp_path)) == (True, "whole")


def test_parts_in_another_order_are_put_right(hub, small, tmp_path):
    original = {k: v.copy() for k, v in small["cifar10"].items()}
    order = np.concatenate([np.arange(8) + 8 * i for i in (3, 2, 1, 4, 0)])
    small["cifar10"] |= {k: original[k][order] for k in ("x_train", "y_train")}
    path, _ = get("cifar10", str(tmp_path))
    with np.load(path, allow_pickle=False) as got:
        for key, array in original.items():
            np.testing.assert_array_equal(got[key], array)
    strange = small["cifar10"] | {"x_train": small["cifar10"]["x_train"][::-1]}
    assert in_order(KNOWN["cifar10"], strange) is strange


@pytest.mark.parametrize(
    ("name", "key", "change", "words"),
    [
        ("mnist", "x_train", lambda a: a ^ 1, "x_train has another SHA-256"),
        ("mnist", "y_test", lambda a: a[::-1], "y_test has another SHA-256"),
        ("cifar100", "x_test", lambda a: a[:, :31], "not uint8 of shape (20, 32, 32, 3)"),
        ("fashion-mnist", "y_train", lambda a: a * 0, "does not hold every class equally often"),
    ],
)
def test_wrong_downloads_are_refused_and_nothing_is_written(hub, small, tmp_path, name, key, change, words):
    small[name][key] = change(small[name][key])
    with pytest.raises(GredpError) as error:
        get(name, str(tmp_path))
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_without_a_network_or_the_package_one_line_says_what_to_put_where(hub, monkeypatch, tmp_path, capsys):
    def offline(*_, **__):
        raise ConnectionError("no route\nto host")

    hub.load_dataset = offline
    message = refused(capsys, "get", "cifar10", "--data-dir", str(tmp_path))
    assert (
        f"x_train [40, 32, 32, 3], y_train [40], x_test [20, 32, 32, 3], y_test [20] at {tmp_path}" in message
    )
    assert "(no route)" in message
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refused(capsys, "get", "mnist", "--data-dir", str(tmp_path))
    assert "pip install 'gredp[data]'" in message
    assert str(tmp_path / "mnist.npz") in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get"], "gredp data get NAME"),
        (["list", "mnist"], "usage: gredp data get NAME | list"),
        (["get", "imagenet"], "unknown dataset 'imagenet'"),
        (["get", "digits"], "embedded"),
    ],
)
def test_wrong_words_are_refused(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_folders_that_cannot_be_made_are_refused(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GredpError, match="cannot be made"):
        get("mnist", str(tmp_path / "file" / "data"))


def test_the_list_says_what_is_there_and_whether_it_is_whole(hub, tmp_path, capsys):
    get("cifar100", str(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"half")
    rows = {row["name"]: row for row in listing(str(tmp_path))}
    assert {name: row["whole"] for name, row in rows.items()} == {
        "digits": True, "mnist": False, "fashion-mnist": False, "cifar10": False, "cifar100": True,
    }  # fmt: skip
    assert rows["cifar10"]["state"] == "not there"
    assert rows["mnist"]["state"].startswith("damaged")
    main(["data", "list", "--data-dir", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["data"] == list(rows.values())
    main(["data", "list", "--data-dir", str(tmp_path)])
    assert "not there" in capsys.readouterr().out


def test_every_known_name_has_sums_of_all_arrays_or_of_none():
    assert set(SOURCES) | {"digits"} == set(KNOWN)
    for source in SOURCES.values():
        assert len(source.sums) in (0, 4)
        assert all(len(s) == 64 for s in (*source.sums, *source.parts))


def test_one_entry_makes_a_data_set_known(tmp_path, monkeypatch, hub, small, capsys):
    """It is fetched, listed and read, its classes and network are its own."""
    entry = KnownData(5, "mlp", "somebody/shapes", "image", "label", (6, 6), 40, 20)
    monkeypatch.setitem(KNOWN, "shapes", entry)
    small["shapes"] = arrays_of((6, 6), 40, 5)
    get("shapes", str(tmp_path))
    assert "shapes" in fetchable()
    assert {row["name"]: row["whole"] for row in listing(str(tmp_path))}["shapes"]
    assert load("shapes", str(tmp_path)).classes == 5
    assert usual_model("shapes") == "mlp"
