"""Stage 7, inverse: back from the frequency domain. All of it is post-processing of a released value."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.gradient.noise import NoisySum


def invert(
    noisy: NoisySum,
    squared_weights: Mapping[str, Tensor],
    preconditioner: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Noisy spectra → real gradients shaped as the parameters: weights undone, inverse, real part, crop."""
    if not isinstance(noisy, NoisySum):
        raise TypeError(f"only a NoisySum can be released, not {type(noisy).__name__}")
    plan = noisy.bounded.plan
    released = {}
    for name, spectrum in noisy.values.items():
        if not spectrum.is_complex():  # a real gradient already
            released[name] = spectrum
            continue
        view = noisy.bounded.block_views[name]
        if plan.query_std is not None:  # the weights were learned
            weights = torch.rsqrt(squared_weights[name]) * preconditioner[name]
            spectrum = spectrum * view.spread(weights.to(spectrum.real))
        released[name] = view.real_part(spectrum)
    return released
