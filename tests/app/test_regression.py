"""A number to predict: from a table's schema or arrays with a declared range to predictions in its units."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import gredp
from gredp.app.cli import main
from gredp.app.data.schema_drafts import propose
from gredp.app.data.tables import parse_schema, read_schema
from gredp.app.report.command import write_report
from gredp.errors import GredpError

QUICK = ["--accountant", "rdp", "--epsilon", "8"]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Rents between 200 and 800 that follow two columns; the schema says 0 to 1,000."""
    draw, folder = np.random.default_rng(1), tmp_path_factory.mktemp("rents")
    x = draw.uniform(-1, 1, (3000, 2))
    rent = 500 + 200 * x[:, 0] - 100 * x[:, 1]
    rows = [f"{a:.4f},{b:.4f},{r:.3f}" for (a, b), r in zip(x, rent)]
    (folder / "rents.csv").write_text("size,age,rent\n" + "\n".join(rows) + "\n")
    (folder / "rents.toml").write_text(
        'label = "rent"\ntarget = [0, 1000]\n[numeric]\nsize = [-1, 1]\nage = [-1, 1]\n'
    )
    return folder / "rents.csv"


@pytest.fixture(scope="module")
def trained(table: Path) -> Path:
    out = table.parent / "run"
    main(["train", "--data", str(table), *QUICK, "--out", str(out), "--json"])
    return out


def test_a_table_is_learned_and_measured_in_its_units(trained: Path):
    record = json.loads((trained / "record.json").read_text())
    assert record["test_r2"] == record["metrics"][-1]["test_r2"] > 0.9
    assert 0 < record["evaluation"]["mae"] < record["evaluation"]["mae_of_the_median"]
    assert record["data"]["target"] == [0, 1000]
    assert not any("accuracy" in key for key in (*record, *record["metrics"][-1]))


def test_predictions_are_in_the_units_of_the_target_and_in_its_range(trained: Path, tmp_path: Path):
    new, out = tmp_path / "new.csv", tmp_path / "predictions.csv"
    new.write_text("size,age\n1,-1\n-1,1\n9e9,-9e9\n")
    main(["predict", str(trained), str(new), "--out", str(out)])
    with out.open() as file:
        head, *rows = csv.reader(file)
    assert head == ["record", "prediction"]
    high, low, far = (float(row[1]) for row in rows)
    assert 600 < high <= 1000
    assert 0 <= low < 400
    assert far == high  # inputs are clipped to their ranges as in training
    model = gredp.load(trained)
    assert model.predict([{"size": 1, "age": -1}]) == pytest.approx([high], rel=1e-6)
    with pytest.raises(GredpError, match="has no probabilities"):
        model.predict_proba([{"size": 1, "age": -1}])


def test_the_page_and_the_terminal_name_what_was_measured(trained: Path, capsys):
    text = write_report([trained]).read_text()
    assert "R²" in text
    assert "accuracy" not in text.split("</style>")[1].lower()


def test_arrays_need_a_declared_range(tmp_path: Path, capsys):
    draw = np.random.default_rng(2)
    x = draw.uniform(0, 1, (300, 8, 8)).astype(np.float32)
    y = 40 * x.mean((1, 2))
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    options = ["train", "--data", str(file), *QUICK, "--epochs", "1", "--allow-large-delta", "--json"]
    options += ["--delta", "1e-5", "--model", "lenet-small", "--batch-size", "50"]
    with pytest.raises(SystemExit):
        main(options)
    assert "--target-range LOW HIGH" in capsys.readouterr().err
    main([*options, "--target-range", "0", "40", "--out", str(tmp_path / "run")])
    assert "test_r2" in json.loads((tmp_path / "run" / "record.json").read_text())
    assert gredp.load(tmp_path / "run").predict(x[:3]).shape == (3,)
    with pytest.raises(SystemExit):
        main([*options, "--target-range", "40", "0"])
    assert "LOW below HIGH" in capsys.readouterr().err


def test_a_label_of_many_numbers_is_asked_about(tmp_path: Path):
    rows = "\n".join(f"{i / 2},{i * 1.5}" for i in range(50))
    (tmp_path / "t.csv").write_text(f"a,b\n{rows}\n")
    found = propose(tmp_path / "t.csv", "b")
    assert "# target = [0.0, 73.5]" in found
    assert "\nclasses" not in found
    (tmp_path / "t.toml").write_text(found)
    with pytest.raises(GredpError, match=r"declare classes = .* or target"):
        read_schema(tmp_path / "t.csv")
    (tmp_path / "t.toml").write_text(found.replace("# target", "target"))
    assert read_schema(tmp_path / "t.csv").target == (0.0, 73.5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"target": [1, 1]}, "low below high"),
        ({"target": [0, 1], "classes": ["a", "b"]}, "one of them"),
        ({}, "one of them"),
        ({"classes": ["a", "b"], "shares": {"c": 0.1}}, "shares names classes"),
        ({"classes": ["a", "b"], "shares": {"a": 1.5}}, "add up to 1"),
        ({"classes": ["a", "b"], "shares": {"a": 0.5, "b": 0.1}}, "add up to 1"),
        ({"target": [0, 1], "shares": {"a": 0.5}}, "shares names classes"),
    ],
)
def test_a_schema_says_what_is_wrong_with_its_label(more, message):
    with pytest.raises(GredpError, match=message):
        parse_schema({"label": "y", "numeric": {"x": [0, 1]}} | more)
