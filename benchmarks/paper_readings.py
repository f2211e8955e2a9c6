"""Which readings of what the paper leaves open fit its figures for LeNet-5; see results/paper_readings.json.

python benchmarks/paper_readings.py                # every reading; finished cells are kept and skipped
python benchmarks/paper_readings.py --epochs 30    # as long as the paper trains, by our reading

Each reading changes one unknown of the base reading. Nothing is tuned for accuracy: cells are compared with
the accuracies on the test set that the paper prints, so they are measured on the test set, once, after the
last epoch. Noise is the paper's own (`claim="paper"`).
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load
from gredp.app.evaluate import evaluate
from gredp.app.models.sequential import lenet5
from gredp.storage.record import header, save
from gredp.validation import to_spectral

OUT = Path(__file__).parent.parent / "results" / "paper_readings.json"
BATCH, DELTA = 500, 1e-5
SCALINGS = {"[-1, 1]": (0.5, 0.5), "[0, 1]": (0.0, 1.0), "mean 0, deviation 1": (0.1307, 0.3081)}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Reading:
    """One answer to every question that the paper leaves open."""

    optimizer: str = "adam"
    activation: str = "relu"
    scaling: str = "[-1, 1]"
    second_width: int = 16
    initialization: str = "torch"
    weight_decay: float = 0.0

    def name(self) -> str:
        """What differs from the base reading."""
        base = asdict(Reading())
        return ", ".join(f"{k} {v}" for k, v in asdict(self).items() if v != base[k]) or "base"

    def build(self, block: int) -> nn.Module:
        model = lenet5(second=self.second_width, activation=ACTIVATIONS[self.activation])
        if self.initialization != "torch":
            fill = {"xavier": nn.init.xavier_uniform_, "kaiming": nn.init.kaiming_normal_}
            for layer in model:
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    fill[self.initialization](layer.weight)
                    nn.init.zeros_(layer.bias)
        return to_spectral(model, block) if block else model

    def optimize(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=self.weight_decay)
        return torch.optim.Adam(model.parameters(), lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: how it was made, and what it is (section 4 and Tables 1 and 3)."""

    row: str
    epsilon: float
    lr: float
    clip_norm: float
    paper: float

    def name(self) -> str:
        return f"{self.row} eps {self.epsilon:g} lr {self.lr:g} clip {self.clip_norm:g}"


METHODS = {
    "plain": {"method": "plain"},
    "dpsgd": {"method": "dpsgd"},
    "spectral-dp": {"method": "spectral_dp", "claim": "paper"},
    "gredp-claimed": {"method": "gredp", "claim": "paper"},
    "gredp-padded": {"method": "gredp", "claim": "paper", "grid": "padded"},
    "gredp-each-sample": {"method": "gredp", "claim": "paper", "per_sample_noise": True},
}
SHAPE = (
    Figure("plain", 0, 0.001, 1.0, 98.72),
    Figure("gredp-claimed", 2.0, 0.001, 1.0, 96.73),
    Figure("gredp-claimed", 2.0, 0.01, 1.0, 96.66),
    Figure("gredp-claimed", 2.0, 0.1, 1.0, 80.18),
    Figure("gredp-claimed", 2.0, 0.01, 0.1, 96.40),
)
HEADLINES = (
    Figure("plain", 0, 0.01, 1.0, 98.72),
    Figure("dpsgd", 1.0, 0.01, 1.0, 92.7),
    Figure("spectral-dp", 1.0, 0.01, 1.0, 95.3),
    Figure("gredp-claimed", 1.0, 0.01, 1.0, 96.5),
    Figure("gredp-claimed", 0.5, 0.01, 1.0, 95.68),
)
#: Algorithm 2 as it is printed
LITERAL = (
    Figure("gredp-padded", 2.0, 0.001, 1.0, 96.73),
    Figure("gredp-each-sample", 2.0, 0.001, 1.0, 96.73),
)
BASE = Reading()
READINGS = (
    BASE,
    replace(BASE, activation="tanh"),
    replace(BASE, optimizer="sgd"),
    replace(BASE, second_width=6),
    replace(BASE, scaling="[0, 1]"),
    replace(BASE, initialization="xavier"),
    replace(BASE, weight_decay=1e-4),
    replace(BASE, activation="tanh", initialization="xavier"),
)


def run(reading: Reading, figure: Figure, epochs: int, seed: int, data_dir: str | None) -> dict[str, object]:
    data = load("mnist", data_dir)
    shift, scale = SCALINGS[reading.scaling]
    prepare = lambda x: (x - shift) / scale  # noqa: E731
    torch.manual_seed(seed)
    spectral = figure.row not in ("plain", "dpsgd")
    model = reading.build(8 if spectral else 0)
    loader = DataLoader(TensorDataset(prepare(data.x_train), data.y_train), batch_size=BATCH)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=reading.optimize(model, figure.lr),
        data_loader=loader,
        target_epsilon=figure.epsilon or 1.0,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=figure.clip_norm,
        **METHODS[figure.row],
    )
    started = time.process_time()
    curve = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        share, _ = evaluate(model, data.x_test, data.y_test, prepare)
        curve.append(round(100 * share, 2))
    return {
        "reading": asdict(reading),
        "figure": asdict(figure),
        "epochs": epochs,
        "seed": seed,
        "accuracy_by_epoch": curve,
        "accuracy": curve[-1],
        "guarantee": engine.guarantee(DELTA).to_json(),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=OUT)
    told = parser.parse_args()
    cells = json.loads(told.out.read_text())["cells"] if told.out.exists() else {}
    for reading in READINGS:
        for figure in (*SHAPE, *HEADLINES, *LITERAL) if reading == BASE else SHAPE:
            key = f"{reading.name()} | {figure.name()} | {told.epochs} epochs | seed {told.seed}"
            if key not in cells:
                cells[key] = run(reading, figure, told.epochs, told.seed, told.data_dir)
                save(told.out, {**header(), "command": "python benchmarks/paper_readings.py", "cells": cells})
                print(key, cells[key]["accuracy"], "paper", figure.paper, flush=True)


if __name__ == "__main__":
    main()
