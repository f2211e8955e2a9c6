"""One run of `gredp train`: data, model, engine, epochs, record; begun, resumed or forked."""

import time
import warnings
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gredp.data import Splits, load
from gredp.distributed import from_first, largest, process_group, rank, refuse_differences, world_size
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.models import DEFAULT_MODEL, build
from gredp.optimizer import PrivateOptimizer
from gredp.randomness import Secret
from gredp.sampling import BatchMemoryManager, PoissonBatchSampler
from gredp.sealed import read_document, write, write_document
from gredp.training.checkpoint import load_weights
from gredp.training.record import describe, dumps, header
from gredp.training.settings import FILE, MAY_CHANGE, TrainSettings
from gredp.training.signals import Stopped, Waiting, handled_by


class Progress(Protocol):
    """What the loop tells while it runs."""

    def begin(self, epochs: int, done: int) -> None: ...

    def update(self, epsilon: float, accuracy: float) -> None: ...


@dataclass(frozen=True)
class Run:
    folder: Path
    record: dict[str, Any]


@dataclass
class Session:
    """One process' share of a run: what it works with, and how far the run has come."""

    settings: TrainSettings
    folder: Path
    data: Splits
    engine: PrivacyEngine
    model: nn.Module
    optimizer: PrivateOptimizer
    loader: DataLoader[Any]
    per_epoch: int
    metrics: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    updates: int = 0
    signal: Waiting = field(default_factory=Waiting)

    @property
    def steps(self) -> int:
        return self.per_epoch * self.settings.epochs

    @property
    def bands(self) -> int:
        """Steps over which noise is correlated."""
        return len(self.optimizer.private_step.plan.correlation)

    @property
    def charged(self) -> int:
        """Steps of this run that are paid for, those that a crash lost included: they are gone."""
        return self.engine.ledger.steps - self.engine.ledger.inherited

    def save(self) -> None:
        done = {"metrics": self.metrics, "seconds": self.seconds, "updates": self.updates}
        self.engine.save(self.folder, done)

    def stop_if_told(self) -> None:
        """Leave, if a signal has come to any process, with everything saved."""
        number = largest(self.signal.number or 0)
        if number:
            self.save()
            where = f" after {self.charged} of {self.steps} steps; go on with: gredp train --resume"
            raise Stopped(number, f"{where} {self.folder}")


def centred(x: Tensor) -> Tensor:
    """Pixels to [−1, 1] by fixed numbers: a mean of the data would be a release of its own."""
    return 2 * x - 1


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Training records, centred as they are read; a batch is read at once."""

    def __init__(self, data: Splits) -> None:
        self.x, self.y = data.x_train, data.y_train

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(centred(self.x[indices]), self.y[indices]))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1024), y.split(1024)))
    model.train()
    return hits / len(y)


def train(settings: TrainSettings, progress: Progress | None = None) -> Run:
    """Train as told, write `record.json` and `model.safetensors`, return the record.

    The target ε is a ceiling: a run has a fixed number of steps, each is charged once, and steps that a crash
    lost are not made up for. Of several processes the first one writes and returns it; the others' is empty.
    """
    settings.check()
    with process_group():
        return _train(settings, progress if rank() == 0 else None)


def _train(settings: TrainSettings, progress: Progress | None) -> Run:
    data = load(settings.dataset, settings.data_dir)
    kept = {name: value for name, value in settings.kept().items() if name not in MAY_CHANGE}
    refuse_differences({**kept, "resume": bool(settings.resume), "data": describe_data(data)})
    secret = Secret(settings.insecure_seed)
    engine = PrivacyEngine(accountant=settings.accountant, secure_mode=True, secret=secret)
    try:
        session = _resume(settings, data, engine) if settings.resume else _begin(settings, data, engine)
        with handled_by(session.signal):
            _epochs(session, progress)
        return _finish(session)
    finally:
        engine.detach()


def _begin(settings: TrainSettings, data: Splits, engine: PrivacyEngine) -> Session:
    """A new run, or a fork: the ledger and the weights of another one, everything else anew."""
    weights = engine.fork(settings.fork) if settings.fork is not None else None
    target: dict[str, Any] = {"target_epsilon": settings.epsilon, "target_delta": settings.delta}
    target |= {"epochs": settings.epochs, "correlation_bands": settings.correlation_bands}
    session = _session(settings, Path(settings.out or _new_folder(settings)), data, engine, target)
    if weights is not None:
        load_weights(session.model, weights)
    engine.secret.incarnation, _ = from_first(lambda: _found(session))
    return session


def _found(session: Session) -> tuple[int, bytes]:
    """Make the run's folder; gives the number of this start."""
    session.save()
    multiplier = session.engine.requested_multiplier
    facts = {"data": describe_data(session.data), "noise_multiplier": multiplier}
    facts["correlation_bands"] = session.bands
    write_document(session.folder / FILE, {"settings": session.settings.kept(), **facts})
    return session.engine.secret.incarnation, b""


def _resume(settings: TrainSettings, data: Splits, engine: PrivacyEngine) -> Session:
    folder = Path(settings.resume or "")
    _refuse_finished(folder)
    facts = read_document(folder / FILE)
    was, told = facts["data"], describe_data(data)
    if was != told:
        key = next(k for k in told if told[k] != was.get(k))
        raise GredpError(f"the data have changed: {key} was {was.get(key)} and is {told[key]}")
    # Multiplier and bands of the first start, not found again: another version could find another digit.
    noise = {"noise_multiplier": facts["noise_multiplier"]}
    noise["correlation_bands"] = facts.get("correlation_bands", 1)
    session = _session(settings, folder, data, engine, noise)
    done = engine.load(folder)
    _refuse_finished(folder)  # again: another process may have ended it while this one waited for the lock
    session.metrics, session.seconds, session.updates = done["metrics"], done["seconds"], done["updates"]
    lost = session.charged - session.updates
    if lost and rank() == 0:
        warnings.warn(
            f"{lost} of {session.charged} steps were lost with an interruption; they stay charged, "
            f"and {session.steps - session.charged} are left",
            stacklevel=2,
        )
    return session


