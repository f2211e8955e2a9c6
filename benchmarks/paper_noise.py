"""How much noise do the paper's figures allow? See results/paper_noise.json.

python benchmarks/paper_noise.py lenet5 --epochs 8     # finished cells are kept and skipped
python benchmarks/paper_noise.py model3 --epochs 5

A network is trained with Adam at six noise scales, from none to the one that the paper's claim gives for its
headline ε. One of them is σ/√(2B): what public code of Spectral-DP effectively adds (docs/paper.md). For each
the accuracy on the test set, once, after the last epoch, and the proven ε: where the accuracies cross the
paper's figure, the ε that its figure needs can be read off. Nothing is tuned.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load
from gredp.app.dataset import centered
from gredp.app.evaluate import evaluate
from gredp.app.models import build
from gredp.budget import Sampling, noise_multiplier
from gredp.paper.cells import LARGE
from gredp.paper.paper import FROM_SCRATCH, HEADLINE
from gredp.sampling import BatchMemoryManager
from gredp.storage.record import header, save

OUT = Path(__file__).parent.parent / "results" / "paper_noise.json"
BATCH, DELTA, BLOCK = 500, 1e-5, 8
FRACTIONS = (0.0, 1 / math.sqrt(2 * BATCH), 0.1, 0.25, 0.5, 1.0)
DATA = {"lenet5": "mnist"}


def run(network: str, epochs: int, fraction: float, lr: float, seed: int, data_dir: str | None) -> dict:
    data = load(DATA.get(network, "cifar10"), data_dir)
    epsilon = HEADLINE[network]
    sampling = Sampling.of_epochs(len(data.y_train), BATCH, epochs)
    claimed = noise_multiplier(epsilon, DELTA, sampling, claim="paper")
    torch.manual_seed(seed)
    model = build(network, data.input_shape, data.classes, BLOCK)
    engine, half = PrivacyEngine(), network in LARGE
    model, optimizer, loader = engine.make_private(
        module=model,
        # Of a sum: gradients in half precision must not be divided before they are rounded.
        optimizer=torch.optim.Adam(model.parameters(), lr, eps=1e-8 * BATCH),
        data_loader=DataLoader(TensorDataset(centered(data.x_train), data.y_train), batch_size=BATCH),
        noise_multiplier=fraction * claimed,
        max_grad_norm=1.0,
        method="gredp",
        claim="paper",
        loss_reduction="sum",
        precision="bf16" if half else "single",
    )
    began, curve = time.process_time(), []
    for _ in range(epochs):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=128, optimizer=optimizer
        ) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    outputs = model(x)
                F.cross_entropy(outputs.float(), y, reduction="sum").backward()
                optimizer.step()
        share, _ = evaluate(model, data.x_test, data.y_test, centered)
        curve.append(round(100 * share, 2))
    return {
        "network": network,
        "epochs": epochs,
        "seed": seed,
        "lr": lr,
        "precision": "bf16" if half else "single",
        "fraction": fraction,
        "claimed_sigma": claimed,
        "paper": FROM_SCRATCH[network]["gredp-claimed"][epsilon],
        "accuracy_by_epoch": curve,
        "accuracy": curve[-1],
        "guarantee": engine.guarantee(DELTA).to_json(),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("network", choices=HEADLINE)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    for fraction in FRACTIONS:
        cells = json.loads(given.out.read_text())["cells"] if given.out.exists() else {}
        settings = f"{given.epochs} epochs | lr {given.lr:g} | {fraction:.4f} σ | seed {given.seed}"
        key = f"{given.network} | {settings}"
        if key not in cells:
            cells[key] = run(given.network, given.epochs, fraction, given.lr, given.seed, given.data_dir)
            save(given.out, {**header(), "command": "python benchmarks/paper_noise.py", "cells": cells})
            spent = cells[key]["guarantee"]["proven_epsilon"]
            print(key, cells[key]["accuracy"], "proven ε", spent, "paper", cells[key]["paper"], flush=True)


if __name__ == "__main__":
    main()
