"""Frequency-domain layers and the private replacements of stock ones."""

from gredp.layers.attention import PrivateMultiheadAttention
from gredp.layers.block_circulant import BlockCirculantLinear
from gredp.layers.recurrent import DPGRU, DPLSTM, DPRNN
from gredp.layers.spectral_conv import SpectralConv2d
from gredp.layers.ws_conv import WSConv2d

#: Opacus' name
DPMultiheadAttention = PrivateMultiheadAttention

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "BlockCirculantLinear",
    "DPMultiheadAttention",
    "PrivateMultiheadAttention",
    "SpectralConv2d",
    "WSConv2d",
]
