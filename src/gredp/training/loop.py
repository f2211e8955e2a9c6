"""One run of `gredp train`: data, model, engine, epochs, record."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp.data import Splits, load
from gredp.engine import PrivacyEngine
from gredp.models import DEFAULT_MODEL, build
from gredp.optimizer import PrivateOptimizer
from gredp.sampling import BatchMemoryManager
from gredp.training.record import describe, dumps, header, prepare_folder, write
from gredp.training.settings import TrainSettings


class Progress(Protocol):
    """What the loop tells while it runs."""

    def begin(self, epochs: int) -> None: ...

    def update(self, epsilon: float, accuracy: float) -> None: ...


@dataclass(frozen=True)
class Run:
    folder: Path
    record: dict[str, Any]


def centred(x: Tensor) -> Tensor:
    """Pixels to [−1, 1] by fixed numbers: a mean of the data would be a release of its own."""
    return 2 * x - 1


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1024), y.split(1024)))
    model.train()
    return hits / len(y)


def train(settings: TrainSettings, progress: Progress | None = None) -> Run:
    """Train as told, write `record.json` and `model.safetensors`, return the record."""
    settings.check()
    data = load(settings.dataset, settings.data_dir)
    folder = Path(settings.out or _new_folder(settings))
    torch.manual_seed(settings.seed)
    name = settings.model or DEFAULT_MODEL.get(data.name, "model3")
    model = build(name, data.input_shape, data.classes, settings.block_size)
    engine = PrivacyEngine(accountant=settings.accountant)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    loader = DataLoader(TensorDataset(centred(data.x_train), data.y_train), batch_size=settings.batch_size)
    model, private, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=settings.epsilon,
        target_delta=settings.delta,
        epochs=settings.epochs,
        max_grad_norm=settings.clip_norm,
        method=settings.method,
        noise=settings.noise,
        claim=settings.claim,
        clipping=settings.clipping,
        **settings.options(),
    )
    prepare_folder(folder)
    started = time.monotonic()
    metrics = [
        {"epoch": epoch, "proven_epsilon": engine.get_epsilon(settings.delta), "test_accuracy": share}
        for epoch, share in _epochs(settings, model, private, loader, data, engine, progress)
    ]
    guarantee = {
        "proven_epsilon": engine.get_epsilon(settings.delta),
        "claimed_epsilon": engine.get_claimed_epsilon(settings.delta),
        "noise_multiplier": private.noise_multiplier,
        "sigma": private.sigma,
        "delta": settings.delta,
        "accountant": settings.accountant,
        "steps": engine.ledger.steps,
        "sample_rate": private.sample_rate,
    }
    record = {
        **header(),
        "settings": asdict(settings) | {"model": name, "block": settings.block_size},
        "data": {
            "name": data.name,
            "records": len(data.x_train),
            "test_records": len(data.x_test),
            "classes": data.classes,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "guarantee": guarantee | {"neighbours": "add or remove one record"},
        "certificate": describe(private.certificate),
        "ledger": engine.ledger.to_json(),
        "metrics": metrics,
        "test_accuracy": metrics[-1]["test_accuracy"],
        "selection": "the last epoch; no epoch or setting was chosen by this run",
        "seconds": round(time.monotonic() - started, 2),
    }
    engine.detach()
    save_file(
        {key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors"
    )
    write(folder / "record.json", dumps(record))
    return Run(folder, record)


def _new_folder(settings: TrainSettings) -> Path:
    stem = Path(settings.dataset).stem
    return Path("runs") / f"{stem}-{settings.method}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def _epochs(
    settings: TrainSettings,
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: DataLoader[Any],
    data: Splits,
    engine: PrivacyEngine,
    progress: Progress | None,
) -> Iterator[tuple[int, float]]:
    x_test = centred(data.x_test)
    if progress is not None:
        progress.begin(settings.epochs)
    for epoch in range(1, settings.epochs + 1):
        with BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=settings.max_physical_batch_size,
            optimizer=optimizer,
        ) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        share = accuracy(model, x_test, data.y_test)
        if progress is not None:
            progress.update(engine.get_epsilon(settings.delta), share)
        yield epoch, share
