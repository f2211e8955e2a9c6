"""The page of a run: what it says is what the ledger says, and whatever it is told it shows as text."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gredp.app.cli import main
from gredp.app.report.command import write_report
from gredp.app.report.facts import Facts
from gredp.app.report.numbers import shown_epsilon
from gredp.errors import GredpError
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.ledger import Entry
from gredp.storage.spent import spent
from worlds import make_private, one_step, records, roll_back, small_model

QUICK = ["--epochs", "1", "--accountant", "rdp", "--json"]


class Page(HTMLParser):
    """Elements with their attributes, and the text, by tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.style = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.text += " "

    def handle_endtag(self, tag):
        self.text += " "
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if self._open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Three finished runs: shaped noise, the paper's claim, and one with a seed that makes it worthless."""
    folder = tmp_path_factory.mktemp("runs")
    main(["train", *QUICK, "--noise", "shaped", "--out", str(folder / "shaped")])
    main(["train", *QUICK, "--claim", "paper", "--out", str(folder / "paper")])
    main(["train", *QUICK, "--method", "dpsgd", "--insecure-seed", "1", "--out", str(folder / "seeded")])
    return folder


@pytest.fixture(autouse=True)
def _drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of `runs` have their pictures; what is made of them again has frames in their places."""
    if "runs" in request.fixturenames and request.node.get_closest_marker("pages") is None:
        frame = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(frame))


def copy(runs: Path, tmp_path: Path, name: str = "shaped") -> Path:
    return Path(shutil.copytree(runs / name, tmp_path / name))


def safe(path: Path) -> Page:
    """The page with all that a strict policy asks of it checked."""
    page = Page(path)
    policy = page.all("meta")[1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy["content"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    known = {"html", "head", "meta", "title", "style", "body", "header", "main", "section", "footer"}
    known |= {"h1", "h2", "h3", "p", "b", "span", "div", "code", "figure", "figcaption"}
    known |= {"h4", "ul", "li", "details", "summary"}
    known |= {"table", "thead", "tbody", "tr", "th", "td"}
    known |= {"svg", "g", "defs", "path", "text", "use", "clippath", "rect"}
    assert {tag for tag, _ in page.elements} <= known
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")]
        assert attributes.get("href", "#").startswith("#")
    names = [a["id"] for _, a in page.elements if "id" in a]
    assert len(names) == len(set(names)), "two figures share an id"
    assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)", page.text + page.style)
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in page.all("svg"))
    return page


def test_training_leaves_a_page_that_says_what_the_ledger_says(runs):
    page, counted = safe(runs / "shaped" / "report.html"), spent(runs / "shaped")
    shown = f"{round_up(counted.proven_epsilon):.4f}"
    assert float(shown) >= counted.proven_epsilon
    assert f"with ε = {shown}" in page.words
    for words in (
        "Privacy report: lenet-small on digits",
        "1,438 records to train on",
        "The unit of privacy is one record (add or remove one record). Using one record or not changes",
        "8 steps of the ledger are composed by Rényi differential privacy (rdp)",
        "Selection: the last epoch; no epoch or setting was chosen by this run",
        "Verified. All 11 seals match, and the record lists the same steps and the same ε.",
        "The test records are taken to be public",
        "energy shares",
    ):
        assert words in page.words, words
    assert len(page.all("svg")) == 6, "accuracy twice, loss twice, noise, shares"
    assert "claimed" not in page.words.lower(), "the paper says nothing about shaped noise"
    assert "dp-accounting" in page.words


@pytest.mark.pages
def test_parts_that_take_turns_are_said(tmp_path):
    """8 steps over 4 bands are 2 mechanisms at four times the rate; ε is the ledger's."""
    run = tmp_path / "banded"
    main(["train", *QUICK, "--correlation-bands", "4", "--out", str(run)])
    page, counted = safe(run / "report.html"), spent(run)
    (entry,) = counted.written.entries
    alone = Entry(entry.noise_multiplier, entry.sample_rate, -(-entry.steps // 4))
    assert counted.proven_epsilon == epsilon([alone], counted.delta, "rdp")
    assert f"with ε = {round_up(counted.proven_epsilon):.4f}" in page.words
    assert "Noise is correlated over 4 steps" in page.words
    assert f"in {alone.steps} of these mechanisms" in page.words
    assert "parts in turn" in page.words
    assert "white noise correlated over 4 steps" in page.words
    assert "do not agree" not in page.words


def test_a_record_from_before_there_were_bands_agrees(runs, tmp_path):
    run = copy(runs, tmp_path)
    record = json.loads((run / "record.json").read_text())
    for row in record["ledger"]:
        del row["bands"], row["split"]
    (run / "record.json").write_text(json.dumps(record))
    assert "do not agree" not in safe(write_report([run])).words


def test_figures_are_text_in_the_pages_ink(runs):
    page = (runs / "shaped" / "report.html").read_text()
    assert "accuracy in %</text>" in page
    assert "currentColor" in page
    assert "#010203" not in page


def test_what_is_claimed_stands_beside_what_is_proven(runs):
    page, counted = safe(runs / "paper" / "report.html"), spent(runs / "paper")
    assert counted.claimed_epsilon < counted.proven_epsilon
    proven, claimed = (f"{round_up(e):.4f}" for e in (counted.proven_epsilon, counted.claimed_epsilon))
    assert 0 < page.words.index(f"proven {proven}") < page.words.index(f"claimed {claimed}")


def test_an_insecure_run_is_marked_loudly(runs):
    assert "This run protects nobody." in safe(runs / "seeded" / "report.html").words
    assert "protects nobody" not in safe(runs / "paper" / "report.html").words


def test_records_that_were_held_out_are_said_to_be_unprotected(runs, tmp_path):
    run = copy(runs, tmp_path)
    text = (run / "record.json").read_text()
    for kind in ("accuracy", "loss"):
        text = text.replace(f'"test_{kind}"', f'"validation_{kind}"')
    record = json.loads(text)
    record["settings"]["validation"] = 100
    record["judged_on"] = "the last 100 training records: held out, and not private in this run"
    (run / "record.json").write_text(json.dumps(record))
    page = safe(write_report([run]))
    assert (
        "That does not hold for all of the training data: this run was evaluated on the last 100"
        in page.words
    )
    assert "Accuracy and loss on held-out training records" in page.words
    assert "ε covers neither these figures nor those records." in page.words
    assert "to test on" not in page.words
    assert "taken to be public" not in page.words
    assert "%, held out" in safe(write_report([run, runs / "paper"])).words


def test_a_test_split_of_private_records_is_not_taken_to_be_public(runs, tmp_path):
    run = copy(runs, tmp_path)
    record = json.loads((run / "record.json").read_text())
    record["settings"]["holdout"] = 0.2
    (run / "record.json").write_text(json.dumps(record))
    page = safe(write_report([run]))
    assert "The test records were held out of the private ones" in page.words
    assert "taken to be public" not in page.words


@pytest.mark.pages
def test_an_infinite_epsilon_is_no_guarantee(tmp_path):
    main(["train", *QUICK, "--method", "plain", "--out", str(tmp_path / "run")])
    page = safe(tmp_path / "run" / "report.html")
    assert "No privacy." in page.words
    assert "differentially private with" not in page.words


@pytest.mark.pages
def test_several_runs_stand_side_by_side(runs, capsys):
    folders = [str(runs / name) for name in ("shaped", "paper", "seeded")]
    main(["report", *folders])
    path = Path(capsys.readouterr().out.strip())
    assert path == runs / "shaped" / "comparison.html"
    page = safe(path)
    assert "Privacy report of 3 runs" in page.words
    for folder in folders:
        assert f"{round_up(spent(folder).proven_epsilon):.4f}" in page.words
    every = [entry for folder in folders for entry in spent(folder).written.entries]
    assert (
        f"on the same records at most ε = {round_up(epsilon(every, 1e-5, 'rdp')):.4f} at δ = 1e-5"
        in page.words
    )
    assert "seeded (INSECURE)" in page.words
    assert sum("paper: " in (picture["aria-label"] or "") for picture in page.all("svg")) == 8


@pytest.mark.parametrize("left", ["after an epoch", "before the first"])
def test_an_interrupted_run_has_a_page(runs, tmp_path, left):
    run = copy(runs, tmp_path)
    for name in ("record.json", "model.safetensors", "report.html"):
        (run / name).unlink()
    lines = (run / "ledger").read_bytes().count(b"\n")
    roll_back(run, lines - 3, "checkpoint-*", *(["metrics.json"] if left == "before the first" else []))
    if left == "after an epoch":
        released = json.loads((run / "metrics.json").read_text())
        (run / "metrics.json").write_text(json.dumps(released | {"steps": 4}))
    page = safe(write_report([run]))
    assert "This run has not finished. 5 of 8 steps are charged" in page.words
    assert f"{round_up(spent(run).proven_epsilon):.4f} proven ε, so far" in page.words
    assert "least noise in any direction" in page.words
    assert len(page.all("svg")) == (6 if left == "after an epoch" else 0)


def test_a_run_of_ones_own_loop_has_a_page(tmp_path):
    model, optimizer, _, engine = make_private(small_model(), records(8), noise_multiplier=1.0, seed=None)
    engine.save(tmp_path / "run")
    one_step(model, optimizer, *records(8))
    engine.detach()
    page = safe(write_report([tmp_path / "run"]))
    assert "This run has not finished. 1 steps are charged" in page.words
    assert "was not made by gredp train" in page.words


def test_a_record_that_disagrees_with_the_ledger_is_called_out(runs, tmp_path):
    run = copy(runs, tmp_path)
    record = json.loads((run / "record.json").read_text())
    record["guarantee"]["proven_epsilon"] /= 2
    (run / "record.json").write_text(json.dumps(record))
    page = safe(write_report([run]))
    assert "Record and ledger do not agree." in page.words
    assert f"with ε = {round_up(spent(run).proven_epsilon):.4f}" in page.words
    record["guarantee"]["proven_epsilon"] *= 2
    record["ledger"][0]["steps"] -= 1
    (run / "record.json").write_text(json.dumps(record))
    assert "lists other steps than the ledger" in safe(write_report([run])).words


@pytest.mark.slow
def test_an_audit_is_shown_where_there_is_one(runs, tmp_path):
    run = copy(runs, tmp_path, "paper")
    with pytest.raises(SystemExit) as end:
        main(["audit", "--run", str(run), "--plays", "20", "--json"])
    assert end.value.code == 0
    page = safe(write_report([run]))
    assert "Not refuted. The attacks found no contradiction, which is no proof." in page.words
    assert "the method of paper" in page.words
    record = json.loads((run / "record.json").read_text())
    record["audit"]["refuted"] = True
    (run / "record.json").write_text(json.dumps(record))
    assert "The audit refutes this method." in safe(write_report([run])).words


HOSTILE = '"><img src=x onerror=alert(1)>{{ 7 * 7 }}$\\frac$\x07 <script>alert(1)<'


def test_hostile_names_are_shown_as_text(tmp_path):
    """A data set's path, a run's folder and a model's layers, as an attacker would name them."""
    folder = tmp_path / HOSTILE / "script>"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8), "y": np.arange(20, dtype=np.uint8) % 3}
    file = folder / "'><svg onload=alert(1)>.npz"
    np.savez(file, **{f"{k}_{part}": v for k, v in arrays.items() for part in ("train", "test")})
    run = folder / "<b>run&amp;"
    main(["train", "--dataset", str(file), "--model", "lenet-small", "--batch-size", "5", *QUICK,
          "--out", str(run)])  # fmt: skip
    record = json.loads((run / "record.json").read_text())
    record["spectrum"][0]["block"] = HOSTILE
    record["versions"] = {"</style><script>alert(1)</script>": "<!--"}
    record["selection"] = "<script>alert(1)</script>"
    (run / "record.json").write_text(json.dumps(record))
    page = safe(write_report([run]))
    assert "<script>alert(1)</script>" in page.words
    assert HOSTILE.replace("\x07", "\ufffd") in page.text
    assert "'><svg onload=alert(1)>" in page.words
    assert "<b>run&amp;" in page.text


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_what_is_no_run_is_refused_in_one_line(runs, tmp_path, capsys):
    assert "name the folder of a run" in refused(capsys)
    assert "it has no ledger" in refused(capsys, str(tmp_path))
    assert "it has no ledger" in refused(capsys, str(runs / "shaped"), str(tmp_path / "nothing"))
    run = copy(runs, tmp_path)
    (run / "report.html").unlink()
    whole = (run / "record.json").read_text()
    for content, words in (
        (whole[:100], "is damaged"),
        ("[]", "holds no object"),
        ("{}", None),
        ('{"format": "other", "version": 1}', "this gredp reads 'gredp-record 1'"),
        ('{"format": "gredp-record", "version": 1}', "not of this version"),
        (whole.replace('"test_accuracy"', '"other"'), "not of this version"),
        (whole.replace('"metrics": [', '"metrics": 7, "x": ['), "not of this version"),
    ):
        (run / "record.json").write_text(content)
        if words is not None:
            assert words in refused(capsys, str(run))
            assert not (run / "report.html").exists()
    (run / "record.json").write_text(whole)
    ledger = (run / "ledger").read_text()
    (run / "ledger").write_text(ledger.replace("0.1335", "0.0335", 1))
    assert "is damaged at line" in refused(capsys, str(run))
    nowhere = str(tmp_path / "no" / "page.html")
    assert "cannot be written" in refused(capsys, str(runs / "paper"), "--out", nowhere)


