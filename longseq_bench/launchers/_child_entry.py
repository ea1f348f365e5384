"""The first steps of a child: leave the terminal, make sure to end with the parent, then work.

The parent imports this module to start a child, so nothing heavy is imported at the top.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from socket import socket

from longseq_bench.core.ranks import longseq_child_main, write_stacks

_PR_SET_PDEATHSIG = 1


def enter(
    request: str, payload: str, pipe: Connection, output: int, listener: socket | None = None
) -> None:
    """Answer one request (worker/main.py) in a session of its own.

    SIGUSR1 makes the process write the stack of each thread to its output.
    payload: data of the request, JSON.  output: the descriptor of the file to print to.
    listener: the open socket to which the ranks connect, for rank 0 of several.
    """
    server = detach(output)
    write_stacks()
    pipe.send_bytes(b'{"server": %d}' % server)

    from longseq_bench.worker.main import serve

    longseq_child_main(serve, request, payload, pipe, listener)


def detach(output: int) -> int:
    """Start a session that prints to `output` and ends with the fork server; return its pid.

    The server ends with the parent, also after kill -9.
    """
    os.setsid()
    # the server ignores Ctrl-C. The system's default, not Python's: the exit status names SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    preloaded = sys.modules.get("longseq_bench.launchers._server_preload")
    # not getppid: if the server died a moment ago, init is the parent
    server = preloaded.PID if preloaded else os.getppid()
    if sys.platform.startswith("linux"):
        # every child inherits the pipe through which the fork server notices the end of the parent
        with suppress(AttributeError, TypeError, OSError):
            os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the parent's was closed
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return int(server)
