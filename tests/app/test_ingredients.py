"""The ingredients as settings of `gredp train`: recorded, resumed, refused in one line."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from gredp import GredpError
from gredp.app.average import WeightAverage
from gredp.app.learning_rate import rate_factor
from gredp.app.settings import TrainSettings, current_names
from gredp.app.train import train
from worlds import batches, one_step, weights, world

QUICK = {"epochs": 1, "accountant": "rdp", "insecure_seed": 1}


def record(tmp_path, name="run", **settings) -> dict:
    train(TrainSettings(out=str(tmp_path / name), **(QUICK | settings)))
    return json.loads((tmp_path / name / "record.json").read_text())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"augment": -1}, "--augment must be 0 or more, not -1"),
        ({"ema": 1.0}, r"--ema must lie in \[0, 1\), not 1.0"),
        ({"noise_schedule": 0.5, "correlation_bands": 2}, "nothing is proven for --noise-schedule"),
        ({"noise_schedule": 0.0}, "--noise-schedule must be a positive number, not 0.0"),
        ({"weight_decay": -1.0}, "--weight-decay must be 0 or more and finite, not -1.0"),
        ({"warmup": -2}, "--warmup must be 0 or more, not -2"),
    ],
)
def test_a_mistake_is_one_line(settings, words):
    with pytest.raises(GredpError, match=words) as error:
        TrainSettings(**settings).check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [{"augment": 3, "max_physical_batch_size": 100}, {"precision": "bf16"}])
def test_views_and_rounded_products_cost_no_privacy(tmp_path, changed):
    plain, other = record(tmp_path, "a"), record(tmp_path, "b", **changed)
    assert changed.items() <= other["settings"].items()
    for key in ("certificate", "ledger", "guarantee"):
        assert other[key] == plain[key]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] != weights[1]  # under one seed nothing else differs


def test_half_precision_takes_the_steps_of_single_precision(tmp_path):
    """Its losses are summed, which must not make steps, decay or schedule those of a larger gradient."""
    given = {"weight_decay": 0.05, "schedule": "cosine", "lr": 0.02}

    def trained(name, **settings):
        record(tmp_path, name, **(given | settings))
        tensors = load_file(tmp_path / name / "model.safetensors")
        return torch.cat([tensors[key].flatten().double() for key in sorted(tensors)])

    start = trained("start", lr=1e-9)
    for optimizer in ("sgd", "adam", "adamw"):
        single = trained(f"{optimizer} single", optimizer=optimizer)
        half = trained(f"{optimizer} half", optimizer=optimizer, precision="bf16")
        assert 0 < (half - single).norm() < 0.1 * (single - start).norm(), optimizer


# ------------------------------------------------------------------ averages of the weights


def test_the_average_follows_the_weights_as_a_loop_says():
    """Through the warm-up, which ends after 35 updates at this decay, and beyond."""
    model, private, _ = world()
    average, truth = WeightAverage(model, 0.8), None
    for t, (x, y) in enumerate(batches(45)):
        one_step(model, private, x, y)
        average.update_parameters(model)
        new = weights(model).double()
        decay = min(0.8, (1 + t) / (10 + t))
        truth = new if truth is None else decay * truth + (1 - decay) * new
        torch.testing.assert_close(weights(average.module).double(), truth, rtol=1e-5, atol=1e-6)
    assert decay == 0.8
    assert not torch.equal(weights(average.module), weights(model))


def test_an_average_resumes_after_an_interruption(tmp_path):
    """As any module of the caller's own that is saved beside the model."""

    def steps(model, private, average, part):
        for x, y in batches(7)[part]:
            one_step(model, private, x, y)
            average.update_parameters(model)

    model, private, engine = world()
    whole = WeightAverage(model, 0.8)
    steps(model, private, whole, slice(None))
    model, private, engine = world()
    average = WeightAverage(model, 0.8)
    steps(model, private, average, slice(3))
    engine.save(tmp_path / "run", modules={"average": average})
    engine.detach()
    model, private, engine = world()
    average = WeightAverage(model, 0.8)
    engine.load(tmp_path / "run", {"average": average})
    steps(model, private, average, slice(3, None))
    assert torch.equal(weights(average.module), weights(whole.module))
    with pytest.raises(GredpError, match="other than model, optimizer, shape"):
        engine.save(tmp_path / "run", modules={"model": average})


