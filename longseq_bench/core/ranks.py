"""The place of a rank among others, the parts of its start, and what a distant rank sends."""

import faulthandler
import hashlib
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import ParamSpec, TypeVar

import psutil

from longseq_bench.core.files import read_text

LOOPBACK = "127.0.0.1"

OPENING = "opening the device"
CONNECTING = "connecting to the other ranks"
LOADING = "loading libraries"
WARMING_UP = "warming up"
"""The parts of a rank's phase `start`, in order. Only ranks that try to connect can fail to meet;
the first use of a GPU, or a compiler, may take minutes before or after that."""

TRIAL, HOSTS, PORT = "LONGSEQ_TRIAL", "LONGSEQ_HOSTS", "LONGSEQ_PORT"
RUN = "LONGSEQ_RUN"
"""Variables of a rank that srun or mpirun starts: the trial as JSON, the names of the hosts with
commas between them, the port at which the ranks meet on the first host, and what the run of the
tool has for a RankInfo, as JSON."""

PART_BYTES = 480
"""Longest line of a distant rank: srun breaks lines of 1,024 bytes and more."""

BEAT_S = 1.0
"""Seconds between the heartbeats of a distant rank."""


AUTOGRAD = "pt_autograd"
"""Begins the names of the threads in which torch runs a backward pass on CUDA."""


@dataclass(frozen=True)
class RankInfo:
    """One rank among `size`; rank 0 serves a store at address:port.

    local_ranks: number of ranks on this host; 0 if all ranks are on it.
    rates: of the device, by measurement, from an earlier trial of the run of the tool.
    profile: file for the profile of a pass; "": none.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = LOOPBACK
    port: int = 0
    local_ranks: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    profile: str = ""


@cache
def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts: longseq, its source, torch, Python."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    found = {"the source of longseq": digest.hexdigest()[:12], "Python": python_version()}
    return found | {name: version(name) for name in ("longseq-bench", "torch")}


def issuing_threads_s(process: psutil.Process) -> float:
    """Return the CPU seconds of the main thread and of autograd's, which run a pass on CUDA."""
    return sum(
        thread.user_time + thread.system_time
        for thread in process.threads()
        if thread.id == process.pid
        or read_text(Path(f"/proc/{process.pid}/task/{thread.id}/comm")).startswith(AUTOGRAD)
    )


# ---- functions that mark a place in a stack ------------------------------------------------------
# When a trial hangs, every rank writes its stack (faulthandler), and the parent reads from it where
# the rank is. A frame of our own code is recognised by the name of one of these functions, so that
# no path is needed. Code under the marker runs inside it; the parent compares names with the
# constants.

P = ParamSpec("P")
T = TypeVar("T")


def longseq_wait_for_peers(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait`, which returns only when other ranks have done their part."""
    return wait(*args, **kwargs)


def longseq_wait_for_device(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait`, which returns when the device has finished its work."""
    return wait(*args, **kwargs)


def longseq_child_main(main: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `main`, the work of a child process. Frames below this one belong to the launcher."""
    return main(*args, **kwargs)


def write_stacks() -> None:
    """Write the stack of each thread to stderr on a fatal signal and on SIGUSR1.

    An outcome keeps the last lines of the output. The frames of C that Python 3.14 adds would take
    the place of the signal's name and of the frames of Python.
    """
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


WAIT_FOR_PEERS = longseq_wait_for_peers.__name__
WAIT_FOR_DEVICE = longseq_wait_for_device.__name__
CHILD_MAIN = longseq_child_main.__name__
