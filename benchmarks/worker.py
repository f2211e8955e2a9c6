"""One variant of one network in a process of its own: builds it, then steps whenever it is asked to.

python benchmarks/worker.py NETWORK VARIANT BATCH THREADS [PHYSICAL]    (driven over standard input)

A batch of 0 is the network's own; PHYSICAL records are in memory at once. Each variant runs as its users get
it: our `make_private` keeps the memory that steps free, plain PyTorch and Opacus do not. "plain kept" does.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from networks import network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gredp
from gredp.memory import keep_freed_memory

#: records of each, side by side, where persons are the unit of privacy
PER_PERSON = 4
OURS: dict[str, dict[str, Any]] = {
    "dpsgd": {"method": "dpsgd"},
    "dpsgd per layer": {"method": "dpsgd", "clipping": "per_layer"},
    "dpsgd adaptive": {"method": "dpsgd", "clipping": "adaptive"},
    "dpsgd persons": {"method": "dpsgd", "records_per_person": PER_PERSON},
    "dpsgd bf16": {"method": "dpsgd", "precision": "bf16"},
    "spectral_dp": {"method": "spectral_dp"},
    "gredp": {"method": "gredp"},
    "gredp shaped": {"method": "gredp", "noise": "shaped"},
}
VARIANTS = ("plain", "plain kept", *OURS, "opacus hooks", "opacus ghost")


def stepper(name: str, variant: str, batch: int | None, physical: int | None = None) -> Callable[[], None]:
    """A function that performs one whole training step of this variant, in parts of `physical` records."""
    model, x = network(name, batch)
    y = torch.randint(0, 10, (len(x),))
    criterion: Any = nn.CrossEntropyLoss()
    if variant in OURS:
        model = gredp.fix(model)
    elif variant.startswith("opacus"):
        from opacus.validators import ModuleValidator

        model = ModuleValidator.fix(model) if name.startswith(("transformer", "lstm")) else model
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | OURS.get(variant, {})
    units = len(x)
    if "records_per_person" in settings:
        units //= PER_PERSON
        settings["persons"] = [person for person in range(units) for _ in range(PER_PERSON)]
    loader = DataLoader(TensorDataset(x, y), batch_size=units)
    common = {"module": model, "optimizer": optimizer, "data_loader": loader}
    if variant in OURS:
        model, optimizer, _ = gredp.PrivacyEngine().make_private(**common, **settings)
    elif variant.startswith("opacus"):
        from opacus import PrivacyEngine

        mode = variant.split()[1]
        made = PrivacyEngine().make_private(
            **common, **settings, criterion=criterion, grad_sample_mode=mode, poisson_sampling=False
        )
        model, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else criterion
    set_train(model)

    parts = list(zip(x.split(physical or len(x)), y.split(physical or len(x))))

    def step() -> None:
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(parts, 1):
            criterion(model(inputs), labels).backward()
            if len(parts) > 1 and variant in OURS:
                optimizer.signal_skip_step(number < len(parts))
            if number == len(parts) or variant in OURS:
                optimizer.step()

    return step


def set_train(model: nn.Module) -> None:
    """Training mode for all but frozen normalisation."""
    for layer in model.modules():
        frozen = isinstance(layer, nn.BatchNorm2d) and not layer.weight.requires_grad
        layer.training = not frozen


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most; not what its parent held before the start."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def main() -> None:
    name, variant, batch, threads, *physical = sys.argv[1:]
    if variant == "plain kept":
        keep_freed_memory()
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    if variant.startswith("opacus"):
        import opacus  # noqa: F401  its import is not part of the step's memory
    before = memory("VmRSS")
    step = stepper(name, variant, int(batch) or None, *map(int, physical))
    step()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        counted = {"one": 1, "turn": 2}.get(line.strip())
        if counted is None:
            break
        if counted > 1:
            step()  # not counted: it finds the caches as another process left them, which no training does
        start = time.perf_counter()
        for _ in range(counted):
            step()
        seconds = (time.perf_counter() - start) / counted
        peak = memory("VmHWM") - before
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
