"""SIGINT and SIGTERM: finish the step, write a checkpoint, end with 130 or 143."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal ended the program; `status` is the exit status that goes with it.

    Not an Exception: code that catches all of those means a failure, and would report that a read failed.
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.status = 128 + number


class DeferredSignal:
    """Notes the first signal; a second one does not wait."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise Stopped(number)
        self.number = number


@contextmanager
def handled_by(handler: object) -> Iterator[None]:
    """Both signals go to `handler` inside; elsewhere than in the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)


def stop_now(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
