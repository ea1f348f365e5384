"""The fork server, which has torch loaded, and of which every trial's processes are children.

A terminal sends Ctrl-C to it too. It ignores that from birth (see _server.py): multiprocessing
lets it do so only after its imports, which take seconds, and until then a Ctrl-C would end it with
a traceback.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.process import BaseProcess

from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers.interrupts import block_interrupts, defer_interrupts


def ready() -> None:
    """Have a server that has done its imports. Raises LauncherError where there can be none. Ctrl-C
    ends one that is still busy with them: nothing that has to be found again is there by then."""
    before = pid()
    try:
        # first, since it lets Ctrl-C through again where it has to be started
        resource_tracker.ensure_running()
        with defer_interrupts(), block_interrupts():
            forkserver.ensure_running()
        if pid() != before:
            first = get_context("forkserver").Process(target=_nothing)
            first.start()
            first.join()
    except (OSError, EOFError) as error:
        raise LauncherError(f"the fork server can't be started: {error}") from error
    except KeyboardInterrupt:
        if (new := pid()) and new != before:
            with suppress(ProcessLookupError):
                os.kill(new, signal.SIGKILL)
        raise


def start(process: BaseProcess) -> None:
    """Start a child of a server that is ready. Raises LauncherError where it can't be started."""
    try:
        process.start()
    except (OSError, EOFError, ValueError) as error:
        raise LauncherError(f"a child of the fork server can't be started: {error}") from error


def pid() -> int:
    """Of the server that this process has started; 0 where there is none."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) or 0


def _nothing() -> None:
    pass
