"""The fork server, which has torch loaded, and of which every trial's processes are children.

A terminal sends Ctrl-C to it too. It ignores that from birth (see _server.py): multiprocessing
lets it do so only after its imports, which take seconds, and until then a Ctrl-C would end it with
a traceback.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

from longseq_bench.errors import LauncherError
from longseq_bench.launchers.interrupts import blocked

_served: set[int] = set()
"""Servers that have started a child: those have done their imports."""


def start(process: BaseProcess) -> None:
    """Start a child of the fork server, and the server first where there is none. Raises
    LauncherError where it can't be started."""
    try:
        # first, since it lets Ctrl-C through again where it has to be started
        resource_tracker.ensure_running()
        with blocked():
            forkserver.ensure_running()
        process.start()
    except (OSError, EOFError) as error:
        raise LauncherError(f"the fork server can't be started: {error}") from error
    _served.add(_pid())


def give_up() -> None:
    """End a server that is still busy with its imports: who waits for it waits no longer."""
    if (pid := _pid()) and pid not in _served:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pid() -> int:
    return getattr(forkserver._forkserver, "_forkserver_pid", None) or 0
