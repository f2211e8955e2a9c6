"""Every record's kernels by ordinary weight gradients: records side by side as groups of one convolution."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from gredp.gradient.convolution.kernels import OwnKernels
from gredp.gradient.norms import CHUNK
from gredp.gradient.per_sample import Products

if TYPE_CHECKING:
    from gredp.gradient.convolution.correlation import Correlation

#: numbers that a vector register holds, and channels must fill: with others oneDNN takes a slow way
LANES = 16


def quick_in_groups(correlation: "Correlation", products: Products | None = None) -> bool:
    """Whether oneDNN has a kernel for it that is quicker than products of shifted copies.

    With AVX-512 it takes half to three quarters of their time, with AVX2 as much as they do.
    """
    geometry, pads = correlation.geometry, correlation.pads
    return (
        correlation.x.device.type == "cpu"
        and correlation.x.dtype == correlation.gradient.dtype == torch.float32
        and not (products is not None and products.rounds(torch.float32))
        and len(geometry.axes) == 2
        and any(k > 1 for k, *_ in geometry.axes)
        and correlation.batch > 0
        and all(d == 1 for d in correlation.dilation)
        and geometry.channels % LANES == geometry.outputs % LANES == 0
        and correlation.padded_by_zeros
        and pads[::2] == pads[1::2]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and bool(torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())
    )


def grouped_kernels(correlation: "Correlation") -> Iterator[OwnKernels]:
    """As `kernels_of`. A record's maps are a group's channels; its views are the batch of the convolution."""
    out, channels, *kernel = correlation.shape
    both = correlation.x, correlation.gradient
    maps = correlation.views * sum(t.shape[1:].numel() for t in both)
    step = max(1, CHUNK * torch.get_num_threads() // (maps + math.prod(correlation.shape)))
    apart = [t.unflatten(0, (-1, correlation.views)).split(step) for t in both]
    geometry = list(correlation.stride), list(correlation.pads[::-2]), [1, 1], False, [0, 0]
    for maps_and_gradients in zip(*apart):
        n = len(maps_and_gradients[0])
        x, gradient = (t.transpose(0, 1).flatten(1, 2) for t in maps_and_gradients)
        weight = x.new_empty(()).expand(n * out, channels, *kernel)
        convolution = *geometry, n * correlation.groups
        backward = torch.ops.aten.convolution_backward
        made = backward(gradient, x, weight, None, *convolution, [False, True, False])[1]
        yield OwnKernels(made.view(n, *correlation.shape), len(kernel))
