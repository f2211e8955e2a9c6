"""Data sets as tensors, checked before anything is charged."""

from gredp.app.data.datasets import Splits, hold_out, load
from gredp.app.known_data import EMBEDDED, KNOWN

__all__ = ["EMBEDDED", "KNOWN", "Splits", "hold_out", "load"]
