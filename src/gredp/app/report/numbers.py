"""Numbers as a page shows them: an ε never smaller than it is."""

import math
from typing import Any

from gredp.privacy.accountant import round_up


def shown_epsilon(value: Any) -> str:
    """Four digits, rounded up."""
    return up(float(value), 4)


def up(value: float, digits: int) -> str:
    if math.isinf(value):
        return "∞"
    if value < 1e6:
        return f"{round_up(value, digits):,.{digits}f}"
    return f"{round_up(value, 4 - math.floor(math.log10(value))):.5g}"


def down(value: Any) -> str:
    """Four digits of a lower bound, rounded down."""
    return f"{math.floor(1e4 * float(value)) / 1e4:.4f}"


def short(value: float) -> str:
    """As people write it: 1e-5."""
    return f"{value:g}".replace("e-0", "e-")


def number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.6g}"


def count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"


def setting(value: Any) -> str:
    return "–" if value is None else short(value) if isinstance(value, float) else str(value)