def _session(
    settings: TrainSettings, folder: Path, data: Splits, engine: PrivacyEngine, noise: dict[str, Any]
) -> Session:
    torch.manual_seed(settings.seed)
    model = build(_network(settings, data), data.input_shape, data.classes, settings.block_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    make = engine.make_private_with_epsilon if "target_epsilon" in noise else engine.make_private
    model, private, loader = make(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(Records(data), batch_size=settings.batch_size),
        max_grad_norm=settings.clip_norm,
        method=settings.method,
        noise=settings.noise,
        claim=settings.claim,
        clipping=settings.clipping,
        **noise,
        **settings.options(),
    )
    return Session(settings, folder, data, engine, model, private, loader, len(loader))


def _refuse_finished(folder: Path) -> None:
    if (folder / "record.json").exists():
        raise GredpError(f"{folder} has finished: its budget is spent; --fork {folder} starts from it")


def describe_data(data: Splits) -> dict[str, Any]:
    """What a run notes of its data, and checks when it is resumed: counts and shapes.

    No hash, keyed or not: with the run's folder in hand it would tell whether a guessed data set is the one.
    """
    return {
        "name": data.name,
        "records": len(data.x_train),
        "test_records": len(data.x_test),
        "classes": data.classes,
        "input_shape": list(data.input_shape),
    }


def _epochs(session: Session, progress: Progress | None) -> None:
    """Step until every step is charged; the ledger alone says how far the run has come."""
    settings, engine = session.settings, session.engine
    sampler = session.loader.batch_sampler
    assert isinstance(sampler, PoissonBatchSampler)
    x_test = centred(session.data.x_test)
    if progress is not None:
        progress.begin(settings.epochs, session.charged // session.per_epoch)
    while not session.metrics or session.metrics[-1]["epoch"] < settings.epochs:
        sampler.steps = min(
            session.per_epoch - session.charged % session.per_epoch, session.steps - session.charged
        )
        _steps(session)
        session.metrics.append({"epoch": session.charged // session.per_epoch})
        if rank() == 0:
            share = accuracy(session.model, x_test, session.data.y_test)
            spent = engine.get_epsilon(settings.delta)
            session.metrics[-1] |= {"proven_epsilon": spent, "test_accuracy": share}
            session.save()
            write(session.folder / "metrics.json", (dumps({"metrics": session.metrics}) + "\n").encode())
            if progress is not None:
                progress.update(spent, share)
        session.stop_if_told()


def _steps(session: Session) -> None:
    """The sampler's steps, with a checkpoint now and then."""
    started, saved = time.monotonic() - session.seconds, time.monotonic()
    with BatchMemoryManager(
        data_loader=session.loader,
        max_physical_batch_size=session.settings.max_physical_batch_size,
        optimizer=session.optimizer,
    ) as parts:
        for x, y in parts:
            charged = session.charged
            session.optimizer.zero_grad()
            F.cross_entropy(session.model(x), y).backward()
            session.optimizer.step()
            now = time.monotonic()
            session.seconds, session.updates = now - started, session.updates + session.charged - charged
            whole = session.charged > charged
            if whole and now - saved >= session.settings.checkpoint_seconds:
                session.save()
                saved = now
            if whole or world_size() == 1:  # several processes meet at the end of a batch only
                session.stop_if_told()


def _finish(session: Session) -> Run:
    if rank():
        return Run(session.folder, {})
    settings, engine, private = session.settings, session.engine, session.optimizer
    assert engine.ledger.file is not None
    guarantee = {
        "proven_epsilon": engine.get_epsilon(settings.delta),
        "claimed_epsilon": engine.get_claimed_epsilon(settings.delta),
        "noise_multiplier": private.noise_multiplier,
        "sigma": private.sigma,
        "delta": settings.delta,
        "accountant": settings.accountant,
        "steps": engine.ledger.steps,
        "sample_rate": private.sample_rate,
        "correlation_bands": session.bands,
    }
    record = {
        **header(),
        "settings": settings.kept()
        | {"model": _network(settings, session.data), "block": settings.block_size},
        "data": describe_data(session.data),
        "processes": world_size(),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "guarantee": guarantee | {"neighbours": "add or remove one record"},
        "certificate": describe(private.certificate),
        "ledger": engine.ledger.to_json(),
        "starts": engine.ledger.file.written.incarnations,
        "insecure": settings.insecure_seed is not None,
        "steps_lost": session.charged - session.updates,
        "metrics": session.metrics,
        "test_accuracy": session.metrics[-1]["test_accuracy"],
        "selection": "the last epoch; no epoch or setting was chosen by this run",
        "seconds": round(session.seconds, 2),
    }
    weights = {key: value.contiguous() for key, value in session.model.state_dict().items()}
    write(session.folder / "model.safetensors", save(weights))
    write(session.folder / "record.json", (dumps(record) + "\n").encode())
    return Run(session.folder, record)


def _network(settings: TrainSettings, data: Splits) -> str:
    return settings.model or DEFAULT_MODEL.get(data.name, "model3")


def _new_folder(settings: TrainSettings) -> Path:
    stem = Path(settings.dataset).stem
    return Path("runs") / f"{stem}-{settings.method}-{datetime.now():%Y%m%d-%H%M%S-%f}"
