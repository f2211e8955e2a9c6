"""`gredp compare`: the statistics against known cases, and a small comparison from end to end."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from gredp import GredpError
from gredp.app.cli import main
from gredp.app.compare import LEVEL, ComparedRun, CompareSettings, summary
from gredp.app.jobs import command, run_jobs
from gredp.app.merge_settings import named, resolved
from gredp.app.settings import TrainSettings
from gredp.app.signals import Stopped
from gredp.privacy.accountant import epsilon, round_up
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry
from gredp.storage.files import write_document

GUARANTEE = {"proven_epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}


def records(values, **more):
    return [{"test_accuracy": v, "guarantee": GUARANTEE, **more} for v in np.asarray(values)]


def test_the_epsilon_of_each_run_stands_beside_what_all_compose_to(tmp_path, capsys, monkeypatch):
    """Four runs at 2.0, as a user may make them."""
    z = calibrate(2.0, 1e-5, 256 / 60000, 1000, "rdp")
    spent = {"noise_multiplier": z, "sample_rate": 256 / 60000, "steps": 1000}
    proven = epsilon([Entry(**spent)], 1e-5, "rdp")
    guarantee = {"proven_epsilon": proven, "delta": 1e-5, "accountant": "rdp"}
    found = {
        name: records([0.8, 0.9], ledger=[spent], guarantee=guarantee, seconds=1.0)
        for name in ("dpsgd", "gredp")
    }
    monkeypatch.setattr("gredp.app.compare.run_jobs", lambda *_: None)
    monkeypatch.setattr("gredp.app.compare._records", lambda out, trials, method: found[method])
    words = ["compare", "--methods", "dpsgd", "gredp", "--out", str(tmp_path)]
    main(words)
    said = " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "comparison.json").read_text())
    two, four = (epsilon([Entry(**spent)] * runs, 1e-5, "rdp") for runs in (2, 4))
    assert 1.99 < record["methods"]["dpsgd"]["proven_epsilon"] <= 2.0
    assert record["methods"]["dpsgd"]["composed_epsilon"] == two
    assert record["composed_epsilon"] == four > two > 2
    assert (record["proven_epsilon_holds_for"], record["runs"]) == ("each run alone", 4)
    assert "proven ε, each run" in said
    line = f"ε holds for each run alone; all 4 on the same records: {round_up(four, 3)} at δ = 1e-05"
    assert line in said
    assert line in (tmp_path / "comparison.svg").read_text()
    assert "seconds" not in json.dumps(record)
    found["gredp"] = records([0.8, 0.9])  # of a version that kept no ledger
    main(words)
    assert "all 4 on the same records: not known" in " ".join(capsys.readouterr().out.split())


def test_a_comparison_that_was_stopped_says_what_it_keeps(tmp_path, capsys, monkeypatch):
    def stopped(jobs, out, *_):
        (out / f"{jobs[0].name}.json").write_text(json.dumps({"command": command(jobs[0])}))
        raise Stopped(15)

    monkeypatch.setattr("gredp.app.compare.run_jobs", stopped)
    words = ["compare", "--methods", "dpsgd", "gredp", "--seeds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["gredp", *words])
    for _ in range(2):  # the command that it names is accepted
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 143
        message = capsys.readouterr().err
        assert (
            f"; 1 of 4 runs are done and kept in {tmp_path}, others have checkpoints; resume with: "
            in message
        )
        monkeypatch.setattr("sys.argv", shlex.split(message.rpartition("resume with: ")[2]))


def test_intervals_and_differences_are_those_of_the_textbook():
    a, b = np.array([0.80, 0.82, 0.81, 0.83]), np.array([0.70, 0.73, 0.71, 0.72])
    found = summary({"a": records(a), "b": records(b)})
    half = stats.t.ppf(0.975, 3) * a.std(ddof=1) / 2
    assert found["methods"]["a"]["interval"] == pytest.approx([a.mean() - half, a.mean() + half])
    pair = found["differences"][0]
    # Welch by hand
    va, vb = a.var(ddof=1) / 4, b.var(ddof=1) / 4
    t = (a.mean() - b.mean()) / np.sqrt(va + vb)
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 3)
    assert pair["p"] == pytest.approx(2 * stats.t.sf(abs(t), freedom))
    assert pair["significant"]


def test_p_values_are_corrected_for_the_number_of_pairs():
    rng = np.random.default_rng(0)
    groups = {name: records(0.8 + 0.01 * rng.standard_normal(4)) for name in "abcd"}
    pairs = summary(groups)["differences"]
    assert len(pairs) == 6
    order = sorted(pairs, key=lambda pair: pair["p"])
    assert order[0]["corrected_p"] == pytest.approx(min(1.0, 6 * order[0]["p"]))
    assert [p["corrected_p"] for p in order] == sorted(p["corrected_p"] for p in order)


def test_methods_that_do_not_differ_are_rarely_called_different():
    rng = np.random.default_rng(1)
    calls, wrong = 300, 0
    for _ in range(calls):
        groups = {name: records(0.8 + 0.01 * rng.standard_normal(5)) for name in "abc"}
        wrong += any(pair["significant"] for pair in summary(groups)["differences"])
    assert stats.binomtest(wrong, calls, LEVEL, alternative="greater").pvalue > 1e-3


def test_runs_without_spread_are_compared_exactly():
    same = summary({"a": records([0.5, 0.5]), "b": records([0.5, 0.5])})["differences"][0]
    other = summary({"a": records([0.5, 0.5]), "b": records([0.6, 0.6])})["differences"][0]
    assert (same["significant"], other["significant"]) == (False, True)


def told(*words):
    """The trials of a comparison, and what all of them are told."""
    settings = resolved(CompareSettings, "compare", words)
    return settings, settings.shared(named(words))


def test_options_reach_every_run():
    settings, given = told("--epsilon", "4", "--lr=0.3", "--methods", "dpsgd", "shaped")
    assert ComparedRun("shaped", 3, given, settings.epochs).arguments == [
        "--method", "gredp", "--noise", "shaped", "--claim", "proven", "--seed", "3",
        "--lr", "0.3", "--epsilon", "4.0",
    ]  # fmt: skip


def test_options_that_say_the_usual_reach_every_run_of_a_recipe():
    settings, given = told("--recipe", "mnist", "--epsilon", "2", "--epochs", "20")
    trial = ComparedRun("dpsgd", 0, given, settings.epochs)
    run = resolved(TrainSettings, "train", trial.arguments)
    assert (run.epsilon, run.epochs, run.lr, run.features) == (2.0, 20, 1200.0, "writing")
    assert trial.epochs == 20
    assert told("--recipe", "mnist")[0].epochs == 30


def test_json_is_all_that_is_printed_and_an_impossible_place_is_one_line(tmp_path, monkeypatch, capsys):
    found = {"dpsgd": records([0.8, 0.9])}
    monkeypatch.setattr("gredp.app.compare.run_jobs", lambda *_: None)
    monkeypatch.setattr("gredp.app.compare._records", lambda out, trials, method: found[method])
    main(["compare", "--methods", "dpsgd", "--json", "--out", str(tmp_path / "c")])
    assert json.loads(capsys.readouterr().out)["methods"]["dpsgd"]["accuracies"] == [0.8, 0.9]
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--out", str(tmp_path / "file" / "c")])
    assert stop.value.code == 2
    assert "cannot be made: Not a directory" in capsys.readouterr().err


def test_runs_of_other_settings_are_not_taken_for_these(tmp_path):
    """Left by an interrupted comparison, or by one whose records were removed: nothing is started."""
    _, given = told("--epsilon", "8")
    trial = ComparedRun("dpsgd", 1, given, 20)
    folder = tmp_path / "runs" / trial.name
    folder.mkdir(parents=True)
    other = resolved(TrainSettings, "train", replace(trial, shared={"epsilon": 2.0}).arguments)
    write_document(folder / "settings.json", {"settings": other.kept()})
    first = replace(trial, seed=0)
    with pytest.raises(GredpError, match=r"dpsgd-seed1 was started with --epsilon 2.0, not 8.0"):
        run_jobs([first, trial], tmp_path, tmp_path / "runs", 1, {})
    assert not (tmp_path / "runs" / first.name).exists()


@pytest.mark.slow
def test_a_comparison_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--methods", "plain", "dpsgd", "--seeds", "2", "--workers", "2"]
    main(["compare", *words, "--epochs", "1"])
    said = capsys.readouterr().out
    assert "plain − dpsgd" in said
    assert "significant" in said
    found = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert found["methods"]["plain"]["proven_epsilon"] == "inf"
    assert found["methods"]["dpsgd"]["proven_epsilon"] <= 2.0
    assert (tmp_path / "comparison" / "comparison.svg").read_text().startswith("<?xml")
    with pytest.raises(SystemExit):
        main(["compare", *words, "--epochs", "2"])
    assert "holds a comparison with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "1"], "at least 2"),
        (["--methods", "dpsgd", "dpsgd"], "each method once"),
        (["--resume", "x"], "takes no --resume"),
        (["--method", "gredp"], "takes no --method"),
        (["--noise", "shaped"], "takes no --noise"),
        (["--claim", "paper"], "takes no --claim"),
        (["--seed", "0"], "takes no --seed"),
        (["--track", "csv"], "takes no --track"),
        (["--epsilon", "-1"], "--epsilon must be a positive number"),
    ],
)
def test_mistakes_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.count("\n") == 1
