"""A checkpoint whose every hash is right is still not believed: what is loaded lies within its domain."""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save

from gredp import GredpError
from gredp.storage.files import read_document, write_document
from worlds import batches, flat, one_step, released, small_model, weights, world

SHAPED = {"method": "gredp", "noise": "shaped", "noise_multiplier": 1e-9}


def saved(path: Path, optimizer: Any = torch.optim.SGD, **options: Any) -> Path:
    """A run of three steps and its checkpoint."""
    model, private, engine = world(optimizer, **options)
    for x, y in batches(3):
        one_step(model, private, x, y)
    engine.save(path / "run", {"epoch": 3})
    engine.detach()
    return path / "run"


def craft(run: Path, tensors: dict[str, torch.Tensor] | None = None, **facts: Any) -> None:
    """Change the checkpoint, and make its hashes and seals right."""
    (document,) = run.glob("checkpoint-*.json")
    kept = document.with_suffix(".safetensors")
    content = save(load(kept.read_bytes()) | (tensors or {}))
    kept.write_bytes(content)
    told = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_document(document, read_document(document) | facts | {"tensors": told})


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    (file,) = run.glob("checkpoint-*.safetensors")
    return load(file.read_bytes())


def test_weights_of_a_shape_are_computed_and_not_believed(tmp_path):
    """With w² = −10⁶ in the last group norms would be nothing, or no numbers: all unclipped, or left out."""
    run = saved(tmp_path, **SHAPED)
    groups = len(tensors_of(run)["shape/total"])
    believed = torch.ones(groups, dtype=torch.float64)
    believed[-1] = -1e6
    craft(run, {"shape/squared": believed, "shape/precondition": torch.ones(groups, dtype=torch.float64)})
    model, private, engine = world(**SHAPED)
    engine.load(run)
    assert (private.private_step.learned._squared > 0).all()
    x, y = batches(1)[0]
    (1e4 * F.cross_entropy(model(x[:1]), y[:1])).backward()
    private.step()
    moved = flat(released(model, private)).nan_to_num(0.0).norm() / private.max_grad_norm
    assert moved < 2, f"one record moves the sum by {moved:.0f} C"
    engine.detach()


def test_a_checkpoint_holds_no_weights_of_a_shape(tmp_path):
    run = saved(tmp_path, **SHAPED)
    assert sorted(n for n in tensors_of(run) if n.startswith("shape/")) == [
        "shape/of_releases",
        "shape/total",
    ]


def number(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.fault("crafted checkpoint")
@pytest.mark.parametrize(
    ("change", "words"),
    {
        "negative weight": ({"shape/of_releases": number(-3, 1)}, "tells of -3.0 releases"),
        "weight of 0": ({"shape/of_releases": number(0, 0)}, "tells of 0.0 releases"),
        "negative variance": ({"shape/of_releases": number(3, -1)}, "with variance -1.0"),
        "no number": ({"shape/of_releases": number(math.nan, 1)}, "of_releases is not 2 finite"),
        "single precision": ({"shape/of_releases": number(3, 1).float()}, "of_releases is not 2 finite"),
        "three counts": ({"shape/of_releases": number(3, 1, 1)}, "of_releases is not 2 finite"),
        "one share": ({"shape/total": number(3)}, "total is not"),
        "weights": ({"model/5.bias": torch.full((4,), math.inf)}, "5.bias is not finite"),
        "weights' shape": ({"model/5.bias": torch.zeros(5)}, r"5.bias is \(5,\) of float32, not \(4,\)"),
        "weights' type": ({"model/5.bias": torch.zeros(4).double()}, "of float64, not"),
        "more weights": ({"model/6.bias": torch.zeros(4)}, "another network: 6.bias is not in it"),
        "momentum": ({"optimizer/0/momentum_buffer": torch.full((9,), math.nan)}, "0/momentum_buffer is not"),
        "momentum's shape": ({"optimizer/0/momentum_buffer": torch.zeros(2, 2)}, "has shape"),
        "foreign state": ({"optimizer/99/momentum_buffer": torch.zeros(4)}, "is of no parameter"),
    }.values(),
)
def test_tensors_outside_their_domain_are_refused_before_anything_changes(tmp_path, change, words):
    run = saved(tmp_path, **SHAPED)
    craft(run, change)
    refused(run, words, SHAPED)


@pytest.mark.fault("crafted checkpoint")
@pytest.mark.parametrize("before", [-1, 4, 1.5, "1", None, True])
def test_steps_before_the_run_lie_within_the_ledger(tmp_path, before):
    run = saved(tmp_path, noise_multiplier=1.0)
    craft(run, charged_before=before)
    refused(run, f"says that {before} steps were charged before", {"noise_multiplier": 1.0})


@pytest.mark.fault("crafted checkpoint")
def test_shares_too_large_for_weights_are_refused(tmp_path):
    run = saved(tmp_path, **SHAPED)
    craft(run, {"shape/total": torch.full_like(tensors_of(run)["shape/total"], 1e200)})
    refused(run, "not positive and finite", SHAPED)


def refused(run: Path, words: str, options: dict[str, Any]) -> None:
    model, private, engine = world(**options)
    before = weights(model)
    with pytest.raises(GredpError, match=words) as error:
        engine.load(run)
    assert "\n" not in str(error.value)
    assert torch.equal(weights(model), before)
    assert not private.original_optimizer.state
    assert not engine.ledger.steps


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adafactor])
def test_every_state_of_torchs_optimizers_is_taken(tmp_path, optimizer):
    run = saved(tmp_path, optimizer, noise_multiplier=1.0)
    _, _, engine = world(optimizer, noise_multiplier=1.0)
    assert engine.load(run) == {"epoch": 3}
    engine.detach()


def test_a_mask_of_infinities_is_taken(tmp_path):
    from gredp.storage.checkpoint import load_weights

    model = small_model()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    load_weights(model, model.state_dict())
