"""The first steps of a child: cut off from the terminal, tied to its parent, then the work.

Nothing heavy is imported at the top, since the parent names `enter` to start a child.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def enter(request: str, payload: str, pipe: Connection, output: str) -> None:
    """Answer one request in a session of its own, with everything printed going to a file."""
    os.setsid()
    _die_with_parent()
    _redirect(output)
    faulthandler.enable()
    pipe.send_bytes(b'{"server": %d}' % os.getppid())

    from longseq_bench.probe.worker import serve

    serve(request, payload, pipe)


def _die_with_parent() -> None:
    """Ctrl-C and kill -9 of the tool end the trial too: the fork server goes, then this."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _redirect(output: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
