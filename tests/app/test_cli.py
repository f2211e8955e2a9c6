"""The commands as a user types them: figures, files, and one clear line for every mistake."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from gredp.app.cli import main
from gredp.app.console import table
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry

KEYS = {
    "proven_epsilon",
    "claimed_epsilon",
    "noise_multiplier",
    "sigma",
    "delta",
    "accountant",
    "steps",
    "sample_rate",
    "correlation_bands",
    "neighbors",
}
QUICK = ["--epochs", "1", "--accountant", "rdp"]


def run(capsys, *arguments: str) -> dict:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "a user's mistake gives one line"
    assert "Traceback" not in message
    return message


def test_the_papers_claim_is_that_of_dpsgd_with_less_noise(capsys):
    claim = run(capsys, "account", "--method", "gredp", "--claim", "paper", "--sigma", "1.1")
    honest = run(capsys, "account", "--method", "dpsgd", "--sigma", str(1.1 / math.sqrt(2)))
    assert set(claim) == KEYS
    assert claim["proven_epsilon"] == pytest.approx(honest["proven_epsilon"], rel=1e-9)
    assert claim["proven_epsilon"] > claim["claimed_epsilon"]
    same_sigma = run(capsys, "account", "--method", "dpsgd", "--sigma", "1.1", "--accountant", "rdp")
    assert claim["claimed_epsilon"] == same_sigma["proven_epsilon"]


def test_layers_that_share_a_norm_cost_their_root(capsys):
    claim = run(capsys, "account", "--claim", "paper", "--sigma", "2.0", "--layers", "5")
    honest = run(capsys, "account", "--method", "dpsgd", "--sigma", str(2 / math.sqrt(10)))
    assert claim["proven_epsilon"] == pytest.approx(honest["proven_epsilon"], rel=1e-9)


@pytest.mark.parametrize("method", ["dpsgd", "spectral_dp", "gredp"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_targets_are_met_from_below(capsys, method, accountant):
    got = run(capsys, "account", "--method", method, "--epsilon", "1.5", "--accountant", accountant)
    assert 1.49 <= got["proven_epsilon"] <= 1.5
    assert got["noise_multiplier"] == pytest.approx(got["sigma"] / (1 if method == "dpsgd" else math.sqrt(2)))
    assert got["steps"] == 3600
    assert got["sample_rate"] == 500 / 60000
    again = epsilon([Entry(got["noise_multiplier"], got["sample_rate"], 3600)], got["delta"], accountant)
    assert got["proven_epsilon"] == again


def test_the_papers_sigma_for_a_target_is_dpsgds(capsys):
    paper = run(capsys, "account", "--claim", "paper", "--epsilon", "1")
    dpsgd = run(capsys, "account", "--method", "dpsgd", "--epsilon", "1", "--accountant", "rdp")
    assert paper["sigma"] == dpsgd["sigma"]
    assert paper["claimed_epsilon"] <= 1 < paper["proven_epsilon"]


def test_shaped_noise_has_no_claim_and_plain_no_privacy(capsys):
    shaped = run(capsys, "account", "--noise", "shaped", "--epsilon", "2", "--accountant", "rdp")
    assert shaped["claimed_epsilon"] is None
    assert 1.99 <= shaped["proven_epsilon"] <= 2
    assert run(capsys, "account", "--method", "plain")["proven_epsilon"] == "inf"
    real = run(capsys, "account", "--noise", "real", "--claim", "paper", "--sigma", "1")
    assert real["proven_epsilon"] == "inf"


def test_the_table_shows_the_proven_figure_first(capsys):
    main(["account", "--claim", "paper", "--sigma", "1"])
    out = capsys.readouterr().out
    assert 0 < out.index("proven ε") < out.index("claimed ε")


@pytest.mark.fault("bad options")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sigma", "-1"], "not -1.0"),
        (["--sigma", "nan"], "not nan"),
        (["--sigma", "1", "--epsilon", "1"], "either --sigma or --epsilon"),
        ([], "either --sigma or --epsilon"),
        (["--epsilon", "0"], "not 0.0"),
        (["--epsilon", "nan"], "not nan"),
        (["--epsilon", "inf"], "not inf"),
        (["--epsilon", "1", "--delta", "1"], "not 1.0"),
        (["--epsilon", "1", "--delta", "-0.1"], "not -0.1"),
        (["--epsilon", "1e-9", "--delta", "1e-14"], "cannot be reached"),
        (["--epsilon", "1", "--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--epsilon", "1", "--records", "100"], "500 is larger than the dataset of 100"),
        (["--epsilon", "1", "--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--epsilon", "1", "--layers", "0"], "--layers must be at least 1, not 0"),
        (["--epsilon", "1", "--noise", "real"], "claim='paper'"),
        (["--epsilon", "1", "--noise", "shaped", "--claim", "paper"], "no claim about shaped noise"),
        (["--epsilon", "1", "--method", "dpsgd", "--noise", "shaped"], "belongs to method 'gredp'"),
    ],
)
def test_wrong_accounts_are_refused_in_one_line(capsys, arguments, words):
    assert words in refused(capsys, "account", *arguments)


@pytest.mark.pages
@pytest.mark.parametrize("method", ["plain", "dpsgd", "spectral_dp", "gredp"])
def test_training_leaves_a_record_and_a_model(capsys, tmp_path, method):
    folder = tmp_path / "run"
    got = run(capsys, "train", "--method", method, *QUICK, "--out", str(folder))
    assert set(got) == KEYS | {"test_accuracy", "evaluation", "run"}
    assert got["run"] == str(folder)
    record = json.loads((folder / "record.json").read_text())
    assert (record["format"], record["version"]) == ("gredp-record", 1)
    assert record["guarantee"]["proven_epsilon"] == got["proven_epsilon"]
    assert record["data"]["records"] == 1438
    assert sum(entry["steps"] for entry in record["ledger"]) == got["steps"] == 8
    assert record["versions"]["torch"]
    kept = {p.name.split("-0")[0] for p in folder.iterdir()}
    released = {"model.safetensors", "record.json", "metrics.json", "report.html"}
    assert kept == released | {"checkpoint", "ledger", "ledger.mark", "lock", "settings.json"}
    weights = load_file(folder / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == record["parameters"]
    if method != "plain":
        assert float(got["proven_epsilon"]) <= 2.0
        replay = [Entry(e["noise_multiplier"], e["sample_rate"], e["steps"]) for e in record["ledger"]]
        assert epsilon(replay, 1e-5, "rdp") == got["proven_epsilon"]


def test_training_prints_accuracy_epsilon_and_place(capsys, tmp_path):
    main(["train", *QUICK, "--out", str(tmp_path / "run")])
    out = capsys.readouterr().out
    for word in ("test accuracy", "proven ε", "accountant", "noise multiplier", "steps", "run"):
        assert word in out


def test_tables_show_names_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table("of [/b]", [("run", "r/a[/b] [red]x :tada:")], ("[/i]", "[bold]"))
    out = capsys.readouterr().out
    for words in ("of [/b]", "r/a[/b] [red]x :tada:", "[/i]", "[bold]"):
        assert words in out


def test_the_seed_fixes_the_start_but_never_the_noise(capsys, tmp_path):
    weights = []
    for name in ("a", "b"):
        run(capsys, "train", *QUICK, "--seed", "3", "--out", str(tmp_path / name))
        weights.append(load_file(tmp_path / name / "model.safetensors")["0.weight"])
    assert not (weights[0] == weights[1]).all()


def own_data(path, **change) -> str:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "y_train": (np.arange(40) % 3).astype(np.uint8),
        "x_test": rng.integers(0, 256, (10, 8, 8), dtype=np.uint8),
        "y_test": (np.arange(10) % 3).astype(np.uint8),
    } | change
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def test_own_data_can_be_brought(capsys, tmp_path):
    file = own_data(tmp_path / "mine.npz")
    got = run(
        capsys, "train", "--dataset", file, "--model", "lenet-small", "--batch-size", "8", *QUICK,
        "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert got["steps"] == 5
    assert got["sample_rate"] == 0.2


def label(value, kind=np.int64):
    y = (np.arange(40) % 3).astype(kind)
    y[7] = value
    return y


def image(value, kind=np.float32):
    x = np.zeros((40, 8, 8), dtype=kind)
    x[3, 2, 1] = value
    return x


@pytest.mark.fault("bad data")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": label(-1)}, "labels must lie in 0 to 2, and that of record 8 does not\n"),
        ({"y_train": label(3)}, "labels must lie in 0 to 2, and that of record 8 does not\n"),
        ({"y_test": np.zeros(0, np.int64)}, "shape (0,), but there are 10 images"),
        ({"y_train": label(0.5, np.float64)}, "float64, not whole numbers"),
        ({"y_train": np.zeros(39, np.int64)}, "shape (39,), but there are 40 images"),
        ({"y_train": np.zeros((40, 1), np.int64)}, "shape (40, 1)"),
        ({"x_train": image(math.nan)}, "record 4 holds values that are not finite\n"),
        ({"x_train": image(math.inf)}, "record 4 holds values that are not finite\n"),
        ({"x_test": image(1e39, np.float64)[:10]}, "record 4 holds values that are not finite\n"),
        ({"x_train": image(255)}, "record 4 holds floats above 64, as if they were bytes"),
        (
            {"x_train": np.zeros((40, 7, 9, 2), np.uint8), "x_test": np.zeros((10, 7, 9, 2), np.uint8)},
            "images have shape (10, 7, 9, 2), not [n, height, width]",
        ),
        ({"x_train": np.zeros((40, 3, 8, 8), np.uint8)}, "shape (40, 3, 8, 8)"),
        ({"x_train": np.zeros((40, 64), np.uint8)}, "shape (40, 64)"),
        ({"x_train": np.zeros((40, 8, 8), "U1")}, "not uint8 or float"),
        ({"x_test": np.zeros((10, 9, 8), np.uint8)}, "differ in shape"),
        ({"x_train": np.zeros((0, 8, 8), np.uint8), "y_train": np.zeros(0, np.int64)}, "set is empty"),
        ({"x_test": None}, "holds ["),
        ({"x_train": np.array([np.zeros(3), np.zeros(4)], dtype=object)}, "cannot be read"),
    ],
)
def test_bad_data_is_refused_at_load(capsys, tmp_path, change, words):
    file = own_data(tmp_path / "mine.npz", **change)
    message = refused(capsys, "train", "--dataset", file, *QUICK, "--out", str(tmp_path / "run"))
    assert words in message
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("crafted data")
def test_files_that_are_no_archives_are_refused(capsys, tmp_path):
    file = tmp_path / "mine.npz"
    file.write_bytes(b"not a zip")
    assert "cannot be read" in refused(capsys, "train", "--dataset", str(file))
    assert "is not there" in refused(capsys, "train", "--dataset", str(tmp_path / "none.npz"))
    assert "is not there" in refused(capsys, "train", "--dataset", "mnist", "--data-dir", str(tmp_path))
    whole = own_data(tmp_path / "whole.npz")
    content = Path(whole).read_bytes()
    for share in range(20):
        file.write_bytes(content[: len(content) * share // 20])
        refused(capsys, "train", "--dataset", str(file), "--out", str(tmp_path / "run"))


@pytest.mark.fault("bad options")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "imagenet"], "unknown dataset 'imagenet'"),
        (["--model", "vgg"], "unknown model 'vgg'"),
        (["--model", "lenet5"], "at least 12×12, not 8×8"),
        (["--epsilon", "0"], "--epsilon must be a positive number, not 0.0"),
        (["--epsilon", "nan"], "not nan"),
        (["--delta", "1"], "not 1.0"),
        (["--delta", "0.5"], "δ × 1,438 records is 7.2e+02, above 0.1: take δ below 7e-05, or say with"),
        (
            ["--delta", "7e-4"],
            "(--allow-large-delta) that you mean it: publishing a record at random would pass",
        ),
        (["--clip-norm", "0"], "--clip-norm must be a positive number, not 0.0"),
        (["--lr", "-1"], "--lr must be a positive number, not -1.0"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--batch-size", "5000"], "5000 is larger than the dataset of 1438"),
        (["--momentum", "1"], "not 1.0"),
        (["--block", "-1"], "--block must be 0"),
        (["--clipping", "soft"], "unknown clipping 'soft'"),
        (["--method", "spectral_dp", "--filter-ratio", "0"], "filter ratio"),
        (["--noise", "real"], "claim='paper'"),
    ],
)
def test_wrong_trainings_are_refused_in_one_line(capsys, tmp_path, arguments, words):
    assert words in refused(capsys, "train", *arguments, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("always:δ")
def test_a_large_delta_is_warned_of_and_taken_only_when_said(capsys, tmp_path):
    words = ["train", *QUICK, "--batch-size", "1438", "--delta"]
    main([*words, "1e-4", "--out", str(tmp_path / "warned")])
    said = capsys.readouterr()
    assert "gredp: warning: δ × 1,438 records is 0.14, above 0.1: take δ below 7e-05\n" in said.err
    assert "δ × records │ 0.14, above 0.1" in " ".join(said.out.split())
    main(["report", str(tmp_path / "warned")])
    shown = " ".join(re.sub("<[^>]*>", " ", (tmp_path / "warned" / "report.html").read_text()).split())
    assert "0.14 δ × records" in shown
    assert "δ is large. Times the training records it is 0.14, above 0.1: take δ below 7e-05." in shown
    main([*words, "0.5", "--allow-large-delta", "--out", str(tmp_path / "meant")])
    said = capsys.readouterr()
    assert "δ × records │ 7.2e+02" in " ".join(said.out.split())
    assert json.loads((tmp_path / "meant" / "record.json").read_text())["settings"]["allow_large_delta"]
    main([*words[:-1], "--out", str(tmp_path / "small")])
    assert "warning" not in capsys.readouterr().err


def test_an_account_looks_at_delta_too(capsys):
    words = ["account", "--method", "dpsgd", "--sigma", "1.5", "--epochs", "1"]
    main(words)
    assert "δ × records │ 0.6, above 0.1: take δ below 2e-06" in " ".join(capsys.readouterr().out.split())
    assert "δ × 60,000 records is 3e+04" in refused(capsys, *words, "--delta", "0.5")
    main([*words, "--delta", "0.5", "--allow-large-delta"])
    assert "δ × records │ 3e+04, above 0.1" in " ".join(capsys.readouterr().out.split())


def test_folders_that_exist_or_cannot_be_written_are_refused(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    assert "exists already" in refused(capsys, "train", *QUICK, "--out", str(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, "train", *QUICK, "--out", str(tmp_path / "file" / "run"))


def test_help_and_account_do_not_import_torch():
    code = (
        "import sys; from gredp.app.cli import main\n"
        "try: main(['account', '--epsilon', '2', '--accountant', 'rdp'])\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_and_module_entry_point():
    done = subprocess.run(
        [sys.executable, "-m", "gredp", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("gredp 0.")
