"""The stages of one step in their order, over one model: capture → clip → sum → noise → inverse."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.distributed import begin, broadcast, finish, rank
from gredp.gradient.adaptive import AdaptedNorms
from gredp.gradient.clip import clip
from gredp.gradient.correlated import CorrelatedSource
from gredp.gradient.inverse import invert
from gredp.gradient.noise import NoiseSource, add_noise
from gredp.gradient.per_sample import PerSampleSpectra
from gredp.gradient.shaping import LearnedShape
from gredp.gradient.summation import BoundedSum
from gredp.mechanisms.plan import StepPlan
from gredp.privacy.certificate import Block
from gredp.spectrum import SMALL, BlockView, frequency_groups, low_band

#: energy shares, or counts of records; no parameter's name: those have no blanks
SHARES = "energy shares"


class PrivateStep:
    """Executes plans. Records go in by `accumulate`, a real gradient comes out of `release`.

    `plan` is that of every step, or where the noise is scheduled, of a step at factor 1: `begin_sum` is
    given that of each step then.
    """

    def __init__(self, plan: StepPlan, source: NoiseSource, expected_batch_size: float) -> None:
        self.plan = plan
        self.source = source
        banded = len(plan.correlation) > 1
        self._noise = CorrelatedSource(source, plan.correlation) if banded else source
        self.block_views = {block.name: _view(block, plan) for block in plan.blocks}
        #: what later steps take from the queries of earlier ones
        self.learned: LearnedShape | AdaptedNorms | None = None
        if plan.shaping is not None:
            self.learned = LearnedShape(plan.shaping, self.block_views, expected_batch_size)
        elif plan.quantile is not None:
            self.learned = AdaptedNorms(plan, expected_batch_size)
        self.begin_sum(plan)
        #: by which processes tell the private models apart
        self.number = 0

    @property
    def squared_weights(self) -> dict[str, Tensor]:
        """w² of each block over its groups, fixed for the step that is being accumulated."""
        if self.learned is not None:
            return self.learned.squared_weights
        whole, band = torch.ones(1), torch.tensor([0.0, 1.0])
        return {name: whole if view.groups is None else band for name, view in self.block_views.items()}

    def begin_sum(self, plan: StepPlan) -> None:
        """Begin a sum, under the plan of the step that it is for. What was summed before is forgotten.

        A plan differs from the first one in its noise alone, and is that of its sum until this is released.
        """
        self._bounded = BoundedSum(plan, self.block_views)

    def accumulate(self, spectra: PerSampleSpectra) -> None:
        """Clip one physical batch and add it to the sum."""
        with torch.no_grad():
            self._bounded.add(clip(spectra, self._bounded.plan, self.block_views, self.squared_weights))

    def agree(self, step: int, stale: bool) -> bool:
        """Whether the batch of any process is stale. `release` must follow, or this process is out.

        All of them reject it, before any sum leaves its process, where one of them steps another model, is at
        another step of the ledger or has another plan.
        """
        what = f"step {step} of private model {self.number} (plan {self._bounded.plan.digest})"
        return bool(begin(what, int(stale)))

    def release(self, parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Noise the sum as its plan says, and give it back as a gradient of the summed loss.

        The caller has charged the ledger, and `step` is its number there: no number is noised twice. Of
        several processes the first draws the noise, and the others are given what it released.
        """
        with torch.no_grad():
            self._bounded.over_processes(parameters)
            released = self._noised(parameters, step) if rank() == 0 else self._awaited(parameters)
            released = broadcast(released)
            shares = released.pop(SHARES, None)
            if self.learned is not None and shares is not None:
                self.learned.learn(shares, self._bounded.plan.query_std or 0.0)
            self.discard()
        finish()
        return released

    def _noised(self, parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The gradients, and what the plan asks for beside them."""
        self._noise.begin(step)
        weights = self.squared_weights
        preconditioner = {} if self.learned is None else self.learned.preconditioner
        noisy = add_noise(self._bounded, parameters, weights, self._noise)
        gradients = invert(noisy, weights, preconditioner)
        return gradients if noisy.shares is None else {**gradients, SHARES: noisy.shares}

    def _awaited(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for what `_noised` gives in the first process."""
        totals, shares = self._bounded.totals, self._bounded.shares
        room = {n: torch.zeros_like(parameters[n], dtype=totals[n].real.dtype) for n in self.block_views}
        return room if shares is None else {**room, SHARES: torch.zeros_like(shares)}

    def discard(self) -> None:
        """Forget the sum so far; nothing of it was released."""
        self.begin_sum(self.plan)

    @property
    def accumulated(self) -> bool:
        return bool(self._bounded.totals)

    @property
    def records(self) -> int:
        """That are in the sum."""
        return self._bounded.records


def _view(block: Block, plan: StepPlan) -> BlockView:
    padded = block != Block.whole(block.name, block.layer, block.shape, len(block.grid))
    if len(block.shape) <= 1:  # a bias has no frequencies to speak of: neighboring units are no neighbors
        return BlockView(block, padded)
    if plan.keep_ratio is not None:
        kept, columns = low_band(block.grid, plan.keep_ratio), None
        if not padded and math.prod(block.grid) > SMALL:  # where the inverse fills up with zeros
            half = kept.view(block.grid)[..., : block.grid[-1] // 2 + 1]
            columns = int(half.nonzero()[:, -1].max()) + 1
        return BlockView(block, padded, kept.long(), columns)
    if plan.shaping is not None and plan.shaping.groups != "layer":
        return BlockView(block, padded, frequency_groups(block.grid, plan.shaping.bands))
    return BlockView(block, padded)  # one group: white within the block