@pytest.mark.pages
def test_a_page_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr("gredp.app.report.page.page", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main(["train", *QUICK, "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert json.loads(said.out)["run"] == str(tmp_path / "run")
    assert said.err.count("\n") == 1
    assert "no report was written (no ink)" in said.err


@pytest.mark.pages
def test_the_path_of_the_page_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    main(["train", *QUICK[:-1], "--out", str(tmp_path / "run")])
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out


def test_a_page_needs_no_torch(runs, tmp_path):
    code = "import sys; from gredp.app.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    out = tmp_path / "page.html"
    command = [sys.executable, "-c", code, "report", str(runs / "shaped"), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert "Verified." in safe(out).words


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (50.1201, "50.1202"),
        (999_999.99999, "1,000,000.0000"),
        (1_000_030.0, "1.0001e+06"),
        (2.5e20, "2.5e+20"),
    ],
)
def test_large_epsilons_are_not_shown_smaller_than_they_are(value, shown):
    assert shown_epsilon(value) == shown
    assert float(shown.replace(",", "")) >= value


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.5, 0.01), (2.0, 1e-5), (8.0, 1e-3)])
def test_no_test_for_membership_beats_the_bound_on_an_attacker(epsilon, delta):
    """Against a linear program over all rates of error that (ε, δ) allows, prior one half."""
    from scipy.optimize import linprog

    factor = math.exp(epsilon)
    limits = [[1, -factor], [factor, -1]]  # TPR ≤ e^ε FPR + δ, 1 − FPR ≤ e^ε (1 − TPR) + δ
    best = linprog([-0.5, 0.5], limits, [delta, factor + delta - 1], bounds=[(0, 1), (0, 1)])
    run = SimpleNamespace(spent=SimpleNamespace(proven_epsilon=epsilon, delta=delta))
    assert Facts.attacker.fget(run) == pytest.approx(0.5 - best.fun, abs=1e-9)


