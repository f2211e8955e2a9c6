"""`gredp train --person`: whose records they are, who is held out, and where the unit of privacy is said."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gredp
from gredp.app.cli import main
from gredp.app.data import load
from gredp.app.data.holdout import held_out
from gredp.app.features import normalize
from gredp.app.merge_settings import resolved
from gredp.app.settings import TrainSettings
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.sampling.persons import Persons

SCHEMA = 'label = "y"\nclasses = ["no", "yes"]\n[numeric]\na = [-3, 3]\nb = [-3, 3]\n'
UNIT = "add or remove one person, with all of their records"


def visits(folder: Path, persons: int = 40, extra: str = "") -> Path:
    """A table in which person p has 1 + p mod 5 rows; the column visit is not in the schema."""
    rng = np.random.default_rng(0)
    rows = []
    for p in range(persons):
        for visit in range(1 + p % 5):
            a, b = rng.normal(size=2)
            rows.append(f"p{p},{visit},{a:.3f},{b:.3f},{'yes' if a + b > 0 else 'no'}")
    rng.shuffle(rows)
    (folder / "mine.csv").write_text("patient,visit,a,b,y\n" + "\n".join(rows) + f"\n{extra}")
    (folder / "mine.toml").write_text(SCHEMA)
    return folder / "mine.csv"


def photos(folder: Path, nested: bool) -> Path:
    """Six persons with two images of each class: CLASS/PERSON/i.png, or CLASS/PERSON_i.png."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for p in range(6):
            for i in range(2):
                file = folder / label / (f"p{p}/{i}.png" if nested else f"p{p}_{i}.png")
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
    return folder


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


# ------------------------------------------------------------------ a whole run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("persons")
    table = visits(folder)
    options = ["--person", "patient", "--epochs", "2", "--accountant", "rdp"]
    main(["train", "--data", str(table), *options, "--out", str(folder / "run")])
    return folder / "run"


