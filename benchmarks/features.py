"""What the patch features are made of: each ingredient left out or changed, on held-out records of CIFAR-10.

python benchmarks/features.py --out results/features.json [--learned runs/learned.safetensors]

A smaller copy of the recipe `cifar10`: RECORDS training records, as many held out, a linear classifier from 0
by as many full steps, with noise in proportion to the records, so that it weighs as it does among 50,000. The
runs stand for private ones and are none themselves: no ε is claimed for RECORDS records. The same noise meets
every variant, and differences are taken record by record. The test set is not read.

A run that was stopped resumes: rows of `--out` are kept, if the recipe as it is scores what it scored there.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from feature_parts import (
    ALL,
    DELTA,
    EPSILON,
    RECORDS,
    SHARE,
    Found,
    bank_of_records,
    beside,
    computed,
    images,
    joined,
    likeness,
    network,
    over_the_image,
    products,
    waves,
    whitened,
)
from last_block import STEPS, last_block
from second_order import Preconditioner, certificate, principal, query_multiplier, released, step_multiplier
from torch import Tensor

import gredp.app.features.patches as patches
from gredp.app.recipe import Recipe
from gredp.privacy.calibrate import calibrate
from gredp.storage.files import read_json
from gredp.storage.record import header, save

SEEDS = 3
RECIPE = Recipe("cifar10").at(EPSILON)
#: of the recipe's 14,128 features of mean square 1
LENGTH = math.sqrt(14_128)
COMMAND = "python benchmarks/features.py --out results/features.json --learned runs/learned.safetensors"

#: what kind of change, its name, and which held-out records are right: `[SEEDS, RECORDS]`
Variant = tuple[str, str, Callable[[], Tensor]]


def accuracies(x: Tensor, **changed: Any) -> Tensor:
    """`[SEEDS, RECORDS]`: which held-out records a classifier gets right."""
    y = images()[1]
    steps, lr = changed.get("steps", RECIPE.epochs), changed.get("lr", RECIPE.lr)
    clip, momentum = changed.get("clip_norm", RECIPE.clip_norm), changed.get("momentum", RECIPE.momentum)
    heads = changed.get("heads", 1)  # classifiers from one budget, whose weights are averaged
    multiplier = changed.get("multiplier") or calibrate(EPSILON, DELTA, 1.0, steps * heads)
    precondition = changed.get("precondition", lambda released: released)
    noise = multiplier * clip / ALL
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
                gradient = gradient + noise * torch.randn(weights.shape, generator=generator)
                velocity = momentum * velocity + precondition(gradient)
                weights = weights - lr * velocity
            average += weights / heads
        right.append((held @ average.mT).argmax(1) == y[RECORDS:])
    return torch.stack(right).double()


#: changes of the comparison with patches
CHANGED: dict[str, Callable[[], dict[str, Any]]] = {
    "256 filters instead of 512": lambda: {"FILTERS": 256},
    "1,024 filters": lambda: {"FILTERS": 1024},
    "2,048 filters": lambda: {"FILTERS": 2048},
    "patches of 4×4 instead of 6×6": lambda: {"SIDE": 4, "DIRECTIONS": 47},
    "patches of 8×8": lambda: {"SIDE": 8},
    "a 2×2 grid instead of 3×3": lambda: {"GRID": 2},
    "a 4×4 grid": lambda: {"GRID": 4},
    "threshold 0.08 instead of 0.15": lambda: {"THRESHOLD": 0.08},
    "threshold 0.25": lambda: {"THRESHOLD": 0.25},
    "threshold 0.35": lambda: {"THRESHOLD": 0.35},
    "threshold 0.25, 1,024 filters": lambda: {"THRESHOLD": 0.25, "FILTERS": 1024},
    "covariance of the records' patches, not private": lambda: {"bank": bank_of_records(False)},
    f"the same, released with {SHARE:.0%} of the budget": lambda: {"bank": bank_of_records(True)},
}
#: patches of other sizes beside those of the recipe
SCALES: dict[str, tuple[dict[str, Any], ...]] = {
    "patches of 4×4 and 8×8 beside them, 256 filters each": (
        {"SIDE": 4, "DIRECTIONS": 47, "FILTERS": 256},
        {"SIDE": 8, "FILTERS": 256},
    ),
}
#: what the sides of an image are divided by, to scatter it once more
SMALLER = (math.sqrt(2), 2.0)
#: changes of the classifier
CLASSIFIERS: dict[str, dict[str, float | int]] = {
    "12 steps instead of 24": {"steps": 12, "lr": 2 * RECIPE.lr},
    "48 steps": {"steps": 48, "lr": RECIPE.lr / 2},
    "momentum 0.9 instead of 0.7": {"momentum": 0.9, "lr": RECIPE.lr / 3},
    "gradients clipped at 60 instead of 10": {"clip_norm": 60.0, "lr": RECIPE.lr / 5},
    "gradients clipped at 2": {"clip_norm": 2.0, "lr": RECIPE.lr * 5},
    "the mean of 3 classifiers from one budget": {"heads": 3},
}
#: of preconditioned steps: ridges (the mean moment is 1), directions whose moments records release, and the
#: share of the budget for it
RIDGES, RELEASED, MOMENTS_SHARE = (10.0, 100.0), 256, 0.05


def variants(weights: Path | None, folder: Path) -> Iterator[Variant]:
    @cache
    def part(name: str) -> Found:
        if name == "scattering":
            return computed(lambda: waves, folder / "scattering.pt")
        return computed(likeness, folder / "patches.pt")

    @cache
    def base() -> tuple[Found, ...]:
        fine = part("patches")
        return whitened(fine), whitened(over_the_image(fine)), whitened(part("scattering"))

    def of(*parts: Found) -> Tensor:
        return accuracies(joined(*parts)[0])

    def without(place: int) -> Tensor:
        return of(*(found for i, found in enumerate(base()) if i != place))

    def standardized() -> Tensor:
        fine, coarse = part("patches"), part("scattering")
        return of(*(whitened(found, whiten=False) for found in (fine, over_the_image(fine), coarse)))

    def longer(place: int) -> Tensor:
        found = [(1.5 * x, drawn) if i == place else (x, drawn) for i, (x, drawn) in enumerate(base())]
        return of(*found)

    def smaller() -> Tensor:
        names = {size: folder / f"scattering {size:.3f}.pt" for size in SMALLER}
        found = [computed(partial(partial, waves, size=size), kept) for size, kept in names.items()]
        return of(*base()[:2], beside(base()[2], *map(whitened, found)))

    def changed(name: str) -> Tensor:
        found = computed(lambda: likeness(**CHANGED[name]()), folder / f"{name}.pt")
        return of(whitened(found), whitened(over_the_image(found)), base()[2])

    def scales(name: str) -> Tensor:
        found = [part("patches")]
        for settings in SCALES[name]:
            kept = folder / f"{settings['SIDE']} with {settings['FILTERS']}.pt"
            found.append(computed(partial(likeness, **settings), kept))
        fine, whole = beside(*map(whitened, found)), beside(*(whitened(over_the_image(f)) for f in found))
        return of(fine, whole, base()[2])

    yield "", "as it is", lambda: of(*base())
    yield "parts", "without scattering", lambda: without(2)
    yield "parts", "without patches", lambda: of(base()[2])
    yield "parts", "without patches over the whole image", lambda: without(1)
    yield "parts", "channels standardized, not whitened", standardized
    yield "parts", "scattering scaled down by √2 and 2 beside it", smaller
    inner = partial(computed, products, folder / "products.pt")
    yield "parts", "products within a patch beside them", lambda: of(*base(), whitened(inner()))
    for name, settings in CLASSIFIERS.items():
        yield "classifier", name, partial(lambda told: accuracies(joined(*base())[0], **told), settings)
    for what, place in (("patches", 0), ("scattering", 2)):
        yield "classifier", f"{what} half again as long: less noise on them", partial(longer, place)
    yield from second_order(lambda: joined(*base()))
    for name in CHANGED:
        yield "patches", name, partial(changed, name)
    for name in SCALES:
        yield "patches", name, partial(scales, name)
    yield from taught(weights, folder, base)


def second_order(features: Callable[[], Found]) -> Iterator[Variant]:
    """Steps preconditioned by second moments of drawn images' features, or of the records', privately."""

    def prepared() -> Found:
        records, drawn = (x * (LENGTH / x.norm(dim=1, keepdim=True)) for x in features())
        return records, drawn

    def public(ridge: float, rate: float) -> Tensor:
        x, drawn = prepared()
        return accuracies(x, precondition=Preconditioner(*principal(drawn), ridge), lr=rate * RECIPE.lr)

    def before(ridge: float) -> Tensor:
        x, drawn = prepared()
        return accuracies(Preconditioner(*principal(drawn), ridge).root(x))

    def private(ridge: float, rate: float) -> Tensor:
        x, drawn = prepared()
        query = certificate(query_multiplier(MOMENTS_SHARE, EPSILON, DELTA))
        noise = query.releases[0].noise_std * RECORDS / ALL
        moments = released(x[:RECORDS], principal(drawn, RELEASED)[0], LENGTH, noise, patches.SEED)
        multiplier = step_multiplier(query, EPSILON, DELTA, RECIPE.epochs)
        settings = {"precondition": Preconditioner(*moments, ridge), "multiplier": multiplier}
        return accuracies(x, lr=rate * RECIPE.lr, **settings)

    for ridge in RIDGES:
        told = f"ridge {ridge:g}"
        yield (
            "second order",
            f"features multiplied by a root of drawn images' moments, {told}",
            partial(before, ridge),
        )
        for rate in (1, 2):
            here = f"{told}, {rate} × the rate"
            yield (
                "second order",
                f"steps preconditioned by drawn images, {here}",
                partial(public, ridge, rate),
            )
            of_records = f"by {RELEASED}² moments of records for {MOMENTS_SHARE:.0%} of the budget, {here}"
            yield "second order", of_records, partial(private, ridge, rate)


def taught(weights: Path | None, folder: Path, base: Callable[[], tuple[Found, ...]]) -> Iterator[Variant]:
    """A small network, untrained or taught by drawn images."""

    @cache
    def small(path: Path | None) -> Found:
        kept = folder / ("untrained.pt" if path is None else "taught.pt")
        return whitened(computed(partial(network, path), kept))

    def alone(trained: bool) -> Tensor:
        assert weights is not None
        x, y, drawn = images()
        multiplier = calibrate(EPSILON, DELTA, 1.0, STEPS) * RECORDS / ALL
        data = x[:RECORDS], y[:RECORDS], x[RECORDS:], drawn
        found = [last_block(weights, *data, multiplier, seed, trained) for seed in range(SEEDS)]
        return (torch.stack(found) == y[RECORDS:]).double()

    untrained = partial(small, None)
    yield "learned", "an untrained network beside them", lambda: accuracies(joined(*base(), untrained())[0])
    if weights is None:
        return
    known = partial(small, weights)
    beside_them = "a network taught by drawn images beside them"
    yield "learned", beside_them, lambda: accuracies(joined(*base(), known())[0])
    yield "learned", "that network alone", lambda: accuracies(known()[0])
    yield "learned", "its last block alone, frozen", lambda: alone(False)
    yield "learned", "its last block alone, trained privately in the second half", lambda: alone(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learned", type=Path, help="weights from learned_features.py")
    parser.add_argument("--parts", type=Path, default=Path("runs/features"), help="folder for computed parts")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose kind or name contains one of these"
    )
    told = parser.parse_args()
    rows = {row["changed"]: row for row in read_json(told.out)["rows"]} if told.out.exists() else {}
    base, begun, every = torch.zeros(()), time.monotonic(), list(variants(told.learned, told.parts))
    names = [name for _, name, _ in every]
    for kind, name, score in every:
        if kind and (name in rows or not any(word in f"{kind}: {name}" for word in told.only)):
            continue
        right = score()
        base = base if kind else right
        gain = (right - base).mean(0)
        row = {"kind": kind, "changed": name, "accuracy": right.mean().item()}
        row |= {"difference": gain.mean().item(), "error": gain.std().item() / math.sqrt(len(gain))}
        row["minutes"] = round((time.monotonic() - begun) / 60, 1)
        before = rows.get(name, row)["accuracy"]
        if not math.isclose(row["accuracy"], before, abs_tol=1e-3):
            parser.error(f"{told.out} has rows of another recipe ({before:.4f}): remove it")
        rows.setdefault(name, row)
        print(row, flush=True)
        facts = {"records": RECORDS, "noise_as_among": ALL, "epsilon": EPSILON, "seeds": SEEDS}
        others = [name for name in rows if name not in names]  # of a network that is not given this time
        listed = [rows[name] for name in [*names, *others] if name in rows]
        save(told.out, header() | {"command": COMMAND} | facts | {"rows": listed})


if __name__ == "__main__":
    main()
