"""A finished run in use: `gredp.load` and `gredp predict`."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import gredp
from gredp.app import cli
from gredp.app.data import load as load_data
from gredp.app.settings import TrainSettings
from gredp.app.train import train

SCHEMA = """label = "kind"
classes = ["left", "right"]
missing = ["size"]
[numeric]
place = [-2, 2]
size = [0, 10]
[categorical]
color = ["red", "green", "none"]
"""


def table(path, rows=300, label=True):
    draw = np.random.default_rng(0)
    place, size = draw.uniform(-2, 2, rows), draw.uniform(0, 10, rows)
    with path.open("w") as file:
        print("id,color,place,size" + ",kind" * label, file=file)
        for i in range(rows):
            known = "" if i % 7 == 0 else f"{size[i]:.3f}"
            kind = f",{'right' if place[i] > 0 else 'left'}" if label else ""
            print(f"{i},{('red', 'green', 'none')[i % 3]},{place[i]:.3f},{known}{kind}", file=file)


@pytest.fixture(scope="module")
def of_table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    table(folder / "rows.csv")
    table(folder / "new.csv", label=False)
    (folder / "rows.toml").write_text(SCHEMA)
    settings = TrainSettings(
        dataset=str(folder / "rows.csv"),
        holdout=0.2,
        epsilon=8,
        epochs=8,
        batch_size=60,
        lr=0.3,
        clipping="automatic",
        accountant="rdp",
        out=str(folder / "run"),
    )
    return train(settings).folder


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    """Bright squares in one corner or the other; class names that are not numbers."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(120):
        image = draw.integers(0, 60, (12, 12), dtype=np.uint8)
        image[: 6 if i % 2 else 12 : 1, :6] += 0 if i % 2 else 150
        image[6:, 6:] += 150 if i % 2 else 0
        place = folder / "data" / ("test" if i % 6 == 5 or i % 6 == 4 else "train") / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i}.png")
    settings = TrainSettings(
        dataset=str(folder / "data"),
        features="scattering",
        normalize=0.02,
        epsilon=8,
        model="linear",
        epochs=6,
        batch_size=40,
        clip_norm=0.1,
        accountant="rdp",
        lr=1.0,
        data_dir=str(folder / "cache"),
        out=str(folder / "run"),
    )
    return train(settings).folder


def test_a_table_is_classified_without_its_label(of_table):
    model = gredp.load(of_table)
    assert list(model.classes_) == ["left", "right"]
    probabilities = model.predict_proba(of_table.parent / "new.csv")
    assert probabilities.shape == (300, 2)
    assert np.allclose(probabilities.sum(1), 1)
    with (of_table.parent / "rows.csv").open() as file:
        wanted = np.array([row["kind"] for row in csv.DictReader(file)])
    assert (model.predict(of_table.parent / "new.csv") == wanted).mean() > 0.8
    assert model.guarantee.proven_epsilon == json.loads((of_table / "record.json").read_text())["guarantee"][
        "proven_epsilon"
    ]  # fmt: skip


