"""`gredp plan`: settings, noise and pictures from counts alone."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import gredp
from gredp.app import cli, measured_step
from gredp.app.defaults import for_images, for_table
from gredp.app.plan import PlanSettings, facts, knee, recommend, rows, run_plan
from gredp.budget import Sampling, noise_multiplier, query_multiplier
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry

TABLE = PlanSettings(1000, input="20", classes=2)


@pytest.fixture(scope="module")
def plan():
    return recommend(TABLE)


def test_settings_are_those_that_training_chooses():
    images = recommend(PlanSettings(20_000, input="3x64x48", delta=1e-6))
    for name, value in for_images(20_000, (3, 32, 32), 2.0).items():
        assert getattr(images.settings, name) == value
    assert images.shape == (3, 32, 32)
    table = recommend(TABLE).settings
    assert {name: getattr(table, name) for name in for_table(1000)} == for_table(1000)
    other = recommend(PlanSettings(20_000, model="model3", delta=1e-6, epochs=3)).settings
    assert (other.features, other.batch_size, other.epochs) == ("none", 192, 3)


def test_the_recommended_noise_keeps_the_target(plan):
    """Its ε, recomputed from what would be charged, is the one that was asked for."""
    charged = [Entry(plan.multiplier, 0.2, 50)]
    assert 1.999 < epsilon(charged, 1e-5) <= 2.0
    images = recommend(PlanSettings(1500, input="1x28x28"))
    assert images.sampling == Sampling(1.0, 30)
    assert 1.999 < epsilon([Entry(images.multiplier, 1.0, 30)], 1e-5) <= 2.0
    normalized = recommend(PlanSettings(1500, input="1x28x28", model="orders-linear"))
    query = Entry(query_multiplier(2.0, 1e-5, 0.02), 1.0, 1)
    assert 1.999 < epsilon([query, Entry(normalized.multiplier, 1.0, 30)], 1e-5) <= 2.0


def test_relative_noise_is_what_the_average_of_all_updates_has(plan):
    assert plan.relative(plan.multiplier) == pytest.approx(plan.multiplier / 200 / math.sqrt(50))
    found = facts(plan)
    assert dict(found["curves"]["epsilon"]).keys() >= {0.125, 32.0}
    assert found["relative_noise"] == plan.relative(plan.multiplier)


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_other_epsilons_are_about_what_they_would_be(plan, target):
    z, relative = plan.at(target)
    exact = noise_multiplier(target, 1e-5, plan.sampling)
    assert z == pytest.approx(exact, rel=0.03)
    assert relative == pytest.approx(plan.relative(exact), rel=0.03)


def test_curves_over_epochs_are_about_what_they_would_be(plan):
    z, relative = plan.at(2.0, 40)
    exact = noise_multiplier(2.0, 1e-5, Sampling(0.2, 200))
    assert z == pytest.approx(exact, rel=0.03)
    assert relative == pytest.approx(exact / 200 / math.sqrt(200), rel=0.03)


def test_a_knee_is_where_a_curve_bends_and_nowhere_else():
    bent = [(x, max(1 / x, 0.1)) for x in (1, 2, 5, 10, 20, 50, 100)]
    assert knee(bent) == (10, 0.1)
    straight = [(x, 1 / x) for x in (1, 2, 5, 10)]
    assert knee(straight) is None
    assert knee([(x, 11 - x) for x in (1, 5, 10)]) is None  # it bends the other way
    assert knee(straight[:2]) is None


def test_full_batches_have_the_same_noise_over_any_number_of_epochs():
    """z grows as √steps: the mechanism is the Gaussian one, whose steps add up."""
    images = recommend(PlanSettings(1500, input="1x28x28"))
    noise = [y for _, y in images.over_epochs()]
    assert max(noise) == pytest.approx(min(noise), rel=0.02)
    told = dict(rows(facts(images)))
    assert told["knee over epochs"].endswith("the noise is the same")


def test_the_command_draws_prints_and_touches_no_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["plan", "--records", "1000", "--input", "20", "--classes", "2", "--no-measure"]
    cli.main([*given, "--json", "--out", "plan.html"])
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["steps"], found["time"]) == (200, 50, None)
    assert [row["epsilon"] for row in found["other_epsilons"]] == [0.5, 1, 2, 4, 8]
    page = Path("plan.html").read_text()
    assert "<script" not in page
    assert page.count("<svg") == 2
    assert page.count("knee: ") == 2
    assert f"{found['noise_multiplier']:.4f}" in page
    cli.main([*given, "--out", "plan.svg"])
    assert "1/records is 0.001" in capsys.readouterr().out
    text = " ".join(ET.parse("plan.svg").getroot().itertext())
    assert "recommended: ε = 2" in text
    assert "knee: epochs" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.svg"]


@pytest.mark.parametrize("shape", ["7", "1x12x12"])
def test_time_comes_from_a_step_of_that_network(shape):
    plan = recommend(PlanSettings(100, input=shape, classes=3))
    found = measured_step.measure(plan)
    assert found["step"] > 0
    assert (found["features"] > 0) == (shape != "7")
    assert found["total"] == pytest.approx(found["features"] + plan.sampling.steps * found["step"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"input": "3x32"}, "like 3x32x32"),
        ({"input": "many"}, "like 3x32x32"),
        ({"records": 0}, "--records must be at least 1"),
        ({"classes": 1}, "--classes must be at least 2"),
        ({"delta": 1e-3}, "δ × 1,000 records is 1"),
        ({"batch_size": 2000}, "larger than the dataset"),
        ({"out": "plan.png"}, r"must end in \.svg or \.html"),
        ({"model": "unheard-of", "input": "1x8x8", "no_measure": True}, "unheard-of"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(given, says):
    with pytest.raises(gredp.GredpError, match=says):
        run_plan(PlanSettings(**({"records": 1000, "input": "20"} | given)))
