"""An LSTM on sequences, trained privately and plainly with the same steps.

python benchmarks/lstm.py --out results/lstm.json

Every sequence has 24 symbols out of 10. Five of these are values, five are fillers; the class is the last
value, wherever it stands, but in one of 20 sequences another class, drawn at random: no network is right in
more than 95 % of them. All sequences are generated; those of the test are other ones.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gredp.engine import PrivacyEngine
from gredp.storage.record import header, save
from gredp.validation import fix

VALUES, SYMBOLS, LENGTH, VALUE_RATE, WRONG = 5, 10, 24, 0.2, 0.05
RECORDS, TEST, EPSILON, DELTA, SEEDS = 40_000, 10_000, 3.0, 1e-6, 3
SETTINGS = {"epochs": 15, "batch_size": 1000, "learning_rate": 0.01, "max_grad_norm": 1.0, "hidden": 32}


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Symbols `[count, LENGTH]` and classes; the first symbol is always a value."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.rand(count, LENGTH, generator=generator) < VALUE_RATE
    kind[:, 0] = True
    which = torch.randint(0, VALUES, (count, LENGTH), generator=generator)
    last = LENGTH - 1 - kind.flip(1).int().argmax(1)
    wrong = torch.rand(count, generator=generator) < WRONG
    other = torch.randint(1, VALUES, (count,), generator=generator) * wrong
    return which + VALUES * ~kind, (which.gather(1, last[:, None])[:, 0] + other) % VALUES


class Reader(nn.Module):
    """The class from the state after the last symbol."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, hidden // 2)
        self.lstm = nn.LSTM(hidden // 2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VALUES)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.lstm(self.symbols(x))
        out: Tensor = self.head(state[0])
        return out


def train(seed: int, private: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """The same network, optimizer and number of steps; plainly, batches are shuffled."""
    torch.manual_seed(seed)
    x, y = sequences(RECORDS, 2 * seed)
    model, engine, began = fix(Reader(settings["hidden"])), PrivacyEngine(), time.process_time()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=settings["learning_rate"])
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=settings["batch_size"], shuffle=True)
    if private:
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=EPSILON,
            target_delta=DELTA,
            epochs=settings["epochs"],
            max_grad_norm=settings["max_grad_norm"],
        )
    steps = 0
    for _ in range(settings["epochs"]):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            steps += 1
    model.eval()
    x, y = sequences(TEST, 2 * seed + 1)
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    return {
        "seed": seed,
        "training": "private" if private else "plain",
        "steps": steps,
        "proven_epsilon": engine.get_epsilon(DELTA) if private else None,
        "test_accuracy": accuracy,
        "cpu_seconds": round(time.process_time() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="An LSTM, privately and plainly, with the same steps.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = header() | {
        "command": "python benchmarks/lstm.py --out results/lstm.json",
        "records": RECORDS,
        "test_records": TEST,
        "delta": DELTA,
        "epsilon": EPSILON,
        "settings": SETTINGS,
        "rows": [],
    }
    for private in (False, True):
        for seed in range(SEEDS):
            record["rows"].append(train(seed, private, SETTINGS))
            print(record["rows"][-1], flush=True)
    save(arguments.out, record)


if __name__ == "__main__":
    main()
