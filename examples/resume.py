"""Your own loop, safe to kill: start it again and it resumes, with every charge kept."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", type=Path, default=Path("runs/resume"))
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--die-in-epoch", type=int, help="to see it: ends as if killed, in the midst of an epoch")
arguments = parser.parse_args()

data = load("digits")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    data_loader=DataLoader(TensorDataset(2 * data.x_train - 1, data.y_train), batch_size=192),
    noise_multiplier=2.0,
    max_grad_norm=1.0,
)
steps = arguments.epochs * len(loader)
if arguments.folder.exists():
    engine.load(arguments.folder)
    print(f"resumes after {engine.ledger.steps} of {steps} charged steps")
else:
    engine.save(arguments.folder)  # from now on every step is charged on disk before its noise is drawn

# The ledger alone says how far the run is: steps that a crash lost are spent and not repeated.
while engine.ledger.steps < steps:
    for i, (x, y) in enumerate(loader):
        if engine.ledger.steps == steps:
            break
        if arguments.die_in_epoch == engine.ledger.steps // len(loader) and i == len(loader) // 2:
            os._exit(1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.save(arguments.folder)

model.eval()
accuracy = (model(2 * data.x_test - 1).argmax(1) == data.y_test).float().mean().item()
print(f"test accuracy {accuracy:.3f} after {steps} steps at proven ε = {engine.get_epsilon(1e-5):.3f}")
