"""Splitting records, or persons, by a keyed draw that looks at each alone."""

import hmac
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gredp.errors import GredpError


def held_out(
    x: np.ndarray, y: np.ndarray, share: float, purpose: str, persons: Sequence[str] | None = None
) -> NDArray[np.bool_]:
    """`[n]`: which of the records (x_i, y_i) are kept apart, about `share` of them.

    Formal guarantee. Whether a record is kept apart is a function of that record and of `purpose`, so adding
    or removing another one moves none: neighboring datasets have neighboring parts. Equal records stay
    together, hence none is trained and tested on at once, and a run that is resumed finds the same parts.
    With `persons`, one for each record, it is a function of the person, who has all records on one side.
    """
    if not 0 < share < 1:
        raise GredpError(f"the share to hold out must lie strictly between 0 and 1, not {share}")
    rows = (row.tobytes() + _bytes(label) for row, label in zip(x, y))
    apart = _apart(rows if persons is None else map(str.encode, persons), share, purpose)
    if apart.all() or not apart.any():
        raise GredpError(
            f"holding out {share:g} of {len(y)} records leaves {int((~apart).sum())} and {int(apart.sum())}"
        )
    return apart


def _bytes(label: np.generic) -> bytes:
    """Of a class, or of a number to predict."""
    return label.tobytes() if label.dtype.kind == "f" else int(label).to_bytes(8, "big")


def trained_on(persons: Iterable[str], share: float | None) -> int:
    """How many persons are left to train on, if a `share` is held out to test."""
    different = set(persons)
    return len(different) - int(_apart(map(str.encode, different), share or 0.0, "test").sum())


def _apart(keys: Iterable[bytes], share: float, purpose: str) -> NDArray[np.bool_]:
    key, limit = f"gredp {purpose}".encode(), int(share * 2**64)
    digests = (hmac.digest(key, each, "sha256")[:8] for each in keys)
    return np.array([int.from_bytes(digest, "big") < limit for digest in digests], dtype=bool)