def test_the_published_model_is_the_average(tmp_path):
    plain, averaged = (record(tmp_path, name, ema=ema) for name, ema in (("a", 0.0), ("b", 0.9)))
    assert (plain["weights"], averaged["weights"]) == ("of the last step", "moving average, decay 0.9")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[key], other[key]) for key in one)


# ------------------------------------------------------------------ the learning rate


def test_the_learning_rate_rises_and_falls():
    cosine = rate_factor("cosine", 4, 20)
    assert [cosine(t) for t in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    for t in range(4, 20):
        assert cosine(t) == pytest.approx((1 + math.cos(math.pi * (t - 4) / 16)) / 2)
    assert cosine(20) == cosine(25) == 0
    assert {rate_factor("constant", 0, 20)(t) for t in range(30)} == {1.0}
    assert rate_factor("cosine", 20, 20)(20) == 1.0


def test_schedulers_of_torch_drive_a_private_optimizer(tmp_path):
    """As a user would: two of them in a row, saved with the run and taken up again."""

    def scheduled():
        model, private, engine = world()
        parts = [LinearLR(private, 0.1, total_iters=2), CosineAnnealingLR(private, 5)]
        return model, private, engine, SequentialLR(private, parts, [2])

    model, private, engine, scheduler = scheduled()
    rates = []
    for x, y in batches(7):
        rates.append(private.param_groups[0]["lr"])
        one_step(model, private, x, y)
        scheduler.step()
    assert len(set(rates)) == 7
    model, private, engine, scheduler = scheduled()
    for x, y in batches(7)[:4]:
        one_step(model, private, x, y)
        scheduler.step()
    engine.save(tmp_path / "run", {"scheduler": scheduler.state_dict()["last_epoch"]})
    engine.detach()
    model, private, engine, scheduler = scheduled()
    done = engine.load(tmp_path / "run")
    assert done == {"scheduler": 4}
    assert private.param_groups[0]["lr"] == rates[4]
    engine.detach()


# ------------------------------------------------------------------ through the whole loop

ALL = {
    "augment": 2,
    "ema": 0.9,
    "schedule": "cosine",
    "warmup": 3,
    "noise": "shaped",
}


def test_the_record_says_what_was_evaluated(tmp_path):
    found = record(tmp_path, **ALL)
    assert found["weights"] == "moving average, decay 0.9"
    assert {name: found["settings"][name] for name in ALL} == ALL
    saved = load_file(tmp_path / "run" / "model.safetensors")
    last = sorted((tmp_path / "run").glob("checkpoint-*.safetensors"))[-1]
    kept = load_file(last)
    for name, value in saved.items():
        assert torch.equal(value, kept[f"average/module.{name}"])
        assert not torch.equal(value, kept[f"model/{name}"])


@pytest.mark.slow
def test_noise_that_falls_ends_at_the_target(tmp_path):
    found = record(tmp_path, noise_schedule=0.5, **ALL)
    entries = found["ledger"]
    assert sum(entry["steps"] for entry in entries) == 8
    multipliers = [entry["noise_multiplier"] for entry in entries]
    assert multipliers == pytest.approx([multipliers[0] * 0.5 ** (k / 4) for k in range(5)])
    assert 1.99 < found["guarantee"]["proven_epsilon"] <= 2


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_an_adaptive_optimizer_is_recorded_and_changes_the_weights_alone(tmp_path, name):
    told = record(tmp_path, name, optimizer=name, weight_decay=0.01)
    by_sgd = record(tmp_path, "sgd", weight_decay=0.01)
    assert (told["settings"]["optimizer"], told["settings"]["weight_decay"]) == (name, 0.01)
    assert told["guarantee"] == by_sgd["guarantee"]
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in (name, "sgd"))
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_settings_of_earlier_versions_are_read(tmp_path):
    old = {"front": "scattering", "normalise": 0.02, "groups": "both", "window": 50}
    assert current_names(old) == {"features": "scattering", "normalize": 0.02}
    assert current_names({"window": 5}) == {
        "window": 5
    }  # which no setting is called: rejected where it is read
