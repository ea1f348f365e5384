"""Imported by the fork server only: it adopts orphaned processes of a trial and ends them.

Without this, init would adopt them, and they could not be distinguished from other processes.
While the server imports torch, it does not read the pipe that closes with the parent: the kernel
kills it instead, until _server_loaded.py is imported.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import warnings

import psutil

# imports free little: searching the objects of torch for garbage again and again takes 0.4 s
gc.disable()

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


_prctl(PR_SET_CHILD_SUBREAPER, 1)
_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# The parent handles Ctrl-C. It was blocked at the start of this process; now ignore it.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

PID = os.getpid()


def outlive_thread() -> None:
    """Let the thread that started this process end; the pipe shows the end of the parent now."""
    _prctl(PR_SET_PDEATHSIG, 0)


def _end_descendants() -> None:
    """Kill all descendants when the parent has ended."""
    if os.getpid() == PID:
        for process in psutil.Process().children(recursive=True):
            process.kill()


atexit.register(_end_descendants)

# the fork server warns about the exit of a process that it adopted
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
