"""How much noise do the paper's figures allow? See results/paper_noise.json.

python benchmarks/paper_noise.py lenet5 --epochs 8 --lr 0.01     # finished cells are kept and skipped
python benchmarks/paper_noise.py resnet20 --epochs 8 --fractions 0 1
python benchmarks/paper_noise.py resnet20 --epochs 8 --fractions 1 --clip-norm 500

A network is trained with Adam at six noise scales, from none to the one that the paper's claim gives for its
headline ε. One of them is σ/√B: what public code of Spectral-DP effectively adds (docs/paper.md). For each
the accuracy on the test set, once, after the last epoch, and the proven ε: where the accuracies cross the
paper's figure, the ε that its figure needs can be read off. Nothing is tuned.

With another `--clip-norm` the noise stays what it is at norm 1: what changes is how much of a record's
gradient is left, and ε. A norm of 500, the batch size, is a norm of 1 on gradients of the mean loss.
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
from gredp.app.models.precision import outputs_in
from gredp.budget import Sampling, noise_multiplier
from gredp.paper.cells import LARGE
from gredp.paper.paper import FROM_SCRATCH, HEADLINE
from gredp.sampling import BatchMemoryManager
from gredp.storage.record import header, save

OUT = Path(__file__).parent.parent / "results" / "paper_noise.json"
BATCH, DELTA, BLOCK = 500, 1e-5, 8
FRACTIONS = (0.0, 1 / math.sqrt(BATCH), 0.1, 0.25, 0.5, 1.0)
DATA = {"lenet5": "mnist"}


def run(given: argparse.Namespace, fraction: float) -> dict:
    network, epochs = given.network, given.epochs
    data = load(DATA.get(network, "cifar10"), given.data_dir)
    epsilon = HEADLINE[network]
    sampling = Sampling.of_epochs(len(data.y_train), BATCH, epochs)
    claimed = noise_multiplier(epsilon, DELTA, sampling, claim="paper")
    torch.manual_seed(given.seed)
    model = build(network, data.input_shape, data.classes, BLOCK)
    half = network in LARGE and torch.cpu._is_avx512_bf16_supported()
    engine, precision = PrivacyEngine(), "bf16" if half else "single"
    model, optimizer, loader = engine.make_private(
        module=model,
        # Of a sum: gradients in half precision must not be divided before they are rounded.
        optimizer=torch.optim.Adam(model.parameters(), given.lr, eps=1e-8 * BATCH),
        data_loader=DataLoader(TensorDataset(centered(data.x_train), data.y_train), batch_size=BATCH),
        noise_multiplier=fraction * claimed / given.clip_norm,
        max_grad_norm=given.clip_norm,
        method="gredp",
        claim="paper",
        loss_reduction="sum",
        precision=precision,
    )
    began, curve = time.process_time(), []
    for _ in range(epochs):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=128, optimizer=optimizer
        ) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                F.cross_entropy(outputs_in(precision, model, x), y, reduction="sum").backward()
                optimizer.step()
        share, _ = evaluate(model, data.x_test, data.y_test, centered)
        curve.append(round(100 * share, 2))
    return {
        "network": network,
        "epochs": epochs,
        "seed": given.seed,
        "lr": given.lr,
        "clip_norm": given.clip_norm,
        "precision": precision,
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
    parser.add_argument("--fractions", type=float, nargs="*", default=FRACTIONS, help="of the claimed σ")
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    norm = f" | norm {given.clip_norm:g}" if given.clip_norm != 1 else ""
    for fraction in given.fractions:
        cells = json.loads(given.out.read_text())["cells"] if given.out.exists() else {}
        settings = f"{given.epochs} epochs | lr {given.lr:g}{norm} | {fraction:.4f} σ | seed {given.seed}"
        key = f"{given.network} | {settings}"
        if key not in cells:
            cells[key] = run(given, fraction)
            save(given.out, {**header(), "command": "python benchmarks/paper_noise.py", "cells": cells})
            spent = cells[key]["guarantee"]["proven_epsilon"]
            print(key, cells[key]["accuracy"], "proven ε", spent, "paper", cells[key]["paper"], flush=True)


if __name__ == "__main__":
    main()
