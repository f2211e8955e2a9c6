"""One run of `gredp train`: data, model, engine, epochs, record."""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch.optim.lr_scheduler import LambdaLR

from gredp.app.blueprint import FEATURES, MODEL
from gredp.app.data import Splits
from gredp.app.dataset import describe_data, read_data
from gredp.app.evaluate import outputs_on_test
from gredp.app.learning_rate import rate_factor
from gredp.app.session import Session, begin, resume
from gredp.app.settings import MAY_CHANGE, TrainSettings
from gredp.app.signals import handled_by
from gredp.app.trackers import Tracker, TrackerGroup, make_trackers
from gredp.distributed import process_group, rank, reject_differences, run_on_rank_zero, world_size
from gredp.engine import PrivacyEngine
from gredp.gradient.spectra import noise_spectrum
from gredp.randomness import Secret
from gredp.sampling import BatchMemoryManager, PoissonBatchSampler
from gredp.storage.files import write
from gredp.storage.record import header, plain_numbers, undate
from gredp.storage.record import save as save_record

if TYPE_CHECKING:
    from gredp.app.console import Bar

#: training records below which noise hides what they have in common, whatever the settings
FEW = 20


@dataclass(frozen=True)
class Run:
    folder: Path
    record: dict[str, Any]


def train(
    settings: TrainSettings,
    progress: "Bar | None" = None,
    trackers: Sequence[Tracker] = (),
    data: Splits | None = None,
) -> Run:
    """Train, write `record.json` and `model.safetensors`, return the record.

    The target ε is a ceiling: a run has a fixed number of steps, each is charged once, and steps that a crash
    lost are not repeated. Of several processes the first one writes and returns the record.
    `data` replaces the dataset that the settings name.
    """
    settings.check()
    with process_group():
        head, first = header(), rank() == 0
        records, extractor = read_data(settings, data)
        kept = {name: value for name, value in settings.kept().items() if name not in MAY_CHANGE}
        facts = {"resume": bool(settings.resume), "data": describe_data(records, extractor)}
        reject_differences(kept | facts)
        if first and settings.private and records.units < FEW:
            what = "records" if records.persons is None else "persons"
            warnings.warn(
                f"{records.units} training {what} are too few for ε = {settings.epsilon:g}: noise "
                "that hides one of them hides them all; expect the accuracy of chance",
                stacklevel=2,
            )
        secret = Secret(settings.insecure_seed)
        engine = PrivacyEngine(accountant=settings.accountant, secure_mode=True, secret=secret)
        try:
            make = resume if settings.resume else begin
            session = make(settings, records, extractor, engine)
            session.progress = progress if first else None
            if session.progress is not None and settings.resume:
                spent, target = engine.get_epsilon(settings.delta), settings.epsilon
                target = target if settings.private else math.inf
                session.progress.resumes(session.folder, session.steps, session.charged, spent, target)
            tracked, run = TrackerGroup(trackers if first else ()), Run(session.folder, {})
            run_on_rank_zero(lambda: _start(session, tracked), "the start of the run")
            try:
                with handled_by(session.signal):
                    _epochs(session, tracked)
                if first:
                    run = _finish(session, head)
                return run
            finally:
                tracked.finish(run.record)
        finally:
            engine.detach()


def _start(session: Session, tracked: TrackerGroup) -> tuple[None, bytes]:
    """In the first process only."""
    settings = session.settings
    tracked.trackers += make_trackers(settings.track, session.folder)
    if tracked.trackers:  # what the whole run will cost takes an accountant's time
        guarantee = session.engine.guarantee(settings.delta, session.steps - session.charged)
        tracked.start(settings.kept(), guarantee.to_json())
    return None, b""


