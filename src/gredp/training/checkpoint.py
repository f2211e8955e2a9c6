"""Everything that training goes on from: weights and their average, optimiser, learned shape.

Tensors are kept as safetensors, the rest as JSON. All of it is covered by ε: it is computed from released
gradients. Secrets of noise and sampling are no part of it, nor is the noise that later steps would take back.
"""

import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from gredp.distributed import world_size
from gredp.errors import GredpError
from gredp.optimizer import PrivateOptimizer
from gredp.sealed import one_line
from gredp.training.run_folder import Checkpoint, RunFolder


def contract(optimizer: PrivateOptimizer) -> dict[str, Any]:
    """What may not change when a run goes on: all that the certificate and the accountant were given."""
    plan = asdict(optimizer.private_step.plan)
    terms = {
        "noise_multiplier": optimizer.noise_multiplier,
        "sample_rate": optimizer.sample_rate,
        "max_grad_norm": optimizer.max_grad_norm,
        "expected_batch_size": optimizer.expected_batch_size,
        "loss_reduction": optimizer.loss_reduction,
        "views": optimizer.capture.views,
        "ema": getattr(optimizer.average, "decay", 0.0),
        "processes": world_size(),
        "noise_schedule": optimizer.schedule.stages,
        "correlation_bands": len(plan.pop("correlation")),
        "plan": plan,
    }
    return json.loads(json.dumps(terms))


def write_checkpoint(
    folder: RunFolder, module: nn.Module, optimizer: PrivateOptimizer, progress: dict[str, Any]
) -> None:
    """`progress` is the caller's own: plain JSON."""
    inner = optimizer.state_dict()
    tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in inner["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    shape = optimizer.private_step.shape
    if shape is not None:
        tensors |= {f"shape/{name}": value for name, value in shape.state().items()}
    if optimizer.average is not None:
        tensors |= {f"average/{name}": value for name, value in optimizer.average.state_dict().items()}
    facts = {
        "contract": contract(optimizer),
        "optimizer": {"state": numbers, "param_groups": inner["param_groups"]},
        "charged_before": optimizer.charged_before,
        "progress": progress,
    }
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise GredpError(f"the state of the optimiser cannot be kept as JSON: {one_line(error)}") from None
    # Clones: tied parameters share memory, which the format does not have.
    folder.save(save({n: v.detach().cpu().contiguous().clone() for n, v in tensors.items()}), facts)


def model_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights alone, by name."""
    return _group(checkpoint, "model")


def _group(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    try:
        tensors = load(checkpoint.tensors)
    except SafetensorError as error:
        raise GredpError(f"the checkpoint's tensors cannot be read: {one_line(error)}") from None
    return {key.removeprefix(name + "/"): t for key, t in tensors.items() if key.startswith(name + "/")}


def restore(checkpoint: Checkpoint, module: nn.Module, optimizer: PrivateOptimizer) -> dict[str, Any]:
    """Put everything back; gives the caller's progress. Another contract than the checkpoint's is refused."""
    now, then = contract(optimizer), {"correlation_bands": 1, **checkpoint.facts.get("contract", {})}
    for key in now:
        if now[key] != then.get(key):
            was, told = (f" ({json.dumps(x)})" if key != "plan" else "" for x in (then.get(key), now[key]))
            raise GredpError(
                f"the run was started with another {key}{was} than is asked for now{told}: "
                "a run goes on as it began; to change it, fork the run"
            )
    try:
        load_weights(module, model_tensors(checkpoint))
        _restore_optimizer(checkpoint, optimizer)
        optimizer.charged_before = int(checkpoint.facts["charged_before"])
        shape = optimizer.private_step.shape
        if shape is not None:
            shape.restore(_group(checkpoint, "shape"))
        if optimizer.average is not None:
            load_weights(optimizer.average, _group(checkpoint, "average"))
        return dict(checkpoint.facts["progress"])
    except GredpError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise GredpError(f"the checkpoint is not of this version of gredp: {one_line(error)}") from None


def _restore_optimizer(checkpoint: Checkpoint, optimizer: PrivateOptimizer) -> None:
    kept = checkpoint.facts["optimizer"]
    state: dict[int, dict[str, Any]] = {int(index): dict(row) for index, row in kept["state"].items()}
    for name, tensor in _group(checkpoint, "optimizer").items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": kept["param_groups"]})


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    try:
        with torch.no_grad():
            module.load_state_dict(weights)
    except RuntimeError as error:
        reason = one_line(error).rstrip(":")
        raise GredpError(f"these weights belong to another network: {reason}") from None
