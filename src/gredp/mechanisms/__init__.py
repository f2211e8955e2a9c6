"""One file per method; each turns its options into a `StepPlan`. Nothing here imports torch."""

from typing import TYPE_CHECKING, Literal

from gredp.mechanisms import dpsgd, gredp, plain, shaped, spectral_dp  # noqa: F401  each registers itself
from gredp.mechanisms.plan import ClipGroup, Mechanism, Shaping, StepPlan
from gredp.mechanisms.registry import Claim, Method, mechanism, method_names, methods, noise_names, register

METHODS = method_names()
if TYPE_CHECKING:
    MethodName = str
    NoiseName = str
else:  # for the command line, which lists them
    MethodName = Literal[*METHODS]
    NoiseName = Literal[*noise_names()]

__all__ = ["METHODS", "Claim", "ClipGroup", "Mechanism", "Method", "MethodName", "NoiseName", "Shaping",
           "StepPlan", "mechanism", "methods", "register"]  # fmt: skip
