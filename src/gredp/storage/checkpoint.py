"""Everything that training resumes from: weights, optimizer, learned shape, modules of the caller's own.

Tensors are kept as safetensors, the rest as JSON. All of it is covered by ε: it is computed from released
gradients. Secrets of noise and sampling are no part of it, nor is the noise that later steps would take back.
"""

import json
from collections import defaultdict
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
#: terms of the contract that earlier versions did not note, as they were
EARLIER = {
    "correlation_bands": 1,
    "unit": "record",
    "records_per_person": None,
    "adaptive": [None, 0.0],
}


def contract(optimizer: PrivateOptimizer) -> dict[str, Any]:
    """What may not change when a run is resumed: all that the certificate and the accountant were given."""
    plan, persons = asdict(optimizer.private_step.plan), optimizer.sampler.persons
    terms = {
        "noise_multiplier": optimizer.requested[0],
        "sample_rate": optimizer.sample_rate,
        "max_grad_norm": optimizer.requested[1],
        "expected_batch_size": optimizer.expected_batch_size,
        "loss_reduction": optimizer.loss_reduction,
        "views": optimizer.sampler.views_of_a_record,
        "unit": optimizer.sampler.unit,
        "records_per_person": None if persons is None else persons.most,
        "processes": world_size(),
        "noise_schedule": optimizer.schedule.stages,
        "correlation_bands": len(plan.pop("correlation")),
        "adaptive": [plan.pop("quantile"), plan.pop("count_std")],
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
    if RESERVED & set(modules) or any("/" in name for name in modules):
        raise GredpError(f"modules to save need names without /, other than {', '.join(sorted(RESERVED))}")
    inner, shape = optimizer.state_dict(), optimizer.private_step.learned
    groups = {"model": module.state_dict(), "shape": {} if shape is None else shape.state(), "optimizer": {}}
    groups |= {name: other.state_dict() for name, other in modules.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in inner["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                groups["optimizer"][f"{index}/{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    facts = {
        "contract": contract(optimizer),
        "optimizer": {"state": numbers, "param_groups": inner["param_groups"]},
        "charged_before": optimizer.charged_before,
        "set": [optimizer.noise_multiplier, optimizer.planned_norm],
        "exposed": optimizer.capture.exposed,
        "progress": progress,
    }
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise GredpError(f"the state of the optimizer cannot be kept as JSON: {one_line(error)}") from None
    tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
    # Clones: tied parameters share memory, which the format does not have.
    folder.save(save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}), facts)


def tensor_groups(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """By what they belong to, then by name: "model" holds the weights."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        for name, tensor in load(checkpoint.tensors).items():
            group, _, rest = name.partition("/")
            groups[group][rest] = tensor
    except SafetensorError as error:
        raise GredpError(f"the checkpoint's tensors cannot be read: {one_line(error)}") from None
    return groups


def restore(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    modules: Mapping[str, nn.Module],
) -> dict[str, Any]:
    """Put everything back; gives the caller's progress. Another contract is rejected.

    Nothing is believed: weights and optimizer have the shapes and types of the model, all numbers are
    finite, counts lie within the ledger, and the weights of a learned shape are recomputed. What is out of
    its domain is rejected before the model or the optimizer changes.
    """
    now, then = contract(optimizer), EARLIER | checkpoint.facts.get("contract", {})
    for key in now:
        if now[key] != then.get(key):
            was, now_is = (f" ({json.dumps(x)})" if key != "plan" else "" for x in (then.get(key), now[key]))
            raise GredpError(
                f"the run began with another {key}{was} than now{now_is}: fork it to change that"
            )
    try:
        groups, loaded = tensor_groups(checkpoint), {"model": module, **modules}
        progress, before = dict(checkpoint.facts["progress"]), checkpoint.facts["charged_before"]
        if type(before) is not int or not 0 <= before <= checkpoint.facts["ledger"]["steps"]:
            raise GredpError(f"the checkpoint says that {before} steps were charged before the run")
        for key, each in loaded.items():
            _check_weights(each, groups[key])
        state = _optimizer_state(checkpoint.facts["optimizer"], groups["optimizer"], optimizer)
        shape = optimizer.private_step.learned
        if shape is not None:
            shape.restore(groups["shape"])
        # a plan of its own, certified and charged: those of earlier versions never change
        optimizer.noise_multiplier, optimizer.max_grad_norm = checkpoint.facts.get("set", optimizer.requested)
        optimizer.load_state_dict(state)
        optimizer.charged_before = before
        optimizer.capture.exposed += int(checkpoint.facts.get("exposed", 0))
        for key, each in loaded.items():
            load_weights(each, groups[key])
        return progress
    except GredpError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise GredpError(f"the checkpoint is not of this version of gredp: {one_line(error)}") from None


def _optimizer_state(
    kept: dict[str, Any], tensors: dict[str, Tensor], optimizer: PrivateOptimizer
) -> dict[str, Any]:
    """For `load_state_dict`: finite, of parameters that are there, and in torch's own of their shape."""
    state: dict[int, dict[str, Any]] = {int(number): dict(row) for number, row in kept["state"].items()}
    for name, tensor in tensors.items():
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
    _check_weights(module, weights)
    with torch.no_grad():
        module.load_state_dict(weights)


def _check_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
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
