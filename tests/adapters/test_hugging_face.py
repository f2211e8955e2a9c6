"""Hugging Face's own Trainer, a transformer from a configuration, LoRA by `peft`: sums and price are ours."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oracles
from gredp import GredpError, PrivacyEngine
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other people's packages say of each other
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
        TrainerCallback,
        TrainingArguments,
    )

    from gredp.adapters import PrivateTrainer
    from gredp.adapters.hugging_face import NO_TARGET, of_sequences, of_tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WORDS, LENGTH, CLASSES = 30, 6, 3


def classifier(**lora) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    lora = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "value"]} | lora
    model = get_peft_model(BertForSequenceClassification(config), LoraConfig(**lora))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            nn.init.normal_(p)
    return model


def whole(model: nn.Module) -> nn.Module:
    """The network itself, without LoRA: every parameter is trained."""
    return model.unload().requires_grad_(True)


def whole_classifier() -> nn.Module:
    return whole(classifier())


def whole_language_model() -> nn.Module:
    return whole(language_model())


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_proj"], init_lora_weights=False)
    return get_peft_model(GPT2LMHeadModel(config), lora)


def translator() -> nn.Module:
    """T5: distances between positions, tables and the last matrix tied."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def texts(count: int = 12, tokens: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    labels = ids.clone() if tokens else torch.randint(0, CLASSES, (count,), generator=generator)
    if tokens:
        labels[: count // 2, 3:] = NO_TARGET  # records of different length
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]


def trainer(model, data, place, kind=PrivateTrainer, arguments=None, **settings) -> PrivateTrainer:
    told = {
        "output_dir": str(place / "out"),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
    }
    arguments = TrainingArguments(**told | (arguments or {}))
    engine = PrivacyEngine(accountant="rdp")
    return kind(
        model,
        arguments,
        train_dataset=data,
        **{"delta": 1e-5, "noise_multiplier": 1.0, "engine": engine} | settings,
    )


class Logits(nn.Module):
    """What the oracle calls: ids in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        if not self.model.config.is_encoder_decoder:
            return self.model(input_ids=ids).logits
        before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        return self.model(input_ids=ids, decoder_input_ids=before).logits


class Keeps(TrainerCallback):
    """The gradient that was released, before the Trainer clears it."""

    def on_optimizer_step(self, args, state, control, model=None, **_):
        self.released = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_of_classes(out: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(out, label, reduction="none")


def next_words(out: Tensor, label: Tensor) -> Tensor:
    """One record: its words predicted from those before, where there is a target."""
    known = [(out[0, t - 1], label[0, t]) for t in range(1, label.shape[1]) if label[0, t] != NO_TARGET]
    return torch.stack([F.cross_entropy(o[None], y[None]) for o, y in known]).mean()


def same_words(out: Tensor, label: Tensor) -> Tensor:
    """One record of a translator, whose decoder was given the words before each target."""
    return F.cross_entropy(out[0], label[0])


@pytest.mark.parametrize("size", [None, 5, LENGTH])
@pytest.mark.parametrize(
    ("make", "tokens", "loss"),
    [
        (classifier, False, one_of_classes),
        (language_model, True, next_words),
        (whole_classifier, False, one_of_classes),
        (whole_language_model, True, next_words),
        (translator, True, same_words),
    ],
)
def test_the_released_sum_is_the_oracles(tmp_path, make, tokens, loss, size):
    """No noise, every record in the batch: each counts by at most the clipping norm, in LoRA's layers."""
    model, data, clip = make(), texts(tokens=tokens), 0.05
    if make is translator:
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"].clone()} for row in data]
    ids, labels = (torch.stack([row[key] for row in data]) for key in ("input_ids", "labels"))
    truth = oracles.per_sample_gradients(Logits(copy.deepcopy(model)).train(), ids, labels, loss)
    keeps = Keeps()
    settings = {"per_device_train_batch_size": 12, "num_train_epochs": 1, "max_grad_norm": clip}
    private = trainer(
        model, data, tmp_path, arguments=settings, noise_multiplier=0.0, max_physical_batch_size=size
    )
    private.add_callback(keeps)
    private.train()
    assert {f"model.{n}" for n in keeps.released} == set(truth)
    if make in (classifier, language_model):
        assert all("lora" in n or "classifier" in n for n in keeps.released)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in truth.values()]).sum(0).sqrt()
    assert (norms > clip).any(), "the clip is felt"
    for name, expected in oracles.clipped_sum(truth, oracles.flat(truth, clip)).items():
        found = keeps.released[name.removeprefix("model.")].double() * 12
        assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name


def test_epsilon_is_the_engines_and_the_loss_is_not_told(tmp_path):
    private = trainer(classifier(), texts(), tmp_path, privacy={"method": "gredp"})
    result = private.train()
    expected = epsilon([Entry(1.0, 4 / 12, 6)], 1e-5, "rdp")
    assert private.engine.get_epsilon(1e-5) == expected == result.metrics["epsilon"]
    history = private.state.log_history
    assert history[0]["epsilon"] < history[-1]["epsilon"] == expected
    told = {key for row in [*history, result.metrics] for key in row}
    assert not told & {"loss", "train_loss", "grad_norm", "total_flos"}
    assert result.training_loss != result.training_loss
    assert private.state.total_flos == 0


def test_a_target_is_met_and_the_model_learns_nothing_else(tmp_path):
    model = classifier()
    before = {n: p.clone() for n, p in model.named_parameters()}
    private = trainer(
        model, texts(), tmp_path, noise_multiplier=None, target_epsilon=2.0, arguments={"max_steps": 5}
    )
    private.train()
    assert private.engine.ledger.steps == 5
    assert 1.98 < private.engine.get_epsilon(1e-5) <= 2.0
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}


