"""Preloaded into the fork server alone: what a trial leaves behind becomes the server's child,
and ends with it.

A process that a trial started and that outlives it would otherwise be adopted by init, where
nobody can tell it from any other.
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

# Ctrl-C is the parent's: held back since this was started, ignored from now on
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

PID = os.getpid()


def _end_descendants() -> None:
    """The tool is gone, however it went: so must be all that it started."""
    if os.getpid() == PID:
        for process in psutil.Process().children(recursive=True):
            process.kill()


atexit.register(_end_descendants)

# an adopted process that ends is news to the fork server, and nothing to warn about
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
