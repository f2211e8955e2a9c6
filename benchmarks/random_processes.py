"""Features learned from images of random processes: no photograph, no private record.

python benchmarks/random_processes.py train --out runs/processes --minutes 70   # resumes
python benchmarks/random_processes.py judge --out runs/processes                # at ε = 2

Images are dead leaves: shapes of power-law sizes that cover each other, filled with colored 1/f noise, waves
or plain colors. A small network learns to find the other view of an image among those of a batch (Baradad et
al., "Learning to see by looking at noise", 2021; privately: Tang et al., "Differentially private image
classification by learning priors from random processes", 2023).
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gredp.app.features.fronts import FRONTS
from gredp.privacy.calibrate import calibrate

#: pixels on a side of an image that is drawn, and of a view of it
DRAWN, SEEN = 48, 32
#: images that are drawn before training, in batches; leaves on each
IMAGES, DRAW, LEAVES = 16_384, 256, 40
BATCH, TEMPERATURE, PEAK_LR, STEPS = 256, 0.2, 0.002, 2000
STEPS_JUDGED = 40


def colored_noise(count: int, size: int, generator: torch.Generator) -> Tensor:
    """`[count, 3, size, size]`, about 0 with deviation 1: 1/f^a noise, a third of it stretched."""
    axis = torch.fft.fftfreq(size)
    exponent = 0.5 + 2.0 * torch.rand(count, 1, 1, generator=generator)
    angle = math.pi * torch.rand(count, 1, 1, generator=generator)
    stretch = torch.where(torch.rand(count, 1, 1, generator=generator) < 0.33, 6.0, 1.0)
    along = axis[:, None] * angle.cos() + axis * angle.sin()
    across = axis * angle.cos() - axis[:, None] * angle.sin()
    gain = (along.square() + (stretch * across).square() + (0.5 / size) ** 2) ** (-exponent / 2)
    white = torch.fft.fft2(torch.randn(count, 3, size, size, generator=generator))
    noise = torch.fft.ifft2(white * gain[:, None]).real
    # Neighboring colors go together, as they do in light.
    mixing = 1.0 + 0.5 * torch.randn(count, 3, 1, generator=generator)
    other = 0.4 * torch.randn(count, 3, 3, generator=generator)
    noise = torch.einsum("nij,njhw->nihw", other, noise) + mixing[..., None] * noise[:, :1]
    return (noise - noise.mean((1, 2, 3), True)) / noise.std((1, 2, 3), keepdim=True)


def waves(count: int, size: int, generator: torch.Generator) -> Tensor:
    """`[count, 3, size, size]`: plane waves, some squared to stripes or crossed to checks."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")

    def wave() -> Tensor:
        turn, phase = 2 * math.pi * torch.rand(2, count, 1, 1, generator=generator)
        length = 2.5 * torch.exp(1.9 * torch.rand(count, 1, 1, generator=generator))
        return torch.sin(2 * math.pi * (x * turn.cos() + y * turn.sin()) / length + phase)

    first, second = wave(), wave()
    kind = torch.rand(count, 1, 1, generator=generator)
    pattern = torch.where(kind < 0.4, first * second, first)
    pattern = torch.where(kind > 0.7, (4 * pattern).tanh(), pattern)
    return pattern[:, None] * (1.0 + 0.5 * torch.randn(count, 3, 1, 1, generator=generator))


