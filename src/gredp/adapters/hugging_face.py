"""Hugging Face's Trainer with private steps; with `peft` it fine-tunes low-rank layers only."""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from gredp.adapters.budget import Budget, reject, reject_private_metric
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError

#: what the Trainer would report of private records without noise
UNCOVERED = ("loss", "train_loss", "grad_norm", "total_flos")
#: label of a position that has no target, by Hugging Face's convention
NO_TARGET = -100


class PrivateTrainer(Trainer):  # type: ignore[misc]  # untyped here, see pyproject.toml
    """`Trainer` at a proven (ε, δ): only trainable parameters are clipped, noised and charged.

    Formal guarantee. That of `PrivacyEngine`. A record's loss is its own (`record_losses`): the models' own
    losses divide by the tokens that were drawn, which couples records. The clipping norm is
    `args.max_grad_norm`, the expected batch `args.per_device_train_batch_size`, the number of steps that of
    `args`; it is never exceeded. "epsilon" is logged in place of the training loss, which it does not
    cover.

    `max_physical_batch_size` bounds the records in memory; the result does not depend on it. With a `folder`,
    the same command resumes an interrupted run, the learning rate where it was.

    | case | what happens |
    |---|---|
    | gradient_accumulation_steps, fp16, bf16, gradient_checkpointing, torch_compile | rejected |
    | several devices or processes, deepspeed, fsdp | rejected |
    | resume_from_checkpoint: its steps are in no ledger | rejected |
    | a best checkpoint, early stopping, a plateau scheduler by a metric not in `public_metrics` | rejected |
    | auto_find_batch_size, label smoothing, neftune noise, compute_loss_func, a trial | rejected |
    | a model whose loss is not known here | rejected: override `record_losses` |
    """

    def __init__(
        self,
        *arguments: Any,
        delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_physical_batch_size: int | None = None,
        folder: str | Path | None = None,
        engine: PrivacyEngine | None = None,
        public_metrics: Collection[str] = (),
        privacy: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`privacy` goes to `PrivacyEngine.make_private`, the rest is Trainer's own.

        `public_metrics` names what may decide: metrics of an `eval_dataset` that is public.
        """
        super().__init__(*arguments, **settings)
        self.public_metrics = frozenset(map(of_evaluation, public_metrics))
        reject_trainer(self)
        norm = self.args.max_grad_norm
        self.budget = Budget(delta, norm, target_epsilon, noise_multiplier, folder, privacy or {})
        self.budget.engine = engine or self.budget.engine
        self.budget.max_physical_batch_size = max_physical_batch_size
        self.add_callback(EndOfBudget(self.budget))

    @property
    def engine(self) -> PrivacyEngine:
        return self.budget.engine

    # ---------------------------------------------------------------- what the Trainer asks for, in its order

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **settings: Any) -> Any:
        if self.budget.charged:
            raise GredpError(f"{self.budget.charged} steps are charged already: make a new PrivateTrainer")
        reject_trainer(self)
        if resume_from_checkpoint or trial is not None:
            raise GredpError(
                "resume_from_checkpoint and trials bring steps that are in no ledger: "
                "give a folder to PrivateTrainer and start it again"
            )
        try:
            return super().train(**settings)._replace(training_loss=float("nan"))
        finally:
            self.engine.detach()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Poisson batches; called first, it makes the model private."""
        if self.train_dataset is None:
            raise GredpError("PrivateTrainer needs a train_dataset")
        plain = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            num_workers=self.args.dataloader_num_workers,
        )
        loader = self.budget.poisson(plain)
        self.model.train()
        steps = self.set_initial_training_values(self.args, loader)[-1]
        optimizer = super().create_optimizer()
        self.optimizer = self.budget.spend(self.model, optimizer, loader, steps)
        return loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.budget.charged and isinstance(scheduler, ReduceLROnPlateau):
            raise GredpError("a run with a plateau scheduler cannot be resumed: its state is not saved")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch expects a step of the optimizer before
            for _ in range(self.budget.charged):  # at an earlier start
                scheduler.step()
        return scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """All parts but the last are added up here; the Trainer steps the last. Reports no loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        if "labels" not in inputs:
            raise GredpError(f"the batches hold {sorted(inputs)}, but no labels to take a loss from")
        labels = inputs["labels"]
        if not len(labels):  # many models cannot run on nothing
            private = self.engine._private()[1]
            private.capture.take_nothing()
            private.signal_skip_step(False)
        else:
            for part, _last in self.budget.parts(inputs, len(labels)):
                self.accelerator.backward(self.compute_loss(model, part))
        return torch.zeros((), device=labels.device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, *_: Any, **__: Any
    ) -> Any:
        """The mean of `record_losses`."""
        labels = inputs["labels"]
        told = {key: value for key, value in inputs.items() if key != "labels"}
        if self._translates() and "decoder_input_ids" not in told:
            told["decoder_input_ids"] = self._base().prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**told)
        loss = self.record_losses(outputs.logits, labels).mean()
        return (loss, outputs) if return_outputs else loss

    def record_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`[b]`: each record's own loss, for token losses their mean over the record's own targets."""
        base = self._base()
        name = type(base).__name__
        kind = getattr(base, "loss_type", None) or ("ForCausalLM" if name.endswith("LMHeadModel") else name)
        if self._translates():  # its decoder's inputs are shifted, not its targets
            return of_tokens(logits, labels)
        if kind not in LOSSES:
            raise GredpError(f"no loss by record is known for {kind}: override PrivateTrainer.record_losses")
        return LOSSES[kind](logits, labels)

    def _base(self) -> Any:
        """The network, within peft's wrapper or not."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    def _translates(self) -> bool:
        """Whether it has an encoder, and a decoder that is given the words before each target."""
        base = self._base()
        conditional = type(base).__name__.endswith("ForConditionalGeneration")
        return conditional and base.config.is_encoder_decoder

    # ---------------------------------------------------------------- what the Trainer tells

    def log(self, logs: dict[str, float], *arguments: Any, **settings: Any) -> None:
        kept = {key: value for key, value in logs.items() if key not in UNCOVERED}
        if self.is_in_train and self.engine.ledger.steps:
            kept["epsilon"] = self.budget.epsilon
        logs.clear()  # the Trainer returns this very dictionary
        logs.update(kept)
        super().log(logs, *arguments, **settings)

    def floating_point_ops(self, inputs: Any) -> int:
        """They would count the records that were drawn."""
        return 0


class EndOfBudget(TrainerCallback):  # type: ignore[misc]  # as above
    """Ends the run with its last planned step, and keeps it where a folder was given."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.budget.used_up

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.budget.save()


