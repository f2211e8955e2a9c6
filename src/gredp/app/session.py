"""One process' share of a run of `gredp train`: new, resumed or forked."""

import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gredp.app.average import WeightAverage
from gredp.app.blueprint import Blueprint
from gredp.app.data import Splits
from gredp.app.dataset import Records, describe_data, start_of
from gredp.app.evaluate import task_of
from gredp.app.features.cache import FeatureExtractor
from gredp.app.features.normalize import certificate, release
from gredp.app.known_data import usual_model
from gredp.app.models.precision import outputs_in
from gredp.app.settings import FILE, TrainSettings
from gredp.app.signals import DeferredSignal, Stopped
from gredp.budget import query_multiplier
from gredp.distributed import all_reduce_max, rank, run_on_rank_zero
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.gradient.spectra import noise_spectrum
from gredp.privacy.certificate import Certificate
from gredp.privacy.schedule import NoiseSchedule
from gredp.sampling.persons import Persons
from gredp.storage.checkpoint import load_weights
from gredp.storage.files import read_document, write_document
from gredp.storage.record import describe, new_folder, plain_numbers, save

if TYPE_CHECKING:
    from gredp.app.console import Bar


class Session:
    """One process' share of a run: what it works with, and how far the run has come."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: Path,
        data: Splits,
        extractor: FeatureExtractor | None,
        engine: PrivacyEngine,
        noise: dict[str, Any],
        statistics: tuple[Tensor, float] | None = None,
    ) -> None:
        """`statistics`: of the features, as released, and their noise; in the model before it is private."""
        self.settings, self.folder, self.engine = settings, folder, engine
        self.data, self.extractor = data, extractor
        self.task = task_of(data)
        self.metrics: list[dict[str, Any]] = []
        self.updates = 0
        #: the certificate of the query before training, if there was one
        self.query: list[dict[str, Any]] | None = None
        self.signal = DeferredSignal()
        self.progress: Bar | None = None
        self.blueprint = Blueprint(
            network(settings, data),
            data.input_shape,
            () if data.target is not None else data.class_names,
            block(settings, data),
            normalized=bool(settings.normalize),
            image=None if len(data.input_shape) == 1 else data.pixels or data.input_shape,  # type: ignore[arg-type]
            schema=data.schema,
            features=None if extractor is None else extractor.identity(),
            target=data.target,
        )
        model = self._model(statistics)
        records = Records(data, engine.secret if settings.augment else None)
        self.batch_size = batch_size(settings, data)
        loader = DataLoader(records, batch_size=self.batch_size)
        self.per_epoch = -(-data.units // self.batch_size)
        #: gradients that are rounded must be of a sum: division by the batch before it would couple records
        self.reduction: Literal["mean", "sum"] = "sum" if settings.precision == "bf16" else "mean"
        make = engine.make_private_with_epsilon if "target_epsilon" in noise else engine.make_private
        self.model, self.optimizer, self.loader = make(
            module=model,
            optimizer=self._optimizer(model),
            data_loader=loader,
            views=max(1, settings.augment),
            persons=data.persons,
            records_per_person=None if data.persons is None else settings.records_per_person,
            noise_schedule=NoiseSchedule.towards(settings.noise_schedule, max(1, self.steps)),
            max_grad_norm=settings.clip_norm,
            method=settings.method,
            noise=settings.noise,
            claim=settings.claim,
            clipping=settings.clipping,
            precision=settings.precision,
            loss_reduction=self.reduction,
            **noise,
            **settings.options(),
        )
        self.average = WeightAverage(self.model, settings.ema) if settings.ema else None

    def _model(self, statistics: tuple[Tensor, float] | None) -> nn.Module:
        torch.manual_seed(self.settings.seed)
        model = self.blueprint.build()
        network, norm = (model, None) if not self.settings.normalize else (model[1], model[0])  # type: ignore[index]
        if self.extractor is not None:
            self.extractor.load_into(network)
        if statistics is not None and norm is not None:
            norm.take(*statistics, self.data.units)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """It sees released gradients only, so whichever it is costs no privacy.

        From a sum over the batch it makes the update that it would make from a mean: what is added to the
        gradient, or compared with it, is so many times as large.
        """
        settings, times = self.settings, self._summed
        if settings.optimizer == "sgd":
            decay = settings.weight_decay * times
            return torch.optim.SGD(model.parameters(), self.lr, settings.momentum, weight_decay=decay)
        shared: dict[str, Any] = {"betas": (settings.momentum, 0.999), "eps": 1e-8 * times}
        if settings.optimizer == "adamw":
            return torch.optim.AdamW(
                model.parameters(), self.lr, weight_decay=settings.weight_decay, **shared
            )
        return torch.optim.Adam(
            model.parameters(), self.lr, weight_decay=settings.weight_decay * times, **shared
        )

    @property
    def _summed(self) -> int:
        """How many times the mean the step's gradient is."""
        return self.batch_size if self.reduction == "sum" else 1

    @property
    def lr(self) -> float:
        """That of the optimizer: SGD's steps grow with the gradient, Adam's do not."""
        return self.settings.lr / (self._summed if self.settings.optimizer == "sgd" else 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of one physical batch, in the precision of the settings."""
        losses = self.task.losses(outputs_in(self.settings.precision, self.model, x), y)
        return losses.sum() if self.reduction == "sum" else losses.mean()

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
        """What has been released so far, beside the weights: for anyone who looks before the run ends."""
        spectrum = noise_spectrum(self.optimizer.private_step)
        released = {"steps": self.engine.ledger.steps, "metrics": self.metrics, "spectrum": spectrum}
        save(self.folder / "metrics.json", released)

    def facts(self) -> dict[str, Any]:
        """What both the settings of a run and its record state."""
        return {
            "settings": self.settings.kept(),
            "data": describe_data(self.data, self.extractor),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "certificate": plain_numbers(describe(self.optimizer.certificate)),
            "normalisation": self.query,
        }

    def stop_if_signaled(self) -> None:
        """Stop if any process has received a signal, with everything saved."""
        number = all_reduce_max(self.signal.number or 0, f"the signals after step {self.charged}")
        if number:
            self.save()
            where = f" after {self.charged} of {self.steps} steps; resume with: gredp train --resume"
            raise Stopped(number, f"{where} {shlex.quote(str(self.folder))}")


def begin(
    settings: TrainSettings, data: Splits, extractor: FeatureExtractor | None, engine: PrivacyEngine
) -> Session:
    """A new run, or a fork: the ledger and the weights of another one, everything else anew."""
    weights = engine.fork(settings.fork) if settings.fork is not None else None
    target = {"target_epsilon": settings.epsilon, "target_delta": settings.delta}
    target |= {name: getattr(settings, name) for name in ("epochs", "correlation_bands", "allow_large_delta")}
    folder = Path(settings.out or new_folder(settings.dataset, settings.method))
    query = statistics = None
    if settings.normalize and weights is None:
        # Charged first, so that the noise of training is calibrated to what is left; a fork has its parent's.
        query = _query(settings, data)
        shares = None if data.persons is None else Persons(data.persons, len(data.persons)).shares()
        statistics = release(engine, data.x_train, query, shares), query.releases[0].noise_std
    session = Session(settings, folder, data, extractor, engine, target, statistics)
    session.query = None if query is None else describe(query)
    if weights is not None:
        load_weights(session.model, weights)
    engine.secret.incarnation, _ = run_on_rank_zero(lambda: _create_folder(session), "the folder of the run")
    return session


def _query(settings: TrainSettings, data: Splits) -> Certificate:
    """That of the means and energies."""
    target = settings.epsilon, settings.delta, settings.normalize, settings.accountant
    return certificate(data.input_shape[0], query_multiplier(*target) if settings.private else 0.0)


def _create_folder(session: Session) -> tuple[int, bytes]:
    """Create the run folder and return the number of this start."""
    session.save()
    plan = {
        "noise_multiplier": session.engine.requested_multiplier,
        "correlation_bands": session.optimizer.one_step.bands,
        "model": network(session.settings, session.data),
        "steps": session.steps,
        "started_in": start_of(session.folder),
    }
    write_document(session.folder / FILE, session.facts() | plan)
    return session.engine.secret.incarnation, b""


def resume(
    settings: TrainSettings, data: Splits, extractor: FeatureExtractor | None, engine: PrivacyEngine
) -> Session:
    folder = Path(settings.resume or "")
    _reject_finished(folder)
    facts = read_document(folder / FILE)
    for key, value in describe_data(data, extractor).items():
        if value != facts["data"].get(key):
            raise GredpError(f"the data have changed: {key} was {facts['data'].get(key)} and is {value}")
    # Multiplier and bands of the first start, not found again: another version could find another digit.
    bands = facts.get("correlation_bands", 1)
    noise = {"noise_multiplier": facts["noise_multiplier"], "correlation_bands": bands}
    session = Session(settings, folder, data, extractor, engine, noise)
    session.query = facts.get("normalisation")
    done = engine.load(folder, session.modules)
    _reject_finished(folder)  # again: another process may have ended it while this one waited for the lock
    session.metrics, session.updates = done["metrics"], done["updates"]
    lost = session.charged - session.updates
    if lost and rank() == 0:
        warnings.warn(
            f"{lost} of {session.charged} steps were lost with an interruption; they stay charged, "
            f"and {session.steps - session.charged} are left",
            stacklevel=2,
        )
    return session


def _reject_finished(folder: Path) -> None:
    if (folder / "record.json").exists():
        raise GredpError(
            f"{folder} has finished: its budget is spent; --fork {shlex.quote(str(folder))} starts from it"
        )


def batch_size(settings: TrainSettings, data: Splits) -> int:
    """Hashes hold out about the requested share: a batch of all the others is one of all that are left.

    The settings stay as they are, so that the command that began a run can resume it.
    """
    left, held = len(data.y_train), len(data.y_test)
    if settings.holdout is None or data.persons is not None:  # the persons that are left are counted exactly
        return settings.batch_size
    expected = int((left + held) * (1 - settings.holdout))  # a batch of them would leave a few for a second
    whole = left < settings.batch_size <= left + held or settings.batch_size == expected
    return left if whole else settings.batch_size


def network(settings: TrainSettings, data: Splits) -> str:
    table = len(data.input_shape) == 1
    by_default = "mlp" if table else "linear" if data.features else usual_model(data.name)
    return settings.model or by_default


def block(settings: TrainSettings, data: Splits) -> int:
    """Columns of a table have no order that a circulant could use: dense by default."""
    return 0 if settings.block is None and len(data.input_shape) == 1 else settings.block_size
