"""Start the interpreters of multiprocessing: its fork server and its resource tracker.

By itself multiprocessing runs `python -c`, so that the current folder leads their path: a psutil.py
in a folder of results would run. It makes a folder for the socket of the server that stays after a
kill, and whose path may be too long for a socket. And the server notices the end of its parent only
after its imports, which take seconds.
"""

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import process, util
from typing import Any

import psutil

from longseq_bench.core.scratch import scratch_folder

DESCRIPTORS = 65_536
"""The soft limit of open files is raised to this at most. Ranks need several descriptors each."""

PER_RANK, AT_START = 4, 24
"""Descriptors of the parent: for each rank that runs, and for a moment at the start of one."""

_PATH = "import sys; sys.path[:] = {path!r}; "
_SERVER = (
    "from longseq_bench.launchers import _server_preload; _server_preload.die_with({parent}); "
)


@contextmanager
def safe_helpers() -> Iterator[None]:
    """Start interpreters of multiprocessing within the block with the path of this process.

    The fork server also ends with this process from its first moment.
    """
    functions: Any = util
    this_process: Any = process.current_process()
    spawn, config = functions.spawnv_passfds, this_process._config
    path = [folder or os.getcwd() for folder in sys.path]
    first = _PATH.format(path=path)
    ends_with_us = _SERVER.format(parent=os.getpid())

    def spawn_safely(executable: Any, arguments: Sequence[Any], descriptors: Any) -> int:
        at = list(arguments).index("-c")
        code = arguments[at + 1]
        own = first + ends_with_us if "multiprocessing.forkserver" in code else first
        command = [*arguments[:at], "-P", "-c", own + code]
        return int(spawn(executable, command, descriptors))

    before = config.get("tempdir")
    functions.spawnv_passfds, config["tempdir"] = spawn_safely, str(scratch_folder())
    try:
        yield
    finally:
        functions.spawnv_passfds, config["tempdir"] = spawn, before


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has another limit, which is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def lacks_descriptors(ranks: int) -> str:
    """Return why this process can't hold the pipes and outputs of so many ranks, or ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + PER_RANK * ranks + AT_START
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return ""
    return (
        f"{ranks} ranks need {needed:,} open files and the limit is {limit:,}: raise it by "
        f"`ulimit -n {needed}`"
    )


def explain_limits() -> str:
    """Return a clause on a limit of the address space, which importing torch needs; "" without."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    gib = limit / 2**30
    return f"; the address space is limited to {gib:.3g} GiB: raise the limit by `ulimit -v`"
