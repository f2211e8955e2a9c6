"""`gredp audit` as a user types it: verdicts, exit status, record, figure, and one line for every mistake."""

import json
import math

import pytest

from gredp.app import audit_cases as claims
from gredp.app.cli import main
from gredp.app.settings import TrainSettings
from gredp.audit import examples

STEP = """
import numpy as np
rng = np.random.default_rng(7)
calls = []

def step(gradients):
    calls.append(gradients.shape)
    clipped = gradients / np.maximum(np.linalg.norm(gradients, axis=1, keepdims=True) / 2, 1)
    return clipped.sum(0) + 2 * 0.5 * rng.standard_normal(gradients.shape[1])

def silent(gradients):
    return gradients.sum(0)

def failing(gradients):
    return 1 / 0

constant = 3
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "own_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return "own_step:step"


def audit(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return stop.value.code, output.out if stop.value.code != 2 else output.err


def test_a_step_of_the_users_stands_at_its_claim_and_falls_at_a_bolder_one(capsys, target):
    common = ("--target", target, "--clip-norm", "2", "--plays", "400", "--json")
    status, out = audit(capsys, *common, "--sigma", "0.5", "--alpha", "1e-7")
    assert (status, json.loads(out)["rows"][0]["refuted"]) == (0, False)
    status, out = audit(capsys, *common, "--sigma", "0.9")
    assert status == 3
    (row,) = json.loads(out)["rows"]
    assert row["refuted"]
    assert row["claimed_epsilon"] < row["audited_epsilon_lower"]
    status, out = audit(capsys, "--target", "own_step:silent", "--sigma", "0.9", "--plays", "30")
    assert status == 3
    assert "REFUTED" in out


def test_a_claim_of_the_paper_falls_with_a_figure_and_a_record(capsys, tmp_path):
    figure, record = tmp_path / "audit.svg", tmp_path / "audit.json"
    status, out = audit(
        capsys, "--method", "gredp", "--noise", "real", "--claim", "paper", "--plays", "60",
        "--figure", str(figure), "--out", str(record),
    )  # fmt: skip
    assert status == 3
    for words in ("REFUTED", "claimed", "audited ≥", "proven", "no proof"):
        assert words in " ".join(out.split())
    saved = json.loads(record.read_text())
    assert (saved["format"], saved["kind"], saved["alpha"]) == ("gredp-record", "audit", 0.01)
    assert saved["rows"][0]["proven_epsilon"] == "inf"
    picture = figure.read_text()
    assert saved["created"] in picture
    assert "canary in the data" in picture


def test_a_proven_claim_is_not_refuted(capsys):
    status, out = audit(capsys, "--method", "dpsgd", "--plays", "20", "--alpha", "1e-7")
    assert status == 0
    assert "not refuted" in out


def test_whole_runs_are_played_against_the_accountants_curve(capsys):
    arguments = (
        "--method",
        "dpsgd",
        "--steps",
        "2",
        "--sample-rate",
        "0.5",
        "--plays",
        "20",
        "--alpha",
        "1e-7",
    )
    status, out = audit(capsys, *arguments, "--json")
    (row,) = json.loads(out)["rows"]
    assert (status, row["game"], row["steps"], row["sample_rate"]) == (0, "whole run", 2, 0.5)


def test_the_audit_becomes_a_section_of_the_runs_record(capsys, tmp_path):
    run = tmp_path / "run"
    main(["train", "--epochs", "1", "--accountant", "rdp", "--out", str(run), "--json"])
    capsys.readouterr()
    status, _ = audit(capsys, "--run", str(run), "--plays", "20", "--alpha", "1e-7")
    assert status == 0
    record = json.loads((run / "record.json").read_text())
    assert record["audit"]["refuted"] is False
    assert record["guarantee"]["proven_epsilon"] <= 2


@pytest.mark.parametrize(
    "told",
    [
        {"noise": "shaped", "exponent": 0.3, "preconditioner": 0.2},
        {"method": "spectral_dp", "filter_ratio": 0.75},
    ],
    ids=["shaped", "filtered"],
)
def test_the_audit_of_a_run_plays_its_method_with_its_options(capsys, tmp_path, monkeypatch, told):
    settings = TrainSettings(**told)
    record = {"format": "gredp-record", "version": 1, "settings": settings.kept(), "guarantee": {}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    played = []
    honest = claims.run_case
    monkeypatch.setattr(
        claims, "run_case", lambda case, *a, **k: played.append(case) or honest(case, *a, **k)
    )
    status, _ = audit(capsys, "--run", str(tmp_path), "--plays", "20", "--alpha", "1e-7")
    assert status == 0
    assert {name: played[0].options[name] for name in told} == told
    (tmp_path / "record.json").write_text(json.dumps(record | {"settings": {"color": "red"}}))
    status, out = audit(capsys, "--run", str(tmp_path))
    assert (status, "not of this version" in out) == (2, True)


def test_all_shares_alpha_out_and_tells_expected_from_unexpected(capsys, monkeypatch):
    """Two cases in place of twenty; the exit status is 0 only if the proven stands and the paper's falls."""
    paper = next(case for case in claims.CASES if case.name == "GReDP, real noise only")
    proven = claims.CASES[0]
    played = [claims.run_case(case, 1e-3, 20) for case in (proven, paper)]
    seen = []

    def rows(verdicts):
        def fake(alpha, plays, delta, progress):
            seen.append(alpha)
            return [row | {"refuted": verdict} for row, verdict in zip(played, verdicts)]

        return fake

    for verdicts, expected in (((False, True), 0), ((True, True), 3), ((False, False), 1)):
        monkeypatch.setattr(claims, "run_all", rows(verdicts))
        assert audit(capsys, "--all")[0] == expected
    assert seen == [0.01] * 3


