"""Train one model with several processes:  torchrun --nproc-per-node=2 examples/two_processes.py

Each process reads its share of every batch. The first one charges the ledger, draws the noise and broadcasts
the noisy gradient. ε is that of one process.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()

dist.init_process_group("gloo")
data = load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
engine = PrivacyEngine()
# All records and the whole batch size in every process, no DistributedSampler, no DistributedDataParallel.
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    data_loader=DataLoader(TensorDataset(2 * data.x_train - 1, data.y_train), batch_size=192),
    noise_multiplier=2.0,
    max_grad_norm=1.0,
)
for _ in range(arguments.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

if dist.get_rank() == 0:
    model.eval()
    accuracy = (model(2 * data.x_test - 1).argmax(1) == data.y_test).float().mean().item()
    spent = engine.get_epsilon(1e-5)
    print(f"{dist.get_world_size()} processes: test accuracy {accuracy:.3f} at proven ε = {spent:.3f}")
dist.destroy_process_group()
