"""Data sets as tensors, checked before anything is charged."""

from gredp.data.datasets import EMBEDDED, KNOWN, Splits, hold_out, load

__all__ = ["EMBEDDED", "KNOWN", "Splits", "hold_out", "load"]
