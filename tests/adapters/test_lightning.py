"""Lightning's own Trainer with the callback: batches, sums, noise and price are the engine's."""

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oracles
from gredp import GredpError, PrivacyEngine
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry
from worlds import records, released, small_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other people's packages say of each other
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelCheckpoint,
    )

    from gredp.adapters import PrivacyCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(LightningModule):
    """As users write them: `training_step` calls a part of the module, not its own forward."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = small_model(), lr
        self.sizes: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.sizes.append(len(x))
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(module: LightningModule, callback: Callback, batch_size: int = 6, data=None, epochs=2, **settings):
    path = settings.pop("ckpt_path", None)
    trainer = Trainer(
        **{
            "max_epochs": epochs,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [callback, *settings.pop("more", [])],
        }
        | settings
    )
    loader = DataLoader(TensorDataset(*(data or records(24))), batch_size=batch_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


def private(**settings) -> PrivacyCallback:
    engine = PrivacyEngine(accountant="rdp")
    return PrivacyCallback(
        **{"delta": 1e-5, "max_grad_norm": 1.0, "noise_multiplier": 1.0, "engine": engine} | settings
    )


@pytest.mark.parametrize("size", [None, 5])
def test_a_summed_loss_that_is_said_to_be_a_mean_is_refused(size):
    class Summed(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")}

    callback = private(max_physical_batch_size=size)
    with pytest.raises(GredpError, match=r"the loss is a sum over records, but loss_reduction is 'mean'"):
        fit(Summed(), callback)
    assert callback.engine.ledger.steps == 0


@pytest.mark.parametrize("size", [None, 5])
def test_the_released_sum_is_the_oracles(size):
    """No noise, every record in the batch: each counts by at most the clipping norm."""
    module, data, clip = Classifier(lr=0.0), records(12), 0.3
    truth = oracles.per_sample_gradients(
        module.net, *data, loss=lambda out, y: F.cross_entropy(out, y, reduction="none")
    )
    callback = private(noise_multiplier=0.0, max_grad_norm=clip, max_physical_batch_size=size)
    fit(module, callback, batch_size=12, data=data, epochs=1)
    assert module.sizes == ([12] if size is None else [5, 5, 2])
    found = released(module.net, callback.optimizer)
    for name, expected in oracles.clipped_sum(truth, oracles.flat(truth, clip)).items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-6)


def test_batches_are_poisson_and_epsilon_is_the_engines():
    module, callback = Classifier(), private(method="gredp")
    trainer = fit(module, callback, epochs=5)
    assert len(module.sizes) == 20
    assert len(set(module.sizes)) > 2, "shuffled batches would all have one size"
    expected = epsilon([Entry(1.0, 6 / 24, 20)], 1e-5, "rdp")
    assert callback.engine.get_epsilon(1e-5) == expected
    assert trainer.callback_metrics["epsilon"] == pytest.approx(expected)
    assert "training_step" not in module.__dict__, "the module is given back as it was"


def test_a_target_is_met_for_the_steps_of_the_trainer():
    callback = private(noise_multiplier=None, target_epsilon=2.0)
    fit(Classifier(), callback, max_steps=3)
    assert callback.engine.ledger.steps == 3
    assert 1.98 < callback.engine.get_epsilon(1e-5) <= 2.0
    shorter = private()
    fit(Classifier(), shorter, limit_train_batches=2)
    assert shorter.engine.ledger.steps == shorter.budget.steps == 4


def test_empty_batches_are_stepped_and_charged():
    module, callback = Classifier(), private(max_physical_batch_size=2)
    fit(module, callback, batch_size=1, epochs=1)
    assert 0 in module.sizes
    assert callback.engine.ledger.steps == 24
    assert all(p.isfinite().all() for p in module.parameters())


def test_a_run_that_broke_off_goes_on_and_ends_at_its_budget(tmp_path):
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 6:
                raise KeyboardInterrupt

    first = private(folder=tmp_path / "run")
    with pytest.raises(SystemExit):
        fit(Classifier(), first, epochs=3, more=[Breaks()])
    again = Classifier()
    start = again.net[-1].weight.clone()
    second = private(folder=tmp_path / "run")
    fit(again, second, epochs=3)
    assert first.engine.ledger.steps == 6
    assert second.engine.ledger.steps == 12
    assert len(again.sizes) == 6
    assert not torch.equal(start, again.net[-1].weight)
    third = private(folder=tmp_path / "run")
    with pytest.raises(GredpError, match="all 12 planned steps are charged"):
        fit(Classifier(), third, epochs=3)
    assert third.engine.ledger.steps == 12


class Remembers(Classifier):
    """Keeps a statistic of the data in a buffer, past any layer that is known to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.mean += batch[0].mean()
        return super().training_step(batch, batch_idx)


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class Draws(Classifier):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class Manual(Classifier):
    automatic_optimization = False


