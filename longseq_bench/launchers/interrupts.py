"""Delay Ctrl-C while a process is being started or ended; let SIGTERM and SIGHUP act as Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

received_signals: list[int] = []
"""The numbers of signals that acted as Ctrl-C."""


def interrupt_on_termination() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does.

    Batch systems send SIGTERM to every process of a job, and SIGKILL some seconds later. A command
    that goes on after its ranks have got it would record their deaths. A signal that is ignored
    stays so, and nothing changes if Ctrl-C is ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        received_signals.append(number)
        # srun and Slurm's daemon both send it; a second one must not disturb the end
        if len(received_signals) == 1:
            signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)


def ignore_interrupts() -> None:
    """Ignore from now on what acts as Ctrl-C: a command has ended, and only its exit is left.

    Python itself sets these signals back before it ends, and one that comes then would be the
    command's exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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
