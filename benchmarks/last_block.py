"""The last block of the network taught by drawn images, and a linear classifier on it, trained privately.

First the classifier alone, on the frozen network, for FROZEN of the steps; then the block with it. The
package's engine clips and adds noise; batch normalization keeps the numbers that it has from drawn images.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from learned_features import Block, learned
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gredp.app.features.patches as patches
from gredp import BatchMemoryManager, PrivacyEngine

#: full steps, those of the classifier alone, and records in memory at once
STEPS, FROZEN, PART = 24, 12, 250
#: learning rates of classifier and block, and the norm of a record's gradient
HEAD_LR, BLOCK_LR, CLIP_NORM = 0.32, 0.005, 10.0


class LastBlock(nn.Module):
    """Maps `[b, 96, 8, 8]` → scores: the block, whitened by drawn images, a classifier from 0."""

    mean: Tensor
    factor: Tensor

    def __init__(self, block: Block, drawn: Tensor, classes: int = 10) -> None:
        super().__init__()
        self.block = block.eval()
        with torch.no_grad():
            mean, factor = patches.whitening(block(drawn).flatten(2).double())
        self.register_buffer("mean", mean.float())
        self.register_buffer("factor", factor.float())
        self.head = nn.Linear(len(mean) * 16, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(patches.whitened(self.block(x).flatten(2), self.mean, self.factor))


def last_block(
    weights: Path,
    x: Tensor,
    y: Tensor,
    held: Tensor,
    drawn: Tensor,
    multiplier: float,
    seed: int,
    trained: bool,
) -> Tensor:
    """Predicted classes of held-out images; `multiplier` is the noise's, for the sum over all of `x`."""
    network = learned(weights)
    fine, fine_held, fine_drawn = (maps(network, images) for images in (x, held, drawn))
    model = LastBlock(network.coarse, fine_drawn)
    for stage, steps in ((0, FROZEN), (1, STEPS - FROZEN)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("head" in name or (stage == 1 and trained and "norm" not in name))
        model = copy.deepcopy(model)  # a plain one
        _train(model, fine, y, multiplier, steps, seed + 1000 * stage)
    with torch.no_grad():
        return torch.cat([model(few).argmax(1) for few in fine_held.split(PART)])


@torch.no_grad()
def maps(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([network(few)[0] for few in images.split(PART)])


def _train(model: LastBlock, x: Tensor, y: Tensor, multiplier: float, steps: int, seed: int) -> None:
    """Full steps on all records. The seed makes the figure repeatable; it would void a guarantee."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if ("head" in name) == head], "lr": lr}
        for head, lr in ((True, HEAD_LR), (False, BLOCK_LR))
    ]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=HEAD_LR, momentum=0.7)
    engine = PrivacyEngine(accountant="rdp")
    model.train()
    model.block.eval()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=multiplier,
        max_grad_norm=CLIP_NORM,
        noise_generator=torch.Generator().manual_seed(seed),
    )
    for _ in range(steps):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=PART, optimizer=optimizer
        ) as parts:
            for few, classes in parts:
                optimizer.zero_grad()
                F.cross_entropy(private(few), classes).backward()
                optimizer.step()
