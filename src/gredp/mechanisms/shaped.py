"""GReDP with shaped noise: less of it where the gradients are weak, all of the gradient, proven."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gredp.errors import GredpError
from gredp.mechanisms.plan import Clipping, Mechanism, Needs, Shaping, StepPlan, Transform, clip_groups
from gredp.privacy.certificate import Block


@dataclass(frozen=True)
class ShapedGReDP(Mechanism):
    """K: {v : ‖w ⊙ F v‖ ≤ c} over all layers together. Σ: σ²c² I in the weighted domain, so z_g = σ there
    whatever the weights are, as long as they come from earlier releases only. The energy query beside
    it has multiplier z_e, and 1/z² = 1/z_g² + 1/z_e².

    The noise is Hermitian (a real white draw carried through the transform), so none of it is lost on
    imaginary parts and no coefficient is dropped.
    """

    shaping: Shaping = field(default_factory=Shaping)
    clipping: Clipping = "flat"
    name = "gredp"
    claimed_by_paper = False

    def __post_init__(self) -> None:
        if self.clipping not in ("flat", "automatic"):
            raise GredpError(
                f"shaped noise weighs all layers against each other: clipping must be flat or automatic, "
                f"not {self.clipping!r}"
            )

    @property
    def transform(self) -> Transform:
        return "kernel"

    @property
    def needs(self) -> Needs:
        return "inputs" if self.transform == "padded" else "spectra"

    def plan(
        self,
        blocks: Sequence[Block],
        clip_norm: float | Sequence[float],
        sigma: float,
        expected_batch_size: float,
    ) -> StepPlan:
        return StepPlan(
            tuple(blocks),
            clip_groups(self.clipping, blocks, clip_norm, sigma),
            transform="kernel",
            normalize=self.clipping == "automatic",
            shaping=self.shaping,
            energy_std=self.shaping.energy_noise * sigma,
        )
