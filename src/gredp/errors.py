"""The one exception a user's mistake raises: a single line with the numbers and what to do."""

import warnings
from collections.abc import Iterable


class GredpError(ValueError):
    """A request cannot be met, or not privately; the message is one line that names the fix.

    >>> import gredp
    >>> gredp.PrivacyEngine(accountant="none")
    Traceback (most recent call last):
    gredp.errors.GredpError: unknown accountant 'none': choose one of pld, rdp
    """


class PeerFailed(GredpError):
    """Another process failed, and says so itself."""


class OutOfStep(GredpError):
    """The processes have lost each other, or came to different places; each of them knows."""


def choose(word: str, value: str, allowed: Iterable[str]) -> None:
    """Reject a value that is not one of `allowed`."""
    if value not in allowed:
        raise GredpError(f"unknown {word} {value!r}: choose one of {', '.join(allowed)}")


def deprecated(old: str, new: str, removed_in: str) -> None:
    """Warn the caller's caller that a public name works for one minor version more (CONTRIBUTING.md)."""
    text = f"{old} is deprecated and will be removed in gredp {removed_in}: use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
