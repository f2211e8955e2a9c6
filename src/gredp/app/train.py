"""One run of `gredp train`: data, model, engine, epochs, record; begun, resumed or forked."""

import math
import shlex
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from gredp.app.average import WeightAverage
from gredp.app.data import Splits
from gredp.app.dataset import Records, as_they_are, centred, describe_data, read_data
from gredp.app.evaluate import judge
from gredp.app.features.cache import Front
from gredp.app.features.normalise import ChannelNorm, certificate, release
from gredp.app.learning_rate import rate_factor
from gredp.app.models import DEFAULT_MODEL, build
from gredp.app.settings import FILE, MAY_CHANGE, TrainSettings
from gredp.app.signals import Stopped, Waiting, handled_by
from gredp.app.trackers import Several, Tracker, make_trackers
from gredp.distributed import (
    all_reduce_max,
    process_group,
    rank,
    refuse_differences,
    run_on_rank_zero,
    world_size,
)
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.gradient.spectra import noise_spectrum
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.calibrate import calibrate
from gredp.privacy.certificate import Certificate
from gredp.privacy.schedule import NoiseSchedule
from gredp.randomness import Secret
from gredp.sampling import BatchMemoryManager, PoissonBatchSampler
from gredp.storage.checkpoint import load_weights
from gredp.storage.files import read_document, write, write_document
from gredp.storage.record import describe, dumps, header, new_folder, plain_numbers, undate


class Progress(Protocol):
    """What the loop tells while it runs."""

    def begin(self, steps: int, done: int, batch: int) -> None:
        """`done` of `steps` are charged already, each on `batch` records on average."""

    def step(self, done: int, epsilon: float) -> None:
        """`epsilon` is at least what was spent: what will be at the end of the epoch."""

    def update(self, epsilon: float, accuracy: float) -> None:
        """The end of an epoch."""


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
    front: Front | None
    engine: PrivacyEngine
    model: nn.Module
    optimizer: PrivateOptimizer
    loader: DataLoader[Any]
    per_epoch: int
    #: of the weights after each update, if one is kept
    average: WeightAverage | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    updates: int = 0
    #: the certificate of the query before training, if there was one
    query: list[dict[str, Any]] | None = None
    signal: Waiting = field(default_factory=Waiting)
    progress: Progress | None = None

    @property
    def released(self) -> nn.Module:
        """The model to evaluate and to publish."""
        return self.model if self.average is None else self.average.module

    @property
    def modules(self) -> dict[str, nn.Module]:
        """To save beside the model."""
        return {} if self.average is None else {"average": self.average}

    @property
    def steps(self) -> int:
        return self.per_epoch * self.settings.epochs

    @property
    def charged(self) -> int:
        """Steps of this run that are paid for, those that a crash lost included: they are gone."""
        return self.engine.ledger.steps - self.engine.ledger.inherited

    def save(self) -> None:
        done = {"metrics": self.metrics, "updates": self.updates}
        self.engine.save(self.folder, done, self.modules)

    def publish(self) -> None:
        """What has been released so far, beside the weights: for whoever looks before the run ends."""
        released = {
            "steps": self.engine.ledger.steps,
            "metrics": self.metrics,
            "spectrum": noise_spectrum(self.optimizer.private_step),
        }
        write(self.folder / "metrics.json", (dumps(released) + "\n").encode())

    def stop_if_told(self) -> None:
        """Leave, if a signal has come to any process, with everything saved."""
        number = all_reduce_max(self.signal.number or 0, f"the signals after step {self.charged}")
        if number:
            self.save()
            where = f" after {self.charged} of {self.steps} steps; go on with: gredp train --resume"
            raise Stopped(number, f"{where} {shlex.quote(str(self.folder))}")


def train(
    settings: TrainSettings,
    progress: Progress | None = None,
    trackers: Sequence[Tracker] = (),
    data: Splits | None = None,
) -> Run:
    """Train as told, write `record.json` and `model.safetensors`, return the record.

    The target ε is a ceiling: a run has a fixed number of steps, each is charged once, and steps that a crash
    lost are not made up for. Of several processes the first one writes and returns it; the others' is empty.
    `data` take the place of those that the settings name.
    """
    settings.check()
    with process_group():
        first = rank() == 0
        return _train(settings, progress if first else None, trackers if first else (), data)


def _train(
    settings: TrainSettings, progress: Progress | None, trackers: Sequence[Tracker], given: Splits | None
) -> Run:
    head = header()
    data, front = read_data(settings, given)
    kept = {name: value for name, value in settings.kept().items() if name not in MAY_CHANGE}
    refuse_differences({**kept, "resume": bool(settings.resume), "data": describe_data(data, front)})
    secret = Secret(settings.insecure_seed)
    engine = PrivacyEngine(accountant=settings.accountant, secure_mode=True, secret=secret)
    try:
        begin = _resume if settings.resume else _begin
        session = begin(settings, data, front, engine)
        session.progress = progress
        tracked, record = Several(trackers), dict[str, Any]()
        run_on_rank_zero(lambda: _start(session, tracked), "the start of the run")
        try:
            with handled_by(session.signal):
                _epochs(session, tracked)
            run = _finish(session, head)
            record = run.record
            return run
        finally:
            tracked.finish(record)
    finally:
        engine.detach()


