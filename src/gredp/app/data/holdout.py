"""Splitting records by a keyed draw that looks at each record alone."""

import hmac

import numpy as np
from numpy.typing import NDArray

from gredp.errors import GredpError


def held_out(x: np.ndarray, y: np.ndarray, share: float, purpose: str) -> NDArray[np.bool_]:
    """`[n]`: which of the records (x_i, y_i) are kept apart, about `share` of them.

    Formal guarantee. Whether a record is kept apart is a function of that record and of `purpose`, so adding
    or removing another one moves none: neighboring datasets have neighboring parts. Equal records stay
    together, hence none is trained and tested on at once, and a run that is resumed finds the same parts.
    """
    if not 0 < share < 1:
        raise GredpError(f"the share to hold out must lie strictly between 0 and 1, not {share}")
    key, limit = f"gredp {purpose}".encode(), int(share * 2**64)
    apart = np.array(
        [
            int.from_bytes(hmac.digest(key, row.tobytes() + _bytes(label), "sha256")[:8], "big") < limit
            for row, label in zip(x, y)
        ],
        dtype=bool,
    )
    if apart.all() or not apart.any():
        raise GredpError(
            f"holding out {share:g} of {len(y)} records leaves {int((~apart).sum())} and {int(apart.sum())}"
        )
    return apart


def _bytes(label: np.generic) -> bytes:
    """Of a class, or of a number to predict."""
    return label.tobytes() if label.dtype.kind == "f" else int(label).to_bytes(8, "big")