def leaf(count: int, y: Tensor, x: Tensor, radius: Tensor, generator: torch.Generator) -> Tensor:
    """`[count, 1, DRAWN, DRAWN]` in [0, 1]: an ellipse, a rectangle or a star-like shape with a soft edge."""
    middle = DRAWN * (1.2 * torch.rand(2, count, 1, 1, generator=generator) - 0.1)
    turn, phase = 2 * math.pi * torch.rand(2, count, 1, 1, generator=generator)
    aspect = torch.exp(0.5 * torch.randn(count, 1, 1, generator=generator))
    a = ((y - middle[0]) * turn.cos() + (x - middle[1]) * turn.sin()) / aspect
    b = ((x - middle[1]) * turn.cos() - (y - middle[0]) * turn.sin()) * aspect
    kind = torch.rand(count, 1, 1, generator=generator)
    points = torch.randint(2, 7, (count, 1, 1), generator=generator)
    wobble = torch.where(kind > 0.6, 0.5 * torch.rand(count, 1, 1, generator=generator), 0.0)
    around = a.square().add(b.square()).sqrt() * (1 + wobble * torch.cos(points * torch.atan2(b, a) + phase))
    distance = torch.where(kind < 0.35, torch.maximum(a.abs(), b.abs()), around)
    return (radius - distance).add(0.5).clamp(0, 1)[:, None]


