"""Compare every method at the same proven ε on the same network, and print the ε the paper would claim.

Single runs differ by chance, so each method runs several times; the output is mean and deviation. The test
set is used once per run and chooses nothing.
"""

import argparse
import statistics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load
from gredp.app.models import build

METHODS = {
    "plain": {"method": "plain"},
    "DP-SGD": {"method": "dpsgd"},
    "Spectral-DP": {"method": "spectral_dp"},
    "GReDP": {"method": "gredp"},
    "GReDP, shaped noise": {"method": "gredp", "noise": "shaped"},
}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--epsilon", type=float, default=2.0)
parser.add_argument("--accountant", choices=["pld", "rdp"], default="pld")
arguments = parser.parse_args()
data = load("digits")


def run(seed: int, **method: str) -> tuple[float, PrivacyEngine]:
    torch.manual_seed(seed)  # for the first weights only; noise and batches are secret
    model = build("lenet-small", data.input_shape, data.classes)
    engine = PrivacyEngine(accountant=arguments.accountant)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(TensorDataset(2 * data.x_train - 1, data.y_train), batch_size=192),
        target_epsilon=arguments.epsilon,
        target_delta=1e-5,
        epochs=arguments.epochs,
        max_grad_norm=1.0,
        **method,
    )
    for _ in range(arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    return (model(2 * data.x_test - 1).argmax(1) == data.y_test).float().mean().item(), engine


for name, method in METHODS.items():
    results = [run(seed, **method) for seed in range(arguments.runs)]
    accuracies = [accuracy for accuracy, _ in results]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    engine = results[0][1]
    claimed = engine.get_claimed_epsilon(1e-5)
    print(
        f"{name:20} test accuracy {statistics.mean(accuracies):.3f} ± {spread:.3f}   "
        f"proven ε = {engine.get_epsilon(1e-5):.3f}   "
        f"the paper's ε = {'none' if claimed is None else f'{claimed:.3f}'}"
    )
