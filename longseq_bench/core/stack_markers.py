"""Functions that mark a place in a stack, so that a stack dump can be read without file paths.

When a trial hangs, every rank writes its stack (faulthandler), and the parent reads from it where
the rank is. A frame of our own code is recognised by the name of one of these functions. Code under
the marker runs inside it; the parent compares names with the constants. Nothing of longseq is
imported here, because both the parent and the child use this module.
"""

import faulthandler
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def longseq_wait_for_peers(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait`, which returns only when other ranks have done their part."""
    return wait(*args, **kwargs)


def longseq_wait_for_device(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait`, which returns when the device has finished its work."""
    return wait(*args, **kwargs)


def longseq_child_main(main: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `main`, the work of a child process. Frames below this one belong to the launcher."""
    return main(*args, **kwargs)


def write_stacks() -> None:
    """Write the stack of each thread to stderr on a fatal signal and on SIGUSR1.

    An outcome keeps the last lines of the output. The frames of C that Python 3.14 adds would take
    the place of the signal's name and of the frames of Python.
    """
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


WAIT_FOR_PEERS = longseq_wait_for_peers.__name__
WAIT_FOR_DEVICE = longseq_wait_for_device.__name__
CHILD_MAIN = longseq_child_main.__name__

COLLECTIVE = "longseq collective: "
"""Start of a line on the collective of a rank, after its stack (worker/flight_recorder.py)."""
COLLECTIVE_FOLLOWS = "longseq collective follows"
"""Announces that line, which takes a moment."""
COLLECTIVE_WAITS = "waits for other ranks"
"""End of the line if the device waits in the collective."""
