"""The weights over frequency groups, learned from released energy shares and from nothing else.

Each record contributes its group-norm shares r = (‖u_k‖/‖u‖)_k, a vector of norm 1, to a query of its
own. The mean of those noisy releases gives the energies m, and these the weights of the next step.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.gradient.clip import ClippedSpectra
from gredp.mechanisms.plan import Shaping
from gredp.spectrum import BlockView


def energy_shares(clipped: ClippedSpectra, views: Mapping[str, BlockView]) -> Tensor:
    """`[groups of all blocks]`: Σ_i r_i. A record without gradient, or not finite, contributes zero."""
    rows = len(clipped.kept)
    parts = []
    for name, view in views.items():
        energy = clipped.energies.get(name)
        if energy is None:
            energy = torch.zeros(rows, view.group_count, device=clipped.kept.device)
        parts.append(energy)
    energy = torch.where(clipped.kept[:, None], torch.cat(parts, 1), 0.0)
    total = energy.sum(1, keepdim=True)
    return (energy / total.clamp(min=1e-30)).sqrt().where(total > 1e-30, 0.0).sum(0)


class LearnedShape:
    """State that moves from step to step: the mean of the released shares, and the weights it implies.

    Before the first release every weight is 1, which is white noise.
    """

    def __init__(self, shaping: Shaping, views: Mapping[str, BlockView], expected_batch_size: float) -> None:
        self.shaping = shaping
        self.counts = [view.group_count for view in views.values()]
        self.names = list(views)
        self.sizes = torch.cat([view.group_sizes for view in views.values()])
        self.expected_batch_size = expected_batch_size
        self.total = torch.zeros(len(self.sizes), dtype=torch.float64)
        #: releases in `total`, and the variance of their noise, both faded as they are
        self.weight = self.variance = 0.0
        self._squared = torch.ones(len(self.sizes), dtype=torch.float64)
        self._precondition = torch.ones(len(self.sizes), dtype=torch.float64)

    @property
    def squared_weights(self) -> dict[str, Tensor]:
        """w² for each block, `[group_count]`."""
        return dict(zip(self.names, self._squared.float().split(self.counts)))

    @property
    def preconditioner(self) -> dict[str, Tensor]:
        """P for each block, `[group_count]`."""
        return dict(zip(self.names, self._precondition.float().split(self.counts)))

    @property
    def mean_shares(self) -> dict[str, Tensor]:
        """The mean of the released shares for each block, `[group_count]`; zero before the first release."""
        mean = self.total / (max(self.weight, 1.0) * self.expected_batch_size)
        return dict(zip(self.names, mean.split(self.counts)))

    def state(self) -> dict[str, Tensor]:
        """All that was learned, for a checkpoint; every number of it was released."""
        return {
            "total": self.total,
            "of_releases": torch.tensor([self.weight, self.variance], dtype=torch.float64),
            "squared": self._squared,
            "precondition": self._precondition,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.total = state["total"].clone()
        self.weight, self.variance = state["of_releases"].tolist()
        self._squared, self._precondition = state["squared"].clone(), state["precondition"].clone()

    def learn(self, noisy_shares: Tensor, noise_std: float) -> None:
        """Take in one release and set the weights of the next step."""
        window = self.shaping.window
        faded = 1 - 1 / window if window else 1.0
        self.total = faded * self.total + noisy_shares.double().cpu()
        self.weight = faded * self.weight + 1
        self.variance = faded**2 * self.variance + noise_std**2
        mean = self.total / (self.weight * self.expected_batch_size)
        # Shares below the noise of their own mean are not known to be smaller than it; a fiftieth of an
        # even share is the other floor, without which an empty group would take all the weight.
        noise = math.sqrt(self.variance) / (self.weight * self.expected_batch_size)
        floor = max(noise, 0.02 / math.sqrt(len(mean)))
        share = mean.clamp(min=floor)
        energy = share.square() / self.sizes  # mean energy of one coefficient
        self._squared = self._normalised(energy.pow(-self.shaping.exponent), share.square())
        update = energy.pow(-self.shaping.preconditioner)
        self._precondition = self._normalised(update.square(), share.square()).sqrt()

    def _normalised(self, weights: Tensor, energy: Tensor) -> Tensor:
        """Scaled so that the mean record keeps its norm, and with frequencies alone each of its layers.

        So the clipping norm means the same for any shape, and the learning rate for any preconditioner.
        """
        counts = self.counts if self.shaping.groups == "frequency" else [len(self.sizes)]
        pairs = zip(weights.split(counts), energy.split(counts))
        return torch.cat([w * (e.sum() / (w * e).sum()) for w, e in pairs])


def relative_noise_energy(sizes: Tensor, squared_weights: Tensor, energies: Tensor) -> float:
    """Noise energy of these weights over white noise's, at the same relative clipping.

    All `[groups]`: coefficients in each group, w², and the mean record's energy in each group. 1 for
    equal weights, never below (Σ √(n_k e_k))² / (Σ n_k Σ e_k).
    """
    n, w2, e = sizes.double(), squared_weights.double(), energies.double()
    return float((n / w2).sum() * (w2 * e).sum() / (n.sum() * e.sum()))
