"""Start the interpreters of multiprocessing: its fork server and its resource tracker.

By itself multiprocessing runs `python -c`, so that the current folder leads their path: a psutil.py
in a folder of results would run. And it makes a folder for the socket of the server that stays
after a kill, and whose path may be too long for a socket.
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from typing import Any

import psutil

from longseq_bench.core.scratch import scratch_folder

DESCRIPTORS = 65_536
"""The soft limit of open files is raised to this at most. Ranks need several descriptors each."""

PER_RANK, AT_START = 4, 24
"""Descriptors of the parent: for each rank that runs, and for a moment at the start of one."""


@contextmanager
def safe_helpers() -> Iterator[None]:
    """Start interpreters of multiprocessing within the block with the path of this process."""
    this_process: Any = process.current_process()
    config = this_process._config
    tempdir, variables = config.get("tempdir"), dict(os.environ)
    config["tempdir"] = str(scratch_folder())
    path = [folder or os.getcwd() for folder in sys.path]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}
    try:
        yield
    finally:
        config["tempdir"] = tempdir
        for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
            del os.environ[name]
            os.environ |= {name: variables[name]} if name in variables else {}


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
