"""Block-circulant layers with an eighth of a dense layer's weights, with noise shaped by frequency."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import BlockCirculantLinear, PrivacyEngine
from gredp.app.data import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--block", type=int, default=8)
arguments = parser.parse_args()

data = load("digits")
model = nn.Sequential(
    nn.Flatten(),
    BlockCirculantLinear(64, 128, block=arguments.block),
    nn.Tanh(),
    BlockCirculantLinear(128, 64, block=arguments.block),
    nn.Tanh(),
    nn.Linear(64, 10),
)
dense = 64 * 128 + 128 * 64 + 64 * 10 + 128 + 64 + 10
weights = sum(p.numel() for p in model.parameters())
print(f"{weights:,} weights; dense layers would have {dense:,}")

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    data_loader=DataLoader(TensorDataset(2 * data.x_train - 1, data.y_train), batch_size=192),
    method="gredp",
    noise="shaped",
    target_epsilon=2.0,
    target_delta=1e-5,
    epochs=arguments.epochs,
    max_grad_norm=1.0,
)
for _ in range(arguments.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

model.eval()
accuracy = (model(2 * data.x_test - 1).argmax(1) == data.y_test).float().mean().item()
print(f"test accuracy {accuracy:.3f} at proven ε = {engine.get_epsilon(1e-5):.3f}")
