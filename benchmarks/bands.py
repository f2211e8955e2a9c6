"""Where noise correlated over steps pays: error of prefix sums, and accuracy on the embedded digits.

python benchmarks/bands.py --out results/bands.json
"""

import json
import math
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scipy.signal import lfilter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load
from gredp.app.settings import TrainSettings
from gredp.app.train import train
from gredp.mechanisms.banded import coefficients
from gredp.privacy.calibrate import calibrate
from gredp.storage.record import header, save

BANDS, EPSILONS, EPOCHS, SEEDS = (1, 2, 4, 8), (2.0, 8.0), (4, 12), (0, 1, 2, 3)
BATCH, DELTA, MOMENTUM = 128, 1e-5, 0.9
COORDINATES = 4000


def iterate_error(bands: int, steps: int, momentum: float = 0.0) -> float:
    """Root-mean-square noise on a coordinate of the iterates of SGD with momentum, for ξ of deviation 1.

    Iterates are the prefix sums of the momentum's sums of noise n = C⁻¹ξ, all of them Toeplitz, so that one
    impulse response tells all: √(Σ_k (T − k) e_k² / T). Learning rate 1; no curvature, which would forget.
    """
    response = [1.0] + [0.0] * (steps - 1)
    for divisor in (coefficients(bands), (1.0, -1.0), (1.0, -momentum)):
        response = lfilter([1.0], divisor, response)
    return math.sqrt(sum((steps - k) * e * e for k, e in enumerate(response)) / steps)


def measured_error(bands: int, steps: int, z: float, rate: float) -> float:
    """Root-mean-square of the prefix sums of noise that the engine releases, over coordinates and steps."""
    model = nn.Linear(1, COORDINATES, bias=False)
    data = TensorDataset(torch.zeros(round(1 / rate), 1))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=z,
        max_grad_norm=1.0,
        sample_rate=rate,
        correlation_bands=bands,
    )
    total, squares = torch.zeros(COORDINATES, 1), 0.0
    while engine.ledger.steps < steps:
        for (x,) in loader:
            if engine.ledger.steps == steps:
                break
            optimizer.zero_grad()
            (model(x).sum() * 0).backward()
            optimizer.step()
            total += model.weight.grad
            squares += float(total.square().mean())
    return math.sqrt(squares / steps)


def row(bands: int, epsilon: float, epochs: int, records: int) -> dict[str, Any]:
    rate, steps = BATCH / records, epochs * math.ceil(records / BATCH)
    z = calibrate(epsilon, DELTA, bands * rate, -(-steps // bands))
    accuracies = []
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            settings = TrainSettings(
                epsilon=epsilon, epochs=epochs, batch_size=BATCH, momentum=MOMENTUM, seed=seed,
                correlation_bands=bands, out=f"{folder}/run",
            )  # fmt: skip
            run = train(settings).record
            assert run["guarantee"]["proven_epsilon"] <= epsilon
            accuracies.append(run["test_accuracy"])
    return {
        "bands": bands,
        "epsilon": epsilon,
        "epochs": epochs,
        "steps": steps,
        "sample_rate": rate,
        "noise_multiplier": z,
        "prefix_error": z * iterate_error(bands, steps),
        "prefix_error_measured": measured_error(bands, steps, z, rate),
        "momentum_error": z * iterate_error(bands, steps, MOMENTUM),
        "test_accuracies": accuracies,
        "test_accuracy": statistics.mean(accuracies),
        "standard_error": statistics.stdev(accuracies) / math.sqrt(len(accuracies)),
    }


def main() -> None:
    """Row by row; rows that the file holds already are kept, so that a long run may be interrupted."""
    torch.set_num_threads(1)
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else None
    kept = json.loads(out.read_text()) if out is not None and out.exists() else {"rows": [], "cpu_seconds": 0}
    started, records = time.process_time() - kept["cpu_seconds"], len(load("digits").x_train)
    settings = {"dataset": "digits", "method": "gredp", "batch_size": BATCH, "delta": DELTA}
    settings |= {"momentum": MOMENTUM, "records": records}
    rows = kept["rows"]
    for epochs, epsilon in product(EPOCHS, EPSILONS):
        for bands in BANDS:
            if any((r["bands"], r["epsilon"], r["epochs"]) == (bands, epsilon, epochs) for r in rows):
                continue
            rows.append(row(bands, epsilon, epochs, records))
            print(rows[-1], flush=True)
            facts = {"command": "python benchmarks/bands.py", "seeds": list(SEEDS), "threads": 1}
            facts["cpu_seconds"] = round(time.process_time() - started)
            if out is not None:
                save(
                    out,
                    {**header(), **facts, "settings": settings, "auto": kept.get("auto", []), "rows": rows},
                )


if __name__ == "__main__":
    main()
