"""Spectral-DP (Feng et al. 2023): keep the lowest frequencies only, clip and noise what is kept."""

from dataclasses import dataclass, replace

from gredp.errors import GredpError, choose
from gredp.mechanisms.plan import GRIDS, HALVES, Clipping, Mechanism, StepPlan, Transform
from gredp.mechanisms.registry import Method, register


@dataclass(frozen=True)
class SpectralDP(Mechanism):
    """K: balls in the span of the kept band. Σ: ½σ²c² in each real direction of it. z = σ/√2 (flat).

    The band is conjugate-symmetric and cut out *before* the clip, so nothing of the clipping norm is
    spent on what is dropped, and every coefficient that is kept is noised. `filter_ratio` ρ is K/N, the
    share that is kept, of weights, rounded up to whole shells of frequencies; biases are kept whole.
    """

    filter_ratio: float = 0.5
    clipping: Clipping = "flat"
    grid: Transform = "kernel"
    name = "spectral_dp"
    reads = "spectra"

    def __post_init__(self) -> None:
        if not 0 < self.filter_ratio <= 1:
            raise GredpError(f"the filter ratio must be above 0 and at most 1, not {self.filter_ratio}")
        choose("grid", self.grid, GRIDS)
        if self.quantile is not None:
            raise GredpError(
                "nothing is proven for adaptive norms of a filtered spectrum: use dpsgd or gredp"
            )

    def step(self, plan: StepPlan, sigma: float, expected_batch_size: float) -> StepPlan:
        return replace(plan, noise_parts=HALVES, keep_ratio=self.filter_ratio)


register(Method("spectral-dp", SpectralDP, "Spectral-DP", "#dd8452", block=8, paper_clipping="layer_wise"))