@pytest.mark.slow
def test_proven_claims_stand_and_those_of_the_paper_fall(capsys, monkeypatch):
    """Some of them; all take minutes, of which `make audit` leaves the record."""
    some = [c for c in claims.CASES if c.name in ("Spectral-DP", "GReDP, Algorithm 2")]
    monkeypatch.setattr(claims, "CASES", some)
    assert {case.claim for case in some} == {"proven", "paper"}
    status, out = audit(capsys, "--all", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0
    for row in rows:
        if row["claim"] == "paper":
            assert row["claimed_epsilon"] < row["audited_epsilon_lower"] < float(row["proven_epsilon"])
    assert [row["refuted"] for row in rows] == [case.claim == "paper" for case in claims.CASES]
    assert math.isclose(sum(row["alpha"] for row in rows), 0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--all", "--self-test"], "one of --all"),
        (["--alpha", "0"], "--alpha must lie strictly between 0 and 1, not 0.0"),
        (["--plays", "3"], "--plays must be at least 20, not 3"),
        (["--sigma", "nan"], "--sigma must be a positive number, not nan"),
        (["--sigma", "0"], "not 0.0"),
        (["--delta", "1"], "not 1.0"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--sample-rate", "1.5"], "at most 1, not 1.5"),
        (["--target", "own_step:step"], "--target needs --sigma"),
        (["--target", "own_step", "--sigma", "1"], "module:function, not 'own_step'"),
        (["--target", "own_step:none", "--sigma", "1"], "cannot be loaded"),
        (["--target", "nowhere_at_all:step", "--sigma", "1"], "No module named 'nowhere_at_all'"),
        (["--target", "own_step:constant", "--sigma", "1"], "not a function"),
        (["--target", "own_step:step", "--sigma", "1", "--dimension", "2"], "at least 3"),
        (["--method", "plain"], "claims no ε"),
        (["--noise", "real"], "claim='paper'"),
        (["--noise", "shaped", "--claim", "paper"], "no claim about shaped noise"),
        (["--clipping", "soft"], "unknown clipping 'soft'"),
        (["--figure", "x.exe"], "must end in .svg"),
        (["--out", "nowhere/x.json"], "cannot be written"),
        (["--target", "own_step:failing", "--sigma", "1"], "ZeroDivisionError"),
        (["--run", "nowhere"], "holds no record of a run"),
    ],
)
def test_wrong_audits_are_refused_in_one_line(capsys, target, arguments, words):
    status, error = audit(capsys, *arguments)
    assert status == 2
    assert words in error
    assert error.strip().count("\n") == 0


def test_the_self_test_shows_who_caught_what(capsys, monkeypatch):
    steps = {examples.variance_for_deviation: 3}
    monkeypatch.setattr(examples, "BROKEN", steps)
    status, out = audit(capsys, "--self-test")
    assert status == 0
    assert "variance for deviation" in out
    monkeypatch.setattr(examples, "BROKEN", {**steps, examples.honest_step: 3})
    status, out = audit(capsys, "--self-test", "--json")
    assert status == 3
    assert [row["caught"] for row in json.loads(out)["self_test"]] == [True, False]
