"""A user's own images and tables: what comes in, what is refused in one line, and what decides nothing."""

import json
import math
import os
import re
import shlex
import shutil
import tomllib
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gredp.app.cli import main
from gredp.app.data import hold_out, load
from gredp.app.data.holdout import held_out
from gredp.app.data.schema_drafts import propose, template
from gredp.app.data.tables import encode, parse_schema, read_schema
from gredp.app.session import Session
from gredp.app.settings import TrainSettings
from gredp.app.signals import Stopped
from gredp.app.train import train
from gredp.errors import GredpError

RNG = np.random.default_rng(0)
SCHEMA = """
label = "income"
classes = ["low", "high"]
missing = ["age", "work"]
[numeric]
age = [20, 60]
hours = [0, 10]
[categorical]
work = ["farm", "town", "sea"]
"""
ROWS = """age,hours,id,work,income
20,5,1,farm,low
60,10,2,town,high
90,-3,3,sea,low
?,2.5,4,,high
"""


def table(folder: Path, rows: str = ROWS, schema: str = SCHEMA, name: str = "mine") -> Path:
    (folder / f"{name}.toml").write_text(schema)
    (folder / f"{name}.csv").write_text(rows, errors="surrogateescape")
    return folder / f"{name}.csv"


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments, "--epochs", "1"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


# ------------------------------------------------------------------ tables


def test_rows_become_features_by_fixed_numbers(tmp_path):
    """Written out by hand: age, age is missing, hours, farm, town, sea."""
    path = table(tmp_path)
    schema = read_schema(path)
    x, y = encode(path, schema)
    np.testing.assert_allclose(
        x,
        [
            [-1, 0, 0, 1, 0, 0],
            [1, 0, 1, 0, 1, 0],
            [1, 0, -1, 0, 0, 1],  # 90 and −3 are clipped
            [0, 1, -0.5, 0, 0, 0],
        ],
    )
    assert (x.dtype, y.tolist()) == (np.float32, [0, 1, 0, 1])


def test_a_row_does_not_depend_on_the_others(tmp_path):
    path = table(tmp_path)
    x, _ = encode(path, read_schema(path))
    lines = ROWS.splitlines()
    for i in range(1, 5):
        alone = table(tmp_path, f"{lines[0]}\n{lines[i]}\n", name="alone")
        np.testing.assert_array_equal(encode(alone, read_schema(alone))[0], x[i - 1 : i])


def test_json_quotes_and_a_byte_order_mark_are_read(tmp_path):
    schema = {"label": "a b", "classes": [0, 1], "numeric": {"x,y": [0, 1]}}
    (tmp_path / "mine.json").write_text(json.dumps(schema))
    (tmp_path / "mine.csv").write_bytes('\ufeff"x,y", a b\n"0.25",1\n\n1,0\n'.encode())
    x, y = encode(tmp_path / "mine.csv", read_schema(tmp_path / "mine.csv"))
    assert x.tolist() == [[-0.5], [1.0]]
    assert y.tolist() == [1, 0]


@pytest.mark.fault("bad data")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("town,high", "city,high", "row 2: work is not one of farm, town, sea"),
        ("20,5", "20,nan", "row 1: hours is missing; list it under missing"),
        ("20,5", "20,inf", "row 1: hours is not a finite number"),
        ("20,5", "20,five", "row 1: hours is not a finite number"),
        ("sea,low", "sea,", "row 3: income is not one of low, high"),
        ("sea,low", "sea", "line 4: 4 values, but 5 columns"),
        ("work,income", "job,income", "has no column 'work': its first line must name the columns"),
        ("work,income", "work,work", "names a column twice"),
        (ROWS, "age,hours,work,income\n", "has no rows"),
        (ROWS, "", "has no column 'income'"),
        ("town,high", "t\udce9wn,high", "cannot be read: it is not UTF-8"),
        ("20,5", '20,"5', "cannot be read"),
    ],
)
def test_bad_tables_are_refused(tmp_path, capsys, old, new, words):
    path = table(tmp_path, ROWS.replace(old, new))
    message = refused(capsys, "--dataset", str(path), "--holdout", "0.5")
    assert words in message
    assert message.count("mine.csv") == 1


SECRET = "731913"


