"""How much noise shaping saves on real gradients: noise energy against white noise at the same z.

Trains Model-3 on CIFAR-10 with shaped noise for some steps, and at several of them compares

    (Σ n_k/w_k²) · (Σ w_k² e_k) / (n Σ e_k)

with the learned weights w and the true mean energies e of that step's gradients (a measurement on public
data; training itself never sees e), and with the noise that was really drawn.

    python benchmarks/shaped_noise_energy.py --out results/shaped_noise_energy.json
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load
from gredp.app.dataset import centered
from gredp.app.evaluate import evaluate
from gredp.app.models import build
from gredp.gradient.clip import energies
from gredp.gradient.shaping import relative_noise_energy
from gredp.storage.record import header, save


def energy_ratios(optimizer, model, x, y) -> dict[str, float]:
    """Noise energy relative to white noise, from the true energies of `x`; the bound is the best possible."""
    step = optimizer.private_step
    F.cross_entropy(model(x), y).backward()
    spectra = optimizer.capture.take()
    with torch.no_grad():
        e = (
            torch.cat([energies(spectra.gradients[n], v) for n, v in step.block_views.items()], 1)
            .mean(0)
            .double()
        )
    n = step.learned_shape.sizes.double()
    w2 = torch.cat(list(step.squared_weights.values())).double()
    layers = torch.cat([torch.full((v.group_count,), i) for i, v in enumerate(step.block_views.values())])
    n_layer, e_layer = (torch.zeros(len(step.block_views)).double().index_add_(0, layers, t) for t in (n, e))
    white = float(n.sum() * e.sum())
    return {
        "shaped": relative_noise_energy(n, w2, e),
        "best_over_layers": float((n_layer * e_layer).sqrt().sum() ** 2) / white,
        "best_over_frequencies": float((n * e).sqrt().sum() ** 2) / white,
    }


def drawn_ratio(optimizer, model) -> float:
    """Energy of one step's noise, drawn with the weights in force, over (σc)² for each parameter."""
    step = optimizer.private_step
    weights, total, count = step.squared_weights, 0.0, 0
    for name, p in model.named_parameters():
        view = step.block_views[name]
        noise = view.spectrum(torch.randn_like(p)) * view.spread(weights[name].rsqrt())
        total += float(view.real_part(noise).square().sum())
        count += p.numel()
    return total / count


def measure(dataset: str, epsilon: float, epochs: int, batch: int, window: int, data_dir: str | None) -> dict:
    torch.manual_seed(0)
    data = load(dataset, data_dir)
    x, y = centered(data.x_train), data.y_train
    model = build("model3", data.input_shape, data.classes)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
        method="gredp",
        noise="shaped",
        window=window,
    )
    rows, steps = [], 0
    measured = {1, 10, 20, 50, *range(100, 10_000, 100)}
    for _ in range(epochs):
        for a, b in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            steps += 1
            if steps in measured:
                row = energy_ratios(optimizer, model, x[:256], y[:256])
                rows.append({"step": steps, **row, "drawn": drawn_ratio(optimizer, model)})
                print(rows[-1], flush=True)
    return {
        "dataset": dataset,
        "model": "model3",
        "parameters": sum(p.numel() for p in model.parameters()),
        "groups": len(optimizer.private_step.learned_shape.sizes),
        "noise_multiplier": optimizer.noise_multiplier,
        "proven_epsilon": engine.get_epsilon(1e-5),
        "test_accuracy": evaluate(model, centered(data.x_test), data.y_test)[0],
        "energy_relative_to_white": rows,
        "geometric_mean_shaped": math.exp(sum(math.log(r["shaped"]) for r in rows) / len(rows)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(
        arguments.dataset,
        arguments.epsilon,
        arguments.epochs,
        arguments.batch_size,
        arguments.window,
        arguments.data_dir,
    )
    command = (
        f"python benchmarks/shaped_noise_energy.py --dataset {arguments.dataset} --epochs {arguments.epochs}"
        + (f" --window {arguments.window}" if arguments.window else "")
    )
    record = header() | {"command": command, "seed": 0} | result
    save(arguments.out, record)


if __name__ == "__main__":
    main()
