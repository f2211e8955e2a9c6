"""Stage 4, clip: bound each record by one factor per clip group; gradients stay as they are stored.

Formal guarantee. For every clip group the released contribution of a record, in the weighted spectral
domain, has norm at most the group's clip_norm, as the numbers that are summed have it: norms come with an
allowance for all that is rounded on the way (`PerSampleGradient.allowance`: 4e-6 of a norm in single
precision). Where gradients are summed as factors whose terms cancel, and no record's own gradient is ever
there, it is at most (1 + 1e-3) times that (LEAST_LEFT). A record whose gradient is not finite contributes
zero, except where the norm is infinite, as in plain training: nothing is bounded there, as its certificate
says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.convolution import Correlation
from gredp.gradient.convolution.padded import padded_energy
from gredp.gradient.per_sample import PerSampleGradient, PerSampleSpectra
from gredp.mechanisms.plan import ClipGroup, StepPlan
from gredp.spectrum import BlockView

#: stabilizer of automatic clipping, as in Bu et al. 2022
AUTOMATIC = 0.01
#: norms whose square leaves single precision are no gradients of a working model: treated as not finite
LARGEST_NORM = 1e19
#: what of a record is left when its terms cancel counts as at least this share of them: a clip that saw
#: nothing of two huge opposite terms would let them into the sum, whose rounding takes others' last digits
LEAST_LEFT = {torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass(frozen=True)
class ClippedSpectra:
    """Per-sample gradients with the factor, for each clip group, that bounds them."""

    gradients: Mapping[str, PerSampleGradient]
    factors: Mapping[str, Tensor]  # block name → [b]
    energies: Mapping[str, Tensor]  # block name → [b, group_count], before the clip
    kept: Tensor  # [b] of bool: records whose gradient is finite
    within: Tensor  # [b, groups] of bool: weighted norm at most the group's, for every group of the plan


def energies(gradient: PerSampleGradient, view: BlockView) -> Tensor:
    """`[b, group_count]`: energy of each record in each frequency group of the block."""
    if view.padded:
        if not isinstance(gradient, Correlation):
            raise GredpError(
                f"{view.block.name} is used more than once in a forward: clip on the kernel's own grid"
            )
        if gradient.padded_grid != view.block.grid:
            raise GredpError(
                f"{view.block.name} was certified for inputs padded to {view.block.grid} but got "
                f"{gradient.padded_grid}: the padded grid needs inputs of one size"
            )
        return view.gather(padded_energy(gradient))
    if view.groups is None:
        return gradient.squared_norm()[:, None]
    return gradient.energy_in(view)


def _norms(
    group: ClipGroup,
    found: Mapping[str, Tensor],
    spectra: PerSampleSpectra,
    plan: StepPlan,
    block_views: Mapping[str, BlockView],
    squared_weights: Mapping[str, Tensor],
) -> Tensor:
    """`[b]`: the records' weighted norms over the group's blocks, never below those of what is summed."""
    names = [name for name in group.blocks if name in found]
    energy = torch.cat([found[name] for name in names], 1)
    counts = torch.tensor([found[name].shape[1] for name in names])
    weights = torch.cat([squared_weights[name] for name in names]).double()
    largest = torch.stack([block.max() for block in weights.split(counts.tolist())])
    allowances, shares, bounds = [], [], []
    for name, most in zip(names, largest.tolist()):
        gradient, view = spectra.gradients[name], block_views[name]
        transforms = 2 if view.padded else int(view.groups is not None)
        allowances.append(gradient.allowance(transforms, math.prod(view.block.grid)) ** 2)
        # What a record's terms add up to before they cancel, and what a dropped band adds to the sum.
        bound, share = gradient.norm_bound(), LEAST_LEFT[gradient.like.dtype] ** 2
        shares.append(share if bound is None and plan.keep_ratio is not None else 0.0)
        if bound is not None:
            bounds.append(bound * (spectra.scale**2 * share * most))
    # One product instead of some small ones for each block.
    factors = torch.tensor([allowances, shares], dtype=torch.float64) * largest
    factors = torch.cat([weights[None], factors.repeat_interleave(counts, 1)])
    squared, rounding, least = (energy @ factors.t().to(energy)).unbind(1)
    least = torch.stack([least, *bounds]).sum(0)
    return torch.maximum(squared, least).sqrt() + rounding.sqrt()


def _unbounded(spectra: PerSampleSpectra) -> ClippedSpectra:
    """For balls without end: certified as no privacy at all."""
    factors = {
        name: gradient.like.new_full((spectra.batch,), spectra.scale)
        for name, gradient in spectra.gradients.items()
    }
    finite = torch.ones(spectra.batch, dtype=torch.bool)
    return ClippedSpectra(spectra.gradients, factors, {}, finite, finite[:, None])


def clip(
    spectra: PerSampleSpectra,
    plan: StepPlan,
    block_views: Mapping[str, BlockView],
    squared_weights: Mapping[str, Tensor],
) -> ClippedSpectra:
    """Factors min(1, c/‖v‖) of each record and clip group, v being weighted by w over frequencies."""
    if not isinstance(spectra, PerSampleSpectra):
        raise TypeError(f"only PerSampleSpectra can be clipped, not {type(spectra).__name__}")
    if all(math.isinf(group.clip_norm) for group in plan.groups):
        return _unbounded(spectra)
    found = {name: energies(g, block_views[name]) for name, g in spectra.gradients.items()}
    if found:
        every = torch.cat(list(found.values()), 1).clamp_(min=0).mul_(spectra.scale**2)
        found = dict(zip(found, every.split([energy.shape[1] for energy in found.values()], 1)))
    reached = [group for group in plan.groups if not found.keys().isdisjoint(group.blocks)]
    norms = [_norms(group, found, spectra, plan, block_views, squared_weights) for group in reached]
    # False for infinity and NaN too; a dropped band cannot hide one, since 0·∞ is NaN.
    kept = (
        (torch.stack(norms) < LARGEST_NORM).all(0) if norms else torch.ones(spectra.batch, dtype=torch.bool)
    )
    factors: dict[str, Tensor] = {}
    # A group that no record reached has norm 0.
    within = kept.new_ones(spectra.batch, len(plan.groups))
    for group, norm in zip(reached, norms):
        if plan.normalize:
            factor = group.clip_norm / (norm + AUTOMATIC)
        else:
            factor = (group.clip_norm / norm.clamp(min=1e-30)).clamp(max=1.0)
        # A factor that single precision cannot hold to its digits would be rounded up as well as down.
        factor = torch.where(kept & (factor > 1e-37), factor, 0.0) * spectra.scale
        factors.update({n: factor for n in group.blocks if n in found})
        within[:, plan.groups.index(group)] = norm <= group.clip_norm
    gradients = spectra.gradients
    if not bool(kept.all()):
        gradients = {n: g.zero_unless(kept) for n, g in gradients.items()}
    return ClippedSpectra(gradients, factors, found, kept, within)