@pytest.mark.parametrize(
    "rows",
    [
        ROWS.replace("town", SECRET),
        ROWS.replace("20,5", f"20,{SECRET}x"),
        ROWS.replace("sea,low", f"sea,{SECRET}"),
        ROWS.replace("20,5", f'20,"{SECRET}'),
        ROWS.replace("20,5", f'20,"5"{SECRET}'),
        ROWS.replace("age,hours,id,work,income", f"{SECRET},4,5,farm,low"),  # a table without a header
    ],
    ids=["category", "number", "label", "open quote", "closed quote", "no header"],
)
def test_no_line_about_a_bad_table_tells_a_value_of_it(tmp_path, capsys, rows):
    message = refused(capsys, "--dataset", str(table(tmp_path, rows)), "--holdout", "0.5")
    assert SECRET not in message


@pytest.mark.fault("bad data")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('["low", "high"]', '["low"]', "classes must list at least two different values"),
        ('["low", "high"]', '["low", "low"]', "classes must list at least two different values"),
        ("[20, 60]", "[60, 20]", "the range of age must be [low, high]"),
        ("[20, 60]", "[20, inf]", "the range of age must be [low, high]"),
        ("[20, 60]", '"all"', "the range of age must be [low, high]"),
        ('["age", "work"]', '["wage"]', "missing names ['wage']"),
        ('label = "income"', 'label = "age"', "only one of them"),
        ('label = "income"', "", "a schema has label"),
        ('label = "income"', 'label = "income"\nepsilon = 3', "and nothing else"),
        ('label = "income"', 'label = "income"\ntest = "../../etc/test.csv"', "in the same folder"),
        ('label = "income"', 'label = "income"\ntest = "gone.csv"', "gone.csv is not there"),
        ('label = "income"', 'label = "inc', "cannot be read"),
    ],
)
def test_bad_schemas_are_refused(tmp_path, capsys, old, new, words):
    path = table(tmp_path, schema=SCHEMA.replace(old, new))
    assert words in refused(capsys, "--dataset", str(path))


def test_a_table_needs_a_schema_and_a_test_split(tmp_path, capsys):
    path = table(tmp_path)
    with pytest.raises(GredpError, match="or keep a share apart with --holdout"):
        load(str(path))
    (tmp_path / "test.csv").write_text(ROWS)
    path = table(tmp_path, schema='test = "test.csv"\n' + SCHEMA)
    assert "give no --holdout" in refused(capsys, "--dataset", str(path), "--holdout", "0.2")
    assert len(load(str(path)).x_test) == 4
    (tmp_path / "mine.toml").unlink()
    assert "a table needs a schema" in refused(capsys, "--dataset", str(path))
    assert "none.csv is not there" in refused(capsys, "--dataset", str(tmp_path / "none.csv"))
    assert "--holdout is for" in refused(capsys, "--holdout", "0.2")


def test_the_schema_of_a_public_table_reads_that_table(tmp_path, capsys):
    (tmp_path / "public.csv").write_text(ROWS.replace("90,-3", "30,-3"))
    main(["data", "schema", str(tmp_path / "public.csv"), "--label", "income", "--public"])
    text = capsys.readouterr().out
    assert "must be public" in text
    main(["data", "schema", str(tmp_path / "public.csv"), "--label", "income", "--public", "--json"])
    assert json.loads(capsys.readouterr().out) == tomllib.loads(text)
    path = table(tmp_path, schema=text)
    schema = read_schema(path)
    assert schema.numeric == {"age": (20, 60), "hours": (-3, 10), "id": (1, 4)}
    assert schema.categorical == {"work": ("farm", "sea", "town")}
    assert schema.missing == ("age", "work")
    assert encode(path, schema)[0].shape == (4, 7)
    with pytest.raises(GredpError, match="no column 'wage'"):
        propose(tmp_path / "public.csv", "wage")


def test_a_template_reads_the_header_alone(tmp_path, capsys):
    """The rows are not even CSV; the command that the error names fills the file that it asks for."""
    path = tmp_path / "my table.csv"
    path.write_bytes(b'age,"joined, at",work,income\n731913,"\xff\x00\n')
    message = refused(capsys, "--data", str(path))
    command = shlex.split(message.partition("`")[2].partition("`")[0])
    assert command[-2:] == [">", str(path.with_suffix(".toml"))]
    main([word.replace("COLUMN", "income") for word in command[1:-2]])
    text = capsys.readouterr().out
    found = tomllib.loads(text)
    assert list(found["numeric"]) == ["age", "joined, at", "work"]
    assert (found["label"], found["classes"], found["dates"]) == ("income", [], {})
    path.with_suffix(".toml").write_text(text)
    assert "classes must list at least two different values" in refused(capsys, "--data", str(path))
    path.with_suffix(".toml").write_text(text.replace("classes = []", 'classes = ["a", "b"]'))
    assert "the range of age must be [low, high]" in refused(capsys, "--data", str(path))
    with pytest.raises(GredpError, match=r"no column 'wage': its first line must name the columns$"):
        template(path, "wage")