def test_the_unit_is_in_record_ledger_model_and_page(run, capsys):
    record = json.loads((run / "record.json").read_text())
    assert record["guarantee"]["neighbors"] == UNIT
    persons = record["data"]["persons"]
    assert 20 < persons < 40
    assert record["data"]["records"] > persons
    entry = record["ledger"][0]
    assert entry["unit"] == "person"
    assert entry["sample_rate"] == (persons // 5) / persons
    assert entry["steps"] == 2 * -(-persons // (persons // 5))
    assert gredp.load(run).guarantee["neighbors"] == UNIT
    main(["ledger", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["neighbors"] == UNIT
    main(["ledger", str(run)])
    assert "one person" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "The unit of privacy is one person" in page
    assert UNIT in page
    assert "δ × persons" in page


def test_predictions_need_no_person(run, tmp_path):
    (tmp_path / "new.csv").write_text("a,b\n2,2\n-2,-2\n")
    assert len(gredp.load(run).predict(tmp_path / "new.csv")) == 2


def test_the_auditor_plays_a_person_against_the_run(run, capsys):
    with pytest.raises(SystemExit) as end:
        main(["audit", "--run", str(run), "--plays", "20", "--json"])
    assert end.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["game"] == "a person, not a record"
    assert not row["refuted"]


@pytest.mark.parametrize(
    "options", [["--records-per-person", "2"], ["--person", "visit"]], ids=["another k", "another column"]
)
def test_a_run_is_resumed_with_its_persons(tmp_path, capsys, options):
    table = visits(tmp_path)
    told = {"batch_size": 5, "epochs": 1, "accountant": "rdp"}
    settings = TrainSettings(dataset=str(table), person="patient", holdout=0.2, **told)
    from gredp.app.dataset import read_data
    from gredp.app.session import begin

    engine = PrivacyEngine()
    begin(TrainSettings(**{**settings.kept(), "out": str(tmp_path / "run")}), *read_data(settings), engine)
    engine.detach()
    message = refused(capsys, "train", "--resume", str(tmp_path / "run"), *options)
    assert f"was started with {options[0]}" in message


# ------------------------------------------------------------------ whose records, and who is held out


def test_a_person_is_held_out_with_all_records(tmp_path):
    data = load(str(visits(tmp_path)), holdout=0.3, person="patient")
    assert data.persons is not None
    assert len(data.persons) == len(data.y_train)
    kept = set(data.persons)
    counts = {f"p{p}": 1 + p % 5 for p in range(40)}
    assert {p: data.persons.count(p) for p in kept} == {p: counts[p] for p in kept}
    assert len(data.y_test) == sum(count for p, count in counts.items() if p not in kept)
    assert 0 < len(kept) < 40
    assert data.units == len(kept)


def test_whether_a_person_is_held_out_depends_on_them_alone():
    ids = [f"p{p % 100}" for p in range(300)]
    x, y = np.random.default_rng(0).normal(size=(300, 2)), np.zeros(300)
    apart = held_out(x, y, 0.2, "test", ids)
    np.testing.assert_array_equal(held_out(x[:150] + 1, y[:150], 0.2, "test", ids[:150]), apart[:150])
    np.testing.assert_array_equal(apart[:100], apart[100:200])


@pytest.mark.parametrize(("nested", "person"), [(True, "folder"), (False, r"(p\d+)_")])
def test_images_have_their_persons_by_folder_or_name(tmp_path, nested, person):
    data = load(str(photos(tmp_path / "pets", nested)), holdout=0.4, person=person)
    assert data.persons is not None
    assert {data.persons.count(p) for p in data.persons} == {4}
    assert len(data.y_test) + len(data.y_train) == 24
    assert set(data.persons) < {f"p{i}" for i in range(6)}


def test_batches_are_of_persons_by_default(tmp_path):
    def chosen(path, person):
        return resolved(TrainSettings, "train", ["--data", str(path), "--person", person])

    table = visits(tmp_path)
    assert chosen(table, "patient").batch_size == load(str(table), holdout=0.2, person="patient").units // 5
    for nested, person in ((True, "folder"), (False, r"(p\d+)_")):
        folder = photos(tmp_path / person[0], nested)
        settings = chosen(folder, person)
        assert settings.batch_size == load(str(folder), holdout=0.2, image_size=8, person=person).units


def test_means_and_energies_are_those_of_persons():
    """N: the sum is that over persons, and a person with all records moves it by at most its norm."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(12, 3, 4, 4, generator=generator)
    ids = list("aabbbbcccccd")
    sums = {}
    for left_out in ("", *"abcd"):
        kept = [i for i, owner in enumerate(ids) if owner != left_out]
        engine = PrivacyEngine()
        shares = Persons([ids[i] for i in kept], len(kept)).shares()
        sums[left_out] = normalize.release(engine, x[kept], normalize.certificate(3, 0.0), shares)
        assert engine.ledger.entries[0].unit == "person"
    v = normalize.contributions(x)
    truth = sum(v[[i for i, o in enumerate(ids) if o == p]].mean(0) for p in "abcd")
    torch.testing.assert_close(sums[""], truth)
    for p in "abcd":
        assert float((sums[""] - sums[p]).norm()) <= normalize.clip_norm(3) * (1 + 1e-12)


# ------------------------------------------------------------------ what is rejected


@pytest.mark.parametrize(
    ("extra", "person", "says"),
    [
        ("", "nobody", "has no column 'nobody'"),
        ("", "a", "--person a is the label or a feature in the schema"),
        ("", "y", "--person y is the label or a feature in the schema"),
        (",0,1,1,yes\n", "patient", "row 121: patient is missing"),
        (
            "p1,7,1,1,yes\nsecret,7,1,1,yes\n",
            "patient",
            r"row 121 and .*row 122 are the same record under two",
        ),
    ],
)
def test_rows_without_their_one_person_are_refused(tmp_path, extra, person, says):
    with pytest.raises(GredpError, match=says) as error:
        load(str(visits(tmp_path, extra=extra)), holdout=0.2, person=person)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_record_may_be_twice_under_one_person(tmp_path):
    table = visits(tmp_path, extra="p1,7,1,1,yes\np1,7,1,1,yes\nother,8,1,1,yes\n")
    assert load(str(table), holdout=0.2, person="patient").units > 20


@pytest.mark.parametrize(
    ("nested", "person", "says"),
    [
        (False, "folder", "is in no person's folder: --person folder is for CLASS/PERSON"),
        (False, r"(q\d+)_", "finds no person from the start of its name on"),
        (False, r"p\d+", "a regular expression with one group"),
        (False, "(p", "is not a regular expression"),
        (True, r"(p\d+)_", "is not an image"),
    ],
)
def test_images_without_their_one_person_are_refused(tmp_path, nested, person, says):
    with pytest.raises(GredpError, match=re.escape(says)) as error:
        load(str(photos(tmp_path / "pets", nested)), holdout=0.4, person=person)
    assert "\n" not in str(error.value)


def test_an_image_under_two_persons_is_refused(tmp_path):
    folder = photos(tmp_path / "pets", False)
    (folder / "cat" / "p9_0.png").write_bytes((folder / "cat" / "p1_0.png").read_bytes())
    with pytest.raises(GredpError, match="are the same record under two persons"):
        load(str(folder), holdout=0.4, person=r"(p\d+)_")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--validation", "10"], "--validation holds out records, not persons"),
        (["train", "--records-per-person", "0"], "--records-per-person must be at least 1, not 0"),
        (["tune", "--lrs", "0.1", "0.2"], "gredp tune takes no --person: it scores records, not persons"),
    ],
)
def test_what_does_not_go_with_persons_is_refused(tmp_path, capsys, arguments, says):
    command, *options = arguments
    table = str(visits(tmp_path))
    assert says in refused(capsys, command, "--data", table, "--person", "patient", *options)
    if command == "train" and "--validation" not in options:
        assert "arrays do not tell persons" in refused(capsys, "train", "--person", "patient")
