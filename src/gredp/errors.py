"""The one exception a user's mistake raises: a single line with the numbers and what to do."""

from collections.abc import Iterable


class GredpError(ValueError):
    """Something the caller asked for cannot be done, or cannot be done privately."""


class PeerFailed(GredpError):
    """Another process failed, and says so itself."""


class OutOfStep(GredpError):
    """The processes have lost each other, or came to different places; each of them knows."""


def choose(word: str, value: str, allowed: Iterable[str]) -> None:
    """Reject a value that is not one of `allowed`."""
    if value not in allowed:
        raise GredpError(f"unknown {word} {value!r}: choose one of {', '.join(allowed)}")
