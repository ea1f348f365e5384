"""The fork server, which has torch loaded, and its children: the processes of all trials.

A terminal sends Ctrl-C to the server too. The server ignores it from the start (see
_server_preload.py). By itself multiprocessing would ignore it only after the imports, which take
seconds; before that, Ctrl-C would end the server with a traceback.

A server that was killed is replaced by the next `ready`. Its children died with it: `has_ended`
tells a launcher.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import psutil

from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers.interrupts import block_interrupts, defer_interrupts

LOST = 255
"""Exit code by multiprocessing of a child whose server has ended. A child may use it as well."""

_PIPES_S = 1.0
"""The longest time from the closing of a server's pipes to its end."""

_KILL_S = 10.0
"""The longest time from SIGKILL to the end of a server, on a busy machine."""


def ready() -> None:
    """Start the server if there is none, and wait for its imports.

    Ctrl-C kills a server that is still importing; it has no children yet.

    Raises:
        LauncherError: the server can't be started.
    """
    before = pid()
    try:
        _ready(before)
    except (OSError, EOFError) as error:
        reason = f"{str(error) or 'it ended'} (TMPDIR is {tempfile.gettempdir()})"
        raise LauncherError(f"the fork server can't be started: {reason}") from error
    except KeyboardInterrupt:
        _kill(before)
        raise


def _ready(before: int) -> None:
    # start the tracker first, because its start unblocks Ctrl-C
    with safe_helpers():
        resource_tracker.ensure_running()
    with defer_interrupts(), block_interrupts(), hide_main(), safe_helpers():
        forkserver.ensure_running()
    if pid() != before:
        first = get_context("forkserver").Process()
        _start(first)
        first.join()


def _kill(before: int) -> None:
    """Kill the server, unless it is the one of `before`, and wait for its end."""
    if (new := pid()) and new != before:
        with suppress(ProcessLookupError):
            os.kill(new, signal.SIGKILL)
        has_ended(new, _KILL_S)


def start(process: BaseProcess) -> int:
    """Start a child, and return the pid of its server.

    Raises LauncherError if the child can't be started.
    """
    try:
        _start(process)
    except (OSError, EOFError, ValueError) as error:
        reason = str(error) or "the server ended"
        raise LauncherError(f"a child of the fork server can't be started: {reason}") from error
    return pid()


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


def lost_with_server(process: BaseProcess, server: int) -> bool:
    """Return True if a child that has ended was lost because its server has ended.

    server: the pid that `start` returned.
    """
    return process.exitcode == LOST and has_ended(server)


def has_ended(server: int, patience_s: float = _PIPES_S) -> bool:
    """Return True if a server has ended. A moment before its end its pipes are closed already."""
    end_s = time.monotonic() + patience_s
    while server == pid() and _is_alive(server):
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.01)
    return True


def _is_alive(server: int) -> bool:
    """Return False once multiprocessing, which waits for the server, finds that it has ended.

    That is later than it becomes a zombie if another thread of it still runs.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(server).status() != psutil.STATUS_ZOMBIE
        return False
    try:
        return os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


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
