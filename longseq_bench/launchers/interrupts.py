"""Ctrl-C that waits until what was begun can be ended again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _nothing() -> None:
    pass


@contextmanager
def uninterrupted(hurry: Callable[[], None] = _nothing) -> Iterator[None]:
    """Ctrl-C waits until the end: nobody could find processes again that are started by halves.
    Raises KeyboardInterrupt then.

    hurry: called at once by a Ctrl-C, to bring that end nearer; what fails of it is not told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def came_now(number: int, frame: object) -> None:
        came.append(number)
        hurry()

    before = signal.signal(signal.SIGINT, came_now)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def blocked() -> Iterator[None]:
    """What is started in here is born with Ctrl-C held back, until it says otherwise itself; this
    process gets it at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
