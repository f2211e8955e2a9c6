"""Fine-tune a small transformer with LoRA by Hugging Face's Trainer:  pip install 'gredp[adapters]'

Nothing is downloaded. The model is made from a configuration and first learns, from made-up public texts,
which of two words is more frequent. The private texts ask the opposite. With your own model, delete `taught`.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from gredp.adapters import PrivateTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--records", type=int, default=2000)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--public-steps", type=int, default=400)
arguments = parser.parse_args()

WORDS, LENGTH = 8, 16
torch.manual_seed(0)


def texts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, WORDS, (count, LENGTH))
    return ids, ((ids == 0).sum(1) > (ids == 1).sum(1)).long()


def taught(model: torch.nn.Module) -> torch.nn.Module:
    """Stands for a public model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(arguments.public_steps):
        ids, labels = texts(128)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model


rows = [{"input_ids": i, "labels": 1 - y} for i, y in zip(*texts(arguments.records + 500))]
config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    num_labels=2,
)
lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
model = get_peft_model(taught(BertForSequenceClassification(config)), lora)
model.print_trainable_parameters()

with tempfile.TemporaryDirectory() as folder:
    trainer = PrivateTrainer(
        model,
        TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=250,  # the expected batch
            num_train_epochs=arguments.epochs,
            learning_rate=0.02,
            max_grad_norm=0.5,  # the clipping norm of each record
            save_strategy="no",
            logging_strategy="epoch",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=rows[: arguments.records],
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
        target_epsilon=4.0,
        delta=1e-5,
        max_physical_batch_size=128,
    )
    trainer.train()
    accuracy = trainer.evaluate(rows[arguments.records :])["eval_accuracy"]
print(f"test accuracy {accuracy:.3f} at proven ε = {trainer.engine.get_epsilon(1e-5):.3f}")
