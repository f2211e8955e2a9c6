"""Features learned from images that we draw ourselves: no photograph, no private record.

python benchmarks/learned_features.py --out runs/learned.safetensors    # about 20 minutes of one core

A small network learns to find the other view of an image among those of a batch (Baradad et al., "Learning to
see by looking at noise", 2021; privately: Tang et al., "Differentially private image classification by
learning priors from random processes", 2023). `features.py --learned` compares what it gives with the fixed
features of the package.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gredp.app.features.random_images import random_images

#: drawn images and their side; pixels on a side of a view
IMAGES, SIDE, SEEN = 6144, 48, 32
BATCH, TEMPERATURE, PEAK_LR = 256, 0.2, 0.002


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; half the side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(x)))


class SmallNetwork(nn.Module):
    """`[b, 3, 32, 32]` in [0, 1] → `[b, 96, 8, 8]` and `[b, 256, 4, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 48, 5, 2, 2, bias=False), nn.BatchNorm2d(48)
        self.fine, self.coarse = Block(48, 96), Block(96, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x - x.mean((2, 3), keepdim=True)
        fine = self.fine(F.relu(self.norm(self.stem(4 * x))))
        return fine, self.coarse(fine)


def learned(path: Path | None) -> SmallNetwork:
    """With the weights of a file, or as it is before training."""
    torch.manual_seed(0)
    network = SmallNetwork()
    if path is not None:
        network.load_state_dict(load_file(path))
    return network.eval()


def views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random views `[b, 3, SEEN, SEEN]` in [0, 1]: crops of 35 to 100 %, mirrored, in other colors."""
    count = len(images)
    scale = (0.35 + 0.65 * torch.rand(count, generator=generator)).sqrt()
    mirror = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    shift = (2 * torch.rand(2, count, generator=generator) - 1) * (1 - scale)
    zero = torch.zeros(count)
    affine = torch.stack([scale * mirror, zero, shift[0], zero, scale, shift[1]], 1).view(count, 2, 3)
    grid = F.affine_grid(affine, [count, 3, SEEN, SEEN], align_corners=False)
    x = F.grid_sample(images, grid, align_corners=False, padding_mode="reflection")
    keep = 0.6 + 0.8 * torch.rand(count, 1, 1, 1, generator=generator)
    gray = torch.rand(count, 1, 1, 1, generator=generator) < 0.2
    x = torch.lerp(x.mean(1, keepdim=True), x, torch.where(gray, 0.0, keep))
    gain = torch.exp(0.25 * torch.randn(count, 1, 1, 1, generator=generator))
    middle = x.mean((1, 2, 3), keepdim=True)
    x = (x - middle) * gain + middle + 0.1 * torch.randn(count, 3, 1, 1, generator=generator)
    return x.clamp(0, 1)


def contrastive_loss(z: Tensor) -> Tensor:
    """Of two views of each image, `[2b, d]`: the other view is to be the nearest of all."""
    similar = (z @ z.mT / TEMPERATURE).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    half = len(z) // 2
    return F.cross_entropy(similar, torch.cat([torch.arange(half, 2 * half), torch.arange(half)]))


def train(steps: int) -> SmallNetwork:
    images, generator = random_images(IMAGES, 3, SIDE, 1), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    network = SmallNetwork()
    head = nn.Sequential(nn.Linear(256, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128))
    weights = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.05)
    for step in range(1, steps + 1):
        chosen = images[torch.randint(len(images), (BATCH,), generator=generator)]
        pairs = torch.cat([views(chosen, generator), views(chosen, generator)])
        with torch.autocast("cpu", torch.bfloat16):
            z = head(network(pairs)[1].mean((2, 3)))
        loss = contrastive_loss(F.normalize(z.float(), dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 50 == 0:
            print(json.dumps({"step": step, "loss": round(loss.item(), 4)}), flush=True)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    told = parser.parse_args()
    told.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in train(told.steps).state_dict().items()}, told.out)


if __name__ == "__main__":
    main()
