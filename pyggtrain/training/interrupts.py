"""Ctrl-C and SIGTERM as requests that a loop asks for at a place where stopping is safe."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run stopped between two steps and its checkpoint is written."""


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """A stop was asked for; nothing has changed since the last finished step."""


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C and the first SIGTERM into a request; a second one of the same kind interrupts at once.

    Of the same kind, since a launcher may follow a Ctrl-C, which reaches all processes, by a SIGTERM to each.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals; elsewhere the program around us decides.
        yield lambda: False
        return
    requested: set[int] = set()

    def request(number: int, frame: FrameType | None) -> None:
        if number in requested:
            raise KeyboardInterrupt
        requested.add(number)

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(requested)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