def of_sequences(logits: Tensor, labels: Tensor) -> Tensor:
    """`[b, classes]`, or `[b, 1]` for a regression, and `[b]`."""
    if labels.is_floating_point():
        return F.mse_loss(logits.reshape(labels.shape), labels, reduction="none")
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_TARGET)


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """`[b, t, words]` and `[b, t]`: the mean over each record's own targets, 0 without any."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=NO_TARGET)
    return losses.sum(1) / (labels != NO_TARGET).sum(1).clamp(min=1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ForSequenceClassification": of_sequences,
    "ForTokenClassification": of_tokens,
    "ForMaskedLM": of_tokens,
    "ForCausalLM": lambda logits, labels: of_tokens(logits[:, :-1], labels[:, 1:]),
}


def of_evaluation(metric: str) -> str:
    """As the Trainer names it when it looks for the best one."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def reject_trainer(trainer: PrivateTrainer) -> None:
    """Reject what would change a gradient, a batch or the number of steps."""
    args = trainer.args
    if args.metric_for_best_model is not None:  # also where best checkpoints or plateaus set it themselves
        who = "load_best_model_at_end, save_strategy, early stopping or lr_scheduler_type"
        reject_private_metric(who, of_evaluation(args.metric_for_best_model), trainer.public_metrics)
    several = (
        args.n_gpu > 1 or args.world_size != 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    )
    other_loss = (
        args.label_smoothing_factor or args.neftune_noise_alpha or trainer.compute_loss_func is not None
    )
    hidden = args.gradient_checkpointing or args.torch_compile
    tokens = args.include_num_input_tokens_seen not in (False, "no")
    reject(
        {
            "gradient_accumulation_steps: use max_physical_batch_size": args.gradient_accumulation_steps != 1,
            "fp16 and bf16 round gradients before they are clipped": args.fp16 or args.bf16,
            "gradient_checkpointing and torch_compile hide layers from the hooks": hidden,
            "several devices, deepspeed or fsdp: use PrivacyEngine under torchrun": several,
            "auto_find_batch_size draws batches that no ledger counts": args.auto_find_batch_size,
            "include_num_input_tokens_seen counts what was drawn": tokens,
            "label_smoothing_factor, neftune_noise_alpha, compute_loss_func: use record_losses": other_loss,
            "an optimizer of your own: use PrivacyEngine in your own loop": trainer.optimizer is not None,
            "max_grad_norm is the clipping norm and must be positive": not args.max_grad_norm > 0,
        }
    )
