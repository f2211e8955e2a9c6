"""The ingredients as settings of `gredp train`: recorded, resumed, refused in one line."""

import json

import pytest

from gredp import GredpError
from gredp.training.loop import train
from gredp.training.settings import TrainSettings

QUICK = {"epochs": 1, "accountant": "rdp", "insecure_seed": 1}


def record(tmp_path, name="run", **settings) -> dict:
    train(TrainSettings(out=str(tmp_path / name), **(QUICK | settings)))
    return json.loads((tmp_path / name / "record.json").read_text())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"augment": -1}, "--augment must be 0 or more views, not -1"),
    ],
)
def test_a_mistake_is_one_line(settings, words):
    with pytest.raises(GredpError, match=words) as error:
        TrainSettings(**settings).check()
    assert "\n" not in str(error.value)


def test_views_cost_no_privacy(tmp_path):
    plain, many = record(tmp_path, "a"), record(tmp_path, "b", augment=3, max_physical_batch_size=100)
    assert many["settings"]["augment"] == 3
    for key in ("certificate", "ledger", "guarantee"):
        assert many[key] == plain[key]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] != weights[1]  # under one seed nothing but the views differs
