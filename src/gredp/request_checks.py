"""Rejects, in one line each, requests to `make_private` that cannot be certified."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gredp.errors import GredpError
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.schedule import NoiseSchedule
from gredp.sampling.samplers import PoissonBatchSampler
from gredp.validation import validate

#: modes of Opacus that differ in how gradients are computed, not in what is computed
GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew", "ghost")


def whole_bands(bands: int | str) -> int:
    if not isinstance(bands, int | float) or not float(bands).is_integer():
        hint = ": 'auto' lost accuracy where it acted, and is gone" if bands == "auto" else ""
        raise GredpError(f"correlation_bands must be a whole number, not {bands!r}{hint}")
    return int(bands)


def checked_schedule(
    stages: Sequence[tuple[int, float]] | NoiseSchedule | None, bands: int | str, poisson: bool = True
) -> NoiseSchedule:
    """Rejected with bands: later steps take noise back, and the proof has one deviation for all steps."""
    schedule = NoiseSchedule.of(stages)
    if not poisson and not schedule.constant:
        raise GredpError("fixed batches are charged by epoch, at one noise: a schedule needs Poisson batches")
    if bands != 1 and not schedule.constant:
        raise GredpError("nothing is proven for a noise schedule with correlation bands: use one of the two")
    return schedule


def warn_of_fixed_batches(noise_multiplier: float, sampler: PoissonBatchSampler) -> None:
    """Name the price: what an epoch costs, and what it would with Poisson batches."""
    if sampler.unit != "blanked record" or not noise_multiplier:
        return
    delta, rate = min(1e-5, 0.1 / sampler.records), min(1.0, sampler.expected / sampler.records)
    fixed = epsilon([Entry(noise_multiplier, 1.0, 1)], delta)
    poisson = epsilon([Entry(noise_multiplier, rate, sampler.steps)], delta, "rdp")
    warnings.warn(
        f"poisson_sampling=False: no sampling hides a record, and an epoch costs ε = {fixed:.3g} at δ = "
        f"{delta:.1g}, not {poisson:.3g} as with Poisson batches; ε is for one record blanked, not removed",
        stacklevel=4,
    )


def check_request(loss_reduction: str, mode: str) -> None:
    if loss_reduction not in ("mean", "sum"):
        raise GredpError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
    if mode == "ghost_fsdp":
        raise GredpError(
            "grad_sample_mode 'ghost_fsdp' is not supported: use 'ghost' with torchrun, unsharded"
        )
    if mode == "no_op":
        raise GredpError(
            "grad_sample_mode 'no_op' is not supported: your own gradients have no certificate; use 'hooks'"
        )
    if mode not in GRAD_SAMPLE_MODES:
        raise GredpError(f"unknown grad_sample_mode {mode!r}: {', '.join(GRAD_SAMPLE_MODES)} mean the same")


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    reduction = getattr(criterion, "reduction", loss_reduction)
    if reduction != loss_reduction:
        raise GredpError(f"the criterion takes a {reduction}, but loss_reduction is {loss_reduction!r}")
    weighted = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.weight is not None
    if weighted and reduction == "mean":
        raise GredpError("class weights in a mean couple records: weigh each record's loss, then average")


def check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    if any(hasattr(part, "_orig_mod") for part in module.modules()):
        torch.compiler.reset()  # what was compiled before knows nothing of the hooks to come
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    if any(parameter.requires_grad for part in scripted for parameter in part.parameters()):
        raise GredpError(
            "torch.jit hides the layers of the model: make it private first, script it at the end"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise GredpError(
            "the parameters are sharded (DTensor): give the whole model to each process of torchrun, "
            "which then train it as one"
        )
    if errors := validate(module):
        raise errors[0]
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise GredpError("DistributedDataParallel would add unclipped gradients: give the model itself")
    if isinstance(optimizer, PrivateOptimizer):
        raise GredpError("this optimizer is private already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise GredpError("LBFGS evaluates the loss several times in a step: use another optimizer")
    names = {id(p): n for n, p in module.named_parameters()}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = stepped - set(names)
    if foreign:
        raise GredpError(f"{len(foreign)} of the optimizer's parameters do not belong to the model")
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    loose = [names[i] for i in names if i in trainable - stepped]
    if loose:
        raise GredpError(f"parameter {loose[0]} is trainable but not in the optimizer: freeze or add it")
    if not trainable:
        raise GredpError("the model has no trainable parameter")
    if any(h for p in module.parameters() for h in (p._backward_hooks or {}).values() if _is_ours(h)):
        raise GredpError("this model is private already: call engine.detach() before making it private again")


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == "gredp.gradient.capture"