def _epochs(session: Session, tracked: Tracker) -> None:
    """Step until every step is charged; the ledger alone says how far the run has come."""
    settings, data = session.settings, session.data
    # The next step of the schedule: it has passed those that a crash lost.
    for group in session.optimizer.param_groups:
        group["initial_lr"] = session.lr
    factor = rate_factor(settings.schedule, settings.warmup, session.steps)
    rate = LambdaLR(session.optimizer, factor, last_epoch=session.charged - 1)
    if session.progress is not None:
        what = "records" if data.persons is None else "persons"
        session.progress.begin(session.steps, session.charged, session.batch_size, what)
    while not session.metrics or session.metrics[-1]["epoch"] < settings.epochs:
        left_of_epoch = session.per_epoch - session.charged % session.per_epoch
        _steps(session, rate, min(left_of_epoch, session.steps - session.charged))
        session.metrics.append({"epoch": session.charged // session.per_epoch})
        if rank() == 0:
            figures = session.task.figures(outputs_on_test(session.released, data), data.y_test)
            spent = session.engine.get_epsilon(settings.delta)
            found = {f"{settings.split}_{name}": value for name, value in figures.items()}
            session.metrics[-1] |= {"proven_epsilon": spent, **found}
            session.save()
            session.publish()
            tracked.log(session.charged, session.metrics[-1])
            if session.progress is not None:
                session.progress.update(spent, figures[session.task.name], session.task.name)
        session.stop_if_signaled()


def _steps(session: Session, rate: LambdaLR, steps: int) -> None:
    """Charge `steps` more, with a checkpoint now and then."""
    settings, optimizer, saved = session.settings, session.optimizer, time.monotonic()
    assert isinstance(session.loader.batch_sampler, PoissonBatchSampler)
    session.loader.batch_sampler.steps = steps
    ceiling = 0.0
    if session.progress is not None:  # once an epoch; its end asks for the same figure, which is cached
        ceiling = session.engine.get_epsilon(settings.delta, steps)
    with BatchMemoryManager(
        data_loader=session.loader,
        max_physical_batch_size=settings.max_physical_batch_size,
        optimizer=optimizer,
    ) as parts:
        for x, y in parts:
            charged = session.charged
            optimizer.zero_grad()
            torch.autograd.backward(session.loss(x, y))
            optimizer.step()
            whole = session.charged > charged
            if whole:
                session.updates += session.charged - charged
                rate.step()
                if session.average is not None:
                    session.average.update_parameters(session.model)
                if session.progress is not None:
                    session.progress.step(session.charged, ceiling)
                if time.monotonic() - saved >= settings.checkpoint_seconds:
                    session.save()
                    saved = time.monotonic()
            if whole or world_size() == 1:  # several processes meet at the end of a batch only
                session.stop_if_signaled()


def _finish(session: Session, head: dict[str, Any]) -> Run:
    settings, engine = session.settings, session.engine
    assert engine.ledger.file is not None
    accuracy, facts = f"{settings.split}_{session.task.name}", session.facts()
    data = session.data
    facts["settings"] |= {"model": session.blueprint.network, "block": session.blueprint.block}
    facts["settings"]["batch_size"] = session.batch_size
    record = {
        **head,
        **facts,
        "processes": world_size(),
        "guarantee": engine.guarantee(settings.delta).to_json(),
        "ledger": engine.ledger.to_json(),
        "starts": engine.ledger.file.written.incarnations,
        "insecure": settings.insecure_seed is not None,
        "steps_lost": session.charged - session.updates,
        "weights": f"moving average, decay {settings.ema}" if settings.ema else "of the last step",
        "metrics": session.metrics,
        "spectrum": noise_spectrum(session.optimizer.private_step),
        accuracy: session.metrics[-1][accuracy],
        "evaluation": session.task.evaluation(outputs_on_test(session.released, data), data.y_test),
        "selection": "the last epoch; no epoch or setting was chosen by this run" + settings.not_covered,
        "judged_on": settings.judged_on,
    }
    guarantee = plain_numbers(record["guarantee"])
    weights = {key: value.contiguous() for key, value in session.released.state_dict().items()}
    metadata = replace(session.blueprint, guarantee=guarantee, insecure=record["insecure"]).metadata()
    write(session.folder / MODEL, save(weights, metadata))
    if settings.pretrained is not None:  # public, and needed wherever the model is used
        write(session.folder / FEATURES, Path(settings.pretrained).expanduser().read_bytes())
    save_record(session.folder / "record.json", record)
    undate(session.folder, record["created"])
    return Run(session.folder, record)
