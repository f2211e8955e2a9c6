"""How long a private step takes on this machine, on made-up numbers of the right shape."""

import time
import warnings
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gredp.app.blueprint import Blueprint
from gredp.app.dataset import centered
from gredp.app.features.fronts import FRONTS
from gredp.engine import PrivacyEngine

if TYPE_CHECKING:
    from gredp.app.plan import Plan

#: images whose features are timed
FEW = 32


def measure(plan: "Plan") -> dict[str, float]:
    """Seconds: of one step, of the features of all records, and of the whole run without evaluations."""
    settings = plan.settings
    part = min(settings.batch_size, settings.max_physical_batch_size)
    x, features = made_up(min(part, FEW), plan.shape), 0.0
    if settings.features != "none":
        extract = FRONTS[settings.features]()
        extract(x)  # the first call builds the filters
        begun = time.perf_counter()
        x = extract(x)
        features = (time.perf_counter() - begun) / len(x) * plan.records
    else:
        x = centered(x)
    x = x.repeat(-(-part // len(x)), *[1] * (x.dim() - 1))[:part]
    # A batch larger than memory comes in parts.
    step = _step(plan, x) * settings.batch_size / part
    return {"step": step, "features": features, "total": features + plan.sampling.steps * step}


def made_up(count: int, shape: tuple[int, ...]) -> Tensor:
    """`[count, *shape]` in [0, 1), from multiples of the golden ratio: nothing is drawn."""
    size = count * torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64) * 0.6180339887498949 % 1).float().view(count, *shape)


def _step(plan: "Plan", x: Tensor) -> float:
    """The quicker of two, after one that nobody counts; all records of `x` are in each."""
    settings = plan.settings
    network = Blueprint(
        settings.model or "",
        tuple(x.shape[1:]),
        tuple(map(str, range(plan.classes))),
        settings.block_size,
        normalized=bool(settings.normalize),
    ).build()
    y = torch.arange(len(x)) % plan.classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine(secure_mode=True).make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=plan.multiplier,
            max_grad_norm=settings.clip_norm,
            method=settings.method,
            noise=settings.noise,
            clipping=settings.clipping,
            **settings.options(),
        )
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            for inputs, labels in loader:
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
            times.append(time.perf_counter() - begun)
    return min(times[1:])
