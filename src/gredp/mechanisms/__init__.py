"""One file per method; each turns its options into a `StepPlan`. Nothing here imports torch."""

from gredp.mechanisms.plan import ClipGroup, Mechanism, Shaping, StepPlan
from gredp.mechanisms.registry import METHODS, mechanism

__all__ = ["METHODS", "ClipGroup", "Mechanism", "Shaping", "StepPlan", "mechanism"]
