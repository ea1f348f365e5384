"""Delay Ctrl-C while a process is being started or ended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the block ends; then raise the signal again.

    An interrupt in the middle of a start would leave a process that nothing can find again. Nothing
    changes if Ctrl-C is ignored, or in a thread other than the main one.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (signal.SIG_IGN, None):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            # also after an exception, which the interrupt probably caused
            signal.raise_signal(signal.SIGINT)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread. A process that is started meanwhile inherits the mask.

    Another thread of this process may still receive it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
