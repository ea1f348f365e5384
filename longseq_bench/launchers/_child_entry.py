"""The first steps of a child: cut off from the terminal, tied to its parent, then the work.

Nothing heavy is imported at the top, since the parent names `enter` to start a child.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from socket import socket

from longseq_bench.core.stack_markers import longseq_child_main

_PR_SET_PDEATHSIG = 1


def enter(
    request: str, payload: str, pipe: Connection, output: int, listener: socket | None = None
) -> None:
    """Answer one request in a session of its own, with everything printed going to a file, where
    SIGUSR1 writes what each thread is doing.

    output: the descriptor of that file. listener: of rank 0 among several, the open socket at which
    they meet.
    """
    server = cut_off(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    pipe.send_bytes(b'{"server": %d}' % server)

    from longseq_bench.worker.main import serve

    longseq_child_main(serve, request, payload, pipe, listener)


def cut_off(output: int) -> int:
    """Lead a session, end with the fork server, print to a descriptor. Returns the server's pid."""
    os.setsid()
    # the server ignores it; here, where no terminal sends it any more, it is what it always is
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preloaded = sys.modules.get("longseq_bench.launchers._server_preload")
    # one that died a moment ago has left this to who adopts orphans
    server = preloaded.PID if preloaded else os.getppid()
    _die_with_parent(server)
    _redirect(output)
    return int(server)


def _die_with_parent(server: int) -> None:
    """Ctrl-C and kill -9 of the tool end the trial too: the fork server goes, then this."""
    if not sys.platform.startswith("linux"):
        return
    # every child is handed this end of the pipe by which the fork server knows that the tool lives
    with suppress(AttributeError, TypeError, OSError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)


def _redirect(output: int) -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # none where the tool's was closed
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
