"""DP-SGD (Abadi et al. 2016): clip each record's gradient, add white noise to the sum."""

from dataclasses import dataclass

from gredp.mechanisms.plan import Clipping, Mechanism
from gredp.mechanisms.registry import Method, register


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """K: balls as `clip_groups` lists them. Σ: σC on every coordinate. z = σ.

    `automatic` clipping (Bu et al. 2022) scales every gradient to norm C·‖g‖/(‖g‖ + 0.01) instead
    of cutting the long ones, which stays in the same ball.
    """

    clipping: Clipping = "flat"
    name = "dpsgd"


register(Method("dpsgd", DPSGD, "DP-SGD", "#4c72b0"))
