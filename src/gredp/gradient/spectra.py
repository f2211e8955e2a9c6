"""The noise of a step as it is seen from outside: block by block, frequency by frequency.

Plans are no secret, and weights and shares were released: nothing here costs privacy.
"""

import math
from typing import Any

import numpy as np
import torch
from scipy.signal import lfilter

from gredp.gradient.shaping import LearnedShape
from gredp.gradient.step import PrivateStep
from gredp.spectrum import BlockView, distance, mirror


def noise_spectrum(step: PrivateStep) -> list[dict[str, Any]]:
    """One row for each block, its lists over frequency groups from low to high; plain numbers.

    `frequency` is a group's mean distance from zero in shares of the highest, `coefficients` its size,
    `noise_std` the root mean square of the noise on one of its Fourier coefficients, as the summed gradient
    is released: before the crop, where the plan has a padded grid; after many steps, where noise is
    correlated over them. `norm_share` is the released mean share of a record's gradient norm, noise and all;
    None where the method releases none.
    """
    plan, weights, learned = step.plan, step.squared_weights, step.learned
    swell = over_steps(plan.correlation)
    deviations = {name: group.noise_std * swell for group in plan.groups for name in group.blocks}
    rows = []
    for name, view in step.block_views.items():
        std = deviations[name] * _scale(view, plan.noise_parts)
        if learned is not None:
            std = std * torch.rsqrt(weights[name].double()) * learned.preconditioner[name].double()
        if plan.keep_ratio is not None:
            std = std * weights[name].double()
        place, sizes = _mean(distance(view.block.grid), view), view.group_sizes
        order = [int(k) for k in place.argsort(stable=True) if sizes[k] > 0]
        shares = learned.mean_shares[name] if isinstance(learned, LearnedShape) else None
        rows.append(
            {
                "block": name,
                "layer": view.block.layer,
                "shape": list(view.block.shape),
                "frequency": [round(float(place[k]), 4) for k in order],
                "coefficients": [int(sizes[k]) for k in order],
                "noise_std": [float(std[k]) for k in order],
                "norm_share": None if shares is None else [float(shares[k]) for k in order],
            }
        )
    return rows


def over_steps(column: tuple[float, ...]) -> float:
    """The deviation of one step's n = C⁻¹ξ, after many steps, for ξ of deviation 1: what C takes back later
    it has added before."""
    impulse = np.eye(1, 100 * len(column))[0]
    return float(np.linalg.norm(lfilter([1.0], column, impulse)))


def _mean(values: torch.Tensor, view: BlockView) -> torch.Tensor:
    """`[prod(grid)]` → `[group_count]`."""
    sums, counts = view.gather(torch.stack([values.double(), torch.ones_like(values).double()]))
    return sums / counts.clamp(min=1)


def _scale(view: BlockView, parts: tuple[float, float] | None) -> torch.Tensor:
    """`[group_count]`: noise of parts (a, b) leaves (a² + b²)/2 on a pair {k, −k}, a² where k is −k."""
    if parts is None:
        return torch.ones(view.group_count, dtype=torch.float64)
    a, b = parts
    own = (mirror(view.block.grid) == torch.arange(math.prod(view.block.grid))).double()
    return _mean((a * a + b * b) / 2 + (a * a - b * b) / 2 * own, view).sqrt()
