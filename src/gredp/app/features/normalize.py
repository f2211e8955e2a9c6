"""Means of features and energies of channels, learned privately before training: a query of the same ledger.

Features enter by their signed roots, x → ±√|x|: they are sums of moduli or positive parts, with long tails.

Formal guarantee. A record with P places contributes v = (roots/√P, mean square of channel c of its roots),
`[C·P + C]`, clipped to K = {‖v‖ ≤ √(2C)}. Released is Σ v + N(0, (z·√(2C))² I): by its certificate the
Gaussian mechanism with multiplier z. It takes all records (sampling rate 1) and is charged before its noise
is drawn; the ledger of the run's folder begins with that charge, and nothing of the release is written before
it.

With persons as the unit of privacy, a person contributes the mean of their records' clipped v, which is in K
as well: the multiplier is that of a record.

What the network makes of it, (±√|x| − mean)/deviation, is post-processing: a feature's mean, drawn towards
its channel's as far as noise explains how they differ, and a channel's deviation from these means. What all
records have in common would take part in every norm that is clipped: of digits half the energy. The numbers
stay with the weights, in checkpoints and in the model's file: a resumed or forked run reads them there.

The norm √(2C) lets a record pass as it is whose roots have energy 1 on average: our features have about that.
"""

import math

import torch
from torch import Tensor, nn

from gredp.app.data.datasets import OnDiskArray
from gredp.distributed import all_reduce_sum, begin, broadcast, finish, rank, world_size
from gredp.engine import PrivacyEngine
from gredp.gradient.noise import SecretSource
from gredp.privacy.certificate import Certificate, Release

#: least deviation that a channel is taken to have: the noise on its energy must not be blown up
SMALLEST = 0.1


class ChannelNorm(nn.Module):
    """`[b, C, H, W]` → the same, (±√|x| − mean)/scale by released numbers; none is trained."""

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels, height, width))
        self.register_buffer("scale", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (root(x) - self.mean) / self.scale[:, None, None]

    def take(self, released: Tensor, noise_std: float, records: int) -> None:
        """Set mean and scale from a released sum `[C·P + C]` over `records` records, or persons."""
        channels, places = len(self.scale), self.mean[0].numel()
        means, energy = (released / records).split([channels * places, channels])
        means = means.view(channels, places) * math.sqrt(places)
        middle = means.mean(1, keepdim=True)
        spread = (means - middle).square().mean(1, keepdim=True)
        true = (spread - places * (noise_std / records) ** 2).clamp(min=0)
        means = middle + (means - middle) * (true / spread.clamp(min=1e-30))
        self.mean.copy_(means.view_as(self.mean))
        self.scale.copy_((energy - means.square().mean(1)).clamp(min=SMALLEST**2).sqrt())


def root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().sqrt()


def certificate(channels: int, noise_multiplier: float) -> Certificate:
    norm = clip_norm(channels)
    return Certificate((Release("means of features, energies of channels", norm, noise_multiplier * norm),))


def clip_norm(channels: int) -> float:
    return math.sqrt(2 * channels)


def contributions(x: Tensor) -> Tensor:
    """`[b, C, H, W]` → `[b, C·P + C]` of float64, each record's clipped; one that is not finite gives 0."""
    x = root(x.double().flatten(2))
    v = torch.cat([x.flatten(1) / math.sqrt(x.shape[2]), x.square().mean(2)], 1)
    v = torch.where(v.isfinite().all(1, keepdim=True), v, 0.0)
    excess: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True) / clip_norm(x.shape[1])
    return v / excess.clamp(min=1)


def release(
    engine: PrivacyEngine, x: "Tensor | OnDiskArray", query: Certificate, shares: Tensor | None = None
) -> Tensor:
    """`[C·P + C]`: the noisy sum over all records `[n, C, H, W]`, charged; before `make_private`.

    `query` is `certificate(C, z)`. With `shares`, for each record one over the number of its person's, it is
    the sum over persons. Of several processes each adds up the records that are its own, and the first one
    draws the noise.
    """
    size = math.prod(x.shape[1:]) + x.shape[1]
    total = torch.zeros(size, dtype=torch.float64)
    own = list(range(rank(), len(x), world_size()))
    for start in range(0, len(own), 256):
        part = own[start : start + 256]
        v = contributions(x[part])
        total += v.sum(0) if shares is None else shares[part] @ v
    begin("the statistics of the records")
    engine.ledger.charge(query, sample_rate=1.0, unit="record" if shares is None else "person")
    engine.ledger.inherited = engine.ledger.steps  # it comes before the run's own steps
    total = all_reduce_sum({"sum": total})["sum"]
    if rank() == 0:
        source = SecretSource(engine.secret)
        source.begin(engine.ledger.steps)
        total = total + query.releases[0].noise_std * source.normal((size,), total)
    total = broadcast({"sum": total})["sum"]
    finish()
    return total
