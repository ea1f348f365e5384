"""The fork server, which has torch loaded, and its children: the processes of all trials.

A terminal sends Ctrl-C to the server too. The server ignores it from the start (see
_server_preload.py). By itself multiprocessing would ignore it only after the imports, which take
seconds; before that, Ctrl-C would end the server with a traceback.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers.interrupts import block_interrupts, defer_interrupts


def ready() -> None:
    """Start the server if there is none, and wait for its imports.

    Ctrl-C kills a server that is still importing; it has no children yet. Raises LauncherError if
    it can't be started.
    """
    before = pid()
    try:
        # start the tracker first, because its start unblocks Ctrl-C
        with safe_helpers():
            resource_tracker.ensure_running()
        with defer_interrupts(), block_interrupts(), hide_main(), safe_helpers():
            forkserver.ensure_running()
        if pid() != before:
            first = get_context("forkserver").Process()
            _start(first)
            first.join()
    except (OSError, EOFError) as error:
        reason = f"{str(error) or 'it ended'} (TMPDIR is {tempfile.gettempdir()})"
        raise LauncherError(f"the fork server can't be started: {reason}") from error
    except KeyboardInterrupt:
        if (new := pid()) and new != before:
            with suppress(ProcessLookupError):
                os.kill(new, signal.SIGKILL)
        raise


def start(process: BaseProcess) -> None:
    """Start a child. Raises LauncherError if it can't be started."""
    try:
        _start(process)
    except (OSError, EOFError, ValueError) as error:
        reason = str(error) or "the server ended"
        raise LauncherError(f"a child of the fork server can't be started: {reason}") from error


def _start(process: BaseProcess) -> None:
    with hide_main(), safe_helpers():
        process.start()


@contextmanager
def hide_main() -> Iterator[None]:
    """Hide the main module within the block, so that a process that is started does not import it.

    It is the user's script, which would run again in every process, or it has no file: a notebook
    and a script from stdin. A child needs nothing of it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def receive(pipe: Connection) -> dict[str, Any] | None:
    """Return the next message of a child, or None if its end of the pipe is closed."""
    try:
        message: dict[str, Any] = json.loads(pipe.recv_bytes())
    except (EOFError, OSError, ValueError):
        return None
    return message


def end(process: BaseProcess, timeout_s: float = 0.0) -> None:
    """Wait up to `timeout_s` for a child to end, then kill its session."""
    process.join(timeout=timeout_s)
    if process.pid and process.is_alive():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def pid() -> int:
    """Return the pid of the server that this process started, or 0."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) or 0


# ---- the interpreters of multiprocessing ---------------------------------------------------------
# By itself multiprocessing runs `python -c`, so that the current folder leads their path: a
# psutil.py in a folder of results would run.


@contextmanager
def safe_helpers() -> Iterator[None]:
    """Start interpreters of multiprocessing within the block with the path of this process."""
    variables = dict(os.environ)
    path = [folder or os.getcwd() for folder in sys.path]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}
    try:
        yield
    finally:
        for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
            del os.environ[name]
            os.environ |= {name: variables[name]} if name in variables else {}