DATES = """
label = "y"
classes = ["none", "some"]
missing = ["joined", "work"]
[dates]
joined = [2020-01-01, 2020-01-11]
[categorical]
work = ["none", "town"]
"""


def test_dates_become_numbers_of_a_declared_range_and_none_may_be_a_category(tmp_path):
    """By hand: joined, joined is missing, none, town."""
    rows = """joined,work,y
2020-01-06,none,none
2020-01-03T12:00,town,some
1999-12-31,None,some
2020-01-11T01:00+02:00,,none
none,n/a,none
"""
    path = table(tmp_path, rows, DATES)
    schema = read_schema(path)
    x, y = encode(path, schema)
    wanted = [[0, 0, 1, 0], [-0.5, 0, 0, 1], [-1, 0, 0, 0], [0.8 + 23 / 120, 0, 0, 0], [0, 1, 0, 0]]
    np.testing.assert_allclose(x, wanted, atol=1e-6)
    assert y.tolist() == [0, 1, 1, 0, 0]
    assert parse_schema(asdict(schema)) == parse_schema(json.loads(json.dumps(asdict(schema)))) == schema
    old = {name: value for name, value in asdict(schema).items() if name != "dates"} | {
        "numeric": {"a": [0, 1]}
    }
    assert parse_schema({**old, "missing": []}).dates == {}
    for value in ("20200103", "3.1.2020", "soon"):
        path = table(tmp_path, f"joined,work,y\n{value},none,some\n", DATES)
        with pytest.raises(GredpError, match=r"row 1: joined is not an ISO date such as 2024-01-31$"):
            encode(path, schema)
    for wrong in ('["2020-01-11", "2020-01-01"]', '["soon", "later"]', "[1, 2]", "[]"):
        path = table(tmp_path, schema=DATES.replace("[2020-01-01, 2020-01-11]", wrong))
        with pytest.raises(GredpError, match="the range of joined must be"):
            read_schema(path)


def test_a_proposal_knows_ids_dates_constants_and_none(tmp_path):
    words = ("town", "none")
    lines = [
        f"{1000 + 7 * i},p{i},2020-{1 + i % 12:02}-03,{words[i % 2]},{i % 5 or 'none'},1,{'ab'[i % 2]}"
        for i in range(30)
    ]
    (tmp_path / "mine.csv").write_text("\n".join(["id,name,day,work,kids,unit,y", *lines]))
    text = propose(tmp_path / "mine.csv", "y")
    assert '# "id" = [1000.0, 1203.0]  # left out: every value differs, as in an id' in text
    assert '# "name" is left out: most values differ' in text
    assert '# "unit" is left out: it has one value' in text
    (tmp_path / "mine.toml").write_text(text)
    schema = read_schema(tmp_path / "mine.csv")
    assert schema.inputs == ["kids", "day", "work"]
    assert schema.dates == {"day": ("2020-01-03", "2020-12-03")}
    assert schema.categorical == {"work": ("none", "town")}
    assert schema.missing == ("kids",)
    assert encode(tmp_path / "mine.csv", schema)[0].shape == (30, 5)


def test_too_few_records_are_warned_of_and_a_larger_batch_is_refused(tmp_path, capsys):
    path = table(tmp_path, ROWS)
    with pytest.warns(UserWarning, match=r"\d training records are too few for ε = 2"):
        train(
            TrainSettings(
                dataset=str(path),
                holdout=0.5,
                accountant="rdp",
                epochs=1,
                batch_size=1,
                out=str(tmp_path / "run"),
            )
        )
    words = refused(capsys, "--data", str(blobs(tmp_path, 40)), "--batch-size", "500")
    assert re.search(r"batch size 500 is larger than the dataset of (\d+) records: take at most \1", words)