def test_rows_in_memory_give_what_the_file_gives(of_table):
    model = gredp.load(of_table)
    with (of_table.parent / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_file = model.predict_proba(of_table.parent / "new.csv")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert np.allclose(model.predict_proba(rows), of_file)
    assert np.allclose(model.predict_proba(columns), of_file)


def test_images_are_classified_as_in_the_test_of_the_run(of_images):
    model, data = gredp.load(of_images), of_images.parent / "data"
    assert list(model.classes_) == ["cat", "dog"]
    files = sorted((data / "test").rglob("*.png"))
    guesses = model.predict(files)
    right = np.mean([guess == file.parent.name for guess, file in zip(guesses, files)])
    record = json.loads((of_images / "record.json").read_text())
    assert right == pytest.approx(record["test_accuracy"], abs=1e-9)


@pytest.mark.parametrize("floats", [False, True])
def test_arrays_and_files_agree(of_images, tmp_path, floats):
    model, files = gredp.load(of_images), sorted((of_images.parent / "data" / "test").rglob("*.png"))
    array = np.stack([np.asarray(Image.open(file)) for file in files])
    array = (array / 255).astype(np.float32) if floats else array
    np.save(tmp_path / "x.npy", array)
    (tmp_path / "list.txt").write_text("\n".join(map(str, files)))
    wanted = model.predict_proba(files)
    for given in (array, tmp_path / "x.npy", tmp_path / "list.txt", of_images.parent / "data" / "test"):
        assert np.allclose(model.predict_proba(given), wanted, atol=1e-5)


def test_predictions_come_from_the_numbers_that_the_run_evaluated(of_images):
    """The network's probabilities, recomputed from the splits that the run has read."""
    settings = json.loads((of_images / "record.json").read_text())["settings"]
    data = load_data(settings["dataset"])
    model = gredp.load(of_images)
    with torch.no_grad():
        wanted = model.network(model.extract(data.x_test)).double().softmax(1).numpy()
    x = (data.x_test[:, 0] * 255).round().to(torch.uint8).numpy()
    assert np.allclose(model.predict_proba(x), wanted, atol=1e-5)


def test_a_run_works_wherever_it_is_moved(of_images, tmp_path, monkeypatch):
    wanted = gredp.load(of_images).predict_proba(of_images.parent / "data" / "test")
    shutil.copytree(of_images, tmp_path / "elsewhere" / "run")
    monkeypatch.chdir(tmp_path)
    moved = gredp.load("elsewhere/run")
    assert np.array_equal(moved.predict_proba(of_images.parent / "data" / "test"), wanted)
    (tmp_path / "elsewhere" / "run" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    assert gredp.load("alone.safetensors").guarantee == moved.guarantee


def test_the_command_writes_a_table_of_probabilities(of_table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["predict", str(of_table), str(of_table.parent / "new.csv")])
    assert "300 predictions in predictions.csv; the model: proven (ε = " in capsys.readouterr().out
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"record", "prediction", "left", "right"}
    assert [row["record"] for row in rows] == [str(i + 1) for i in range(300)]
    wanted = gredp.load(of_table).predict_proba(of_table.parent / "new.csv")
    assert np.allclose([[float(row["left"]), float(row["right"])] for row in rows], wanted, atol=1e-6)


def test_larger_images_are_scaled_to_those_of_the_run(of_images, tmp_path):
    file = next((of_images.parent / "data" / "test" / "cat").iterdir())
    Image.open(file).resize((48, 48), Image.Resampling.NEAREST).convert("RGB").save(tmp_path / "large.png")
    model = gredp.load(of_images)
    assert model.predict([tmp_path / "large.png"]) == model.predict([file])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere", "is not there"),
        ("empty", "holds no image"),
        (np.zeros((3, 12, 12, 3), np.uint8), r"not \[n, height, width, 1\]"),
        (np.full((3, 12, 12), 200.0), "divide bytes by 255"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(of_images, tmp_path, monkeypatch, given, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(gredp.GredpError, match=says):
        gredp.load(of_images).predict(given)


def test_rows_that_leave_the_schema_are_named_and_not_quoted(of_table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (of_table.parent / "new.csv").read_text().splitlines()
    lines[290] = lines[290].replace("red", "violet").replace("green", "violet").replace("none", "violet")
    (tmp_path / "bad.csv").write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        cli.main(["predict", str(of_table), "bad.csv"])
    said = capsys.readouterr().err
    assert "bad.csv, row 290: color is not one of red, green, none" in said
    assert "violet" not in said
    assert not list(tmp_path.glob("predictions*"))


def test_a_file_that_does_not_say_how_to_use_it_is_refused(of_table, tmp_path):
    save_file(load_file(of_table / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(gredp.GredpError, match="does not say how to use it"):
        gredp.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(gredp.GredpError, match="cannot be read"):
        gredp.load(tmp_path)
    with pytest.raises(gredp.GredpError, match="has finished"):
        gredp.load(tmp_path / "nothing")


def test_a_model_whose_noise_is_known_says_so(tmp_path):
    told = {"insecure_seed": 1, "accountant": "rdp"}
    folder = train(TrainSettings(epochs=1, out=str(tmp_path / "run"), **told)).folder
    with pytest.warns(UserWarning, match="knows --insecure-seed"):
        gredp.load(folder)
