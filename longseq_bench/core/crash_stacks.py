"""Write the Python stacks of a child process when it crashes, and when its parent asks for them."""

import faulthandler
import signal
import sys


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
