"""Everything that training resumes from: weights, optimizer, learned shape, modules of the caller's own.

Tensors are kept as safetensors, the rest as JSON. All of it is covered by ε: it is computed from released
gradients. Secrets of noise and sampling are no part of it, nor is the noise that later steps would take back.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from gredp.distributed import world_size
from gredp.errors import GredpError
from gredp.optimizer import PrivateOptimizer
from gredp.storage.files import one_line
from gredp.storage.run_folder import Checkpoint, RunFolder

#: groups of tensors in a checkpoint
RESERVED = {"model", "optimizer", "shape"}


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
        "processes": world_size(),
        "noise_schedule": optimizer.schedule.stages,
        "correlation_bands": len(plan.pop("correlation")),
        "plan": plan,
    }
    return json.loads(json.dumps(terms))


def write_checkpoint(
    folder: RunFolder,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    progress: dict[str, Any],
    modules: Mapping[str, nn.Module],
) -> None:
    """`progress` is the caller's own: plain JSON. So are `modules`, by names of their own."""
    if RESERVED & set(modules):
        raise GredpError(f"modules to save need names other than {', '.join(sorted(RESERVED))}")
    inner = optimizer.state_dict()
    tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in inner["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    shape = optimizer.private_step.learned_shape
    if shape is not None:
        tensors |= {f"shape/{name}": value for name, value in shape.state().items()}
    for key, other in modules.items():
        tensors |= {f"{key}/{name}": value for name, value in other.state_dict().items()}
    facts = {
        "contract": contract(optimizer),
        "optimizer": {"state": numbers, "param_groups": inner["param_groups"]},
        "charged_before": optimizer.charged_before,
        "progress": progress,
    }
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise GredpError(f"the state of the optimizer cannot be kept as JSON: {one_line(error)}") from None
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


def restore(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    modules: Mapping[str, nn.Module],
) -> dict[str, Any]:
    """Put everything back; gives the caller's progress. Another contract than the checkpoint's is refused.

    Nothing is believed: weights and optimizer have the shapes and types of the model, all numbers are
    finite, counts lie within the ledger, and the weights of a learned shape are computed anew. What is out of
    its domain is refused before the model or the optimizer changes.
    """
    now, then = contract(optimizer), {"correlation_bands": 1, **checkpoint.facts.get("contract", {})}
    for key in now:
        if now[key] != then.get(key):
            was, told = (f" ({json.dumps(x)})" if key != "plan" else "" for x in (then.get(key), now[key]))
            raise GredpError(
                f"the run was started with another {key}{was} than is asked for now{told}: "
                "a run goes on as it began; to change it, fork the run"
            )
    try:
        weights = model_tensors(checkpoint)
        kept = {key: _group(checkpoint, key) for key in modules}
        progress, before = dict(checkpoint.facts["progress"]), checkpoint.facts["charged_before"]
        if type(before) is not int or not 0 <= before <= checkpoint.facts["ledger"]["steps"]:
            raise GredpError(f"the checkpoint says that {before} steps were charged before the run")
        _refuse_weights(module, weights)
        for key, other in modules.items():
            _refuse_weights(other, kept[key])
        state = _optimizer_state(checkpoint, optimizer)
        shape = optimizer.private_step.learned_shape
        if shape is not None:
            shape.restore(_group(checkpoint, "shape"))
        optimizer.load_state_dict(state)
        optimizer.charged_before = before
        for key, other in modules.items():
            load_weights(other, kept[key])
        load_weights(module, weights)
        return progress
    except GredpError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise GredpError(f"the checkpoint is not of this version of gredp: {one_line(error)}") from None


def _optimizer_state(checkpoint: Checkpoint, optimizer: PrivateOptimizer) -> dict[str, Any]:
    """For `load_state_dict`: finite, of parameters that are there, and in torch's own of their shape."""
    kept = checkpoint.facts["optimizer"]
    state: dict[int, dict[str, Any]] = {int(number): dict(row) for number, row in kept["state"].items()}
    for name, tensor in _group(checkpoint, "optimizer").items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    own = optimizer.original_optimizer
    parameters = [p for group in own.param_groups for p in group["params"]]
    shaped = type(own).__module__.startswith("torch.optim")
    for index, row in state.items():
        for key, value in row.items():
            name = f"optimizer/{index}/{key}"
            if not 0 <= index < len(parameters):
                raise GredpError(f"the checkpoint's {name} is of no parameter: there are {len(parameters)}")
            if not torch.as_tensor(0.0 if value is None else value).isfinite().all():
                raise GredpError(f"the checkpoint's {name} is not finite")
            if shaped and isinstance(value, Tensor) and not _fits(value, parameters[index]):
                was, now = tuple(value.shape), tuple(parameters[index].shape)
                raise GredpError(f"the checkpoint's {name} has shape {was}, its parameter {now}")
    return {"state": state, "param_groups": kept["param_groups"]}


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """A single number, or a parameter's shape with some of its sizes reduced to 1."""
    pairs = zip(value.shape, parameter.shape)
    return value.numel() == 1 or (value.dim() == parameter.dim() and all(n in (1, m) for n, m in pairs))


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    _refuse_weights(module, weights)
    with torch.no_grad():
        module.load_state_dict(weights)


def _refuse_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """The module's names, shapes and types, and finite wherever its own are: a mask may hold −∞."""
    own = module.state_dict()
    for name in sorted(own.keys() ^ weights.keys()):
        has = "is missing" if name in own else "is not in it"
        raise GredpError(f"these weights belong to another network: {name} {has}")
    for name, value in own.items():
        kept = weights[name]
        if (kept.shape, kept.dtype) != (value.shape, value.dtype):
            was, now = (f"{tuple(t.shape)} of {str(t.dtype)[6:]}" for t in (kept, value))
            raise GredpError(f"these weights belong to another network: {name} is {was}, not {now}")
        if (value.isfinite().cpu() & ~kept.isfinite().cpu()).any():
            raise GredpError(f"the weights' {name} is not finite: the run that they are of has diverged")
