"""What the patch features are made of: each ingredient left out or changed, on held-out records of CIFAR-10.

python benchmarks/features.py --out results/features.json [--learned runs/learned.safetensors]

A smaller copy of the recipe `cifar10`: RECORDS training records, as many held out, a linear classifier from 0
by as many full steps, with noise in proportion to the records, so that it weighs as it does among 50,000. The
runs stand for private ones and are none themselves: no ε is claimed for RECORDS records. The same noise meets
every variant, and differences are taken record by record. The test set is not read.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learned_features import learned
from torch import Tensor

import gredp.app.features.patches as patches
from gredp.app.data import load
from gredp.app.features.normalize import root
from gredp.app.features.random_images import random_images
from gredp.app.features.scattering import Scattering, mirrored
from gredp.app.recipe import Recipe
from gredp.privacy.calibrate import calibrate
from gredp.storage.record import header, save

RECORDS, ALL, SIDE = 8000, 50_000, 32
EPSILON, DELTA, SEEDS = 2.0, 1e-5, 3
RECIPE = Recipe("cifar10").at(EPSILON)
#: of the recipe's 14,128 features of mean square 1
LENGTH = math.sqrt(14_128)
#: share of the budget that a private covariance of patches would get
SHARE = 0.02
COMMAND = "python benchmarks/features.py --out results/features.json --learned runs/learned.safetensors"

#: images → `[b, C, cells]`
Part = Callable[[Tensor], Tensor]


def averaged(extract: Part) -> Part:
    """Over an image and its mirror image; a function of maps `[b, C, h, w]`."""
    return lambda x: (extract(x) + extract(x.flip(-1)).flip(-1)) / 2


def likeness() -> Part:
    compare = patches.Likeness(3, SIDE, SIDE).float()
    return averaged(compare)


def waves(x: Tensor) -> Tensor:
    found = Scattering()(x)
    found = (found + found.flip(-1)[:, mirrored(found.shape[1])]) / 2
    rows = patches.cells(found.shape[2], patches.SCATTERING_GRID).to(x)
    return rows @ found @ rows.mT


def products() -> Part:
    """Order two: products of the first 24 whitened directions of a patch, on the same grid."""
    whitening, _ = patches.bank(3)
    kernels = whitening.view(-1, 3, patches.SIDE, patches.SIDE).float()[-24:]
    pairs = torch.triu_indices(24, 24)
    rows = patches.cells(SIDE - patches.SIDE + 1, patches.GRID).float()

    def extract(x: Tensor) -> Tensor:
        z = F.conv2d(x, kernels)
        z = z / (z.square().sum(1, keepdim=True) + patches.FLAT).sqrt()
        return rows @ (z[:, pairs[0]] * z[:, pairs[1]]) @ rows.mT

    return averaged(extract)


def network(path: Path | None) -> Part:
    """Both blocks of the small network, on a 4×4 grid."""
    model = learned(path)

    def extract(x: Tensor) -> Tensor:
        fine, coarse = model(x)
        return torch.cat([F.avg_pool2d(fine, 2), coarse], 1)

    return averaged(extract)


@cache
def images() -> tuple[Tensor, Tensor, Tensor]:
    """Records, classes, and the drawn images that channels are whitened by."""
    data = load("cifar10")
    which = torch.cat([torch.arange(RECORDS), torch.arange(ALL - RECORDS, ALL)])
    side = SIDE * 3 // 2
    cut = slice((side - SIDE) // 2, (side + SIDE) // 2)
    drawn = random_images(patches.DRAWN, 3, side, patches.SEED)[:, :, cut, cut]
    return data.x_train[which], data.y_train[which], drawn


@torch.no_grad()
def computed(part: Part) -> tuple[Tensor, Tensor]:
    """Signed roots of the records' and of the drawn images' features, `[n, C, cells]`."""
    x, _, drawn = images()
    of_records, of_drawn = (
        torch.cat([root(part(few)).flatten(2) for few in some.split(patches.CHUNK)]) for some in (x, drawn)
    )
    return of_records, of_drawn


def over_the_image(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return found[0].mean(2, keepdim=True), found[1].mean(2, keepdim=True)


def whitened(found: tuple[Tensor, Tensor], whiten: bool = True) -> Tensor:
    records, drawn = found
    mean, factor = patches.whitening(drawn.double())
    if not whiten:  # channels standardized by the drawn images
        factor = torch.diag(1 / drawn.double().transpose(0, 1).flatten(1).std(1).clamp(min=patches.SMALLEST))
    return patches.whitened(records, mean.float(), factor.float())


def accuracies(x: Tensor, **changed: Any) -> Tensor:
    """`[SEEDS, RECORDS]`: which held-out records a classifier gets right."""
    y = images()[1]
    steps, lr = changed.get("steps", RECIPE.epochs), changed.get("lr", RECIPE.lr)
    clip, momentum = changed.get("clip_norm", RECIPE.clip_norm), changed.get("momentum", RECIPE.momentum)
    heads = changed.get("heads", 1)  # classifiers from one budget, whose weights are averaged
    noise = calibrate(EPSILON, DELTA, 1.0, steps * heads) * clip / ALL
    x = x * (LENGTH / x.norm(dim=1, keepdim=True))  # the rate was chosen for this length
    x, held = x[:RECORDS], x[RECORDS:]
    labels = F.one_hot(y[:RECORDS], 10)
    right = []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        average = torch.zeros(10, x.shape[1])
        for _ in range(heads):
            weights = velocity = torch.zeros(10, x.shape[1])
            for _ in range(steps):
                residual = (x @ weights.mT).softmax(1) - labels
                factors = (clip / (residual.norm(dim=1) * LENGTH).clamp(min=1e-12)).clamp(max=1)
                gradient = (residual * factors[:, None]).mT @ x / RECORDS
                velocity = (
                    momentum * velocity + gradient + noise * torch.randn(weights.shape, generator=generator)
                )
                weights = weights - lr * velocity
            average += weights / heads
        right.append((held @ average.mT).argmax(1) == y[RECORDS:])
    return torch.stack(right).double()


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """The package's constants changed for a while; what was computed with them is forgotten."""
    before = {name: getattr(patches, name) for name in values}
    try:
        for name, value in values.items():
            setattr(patches, name, value)
        if "bank" not in values:
            patches.bank.cache_clear()
        yield
    finally:
        for name, value in before.items():
            setattr(patches, name, value)
        patches.bank.cache_clear()