def test_the_page_is_one_to_sign(runs):
    page = safe(write_report([runs / "shaped"]))
    digest = hashlib.sha256((runs / "shaped" / "model.safetensors").read_bytes()).hexdigest()
    after = [
        "What ε does not cover",
        "359 test records are taken to be public",
        "The number of training records (1,438)",
        "the names of the 10 classes",
        "for k of them ε is up to k times as large",
        digest,
        "How good it is",
        "majority's share",
        "Those that differ from the defaults of gredp train:",
        "noise shaped",
        "settings at their defaults",
        "Sign-off",
    ]
    places = [page.words.find(words) for words in after]
    assert -1 not in places, after[places.index(-1)]
    assert places == sorted(places)
    assert "of the time with the model" in page.words


def test_white_noise_has_no_picture_and_a_warning_is_shown(runs, tmp_path):
    folder = copy(runs, tmp_path, "paper")
    assert len(safe(write_report([folder])).all("svg")) == 4, "accuracy twice, loss twice"
    record = json.loads((folder / "record.json").read_text())
    record["evaluation"]["warning"] = "finds 0 of 9 of class <b>fraud"
    (folder / "record.json").write_text(json.dumps(record))
    assert "It finds 0 of 9 of class <b>fraud." in safe(write_report([folder])).words


def test_runs_on_different_data_are_not_compared(runs, tmp_path):
    other = copy(runs, tmp_path)
    record = json.loads((other / "record.json").read_text())
    record["data"]["name"] = "letters"
    (other / "record.json").write_text(json.dumps(record))
    with pytest.raises(GredpError, match=r"a run on digits and .* one on letters: compare runs on the same"):
        write_report([runs / "shaped", other])
