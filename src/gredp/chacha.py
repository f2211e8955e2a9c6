"""ChaCha20 (RFC 8439) in integer operations on tensors: a keystream on the device where it is used."""

import struct

import torch
from torch import Tensor

#: the words of a quarter round: four columns of the state, then four diagonals
QUARTERS = tuple(
    (i, 4 + (i + d) % 4, 8 + (i + 2 * d) % 4, 12 + (i + 3 * d) % 4) for d in (0, 1) for i in range(4)
)


def chacha20(key: bytes, blocks: int, device: torch.device) -> Tensor:
    """`[16 · blocks]` of int32: the keystream from counter 0 on, nonce 0. A key serves once.

    int32 wraps around in additions as uint32 does; a right shift copies the sign, which a mask takes away.
    """
    start = torch.zeros(16, blocks, dtype=torch.int32, device=device)
    for row, word in enumerate(struct.unpack("<12i", b"expand 32-byte k" + key)):
        start[row] = word
    start[12] = torch.arange(blocks, dtype=torch.int32, device=device)
    x = list(start.clone())
    for a, b, c, d in QUARTERS * 10:
        for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to].add_(x[by])
            mixed = x[turned].bitwise_xor_(x[to])
            x[turned] = (mixed << bits).bitwise_or_((mixed >> (32 - bits)).bitwise_and_((1 << bits) - 1))
    return torch.stack(x).add_(start).t().flatten()
