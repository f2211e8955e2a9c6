"""Small models and data sets made private in every way the engine offers; shared by the laws."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import BlockCirculantLinear, PrivacyEngine, SpectralConv2d
from gredp.optimizer import PrivateOptimizer
from gredp.storage.evidence import create_mark
from gredp.storage.ledger_file import parse

HALVES = (math.sqrt(0.5), math.sqrt(0.5))

#: every mechanism and reading, as arguments of make_private
MECHANISMS: dict[str, dict[str, Any]] = {
    "dpsgd": {"method": "dpsgd"},
    "dpsgd per layer": {"method": "dpsgd", "clipping": "per_layer"},
    "dpsgd layer-wise": {"method": "dpsgd", "clipping": "layer_wise"},
    "dpsgd automatic": {"method": "dpsgd", "clipping": "automatic"},
    "dpsgd adaptive per layer": {"method": "dpsgd", "clipping": "adaptive_per_layer"},
    "spectral-dp": {"method": "spectral_dp"},
    "spectral-dp padded": {"method": "spectral_dp", "grid": "padded"},
    "gredp": {"method": "gredp"},
    "gredp unequal parts": {"method": "gredp", "noise_parts": (0.6, 0.8)},
    "gredp padded": {"method": "gredp", "grid": "padded"},
    "gredp layer-wise": {"method": "gredp", "clipping": "layer_wise"},
    "gredp per-sample noise": {"method": "gredp", "per_sample_noise": True},
    "gredp shaped": {"method": "gredp", "noise": "shaped"},
    "gredp preconditioned": {
        "method": "gredp",
        "noise": "shaped",
        "exponent": 0.3,
        "preconditioner": 0.3,
        "groups": "frequency",
        "window": 5,
    },
}


def small_model(seed: int = 0) -> nn.Module:
    """One layer of each kind that has a Fourier grid, odd and even sizes, with biases."""
    torch.manual_seed(seed)
    return nn.Sequential(
        SpectralConv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        BlockCirculantLinear(3 * 25, 7, block=5),
        nn.Tanh(),
        nn.Linear(7, 4),
    )


def records(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 5, 5, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


def make_private(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    noise_multiplier: float = 0.0,
    clip: Any = 1.0,
    batch_size: int | None = None,
    sample_rate: float | None = 1.0,
    lr: float = 0.0,
    seed: int | None = 0,
    **options: Any,
) -> tuple[nn.Module, PrivateOptimizer, DataLoader[Any], PrivacyEngine]:
    """By default every record takes part in every step and the weights do not move."""
    engine = PrivacyEngine()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(TensorDataset(*data), batch_size=batch_size or len(data[0])),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip,
        noise_generator=generator,
        sample_rate=sample_rate,
        **options,
    )
    return module, optimizer, loader, engine


def one_step(model: nn.Module, optimizer: PrivateOptimizer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Run one step and give back what it released: the gradient of the summed loss, by parameter."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return released(model, optimizer)


def released(model: nn.Module, optimizer: PrivateOptimizer) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().clone() * optimizer.expected_batch_size
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def no_gradient_step(model: nn.Module, optimizer: PrivateOptimizer, x: Tensor) -> dict[str, Tensor]:
    """A step in which every record's gradient is zero: what is released is the noise alone."""
    optimizer.zero_grad()
    (model(x).sum() * 0).backward()
    optimizer.step()
    return released(model, optimizer)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def world(
    optimizer: Any = torch.optim.SGD, **options: Any
) -> tuple[nn.Module, PrivateOptimizer, PrivacyEngine]:
    """A private model with something to remember: momentum, or Adam's moments."""
    x, y = records(12)
    model = small_model()
    inner = optimizer(
        model.parameters(), lr=0.05, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})
    )
    engine = PrivacyEngine()
    model, private, _ = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=12),
        **({"noise_multiplier": 0.0, "max_grad_norm": 0.5} | options),
    )
    return model, private, engine


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """The same draws for every run that is compared."""
    x, y = records(12)
    return [(x[i % 5 :], y[i % 5 :]) for i in range(count)]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def roll_back(run: Path, lines: int, *also: str) -> None:
    """The folder as it was when its ledger had so many lines: with the mark, and without what came later."""
    ledger = run / "ledger"
    content = ledger.read_bytes().splitlines(keepends=True)[:lines]
    ledger.write_bytes(b"".join(content))
    written = parse(ledger, b"".join(content))
    create_mark(ledger, written.place)
    for name in also:
        for path in run.glob(name):
            path.unlink()
