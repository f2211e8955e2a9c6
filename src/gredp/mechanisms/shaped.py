"""GReDP with shaped noise: less of it where the gradients are weak, all of the gradient, proven."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gredp.errors import GredpError
from gredp.mechanisms.plan import Blocks, ClipGroup, Clipping, Mechanism, Needs, Shaping, StepPlan, Transform
from gredp.mechanisms.registry import Method, register


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

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Those of `Shaping` too, by their own names."""
        return {**super().options(), **asdict(Shaping())}

    @classmethod
    def build(cls, shaping: Shaping | None = None, clipping: Clipping = "flat", **of: Any) -> Mechanism:
        return cls(replace(shaping or Shaping(), **of), clipping)

    @property
    def transform(self) -> Transform:
        return "kernel"

    @property
    def needs(self) -> Needs:
        return "spectra"

    def step(
        self, blocks: Blocks, groups: tuple[ClipGroup, ...], sigma: float, expected_batch_size: float
    ) -> StepPlan:
        return StepPlan(
            blocks,
            groups,
            transform="kernel",
            shaping=self.shaping,
            energy_std=self.shaping.energy_noise * sigma,
        )


register(Method("shaped", ShapedGReDP, "GReDP shaped", "#8172b3", block=8, noises={"shaped": {}}))
