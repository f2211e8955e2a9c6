"""The weights over frequency groups, learned from released energy shares and from nothing else.

Each record contributes its group-norm shares r = (‖u_k‖/‖u‖)_k, a vector of norm 1, to a query of its
own. The mean of those noisy releases gives the energies m, and these the weights of the next step.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.clip import ClippedSpectra
from gredp.mechanisms.plan import Shaping
from gredp.spectrum import BlockView


def energy_shares(clipped: ClippedSpectra, block_views: Mapping[str, BlockView]) -> Tensor:
    """`[groups of all blocks]`: Σ_i r_i. A record without gradient, or not finite, contributes zero."""
    kept = clipped.kept[:, None]
    parts = [
        clipped.energies[name] if name in clipped.energies else kept.new_zeros(len(kept), view.group_count)
        for name, view in block_views.items()
    ]
    energy = torch.where(kept, torch.cat(parts, 1), 0.0)
    total = energy.sum(1, keepdim=True)
    return (energy / total.clamp(min=1e-30)).sqrt().where(total > 1e-30, 0.0).sum(0)


class LearnedShape:
    """State that moves from step to step: the mean of the released shares, and the weights it implies.

    Before the first release every weight is 1, which is white noise.
    """

    def __init__(
        self, shaping: Shaping, block_views: Mapping[str, BlockView], expected_batch_size: float
    ) -> None:
        self.shaping = shaping
        self.counts = [view.group_count for view in block_views.values()]
        self.names = list(block_views)
        self.sizes = torch.cat([view.group_sizes for view in block_views.values()])
        self.expected_batch_size = expected_batch_size
        self.total = torch.zeros(len(self.sizes), dtype=torch.float64)
        #: releases in `total`, and the variance of their noise, both faded as they are
        self.weight = self.variance = 0.0
        self._squared, self._precondition = self._weights(self.total, self.weight, self.variance)

    def _by_block(self, values: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, values.split(self.counts)))

    @property
    def squared_weights(self) -> dict[str, Tensor]:
        """w² for each block, `[group_count]`."""
        return self._by_block(self._squared.float())

    @property
    def preconditioner(self) -> dict[str, Tensor]:
        """P for each block, `[group_count]`."""
        return self._by_block(self._precondition.float())

    @property
    def mean_shares(self) -> dict[str, Tensor]:
        """The mean of the released shares for each block, `[group_count]`; zero before the first release."""
        return self._by_block(self.total / (max(self.weight, 1.0) * self.expected_batch_size))

    def state(self) -> dict[str, Tensor]:
        """All that was learned, for a checkpoint; every number of it was released.

        The weights are no part of it: they follow from it, and so a checkpoint has none to lie about.
        """
        releases = torch.tensor([self.weight, self.variance], dtype=torch.float64)
        return {"total": self.total, "of_releases": releases}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take `state` over, or reject it and change nothing; other tensors than its two are ignored."""
        total, releases = state["total"], state["of_releases"]
        for name, tensor, size in (("total", total, len(self.sizes)), ("of_releases", releases, 2)):
            if tensor.dtype != torch.float64 or tensor.shape != (size,) or not tensor.isfinite().all():
                raise GredpError(f"the learned shape's {name} is not {size} finite numbers of float64")
        weight, variance = releases.tolist()
        if variance < 0 or not (weight >= 1 or (weight == variance == 0 and not total.any())):
            raise GredpError(f"the learned shape tells of {weight} releases with variance {variance}")
        weights = self._weights(total, weight, variance)
        if any(not (w.float() > 0).all() or not w.float().isfinite().all() for w in weights):
            raise GredpError("the learned shape's shares give weights that are not positive and finite")
        self.total, self.weight, self.variance = total.clone(), weight, variance
        self._squared, self._precondition = weights

    def learn(self, noisy_shares: Tensor, noise_std: float) -> None:
        """Take in one release and set the weights of the next step."""
        window = self.shaping.window
        faded = 1 - 1 / window if window else 1.0
        self.total = faded * self.total + noisy_shares.double().cpu()
        self.weight = faded * self.weight + 1
        self.variance = faded**2 * self.variance + noise_std**2
        self._squared, self._precondition = self._weights(self.total, self.weight, self.variance)

    def _weights(self, total: Tensor, weight: float, variance: float) -> tuple[Tensor, Tensor]:
        """(w², P) of every group, from the releases and nothing else; 1 before the first."""
        if not weight:
            return torch.ones_like(total), torch.ones_like(total)
        mean = total / (weight * self.expected_batch_size)
        # Shares below the noise of their own mean are not known to be smaller than it; a fiftieth of an
        # even share is the other floor, without which an empty group would take all the weight.
        noise = math.sqrt(variance) / (weight * self.expected_batch_size)
        floor = max(noise, 0.02 / math.sqrt(len(mean)))
        share = mean.clamp(min=floor)
        energy = share.square() / self.sizes  # mean energy of one coefficient
        squared = self._normalized(energy.pow(-self.shaping.exponent), share.square())
        update = energy.pow(-self.shaping.preconditioner)
        return squared, self._normalized(update.square(), share.square()).sqrt()

    def _normalized(self, weights: Tensor, energy: Tensor) -> Tensor:
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