def test_empty_batches_are_stepped_and_charged(tmp_path):
    sizes = []

    class Counts(PrivateTrainer):
        def training_step(self, model, inputs, *rest):
            sizes.append(len(inputs["labels"]))
            return super().training_step(model, inputs, *rest)

    private = trainer(
        classifier(),
        texts(),
        tmp_path,
        Counts,
        arguments={"per_device_train_batch_size": 1},
        max_physical_batch_size=1,
    )
    private.train()
    assert 0 in sizes
    assert private.engine.ledger.steps == 24
    assert all(p.isfinite().all() for p in private.model.parameters())


def test_a_run_that_broke_off_goes_on_with_its_learning_rate(tmp_path):
    class Breaks(TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise KeyboardInterrupt

    first = trainer(classifier(), texts(), tmp_path, folder=tmp_path / "run")
    first.add_callback(Breaks())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again = trainer(classifier(), texts(), tmp_path, folder=tmp_path / "run", arguments={"logging_steps": 1})
    again.train()
    assert (first.engine.ledger.steps, again.engine.ledger.steps) == (3, 6)
    rates = [row["learning_rate"] for row in again.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.1 * (6 - step) / 6 for step in (3, 4, 5)])


def test_losses_of_records_do_not_know_each_other():
    logits = torch.randn(3, 4, 5)
    labels = torch.tensor([[1, 2, NO_TARGET, NO_TARGET], [0, 1, 2, 3], [NO_TARGET] * 4])
    alone = torch.cat([of_tokens(logits[i : i + 1], labels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(of_tokens(logits, labels), alone)
    assert alone[2] == 0
    assert of_tokens(logits[:1, :2], labels[:1, :2]) == pytest.approx(alone[0].item())
    assert of_sequences(torch.ones(2, 1), torch.tensor([1.0, 3.0])).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"bf16": True}, "fp16 and bf16"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_what_would_break_the_guarantee_is_refused(tmp_path, arguments, words):
    with pytest.raises(GredpError, match=words):
        trainer(classifier(), texts(), tmp_path, arguments=arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"metric_for_best_model": "loss"},
    ],
    ids=["best model", "plateau", "early stopping"],
)
def test_what_decides_by_a_metric_that_is_not_public_is_refused(tmp_path, arguments):
    told = {"arguments": {"eval_strategy": "epoch"} | arguments, "eval_dataset": texts(4)}
    if list(arguments) == ["metric_for_best_model"]:
        told["callbacks"] = [EarlyStoppingCallback(5)]
    with pytest.raises(GredpError, match=r"decides by 'eval_loss', which ε does not cover.*public_metrics"):
        trainer(classifier(), texts(), tmp_path, **told)
    private = trainer(classifier(), texts(), tmp_path, public_metrics=("loss",), **told)
    private.train()
    assert private.engine.ledger.steps == 6


def test_other_ways_in_are_refused(tmp_path):
    with pytest.raises(GredpError, match="no ledger"):
        trainer(classifier(), texts(), tmp_path).train(resume_from_checkpoint=True)
    model = classifier()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GredpError, match="optimizer of your own"):
        trainer(model, texts(), tmp_path, optimizers=(own, None))
    private = trainer(classifier(), texts(), tmp_path)
    private.train()
    with pytest.raises(GredpError, match="6 steps are charged already"):
        private.train()
    unlabelled = [{"input_ids": row["input_ids"]} for row in texts()]
    with pytest.raises(GredpError, match="no labels"):
        trainer(classifier(), unlabelled, tmp_path).train()
    model = classifier()
    model.get_base_model().loss_type = "ForQuestionAnswering"
    with pytest.raises(GredpError, match="ForQuestionAnswering: override"):
        trainer(model, texts(), tmp_path).train()


def test_accelerate_takes_what_the_engine_returns():
    """Private first, then prepared: the sums are the same, and the ledger counts every step."""
    x, y = torch.randn(24, 5), torch.randint(0, 3, (24,))
    engine, accelerator = PrivacyEngine(accountant="rdp"), Accelerator(cpu=True)
    model = nn.Linear(5, 3)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=24),
        noise_multiplier=0.0,
        max_grad_norm=0.2,
    )
    truth = oracles.per_sample_gradients(model, x, y, one_of_classes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for a, b in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(a), b))
        optimizer.step()
    assert engine.ledger.steps == 1
    for name, expected in oracles.clipped_sum(truth, oracles.flat(truth, 0.2)).items():
        torch.testing.assert_close(
            model.get_parameter(name).grad.double() * 24, expected, rtol=1e-4, atol=1e-6
        )


def windows(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every record cut into windows of two words."""
    count = LENGTH // 2
    return {
        "input_ids": torch.stack([row["input_ids"] for row in rows])[:, : 2 * count].reshape(-1, 2),
        "labels": torch.stack([row["labels"] for row in rows]).repeat_interleave(count),
    }


def flattened(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All records behind one another, as one row."""
    return {
        "input_ids": torch.cat([row["input_ids"][:1] for row in rows])[None],
        "labels": torch.stack([row["labels"] for row in rows])[:1],
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [windows, flattened])
def test_rows_that_are_not_records_are_refused_whatever_fetched_them(tmp_path, collate, workers):
    """Each window was clipped by itself, and a whole batch as one record."""
    arguments = {"per_device_train_batch_size": 5, "dataloader_num_workers": workers}
    private = trainer(classifier(), texts(5), tmp_path, arguments=arguments, data_collator=collate)
    with pytest.raises(GredpError, match=r"run on \d+ inputs, but 5 records were drawn"):
        private.train()
    assert private.engine.ledger.steps == 0
