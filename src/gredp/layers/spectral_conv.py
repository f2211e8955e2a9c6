"""A convolution whose per-sample weight gradient can be had as a spectrum."""

from typing import Literal

from torch import Tensor, nn

from gredp.spectrum import fft


class SpectralConv2d(nn.Conv2d):
    """Drop-in for `nn.Conv2d`: the same forward, and the weight gradient in the frequency domain.

    The spectrum lives on the kernel's own grid (its inverse is the gradient itself), or on the padded
    input's grid as in the paper, where it is the product of two spectra and the gradient is a crop.
    """

    def per_sample_spectrum(
        self, x: Tensor, grad_output: Tensor, grid: Literal["kernel", "padded"] = "kernel"
    ) -> Tensor:
        """`[B, out, in/groups, *grid]` complex: each record's weight gradient, transformed unitarily.

        `x` is the layer's input and `grad_output` the gradient of the summed loss at its output.
        """
        from gredp.gradient.convolution.padded import padded_dense
        from gredp.gradient.rules import convolution

        gradient = convolution(self, x, grad_output)["weight"]
        return padded_dense(gradient) if grid == "padded" else fft(gradient.dense(), 2)

    def to_dense(self) -> Tensor:
        """The kernel that the stock layer would hold."""
        return self.weight

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> "SpectralConv2d":
        """The same convolution, sharing its parameters."""
        new = cls.__new__(cls)
        new.__dict__.update(conv.__dict__)
        # Containers are copied, so that hooks put on one layer do not appear on the other.
        for key, value in conv.__dict__.items():
            if isinstance(value, dict):
                new.__dict__[key] = value.copy()
        return new
