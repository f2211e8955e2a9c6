"""Data sets as tensors, checked before anything is charged."""

from gredp.app.data.datasets import EMBEDDED, KNOWN, Splits, hold_out, load

__all__ = ["EMBEDDED", "KNOWN", "Splits", "hold_out", "load"]