def blobs(folder: Path, rows: int = 400) -> Path:
    x = RNG.normal(size=(rows, 3)) + 2 * (np.arange(rows) % 2)[:, None]
    lines = [",".join(f"{v:.6f}" for v in row) + f",{'ab'[i % 2]}" for i, row in enumerate(x)]
    schema = 'label = "y"\nclasses = ["a", "b"]\n[numeric]\nu = [-3, 5]\nv = [-3, 5]\nw = [-3, 5]\n'
    return table(folder, "\n".join(["u,v,w,y", *lines]) + "\n", schema)


def test_a_table_is_learned_without_any_setting_and_resumable_settings_are_kept(tmp_path, capsys):
    path = blobs(tmp_path)
    out = tmp_path / "run"
    main(
        [
            "train",
            "--data",
            str(path),
            "--holdout",
            "0.25",
            "--accountant",
            "rdp",
            "--json",
            "--out",
            str(out),
        ]
    )
    got = json.loads(capsys.readouterr().out)
    assert got["proven_epsilon"] <= 2
    assert got["test_accuracy"] > 0.9
    record = json.loads((out / "record.json").read_text())
    assert record["settings"]["model"] == "mlp"
    assert (record["settings"]["block"], record["settings"]["clipping"]) == (0, "automatic")
    assert record["data"]["input_shape"] == [3]
    assert record["data"]["records"] + record["data"]["test_records"] == 400
    assert "held-out records, which ε does not cover" in record["selection"]


def test_what_is_said_wins_over_the_defaults_of_tables(tmp_path, capsys):
    path = blobs(tmp_path)
    arguments = [
        "--lr",
        "0.25",
        "--epochs",
        "1",
        "--batch-size",
        "50",
        "--clipping",
        "flat",
        "--accountant",
        "rdp",
    ]
    out = tmp_path / "run"
    main(["train", "--dataset", str(path), "--holdout", "0.25", *arguments, "--json", "--out", str(out)])
    capsys.readouterr()
    settings = json.loads((out / "record.json").read_text())["settings"]
    assert [settings[k] for k in ("lr", "epochs", "batch_size", "clipping")] == [0.25, 1, 50, "flat"]
    message = refused(capsys, "--dataset", str(path), "--holdout", "0.25", "--model", "lenet5")
    assert "takes images, not rows of 3 features" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--holdout", "nan"], "--holdout must lie strictly between 0 and 1, not nan"),
        (["--holdout", "inf"], "--holdout must lie strictly between 0 and 1, not inf"),
        (["--holdout", "0.25", "--augment", "2"], "--augment draws views of images, not of rows of 3"),
    ],
)
def test_options_that_do_not_fit_a_table_are_refused_before_a_folder_is_made(
    tmp_path, capsys, options, words
):
    out = tmp_path / "run"
    assert words in refused(capsys, "--dataset", str(blobs(tmp_path, 40)), *options, "--out", str(out))
    assert not out.exists()


# ------------------------------------------------------------------ holding out


def test_a_record_is_held_out_by_itself_alone():
    x, y = RNG.normal(size=(4000, 5)).astype(np.float32), np.arange(4000) % 3
    apart = held_out(x, y, 0.2, "test")
    assert abs(apart.mean() - 0.2) <= 6 * math.sqrt(0.16 / 4000)
    order = RNG.permutation(4000)[:1000]
    np.testing.assert_array_equal(held_out(x[order], y[order], 0.2, "test"), apart[order])
    other = held_out(x, y, 0.2, "validation")
    assert abs((apart & other).mean() - 0.04) <= 6 * math.sqrt(0.04 / 4000)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(GredpError, match="strictly between"):
        held_out(np.zeros((3, 1)), np.zeros(3), share, "test")


def test_a_part_without_records_is_refused():
    with pytest.raises(GredpError, match="leaves"):
        held_out(np.zeros((3, 1)), np.zeros(3), 0.5, "test")


# ------------------------------------------------------------------ images


