"""The one exception a user's mistake raises: a single line with the numbers and what to do."""


class GredpError(ValueError):
    """Something the caller asked for cannot be done, or cannot be done privately."""


class PeerFailed(GredpError):
    """Another process failed, and says so itself."""


class OutOfStep(GredpError):
    """The processes have lost each other, or came to different places; each of them knows."""
