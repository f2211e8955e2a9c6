"""A convolution with standardized kernels: with group normalization it does what batch normalization does."""

import torch
from torch import Tensor, nn

from gredp.errors import deprecated

#: keeps a constant kernel, which has no direction, from dividing by zero
EPS = 1e-6


class WSConv2d(nn.Conv2d):
    """Drop-in for `nn.Conv2d` (Qiao et al. 2019): each output's kernel is used with mean 0 and norm 1.

    Inputs of unit variance then give outputs of unit variance, whatever noise has been added to the
    weights' mean and scale. It depends on the weights alone, so records stay apart.
    """

    def standardized(self) -> tuple[Tensor, Tensor]:
        """Kernels `[out, n]` of norm 1 (a little below) and the scales `[out]` that made them so."""
        centered = self.weight.flatten(1) - self.weight.flatten(1).mean(1, keepdim=True)
        scale = torch.rsqrt(centered.square().sum(1) + EPS)
        return centered * scale[:, None], scale

    def standardised(self) -> tuple[Tensor, Tensor]:
        """Deprecated: `standardized`."""
        deprecated("WSConv2d.standardised", "standardized", "0.3")
        return self.standardized()

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardized()[0].view_as(self.weight), self.bias)
