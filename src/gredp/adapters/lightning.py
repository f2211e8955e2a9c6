"""A callback that makes a LightningModule's training private; the module and its Trainer stay as they are."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from gredp.adapters.budget import Budget, reject, reject_private_metric
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.optimizer import PrivateOptimizer
from gredp.sampling import PoissonBatchSampler


class PrivacyCallback(Callback):  # type: ignore[misc]  # untyped here, see pyproject.toml
    """`Trainer(callbacks=[PrivacyCallback(...)])` trains at a proven (ε, δ) and logs "epsilon" every epoch.

    Formal guarantee. That of `PrivacyEngine`, with automatic optimization, provided that `training_step`
    returns a mean (with `loss_reduction="sum"`, a sum) of terms that depend on one record each. The number
    of steps is the Trainer's (`max_epochs`, `max_steps`, `limit_train_batches`) and is
    never exceeded. What `training_step` logs of private records is not covered by ε, and decides nothing.

    `max_physical_batch_size` bounds the records in memory: `training_step` is called for each part of a
    batch, and the result stays the same. With a `folder`, the same command resumes an interrupted run.
    `public_metrics` names what callbacks and schedulers may decide by: metrics of records that are public.

    | case | what happens |
    |---|---|
    | gradient_clip_val, accumulate_grad_batches, mixed or half precision, several devices | rejected |
    | manual optimization, several loaders, overfit_batches, reloaded loaders | rejected |
    | searches for a batch size or learning rate: they read records uncharged | rejected |
    | early stopping, best checkpoints, plateau schedulers by a metric not in `public_metrics` | rejected |
    | ckpt_path: its steps are in no ledger | rejected |
    | training_step returns None | rejected: the step was drawn and must be charged |
    """

    def __init__(
        self,
        *,
        delta: float,
        max_grad_norm: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_physical_batch_size: int | None = None,
        folder: str | Path | None = None,
        engine: PrivacyEngine | None = None,
        public_metrics: Collection[str] = (),
        **options: Any,
    ) -> None:
        """`options` go to `PrivacyEngine.make_private`."""
        self.budget = Budget(delta, max_grad_norm, target_epsilon, noise_multiplier, folder, options)
        self.budget.engine = engine or self.budget.engine
        self.budget.max_physical_batch_size = max_physical_batch_size
        self.budget.public_metrics = frozenset(public_metrics)
        self.optimizer: PrivateOptimizer | None = None

    @property
    def engine(self) -> PrivacyEngine:
        return self.budget.engine

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            reject_trainer(trainer, pl_module, self.budget.public_metrics)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first moment with optimizers, before any batch is drawn."""
        reject_trainer(trainer, pl_module, self.budget.public_metrics)  # schedulers were not there before
        loop = trainer.fit_loop
        source = loop._data_source
        loader = self.budget.poisson(source.dataloader())
        # From here on Lightning reads the Poisson batches, also if it has looked at the loader before.
        source.instance, loop._combined_loader = loader, None
        loop.setup_data()
        pl_module.train()
        (optimizer,) = trainer.optimizers  # Lightning refuses more, since optimization is automatic
        self.optimizer = self.budget.spend(pl_module, optimizer, loader, planned(trainer))
        if self.budget.charged and trainer.lr_scheduler_configs:
            raise GredpError("a run with learning rate schedulers cannot be resumed: their state is lost")
        trainer.optimizers = [self.optimizer]
        pl_module.training_step = self._private_step(pl_module.training_step)

    def _private_step(self, whole: Callable[..., Any]) -> Callable[[Any, int], Any]:
        """`training_step` over parts of the batch: all but the last are added up here."""
        private = self.optimizer
        assert private is not None
        takes = inspect.signature(whole).parameters
        if "dataloader_iter" in takes:
            raise GredpError("training_step draws its own batches (dataloader_iter): let it take a batch")

        def training_step(batch: Any, batch_idx: int) -> Any:
            for part, last in self.budget.parts(batch, records(batch)):
                with private.capture.one_pass(part):
                    result = whole(part, *[batch_idx][: len(takes) - 1])
                if result is None:
                    raise GredpError("training_step returned None: a batch that was drawn cannot be skipped")
                # Here, since Lightning divides it before the backward, after which it cannot be told.
                private.capture.reduction.reject_other([loss_of(result)], records(part))
                if not last:
                    loss_of(result).backward()
            return result

        return training_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """What callbacks of others may have changed since the start."""
        reject_trainer(trainer, pl_module, self.budget.public_metrics)
        (inner,) = (getattr(o, "optimizer", o) for o in trainer.optimizers)
        poisson = isinstance(trainer.train_dataloader.batch_sampler, PoissonBatchSampler)
        if inner is not self.optimizer or not poisson:
            raise GredpError("the private optimizer or the Poisson batches were replaced during training")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.budget.used_up:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("epsilon", self.budget.epsilon, prog_bar=True)
        self.budget.save()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._give_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back(pl_module)

    def _give_back(self, pl_module: LightningModule) -> None:
        pl_module.__dict__.pop("training_step", None)
        self.engine.detach()


def planned(trainer: Trainer) -> float:
    """Steps that the Trainer will take; infinite where it was given no end."""
    epochs = trainer.max_epochs if trainer.max_epochs not in (None, -1) else float("inf")
    steps = trainer.max_steps if trainer.max_steps != -1 else float("inf")
    return min(epochs * trainer.num_training_batches, steps)


def loss_of(result: Any) -> Tensor:
    """Of what a training_step returned."""
    return result["loss"] if isinstance(result, Mapping) else result


def records(batch: Any) -> int:
    """How many there are: the first dimension of the first tensor."""
    while not hasattr(batch, "shape"):
        batch = next(iter(batch.values())) if hasattr(batch, "values") else batch[0]
    return batch.shape[0]


def reject_trainer(trainer: Trainer, pl_module: LightningModule, public: Collection[str]) -> None:
    """Reject what would change a gradient, a batch or the number of steps."""
    for callback in trainer.callbacks:
        reject_private_metric(type(callback).__name__, getattr(callback, "monitor", None), public)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            reject_private_metric(type(config.scheduler).__name__, config.monitor, public)
    precision, searches = str(trainer.precision), (BatchSizeFinder, LearningRateFinder)
    reject(
        {
            "gradient_clip_val: give max_grad_norm to PrivacyCallback instead": trainer.gradient_clip_val,
            "accumulate_grad_batches: use max_physical_batch_size": trainer.accumulate_grad_batches != 1,
            f"precision {precision} rounds gradients before they are clipped: use 32-true": precision
            not in ("32-true", "64-true"),
            "several devices: use PrivacyEngine under torchrun": not isinstance(
                trainer.strategy, SingleDeviceStrategy
            ),
            "manual optimization: use PrivacyEngine in your own loop": not pl_module.automatic_optimization,
            "overfit_batches replaces the Poisson batches": trainer.overfit_batches,
            "reload_dataloaders_every_n_epochs replaces the Poisson batches": (
                trainer.reload_dataloaders_every_n_epochs
            ),
            "the steps before ckpt_path are in no ledger: use folder": trainer.ckpt_path,
            "searches for a batch size or learning rate read records uncharged": any(
                isinstance(callback, searches) for callback in trainer.callbacks
            ),
        }
    )