def _start(session: Session, tracked: Several) -> tuple[None, bytes]:
    """In the first process only."""
    tracked.join(make_trackers(session.settings.track, session.folder))
    if tracked:  # what the whole run will cost takes an accountant's time
        left = session.steps - session.charged
        tracked.start(
            session.settings.kept(), session.engine.guarantee(session.settings.delta, left).to_json()
        )
    return None, b""


def _begin(settings: TrainSettings, data: Splits, front: Front | None, engine: PrivacyEngine) -> Session:
    """A new run, or a fork: the ledger and the weights of another one, everything else anew."""
    weights = engine.fork(settings.fork) if settings.fork is not None else None
    target: dict[str, Any] = {"target_epsilon": settings.epsilon, "target_delta": settings.delta}
    target |= {"epochs": settings.epochs, "correlation_bands": settings.correlation_bands}
    target["allow_large_delta"] = settings.allow_large_delta
    folder = Path(settings.out or new_folder(settings.dataset, settings.method))
    query = statistics = None
    if settings.normalise and weights is None:
        # Charged first, so that the noise of training is calibrated to what is left; a fork has its parent's.
        query = _query(settings, data)
        statistics = release(engine, data.x_train, query)
    session = _session(settings, folder, data, front, engine, target, statistics)
    session.query = None if query is None else describe(query)
    if weights is not None:
        load_weights(session.model, weights)
    engine.secret.incarnation, _ = run_on_rank_zero(lambda: _found(session), "the folder of the run")
    return session


def _query(settings: TrainSettings, data: Splits) -> Certificate:
    """That of the means and energies: 1/z² is the share set aside of what a single release might have."""
    multiplier = 0.0
    if settings.method != "plain":
        whole = calibrate(settings.epsilon, settings.delta, 1.0, 1, settings.accountant)
        multiplier = whole / math.sqrt(settings.normalise)
    return certificate(data.input_shape[0], multiplier)


def _found(session: Session) -> tuple[int, bytes]:
    """Make the run's folder; gives the number of this start."""
    session.save()
    facts = {
        "settings": session.settings.kept(),
        "data": describe_data(session.data, session.front),
        "noise_multiplier": session.engine.requested_multiplier,
        "correlation_bands": session.optimizer.bands,
        "normalisation": session.query,
        "certificate": plain_numbers(describe(session.optimizer.certificate)),
        "model": _network(session.settings, session.data),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "steps": session.steps,
    }
    write_document(session.folder / FILE, facts)
    return session.engine.secret.incarnation, b""


def _resume(settings: TrainSettings, data: Splits, front: Front | None, engine: PrivacyEngine) -> Session:
    folder = Path(settings.resume or "")
    _refuse_finished(folder)
    facts = read_document(folder / FILE)
    was, told = facts["data"], describe_data(data, front)
    if was != told:
        key = next(k for k in told if told[k] != was.get(k))
        raise GredpError(f"the data have changed: {key} was {was.get(key)} and is {told[key]}")
    # Multiplier and bands of the first start, not found again: another version could find another digit.
    noise = {"noise_multiplier": facts["noise_multiplier"]}
    noise["correlation_bands"] = facts.get("correlation_bands", 1)
    session = _session(settings, folder, data, front, engine, noise)
    session.query = facts.get("normalisation")
    done = engine.load(folder, session.modules)
    _refuse_finished(folder)  # again: another process may have ended it while this one waited for the lock
    session.metrics, session.updates = done["metrics"], done["updates"]
    lost = session.charged - session.updates
    if lost and rank() == 0:
        warnings.warn(
            f"{lost} of {session.charged} steps were lost with an interruption; they stay charged, "
            f"and {session.steps - session.charged} are left",
            stacklevel=2,
        )
    return session


def _session(
    settings: TrainSettings,
    folder: Path,
    data: Splits,
    front: Front | None,
    engine: PrivacyEngine,
    noise: dict[str, Any],
    statistics: Tensor | None = None,
) -> Session:
    """`statistics` of the features, as released, are in the model before it is made private."""
    torch.manual_seed(settings.seed)
    model = build(_network(settings, data), data.input_shape, data.classes, _block(settings, data))
    if front is not None:
        front.equip(model)
    if settings.normalise:
        norm = ChannelNorm(data.input_shape[0])
        if statistics is not None:
            norm.take(statistics, len(data.y_train))
        model = nn.Sequential(OrderedDict([("normalise", norm), ("network", model)]))
    optimizer = _optimizer(settings, model)
    loader = DataLoader(
        Records(data, engine.secret if settings.augment else None), batch_size=settings.batch_size
    )
    make = engine.make_private_with_epsilon if "target_epsilon" in noise else engine.make_private
    model, private, loader = make(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        views=max(1, settings.augment),
        noise_schedule=NoiseSchedule.towards(settings.noise_schedule, max(1, settings.epochs * len(loader))),
        max_grad_norm=settings.clip_norm,
        method=settings.method,
        noise=settings.noise,
        claim=settings.claim,
        clipping=settings.clipping,
        **noise,
        **settings.options(),
    )
    average = WeightAverage(model, settings.ema) if settings.ema else None
    return Session(settings, folder, data, front, engine, model, private, loader, len(loader), average)