def bank_of_records(noisy: bool) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Whitening and filters from the covariance of the records' patches, exact or released privately.

    A record adds the mean of x_p x_pᵀ over its patches of norm 1, of Frobenius norm at most 1, and the sum of
    all gets Gaussian noise on its upper triangle: one query at a SHARE of the budget.
    """
    total = torch.zeros(27 * 4, 27 * 4, dtype=torch.float64)
    for few in images()[0][:RECORDS].split(500):
        rows = F.unfold(few, patches.SIDE).double().mT
        rows = F.normalize(rows - rows.mean(2, keepdim=True), dim=2)
        total += torch.einsum("bpi,bpj->ij", rows, rows) / rows.shape[1]
    if noisy:
        multiplier = calibrate(EPSILON, DELTA, 1.0, 1) / math.sqrt(SHARE)
        draw = torch.randn(total.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        upper = draw.triu(1) / math.sqrt(2)  # each off-diagonal entry is there twice
        total += (upper + upper.mT + draw.diag().diag()) * multiplier * RECORDS / ALL
    covariance = total / total.trace() * len(total)
    variances, directions = torch.linalg.eigh(covariance)
    variances = variances.clamp(min=0)
    kept = slice(-patches.DIRECTIONS, None)
    whitening = (directions / (variances + patches.PATCH_RIDGE).sqrt())[:, kept].mT
    generator = torch.Generator().manual_seed(patches.SEED)
    mix = torch.randn(patches.FILTERS, len(variances), generator=generator, dtype=torch.float64)
    chosen = mix * variances.sqrt() @ directions.mT @ whitening.mT
    bank = whitening - whitening.mean(1, keepdim=True), chosen / chosen.norm(dim=1, keepdim=True)
    return lambda channels: bank


#: changes of the comparison with patches
CHANGED: dict[str, Callable[[], dict[str, Any]]] = {
    "256 filters instead of 512": lambda: {"FILTERS": 256},
    "1,024 filters": lambda: {"FILTERS": 1024},
    "patches of 4×4 instead of 6×6": lambda: {"SIDE": 4, "DIRECTIONS": 47},
    "patches of 8×8": lambda: {"SIDE": 8},
    "a 2×2 grid instead of 3×3": lambda: {"GRID": 2},
    "a 4×4 grid": lambda: {"GRID": 4},
    "threshold 0.08 instead of 0.15": lambda: {"THRESHOLD": 0.08},
    "threshold 0.25": lambda: {"THRESHOLD": 0.25},
    "covariance of the records' patches, not private": lambda: {"bank": bank_of_records(False)},
    f"the same, released with {SHARE:.0%} of the budget": lambda: {"bank": bank_of_records(True)},
}
#: changes of the classifier
CLASSIFIERS: dict[str, dict[str, float | int]] = {
    "12 steps instead of 24": {"steps": 12, "lr": 2 * RECIPE.lr},
    "48 steps": {"steps": 48, "lr": RECIPE.lr / 2},
    "momentum 0.9 instead of 0.7": {"momentum": 0.9, "lr": RECIPE.lr / 3},
    "gradients clipped at 60 instead of 10": {"clip_norm": 60.0, "lr": RECIPE.lr / 5},
    "gradients clipped at 2": {"clip_norm": 2.0, "lr": RECIPE.lr * 5},
    "the mean of 3 classifiers from one budget": {"heads": 3},
}


def variants(weights: Path | None) -> Iterator[tuple[str, str, Tensor]]:
    """What kind of change, its name, and which held-out records are right."""
    fine, coarse = computed(likeness()), computed(waves)
    whole = over_the_image(fine)
    base = [whitened(part) for part in (fine, whole, coarse)]

    def joined(*parts: Tensor) -> Tensor:
        return patches.joined(list(parts)).flatten(1)

    yield "", "as it is", accuracies(joined(*base))
    yield "parts", "without scattering", accuracies(joined(*base[:2]))
    yield "parts", "without patches", accuracies(base[2])
    yield "parts", "without patches over the whole image", accuracies(joined(base[0], base[2]))
    plain = [whitened(part, whiten=False) for part in (fine, whole, coarse)]
    yield "parts", "channels standardized, not whitened", accuracies(joined(*plain))
    yield (
        "parts",
        "products within a patch beside them",
        accuracies(joined(*base, whitened(computed(products())))),
    )
    for name, settings in CLASSIFIERS.items():
        yield "classifier", name, accuracies(joined(*base), **settings)
    for what, place in (("patches", 0), ("scattering", 2)):
        longer = [1.5 * part if i == place else part for i, part in enumerate(base)]
        yield "classifier", f"{what} half again as long: less noise on them", accuracies(joined(*longer))
    for name, change in CHANGED.items():
        with constants(**change()):
            found = computed(likeness())
        here = whitened(found), whitened(over_the_image(found)), base[2]
        yield "patches", name, accuracies(joined(*here))
    untrained = whitened(computed(network(None)))
    yield "learned", "an untrained network beside them", accuracies(joined(*base, untrained))
    if weights is not None:
        taught = whitened(computed(network(weights)))
        yield "learned", "a network taught by drawn images beside them", accuracies(joined(*base, taught))
        yield "learned", "that network alone", accuracies(taught)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learned", type=Path, help="weights from learned_features.py")
    told = parser.parse_args()
    rows: list[dict[str, Any]] = []
    base, begun = torch.zeros(()), time.monotonic()
    for kind, name, right in variants(told.learned):
        base = right if not rows else base
        gain = (right - base).mean(0)
        row = {"kind": kind, "changed": name, "accuracy": right.mean().item()}
        row |= {"difference": gain.mean().item(), "error": gain.std().item() / math.sqrt(len(gain))}
        rows.append(row | {"minutes": round((time.monotonic() - begun) / 60, 1)})
        print(rows[-1], flush=True)
        facts = {"records": RECORDS, "noise_as_among": ALL, "epsilon": EPSILON, "seeds": SEEDS, "rows": rows}
        command = (
            "python benchmarks/features.py --out results/features.json --learned runs/learned.safetensors"
        )
        save(told.out, header() | {"command": command} | facts)


if __name__ == "__main__":
    main()