class Normalises(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (Classifier, {"gradient_clip_val": 1.0}, "gradient_clip_val: give max_grad_norm"),
        (Classifier, {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        (Classifier, {"more": [GradientAccumulationScheduler({1: 2})]}, "accumulate_grad_batches"),
        (Classifier, {"more": [LearningRateFinder()]}, "searches"),
        (Classifier, {"precision": "bf16-mixed"}, "precision bf16-mixed"),
        (Classifier, {"precision": "bf16-true"}, "precision bf16-true"),
        (Classifier, {"strategy": "ddp", "devices": 1}, "several devices"),
        (Classifier, {"overfit_batches": 1}, "overfit_batches"),
        (Classifier, {"reload_dataloaders_every_n_epochs": 1}, "reload"),
        (Classifier, {"max_epochs": -1}, "fixed and positive"),
        (Manual, {}, "manual optimization"),
        (Skips, {}, "cannot be skipped"),
        (Draws, {}, "dataloader_iter"),
        (Remembers, {}, "buffer mean was changed"),
        (Normalises, {}, "BatchNorm1d mixes the records"),
    ],
    ids=lambda value: None if isinstance(value, dict) else getattr(value, "__name__", None),
)
def test_what_would_break_the_guarantee_is_refused(module, settings, words):
    with pytest.raises(GredpError, match=words):
        fit(module(), private(), **settings)


def test_checkpoints_without_a_ledger_are_refused(tmp_path):
    trainer = fit(Classifier(), private(), epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    with pytest.raises(GredpError, match="ckpt_path"):
        fit(Classifier(), private(), ckpt_path=tmp_path / "some.ckpt")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_epsilon": 1.0}, "either target_epsilon or noise_multiplier"),
        ({"noise_multiplier": None}, "either target_epsilon or noise_multiplier"),
        ({"sample_rate": 0.1}, "sample_rate is not for adapters"),
        ({"claim": "paper"}, "claim is not for adapters"),
        ({"correlation_bands": 2}, "correlation_bands is not for adapters"),
        ({"noise_schedule": [(2, 1.0), (2, 0.5)]}, "noise_schedule is not for adapters"),
    ],
)
def test_wrong_budgets_are_refused(settings, words):
    with pytest.raises(GredpError, match=words):
        private(**settings)


def test_the_how_to_page_trains(capsys):
    page = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "lightning" in b)
    data = TensorDataset(torch.rand(300, 1, 8, 8), torch.arange(300) % 10)
    exec(compile(block, "docs/howto.md", "exec"), {"torch": torch, "DataLoader": DataLoader, "data": data})
    expected = epsilon([Entry(2.0, 256 / 300, 2)], 1e-5, "pld")
    assert float(capsys.readouterr().out.split()[-1]) == expected


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_schedulers_drive_the_private_optimizer(tmp_path):
    callback = private(folder=tmp_path / "run")
    fit(Scheduled(), callback, epochs=2)
    assert callback.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    with pytest.raises(GredpError, match="schedulers cannot be resumed"):
        fit(Scheduled(), private(folder=tmp_path / "run"), epochs=2)


class Logs(Classifier):
    """The losses of training and of other records, a scheduler that follows one of them."""

    def __init__(self, plateau: str | None = None) -> None:
        super().__init__()
        self.plateau = plateau

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self):
        return DataLoader(TensorDataset(*records(8, seed=1)), batch_size=8)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.plateau is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.plateau}}


@pytest.mark.parametrize("metric", ["train_loss", "val_loss"])
@pytest.mark.parametrize("who", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])
def test_what_decides_by_a_metric_that_is_not_public_is_refused(tmp_path, who, metric):
    module = Logs(metric if who == "ReduceLROnPlateau" else None)

    def callbacks():
        return {
            "EarlyStopping": [EarlyStopping(metric)],
            "ModelCheckpoint": [ModelCheckpoint(tmp_path, monitor=metric)],
        }.get(who, [])

    callback = private()
    with pytest.raises(
        GredpError, match=rf"{who} decides by '{metric}', which ε does not cover.*public_metrics"
    ):
        fit(module, callback, more=callbacks(), enable_checkpointing=who == "ModelCheckpoint")
    assert callback.engine.ledger.steps == 0
    declared = private(public_metrics=[metric])
    fit(module, declared, more=callbacks(), enable_checkpointing=who == "ModelCheckpoint")
    assert declared.engine.ledger.steps == 8


def test_checkpoints_by_what_no_record_changes_are_taken(tmp_path):
    for monitor in (None, "step", "epsilon"):
        fit(Logs(), private(), more=[ModelCheckpoint(tmp_path, monitor=monitor)], enable_checkpointing=True)


def test_a_callback_that_comes_later_is_seen():
    class Joins(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.callbacks.append(EarlyStopping("train_loss"))

    with pytest.raises(GredpError, match="EarlyStopping decides by 'train_loss'"):
        fit(Logs(), private(), more=[Joins()])


def test_steps_that_an_engine_had_charged_before_are_not_those_of_the_run():
    engine = PrivacyEngine()
    for total in (8, 16):
        fit(Classifier(), private(engine=engine), epochs=2)
        assert engine.ledger.steps == total


class Twice(Classifier):
    """Steps twice on every batch, as training with two players is sometimes written."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for _ in range(2):
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"noise_multiplier": None, "target_epsilon": 2.0}, "would end at ε = .*, above the target of 2.0"),
        ({"noise_multiplier": 3.0}, "all 7 planned steps are charged"),
    ],
    ids=["target", "multiplier"],
)
def test_a_run_that_steps_more_often_than_planned_ends_at_its_budget(budget, words):
    callback = private(**budget)
    with pytest.raises(GredpError, match=words):
        fit(Twice(), callback, max_steps=7, epochs=9)
    assert callback.engine.ledger.steps <= 7
    if "target_epsilon" in budget:
        assert 0 < callback.engine.get_epsilon(1e-5) <= 2.0


class TwoViews(Classifier):
    """Two views of every record, each clipped by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(torch.cat([x, x.flip(-1)])), torch.cat([y, y]))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_are_not_records_are_refused_whatever_fetched_them(workers):
    callback, module = private(), TwoViews()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
    )
    loader = DataLoader(TensorDataset(*records(24)), batch_size=6, num_workers=workers)
    with pytest.raises(GredpError, match=r"run on \d+ inputs, but \d+ records were drawn"):
        trainer.fit(module, loader)
    assert callback.engine.ledger.steps == 0