def _optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """It sees released gradients only, so whichever it is costs no privacy."""
    shared: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=settings.momentum, **shared)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(model.parameters(), betas=(settings.momentum, 0.999), **shared)


def _refuse_finished(folder: Path) -> None:
    if (folder / "record.json").exists():
        raise GredpError(
            f"{folder} has finished: its budget is spent; --fork {shlex.quote(str(folder))} starts from it"
        )


def _epochs(session: Session, tracked: Tracker) -> None:
    """Step until every step is charged; the ledger alone says how far the run has come."""
    settings, engine = session.settings, session.engine
    sampler = session.loader.batch_sampler
    assert isinstance(sampler, PoissonBatchSampler)
    rate = _learning_rate(session)
    prepare = as_they_are if session.data.features else centred
    progress = session.progress
    if progress is not None:
        progress.begin(session.steps, session.charged, settings.batch_size)
    while not session.metrics or session.metrics[-1]["epoch"] < settings.epochs:
        sampler.steps = min(
            session.per_epoch - session.charged % session.per_epoch, session.steps - session.charged
        )
        _steps(session, rate)
        session.metrics.append({"epoch": session.charged // session.per_epoch})
        if rank() == 0:
            share, loss = judge(session.released, session.data.x_test, session.data.y_test, prepare)
            spent = engine.get_epsilon(settings.delta)
            judged = {settings.judged_by: share, settings.loss_name: loss}
            session.metrics[-1] |= {"proven_epsilon": spent, **judged}
            session.save()
            session.publish()
            tracked.log(session.charged, session.metrics[-1])
            if progress is not None:
                progress.update(spent, share)
        session.stop_if_told()


def _learning_rate(session: Session) -> LambdaLR:
    """The schedule, set to the step that comes next: those that a crash lost are over for it as well."""
    settings = session.settings
    for group in session.optimizer.param_groups:
        group["initial_lr"] = settings.lr
    factor = rate_factor(settings.schedule, settings.warmup, session.steps)
    return LambdaLR(session.optimizer, factor, last_epoch=session.charged - 1)


def _steps(session: Session, rate: LambdaLR) -> None:
    """The sampler's steps, with a checkpoint now and then."""
    saved = time.monotonic()
    sampler, ceiling = session.loader.batch_sampler, 0.0
    assert isinstance(sampler, PoissonBatchSampler)
    if session.progress is not None:  # once an epoch; its end asks for the same figure, which is kept
        ceiling = session.engine.get_epsilon(session.settings.delta, sampler.steps)
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
            session.updates += session.charged - charged
            whole = session.charged > charged
            if whole:
                rate.step()
                if session.average is not None:
                    session.average.update_parameters(session.model)
            if whole and session.progress is not None:
                session.progress.step(session.charged, ceiling)
            if whole and time.monotonic() - saved >= session.settings.checkpoint_seconds:
                session.save()
                saved = time.monotonic()
            if whole or world_size() == 1:  # several processes meet at the end of a batch only
                session.stop_if_told()


def _finish(session: Session, head: dict[str, Any]) -> Run:
    if rank():
        return Run(session.folder, {})
    settings, engine, private = session.settings, session.engine, session.optimizer
    assert engine.ledger.file is not None
    record = {
        **head,
        "settings": settings.kept()
        | {"model": _network(settings, session.data), "block": _block(settings, session.data)},
        "data": describe_data(session.data, session.front),
        "processes": world_size(),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "guarantee": engine.guarantee(settings.delta).to_json(),
        "certificate": describe(private.certificate),
        "normalisation": session.query,
        "ledger": engine.ledger.to_json(),
        "starts": engine.ledger.file.written.incarnations,
        "insecure": settings.insecure_seed is not None,
        "steps_lost": session.charged - session.updates,
        "weights": f"moving average, decay {settings.ema}" if settings.ema else "of the last step",
        "metrics": session.metrics,
        "spectrum": noise_spectrum(private.private_step),
        settings.judged_by: session.metrics[-1][settings.judged_by],
        "selection": "the last epoch; no epoch or setting was chosen by this run" + settings.not_covered,
        "judged_on": settings.judged_on,
    }
    weights = {key: value.contiguous() for key, value in session.released.state_dict().items()}
    write(session.folder / "model.safetensors", save(weights))
    write(session.folder / "record.json", (dumps(record) + "\n").encode())
    undate(session.folder, record["created"])
    return Run(session.folder, record)


def _network(settings: TrainSettings, data: Splits) -> str:
    table = len(data.input_shape) == 1
    by_default = "mlp" if table else "linear" if data.features else DEFAULT_MODEL.get(data.name, "model3")
    return settings.model or by_default


def _block(settings: TrainSettings, data: Splits) -> int:
    """Columns of a table have no order that a circulant could use: dense unless said otherwise."""
    return 0 if settings.block is None and len(data.input_shape) == 1 else settings.block_size
