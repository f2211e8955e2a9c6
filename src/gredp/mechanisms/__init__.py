"""One file per method; each turns its options into a `StepPlan`. Nothing here imports torch."""

from typing import TYPE_CHECKING, Literal

from gredp.mechanisms import dpsgd, gredp, plain, registry, shaped, spectral_dp  # noqa: F401  each registers
from gredp.mechanisms.plan import Mechanism, Shaping, StepPlan
from gredp.mechanisms.registry import ClaimName, Method, mechanism, methods, register

METHODS = registry.method_names()
if TYPE_CHECKING:
    MethodName = str
    NoiseName = str
else:  # for the command line, which lists them
    MethodName = Literal[*METHODS]
    NoiseName = Literal[*registry.noise_names()]

__all__ = ["METHODS", "ClaimName", "Mechanism", "Method", "MethodName", "NoiseName", "Shaping", "StepPlan",
           "mechanism", "methods", "register"]  # fmt: skip
