"""`gredp compare`: the statistics against known cases, and a small comparison from end to end."""

import json

import numpy as np
import pytest
from scipy import stats

from gredp import GredpError
from gredp.compare import LEVEL, CompareSettings, Trial, run_compare, summary


def records(values):
    return [
        {"test_accuracy": v, "seconds": 1.0, "guarantee": {"proven_epsilon": 2.0}} for v in np.asarray(values)
    ]


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


def test_options_reach_every_run():
    settings = CompareSettings(epsilon=4.0, lr=0.3, methods=("dpsgd", "shaped"))
    assert Trial("shaped", 3, settings).arguments == [
        "--method", "gredp", "--noise", "shaped", "--seed", "3", "--epsilon", "4.0", "--lr", "0.3",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_comparison_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = CompareSettings(methods=("plain", "dpsgd"), seeds=2, epochs=1, workers=2)
    run_compare(settings)
    said = capsys.readouterr().out
    assert "plain − dpsgd" in said
    assert "significant" in said
    found = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert found["methods"]["plain"]["proven_epsilon"] == "inf"
    assert found["methods"]["dpsgd"]["proven_epsilon"] <= 2.0
    assert (tmp_path / "comparison" / "comparison.svg").read_text().startswith("<?xml")
    with pytest.raises(GredpError, match="holds a comparison with other settings"):
        run_compare(CompareSettings(methods=("plain", "dpsgd"), seeds=2, epochs=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (CompareSettings(seeds=1), "at least 2"),
        (CompareSettings(methods=("dpsgd", "dpsgd")), "each method once"),
        (CompareSettings(resume="x"), "neither --resume"),
        (CompareSettings(epsilon=-1.0), "--epsilon must be a positive number"),
    ],
)
def test_mistakes_are_refused(settings, message):
    with pytest.raises(GredpError, match=message):
        run_compare(settings)
