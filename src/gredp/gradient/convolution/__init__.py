"""Stage 3, factors: per-sample gradients of convolutions, where a private step spends its time."""

from gredp.gradient.convolution.correlation import Correlation

__all__ = ["Correlation"]
