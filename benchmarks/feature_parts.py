"""Features of held-out CIFAR-10 records, part by part: what `features.py` compares.

A part is computed once and kept in a folder, as private as the records; `whitened` makes features of it.
"""

import math
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
from gredp.app.features.writing import resize, scaled
from gredp.privacy.calibrate import calibrate

RECORDS, ALL, SIDE = 8000, 50_000, 32
EPSILON, DELTA = 2.0, 1e-5
#: share of the budget that a private covariance of patches would get
SHARE = 0.02

#: images → `[b, C, cells]`
Part = Callable[[Tensor], Tensor]
#: signed roots of the records' and of the drawn images' features, `[n, C, cells]`
Found = tuple[Tensor, Tensor]


def averaged(extract: Part) -> Part:
    """Over an image and its mirror image; a function of maps `[b, C, h, w]`."""
    return lambda x: (extract(x) + extract(x.flip(-1)).flip(-1)) / 2


def likeness(**changed: Any) -> Part:
    """The comparison with patches, some constants of the package changed."""
    with constants(**changed):
        compare = patches.Likeness(3, SIDE, SIDE).float()
        threshold, grid = patches.THRESHOLD, patches.GRID

    def extract(x: Tensor) -> Tensor:
        with constants(THRESHOLD=threshold, GRID=grid):
            found: Tensor = compare(x)
        return found

    return averaged(extract)


def waves(x: Tensor, size: float = 1.0) -> Tensor:
    """Scattering of images scaled down by `size`, on the recipe's grid."""
    smaller = resize(SIDE, scaled(SIDE, size)).to(x)
    found = Scattering()(smaller @ x @ smaller.mT)
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
def computed(part: Callable[[], Part], kept: Path) -> Found:
    """Read from the file `kept`, if it is there."""
    if kept.exists():
        return tuple(torch.load(kept))
    x, _, drawn = images()
    extract = part()
    of_records, of_drawn = (
        torch.cat([root(extract(few)).flatten(2) for few in some.split(patches.CHUNK)]) for some in (x, drawn)
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save((of_records, of_drawn), kept)
    return of_records, of_drawn


def over_the_image(found: Found) -> Found:
    return found[0].mean(2, keepdim=True), found[1].mean(2, keepdim=True)


def whitened(found: Found, whiten: bool = True) -> Found:
    """Features of records and of drawn images, `[n, C·cells]`, by the drawn images' channels."""
    mean, factor = patches.whitening(found[1].double())
    if not whiten:  # channels standardized by the drawn images
        spread = found[1].double().transpose(0, 1).flatten(1).std(1)
        factor = torch.diag(1 / spread.clamp(min=patches.SMALLEST))
    records, drawn = (patches.whitened(part, mean.float(), factor.float()) for part in found)
    return records, drawn


def joined(*parts: Found) -> Found:
    records, drawn = (patches.joined(list(some)).flatten(1) for some in zip(*parts))
    return records, drawn


def beside(*parts: Found) -> Found:
    """As one part."""
    records, drawn = (torch.cat(some, 1) for some in zip(*parts))
    return records, drawn


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """The package's constants changed for a while; what was computed with them is forgotten."""
    before = {name: getattr(patches, name) for name in values}
    try:
        for name, value in values.items():
            setattr(patches, name, value)
        if "bank" not in values and values.keys() - {"THRESHOLD", "GRID"}:
            patches.bank.cache_clear()
        yield
    finally:
        for name, value in before.items():
            setattr(patches, name, value)
        if values.keys() - {"THRESHOLD", "GRID"}:
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