def folders(root: Path, mode: str = "RGB", size: tuple[int, int] = (8, 6), splits=("train", "test")) -> Path:
    for split in splits:
        for number, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(4):
                color = RNG.integers(0, 100, (size[1], size[0], 3), dtype=np.uint8) + 100 * number
                picture = Image.fromarray(color.astype(np.uint8)).convert(mode)
                picture.save(root / split / name / f"{i}.png")
    return root


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3), ("P", 3)])
def test_class_folders_become_images_and_labels(tmp_path, mode, channels):
    data = load(str(folders(tmp_path / "pets", mode)))
    assert (data.name, data.classes, data.input_shape) == ("pets", 2, (channels, 6, 8))
    assert sorted(data.y_train.tolist()) == [0] * 4 + [1] * 4
    first = np.asarray(Image.open(tmp_path / "pets/train/cat/0.png").convert("RGB" if channels == 3 else "L"))
    expected = torch.from_numpy(first.reshape(6, 8, channels).transpose(2, 0, 1).copy()).float() / 255
    found = [i for i, x in enumerate(data.x_train) if torch.equal(x, expected)]
    assert data.y_train[found].tolist() == [0]
    again = load(str((tmp_path / "pets").rename(tmp_path / "moved")))
    assert torch.equal(again.x_train, data.x_train)
    assert torch.equal(again.y_train, data.y_train)


def test_the_last_images_are_of_all_classes(tmp_path):
    """They are what --validation holds out."""
    root = folders(tmp_path / "pets")
    for name in ("cat", "dog"):
        for i in range(40):
            shutil.copy(root / "train" / name / "0.png", root / "train" / name / f"n{i}.png")
    held = hold_out(load(str(root)), 30)
    assert 5 <= int(held.y_test.sum()) <= 25
    assert 5 <= int(held.y_train.sum()) - 14 <= 25


