"""Imported by the fork server only: it adopts orphaned processes of a trial and ends them.

Without this, init would adopt them, and they could not be distinguished from other processes.
"""

import atexit
import ctypes
import os
import signal
import sys
import warnings

import psutil

PR_SET_CHILD_SUBREAPER = 36

if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

# The parent handles Ctrl-C. It was blocked at the start of this process; now ignore it.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

PID = os.getpid()


def _end_descendants() -> None:
    """Kill all descendants when the parent has ended."""
    if os.getpid() == PID:
        for process in psutil.Process().children(recursive=True):
            process.kill()


atexit.register(_end_descendants)

# the fork server warns about the exit of a process that it adopted
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
