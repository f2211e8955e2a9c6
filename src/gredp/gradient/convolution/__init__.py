"""Per-sample gradients of convolutions, the layers in which a private step spends its time."""

from gredp.gradient.convolution.correlation import Correlation

__all__ = ["Correlation"]