def test_holding_out_records_sorted_by_class_is_warned_of():
    data = load("digits")
    order = data.y_train.argsort()
    in_order = replace(data, x_train=data.x_train[order], y_train=data.y_train[order])
    with pytest.warns(UserWarning, match="the last 200 training records are of 2 of 10 classes only"):
        hold_out(in_order, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hold_out(data, 200)
        hold_out(in_order, 20)  # too few to tell


def test_images_of_many_sizes_are_scaled_when_told(tmp_path):
    root = folders(tmp_path / "pets")
    Image.new("RGB", (20, 30), (255, 0, 0)).save(root / "train/cat/big.jpg")
    with pytest.raises(
        GredpError, match=r"big.jpg is not of 6×8 pixels as others are: scale all with --image-size"
    ):
        load(str(root))
    data = load(str(root), image_size=5)
    assert data.x_train.shape == (9, 3, 5, 5)
    assert sum(bool(x[0].min() > 0.95) for x in data.x_train) == 1


def test_photographs_are_turned_as_the_camera_was(tmp_path):
    root = folders(tmp_path / "pets")
    picture = Image.new("RGB", (6, 8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(root / "train/cat/turned.jpg", exif=exif)
    assert load(str(root)).x_train.shape == (9, 3, 6, 8)


@pytest.mark.slow
def test_class_folders_can_be_trained_on_with_a_share_held_out(tmp_path, capsys):
    root = folders(tmp_path / "pets", "L", (8, 8), splits=("train",))
    for i in range(30):
        Image.fromarray(RNG.integers(0, 256, (8, 8), dtype=np.uint8)).save(root / f"train/cat/n{i}.png")
    arguments = [
        "--model",
        "lenet-small",
        "--batch-size",
        "5",
        "--epochs",
        "1",
        "--accountant",
        "rdp",
        "--json",
    ]
    main(["train", "--dataset", str(root), "--holdout", "0.3", *arguments, "--out", str(tmp_path / "run")])
    assert json.loads(capsys.readouterr().out)["proven_epsilon"] <= 2
    with pytest.raises(GredpError, match="or keep a share apart"):
        load(str(root))


def _bad(root: Path, kind: str) -> None:
    cat = root / "train" / "cat"
    if kind == "empty":
        for file in cat.iterdir():
            file.unlink()
    elif kind == "text":
        (cat / "0.png").write_text("no image")
    elif kind == "cut":
        (cat / "0.png").write_bytes((cat / "0.png").read_bytes()[:60])
    elif kind == "other":
        (cat / "notes.txt").write_text("x")
    elif kind == "gif":
        Image.new("RGB", (8, 6)).save(cat / "0.gif")
        (cat / "0.gif").rename(cat / "0.png")
    elif kind == "deep":
        Image.fromarray(RNG.integers(0, 60000, (6, 8), dtype=np.uint16)).save(cat / "0.png")
    elif kind == "link":
        (cat / "0.png").unlink()
        Image.new("RGB", (8, 6)).save(root.parent / "outside.png")
        (cat / "0.png").symlink_to(root.parent / "outside.png")
    elif kind == "pipe":
        os.mkfifo(cat / "pipe.png")
    elif kind == "class":
        (root / "train" / "cow").mkdir()
    elif kind == "one class":
        for split in ("train", "test"):
            shutil.rmtree(root / split / "dog")
    elif kind == "gone":
        shutil.rmtree(root / "train" / "dog")
        (root / "train" / "cow").mkdir()
    elif kind == "no train":
        (root / "train").rename(root / "tests")
    elif kind == "beside":
        (root / "cow").mkdir()
    elif kind == "mixed":
        (root / "notes.txt").touch()
    elif kind == "flat":
        for file in sorted(root.glob("*/cat/*")):
            file.rename(root / file.name)
        shutil.rmtree(root / "train")
        shutil.rmtree(root / "test")
    elif kind == "nothing":
        shutil.rmtree(root)
        root.mkdir()


@pytest.mark.fault("bad data")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "cat holds no image"),
        ("text", "0.png cannot be read as an image of PNG or JPEG\n"),
        ("cut", "0.png cannot be read as an image of PNG or JPEG\n"),
        ("other", "notes.txt is not an image"),
        ("gif", "0.png cannot be read as an image"),
        ("deep", "0.png has pixels of mode I;16"),
        ("link", "0.png is a link that leaves"),
        ("pipe", "pipe.png is not a plain file"),
        ("class", "cow: there is no such class"),
        ("one class", "holds 1 class folders; there must be at least 2"),
        ("gone", "dog is not there"),
        ("no train", "train is not there"),
        ("beside", "holds cow beside test, train: images lie in CLASS/*.png"),
        ("mixed", "holds 2 folders and 1 files, such as notes.txt"),
        ("flat", "images and no class folder: images lie in CLASS/*.png"),
        ("nothing", "holds nothing: images lie in CLASS/*.png"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, capsys, kind, words):
    root = folders(tmp_path / "pets")
    _bad(root, kind)
    assert words in refused(capsys, "--dataset", str(root), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_signal_while_images_are_read_is_no_damage(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise Stopped(2)

    root = folders(tmp_path / "pets")
    monkeypatch.setattr(Image, "open", stopped)
    with pytest.raises(Stopped, match="SIGINT"):
        load(str(root))


def test_enormous_images_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    root = folders(tmp_path / "pets")
    monkeypatch.setattr("gredp.app.data.images.LARGEST_IMAGE", 47)
    with pytest.raises(GredpError, match="8×6 pixels, more than 47"):
        load(str(root))


def test_a_run_resumes_from_another_folder_and_says_what(tmp_path, monkeypatch, capsys):
    """Of a relative path; the run folder tells no more of the paths than was typed."""
    home = tmp_path / "alice"
    home.mkdir()
    blobs(home)
    monkeypatch.chdir(home)
    honest, epochs = Session.save, []

    def second_epoch_is_stopped(session):
        honest(session)
        epochs.append(session.charged)
        if len(epochs) == 3:
            raise Stopped(15)

    monkeypatch.setattr(Session, "save", second_epoch_is_stopped)
    with pytest.raises(SystemExit):
        main(["train", "--data", "mine.csv", "--accountant", "rdp", "--out", "runs/one"])
    shutil.copytree("runs/one", "runs/two")
    assert "alice" not in (home / "runs/one/settings.json").read_text()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main(["train", "--resume", "alice/runs/one"])
    steps = epochs[-1]
    line = capsys.readouterr().err.partition("\n")[0]
    assert re.fullmatch(
        rf"resuming alice/runs/one: {epochs[2]} of {steps} steps are done, ε [\d.]+ of 2 is spent", line
    )
    assert json.loads((home / "runs/one/record.json").read_text())["settings"]["dataset"] == "mine.csv"
    (home / "mine.csv").rename(tmp_path / "mine.csv")
    (home / "mine.toml").rename(tmp_path / "mine.toml")
    main(["train", "--resume", "alice/runs/two", "--data", str(tmp_path / "mine.csv"), "--json"])
    for changed in (["--data", "other.csv"], ["--data", "digits"]):
        with pytest.raises(SystemExit):
            main(["train", "--resume", "alice/runs/two", *changed])
        assert "was started with --dataset mine.csv" in capsys.readouterr().err
