"""The ranges of numbers that commands take. No torch."""

import math
from collections.abc import Callable, Collection

from gredp.errors import GredpError

#: what a number must do → the test, and the options that it holds for
RANGES: dict[str, tuple[Callable[[float], bool], Collection[str]]] = {
    "be a positive number": (
        lambda value: 0 < value < math.inf,
        ("epsilon", "clip_norm", "lr", "noise_schedule", "score_noise", "sigma"),
    ),
    "be at least 1": (
        lambda value: value >= 1,
        (
            "epochs",
            "batch_size",
            "max_physical_batch_size",
            "workers",
            "seeds",
            "steps",
            "records_per_person",
        ),
    ),
    "be at least 3": (lambda value: value >= 3, ("dimension",)),
    "be at least 20": (lambda value: value >= 20, ("plays",)),
    "be 0 or more": (
        lambda value: value >= 0,
        ("validation", "warmup", "augment", "block", "checkpoint_seconds"),
    ),
    "be 0 or more and finite": (lambda value: 0 <= value < math.inf, ("weight_decay",)),
    "lie in [0, 1)": (lambda value: 0 <= value < 1, ("momentum", "ema", "normalize")),
    "lie strictly between 0 and 1": (lambda value: 0 < value < 1, ("holdout", "score_share", "alpha")),
    "be above 0 and at most 1": (lambda value: 0 < value <= 1, ("sample_rate",)),
    "lie in 1 to 4096": (lambda value: 1 <= value <= 4096, ("image_size",)),
}


def option(name: str) -> str:
    """How a setting is written on the command line."""
    return f"--{name.replace('_', '-')}"


def check_ranges(settings: object) -> None:
    """Reject a number of any command that lies outside its range."""
    for rule, (holds, names) in RANGES.items():
        for name in names:
            value = getattr(settings, name, None)
            if value is not None and not holds(value):
                raise GredpError(f"{option(name)} must {rule}, not {value}")