def draw(count: int, generator: torch.Generator) -> Tensor:
    """`[count, 3, DRAWN, DRAWN]` of uint8."""
    pool = torch.cat([colored_noise(count, DRAWN, generator), waves(count // 4, DRAWN, generator)])
    y, x = torch.meshgrid(torch.arange(DRAWN), torch.arange(DRAWN), indexing="ij")

    def filling() -> Tensor:
        which = torch.randint(len(pool), (count,), generator=generator)
        strength = 0.25 * torch.rand(count, 1, 1, 1, generator=generator).square()
        color = torch.rand(count, 1, 1, 1, generator=generator)
        color = color + 0.12 * torch.randn(count, 3, 1, 1, generator=generator)
        slope = 0.2 * torch.randn(2, count, 1, 1, 1, generator=generator) / DRAWN
        return color + strength * pool[which] + slope[0] * y + slope[1] * x

    image = filling()
    leaves = torch.randint(3, LEAVES, (count, 1, 1), generator=generator)
    for place in range(LEAVES):
        # Radii with density r^-3 between 3 and 24 pixels: the same at every scale.
        u = torch.rand(count, 1, 1, generator=generator)
        radius = (3.0**-2 - u * (3.0**-2 - 24.0**-2)) ** -0.5
        mask = leaf(count, y, x, radius, generator) * (place < leaves)[:, None]
        image = torch.lerp(image, filling(), mask)
    return (255 * image.clamp(0, 1)).round().byte()


def views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random views `[b, 3, SEEN, SEEN]` in [0, 1]: crops of 35 to 100 %, mirrored, in other colors."""
    count = len(images)
    scale = (0.35 + 0.65 * torch.rand(count, generator=generator)).sqrt()
    mirror = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    aspect = torch.exp(0.15 * torch.randn(count, generator=generator))
    wide, high = (scale * aspect).clamp(max=1), (scale / aspect).clamp(max=1)
    shift = (2 * torch.rand(2, count, generator=generator) - 1) * (1 - torch.stack([wide, high]))
    zero = torch.zeros(count)
    affine = torch.stack([wide * mirror, zero, shift[0], zero, high, shift[1]], 1).view(count, 2, 3)
    grid = F.affine_grid(affine, [count, 3, SEEN, SEEN], align_corners=False)
    x = F.grid_sample(images.float() / 255, grid, align_corners=False, padding_mode="reflection")
    grey = x.mean(1, keepdim=True)
    keep = torch.rand(count, 1, 1, 1, generator=generator)
    keep = torch.where(torch.rand(count, 1, 1, 1, generator=generator) < 0.2, 0.0, 0.6 + 0.8 * keep)
    x = torch.lerp(grey, x, keep)
    gain = torch.exp(0.25 * torch.randn(count, 1, 1, 1, generator=generator))
    tint = 0.1 * torch.randn(count, 3, 1, 1, generator=generator)
    middle = x.mean((1, 2, 3), keepdim=True)
    x = (x - middle) * gain + middle + tint + 0.1 * torch.randn(count, 1, 1, 1, generator=generator)
    return x.clamp(0, 1)


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(x)))


class Processes(nn.Module):
    """`[b, 3, 32, 32]` in [0, 1] → `[b, 96, 8, 8]` and `[b, 256, 4, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 48, 5, 2, 2, bias=False), nn.BatchNorm2d(48)
        self.fine, self.coarse = Block(48, 96), Block(96, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x - x.mean((2, 3), keepdim=True)
        fine = self.fine(F.relu(self.norm(self.stem(4 * x))))
        return fine, self.coarse(fine)


class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Processes()
        head = [nn.Linear(256, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)]
        self.head = nn.Sequential(*head)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.network(x)[1].mean((2, 3))).float(), dim=1)


def loss(z: Tensor) -> Tensor:
    """Of two views of each image, `[2b, d]`: the other view is to be the nearest of all."""
    similar = (z @ z.mT / TEMPERATURE).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    half = len(z) // 2
    return F.cross_entropy(similar, torch.cat([torch.arange(half, 2 * half), torch.arange(half)]))


def drawn(path: Path) -> Tensor:
    """The images of all training: drawn once, kept as a file; `[IMAGES, 3, DRAWN, DRAWN]`."""
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        parts = [draw(DRAW, generator).numpy() for _ in range(IMAGES // DRAW)]
        np.save(path, np.concatenate(parts))
    return torch.from_numpy(np.load(path))


def batches(images: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        which = torch.randint(len(images), (BATCH,), generator=generator)
        yield torch.cat([views(images[which], generator), views(images[which], generator)])


@dataclass(frozen=True)
class Settings:
    part: tyro.conf.Positional[Literal["train", "judge"]]
    out: Path
    minutes: float = 70.0
    """train until then; the rate has fallen to 0 after STEPS steps"""
    save_minutes: float = 5.0
    records: int = 50_000
    """judge: training records of CIFAR-10, a fifth of them held out"""


def save(network: nn.Module, path: Path) -> None:
    """In half precision."""
    tensors = network.state_dict()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in halves.items()}, path)


def train(settings: Settings) -> None:
    begun = saved = time.monotonic()
    images = drawn(settings.out / "images.npy")
    torch.manual_seed(0)
    learner = Learner().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not (settings.out / "untrained.safetensors").exists():
        save(learner.network, settings.out / "untrained.safetensors")
    optimizer = torch.optim.AdamW(learner.parameters(), lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))
    checkpoint, step, recent = settings.out / "checkpoint.pt", 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        learner.load_state_dict(state["learner"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for batch in batches(images, torch.Generator().manual_seed(1 + step)):
        rate = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * rate
        with torch.autocast("cpu", torch.bfloat16):
            z = learner(batch.contiguous(memory_format=torch.channels_last))
        value = loss(z)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        step += 1
        recent = value.item() if step == 1 else 0.98 * recent + 0.02 * value.item()
        now = time.monotonic()
        last = step >= STEPS or now - begun > 60 * settings.minutes
        if step % 50 == 0 or last:
            print(
                json.dumps({"step": step, "loss": round(recent, 4), "minutes": round((now - begun) / 60, 1)}),
                flush=True,
            )
        if last or now - saved > 60 * settings.save_minutes:
            state = {"learner": learner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)
            save(learner.network, settings.out / "weights.safetensors")
            saved = now
        if last:
            return


def both(network: Processes, x: Tensor) -> Tensor:
    """`[n, 3, 32, 32]` in [0, 1] → `[n, 352, 4, 4]`: what both blocks give."""
    fine, coarse = network(x)
    return torch.cat([F.avg_pool2d(fine, 2), coarse], 1)


def cifar10(records: int) -> tuple[Tensor, Tensor]:
    """The last `records` training records: images in bytes, classes."""
    with np.load(Path("~/.cache/gredp/data/cifar10.npz").expanduser()) as data:
        x, y = (torch.from_numpy(data[name][-records:]) for name in ("x_train", "y_train"))
    return x.permute(0, 3, 1, 2), y.long()


@torch.no_grad()
def rows(extract: Callable[[Tensor], Tensor], x: Tensor, training: int, mirror: bool = True) -> Tensor:
    """Roots of the features, channels and then records standardized; rows of norm 1, in halves.

    The channels' means and deviations are taken without noise: a private run would spend 2 % on them.
    """
    parts = []
    for part in x.split(256):
        found = extract(part.float() / 255)
        found = (found + extract(part.flip(3).float() / 255)) / 2 if mirror else found
        parts.append((found.sign() * found.abs().sqrt()).half())
    means = torch.stack([part.float().mean((0, 2, 3)) for part in parts[: training // 256]]).mean(0)
    squares = torch.stack([part.float().square().mean((0, 2, 3)) for part in parts[: training // 256]]).mean(
        0
    )
    scale = (squares - means.square()).clamp(min=0.01).sqrt()
    for place, part in enumerate(parts):
        row = ((part.float() - means[:, None, None]) / scale[:, None, None]).flatten(1)
        parts[place] = F.normalize(row - row.mean(1, keepdim=True)).half()
    return torch.cat(parts)


@cache
def multiplier() -> float:
    return calibrate(2.0, 1e-5, 1.0, STEPS_JUDGED)


def private_accuracy(x: Tensor, y: Tensor, training: int, rate: float) -> float:
    """Of a linear classifier at ε = 2: some steps on all records, every gradient brought to norm 1."""
    noise = multiplier() / training
    generator = torch.Generator().manual_seed(0)
    weights = velocity = torch.zeros(10, x.shape[1])
    pairs = list(zip(x[:training].split(4096), y[:training].split(4096)))
    for _ in range(STEPS_JUDGED):
        total = torch.zeros_like(weights)
        for part, classes in pairs:
            residual = (part.float() @ weights.mT).softmax(1) - F.one_hot(classes, 10)
            total += F.normalize(residual).mT @ part.float()
        step = total / training + noise * torch.randn(weights.shape, generator=generator)
        velocity = 0.9 * velocity + step
        weights = weights - rate * velocity
    guesses = torch.cat([(part.float() @ weights.mT).argmax(1) for part in x[training:].split(4096)])
    return (guesses == y[training:]).double().mean().item()


def judge(settings: Settings) -> None:
    """The learned features, those of the untrained network, and both beside the fixed ones."""
    x, y = cifar10(settings.records)
    training = settings.records * 4 // 5 // 256 * 256
    parts = {
        "learned": rows(partial(both, read(settings.out)), x, training),
        "untrained": rows(partial(both, read(settings.out, untrained=True)), x, training),
        "scattering": rows(FRONTS["scattering"](), x, training),
        "patches": rows(FRONTS["patches"](), x, training, mirror=False),
    }
    fixed, found = ("scattering", "patches"), []
    for names in (*((name,) for name in parts), fixed, (*fixed, "untrained"), (*fixed, "learned")):
        features = torch.cat([parts[name] / math.sqrt(len(names)) for name in names], 1)
        accuracies = {rate: private_accuracy(features, y, training, rate) for rate in (60.0, 120.0)}
        row = {"features": names, "numbers": features.shape[1], "held out": max(accuracies.values())}
        found.append(row | {"rates": accuracies})
        print(json.dumps(found[-1]), flush=True)
    facts = {"training": training, "held_out": len(y) - training, "epsilon": 2.0, "delta": 1e-5}
    (settings.out / "random_processes.json").write_text(json.dumps(facts | {"rows": found}, indent=2) + "\n")


def read(folder: Path, untrained: bool = False) -> Processes:
    network = Processes().eval()
    network.load_state_dict(load_file(folder / f"{'untrained' if untrained else 'weights'}.safetensors"))
    return network


def main() -> None:
    settings = tyro.cli(Settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    {"train": train, "judge": judge}[settings.part](settings)


if __name__ == "__main__":
    main()
