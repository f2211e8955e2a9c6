"""GReDP with shaped noise: less of it where the gradients are weak, all of the gradient, proven."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gredp.errors import GredpError
from gredp.mechanisms.plan import Clipping, Mechanism, Shaping, StepPlan
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
    in_paper = False
    reads = "spectra"
    grid = "kernel"

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
    def build(cls, **options: Any) -> Mechanism:
        of_shaping = {name: options.pop(name) for name in asdict(Shaping()) if name in options}
        return cls(replace(options.pop("shaping", None) or Shaping(), **of_shaping), **options)

    def step(self, plan: StepPlan, sigma: float, expected_batch_size: float) -> StepPlan:
        return replace(plan, shaping=self.shaping, energy_std=self.shaping.energy_noise * sigma)


register(Method("shaped", ShapedGReDP, "GReDP shaped", "#8172b3", block=8, noises={"shaped": {}}))
