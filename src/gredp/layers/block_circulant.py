"""A fully connected layer whose weight is made of circulant blocks, multiplied in the frequency domain."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.errors import GredpError


class BlockCirculantLinear(nn.Module):
    """Drop-in for `nn.Linear` with one d-th of its weights and an FFT product.

    The weight is `[p, q, d]`: block (o, j) of the dense matrix is circulant with first column
    `weight[o, j]`, so output block o is Σ_j weight[o, j] ⊛ x_j (circular convolution). Sizes that are
    not multiples of `block` are padded with zeros on the way in and cut on the way out.

    Shapes: `[*, in_features]` → `[*, out_features]`.

    >>> layer = BlockCirculantLinear(20, 12, block=4)
    >>> layer(torch.zeros(2, 20)).shape, layer.weight.numel(), layer.to_dense().numel()
    (torch.Size([2, 12]), 60, 240)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int = 8,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, out_features, block) < 1:
            raise GredpError(
                "BlockCirculantLinear needs positive sizes, not "
                f"in_features={in_features}, out_features={out_features}, block={block}"
            )
        self.in_features, self.out_features, self.block = in_features, out_features, block
        p, q = math.ceil(out_features / block), math.ceil(in_features / block)
        self.weight = nn.Parameter(torch.empty(p, q, block, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Linear`: every entry of the dense matrix is uniform within 1/√in_features."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # FFT libraries refuse to transform nothing
            return F.linear(x, self.to_dense(), self.bias)
        p, q, d = self.weight.shape
        # [*, q, k] x [p, q, k] -> [*, p, k]: one small matrix product for each frequency k
        spectrum = torch.fft.rfft(to_blocks(x, q, d))
        kernel = torch.fft.rfft(self.weight)
        lead = spectrum.shape[:-2]
        product = spectrum.reshape(-1, q, spectrum.shape[-1]).permute(2, 0, 1) @ kernel.permute(2, 1, 0)
        out = torch.fft.irfft(product.permute(1, 2, 0), n=d).reshape(*lead, p * d)[..., : self.out_features]
        return out if self.bias is None else out + self.bias

    def to_dense(self) -> Tensor:
        """The `[out_features, in_features]` matrix that this layer multiplies by."""
        p, q, d = self.weight.shape
        index = (torch.arange(d)[:, None] - torch.arange(d)[None, :]) % d
        dense = self.weight[:, :, index.to(self.weight.device)]  # [p, q, d, d]
        return dense.permute(0, 2, 1, 3).reshape(p * d, q * d)[: self.out_features, : self.in_features]

    @classmethod
    def from_linear(cls, linear: nn.Linear, block: int = 8) -> "BlockCirculantLinear":
        """The block-circulant layer nearest in direction, with the dense weight's norm.

        That is the mean over each wrapped diagonal (least squares), scaled back up: averaging d random
        weights would otherwise shrink a fresh layer by √d. A circulant weight is kept exactly.
        """
        weight = linear.weight
        sizes = (linear.in_features, linear.out_features, block, linear.bias is not None)
        layer = cls(*sizes, weight.device, weight.dtype)
        with torch.enable_grad():
            dense = layer.to_dense()
        # The gradient of a linear map is its transpose: here the sum over each wrapped diagonal.
        sums, counts = (
            torch.autograd.grad(dense, layer.weight, values, retain_graph=True)[0]
            for values in (weight.detach(), torch.ones_like(weight))
        )
        with torch.no_grad():
            layer.weight.copy_(sums / counts.clamp(min=1))
            layer.weight.mul_(weight.norm() / layer.to_dense().norm().clamp(min=1e-30))
            layer.weight.requires_grad_(weight.requires_grad)
            if layer.bias is not None and linear.bias is not None:
                layer.bias.copy_(linear.bias).requires_grad_(linear.bias.requires_grad)
        return layer

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"block={self.block}, bias={self.bias is not None}"
        )


def to_blocks(x: Tensor, count: int, block: int) -> Tensor:
    """`[*, n]` → `[*, count, block]`, zeros behind the end."""
    missing = count * block - x.shape[-1]
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (count, block))
