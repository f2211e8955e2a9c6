"""The stages of one step in their order, over one model: capture → clip → sum → noise → inverse."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.gradient.clip import clip
from gredp.gradient.inverse import invert
from gredp.gradient.noise import NoiseSource, add_noise
from gredp.gradient.per_sample import PerSampleSpectra
from gredp.gradient.shaping import LearnedShape
from gredp.gradient.summation import BoundedSum
from gredp.mechanisms.plan import StepPlan
from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView, frequency_groups, low_band


class PrivateStep:
    """Executes a plan. Records go in by `accumulate`, a real gradient comes out of `release`."""

    def __init__(self, plan: StepPlan, source: NoiseSource, expected_batch_size: float) -> None:
        self.plan = plan
        self.source = source
        self.views = {block.name: _view(block, plan) for block in plan.blocks}
        self.shape = (
            LearnedShape(plan.shaping, self.views, expected_batch_size) if plan.shaping is not None else None
        )
        self._bounded = BoundedSum(plan, self.views)

    @property
    def squared_weights(self) -> dict[str, Tensor]:
        """w² of each block over its groups, fixed for the step that is being accumulated."""
        if self.shape is not None:
            return self.shape.squared_weights
        if self.plan.keep_ratio is not None:
            return {name: torch.tensor([0.0, 1.0]) for name in self.views}
        return {name: torch.ones(1) for name in self.views}

    def accumulate(self, spectra: PerSampleSpectra) -> None:
        """Clip one physical batch and add it to the sum."""
        with torch.no_grad():
            self._bounded.add(clip(spectra, self.plan, self.views, self.squared_weights))

    def release(self, parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Noise the sum, give it back as a gradient of the summed loss, and begin the next step.

        The caller has charged the ledger, and `step` is its number there: no number is noised twice.
        """
        self.source.begin(step)
        with torch.no_grad():
            weights = self.squared_weights
            ones = {name: torch.ones(1) for name in self.views}
            preconditioner = self.shape.preconditioner if self.shape is not None else ones
            noisy = add_noise(self._bounded, parameters, weights, self.source)
            gradients = invert(noisy, weights, preconditioner)
            if self.shape is not None and noisy.shares is not None:
                self.shape.learn(noisy.shares, self.plan.energy_std)
            self.discard()
        return gradients

    def discard(self) -> None:
        """Forget the sum so far; nothing of it was released."""
        self._bounded = BoundedSum(self.plan, self.views)

    @property
    def accumulated(self) -> bool:
        return bool(self._bounded.totals)


def _view(block: Block, plan: StepPlan) -> BlockView:
    padded = block != Block.whole(block.name, block.layer, block.shape, len(block.grid))
    if plan.keep_ratio is not None:
        # A bias has no frequencies to speak of: neighbouring units are no neighbours.
        ratio = plan.keep_ratio if len(block.shape) > 1 else 1.0
        return BlockView(block, padded, low_band(block.grid, ratio).long())
    if plan.shaping is not None and len(block.shape) > 1:
        return BlockView(block, padded, frequency_groups(block.grid, plan.shaping.bands))
    return BlockView(block, padded)  # one group: white within the block
