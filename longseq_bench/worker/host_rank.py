"""A rank of a trial over several hosts: the process that srun or mpirun starts.

    python -P -m longseq_bench.worker.host_rank

It takes the trial and the hosts from the environment, and its place from the variables of the
engine. It sends messages on standard output, which the engine passes on with a label: JSON in lines
of at most PART_BYTES, then an empty line. In this order:

{"versions": {...}, "step": "12.0"}        at once, before torch is imported
{"beat": 1.25}                             each second: CPU seconds of the threads that issue work
{"phase": ...}, {"outcome": ...}           as any rank (worker/messages.py)

SIGUSR1 makes it write its stack to stderr. It ends when nobody reads its output any more.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress

import psutil

from longseq_bench.core.ranks import (
    BEAT_S,
    HOSTS,
    PART_BYTES,
    PORT,
    RUN,
    TRIAL,
    RankInfo,
    issuing_threads_s,
    versions,
    write_stacks,
)

ENGINES = {
    "SLURM_STEP_ID": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "OMPI_COMM_WORLD_RANK": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
}  # fmt: skip
"""The variable that shows an engine, and those with rank, number of ranks and local rank. mpirun
comes last, because it may run inside a step of Slurm."""


class LineOutput:
    """Writes messages to standard output, as `send_bytes` of a pipe does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send_bytes(self, message: bytes) -> None:
        """Write a message. If nobody reads it, end this process."""
        parts = [message[i : i + PART_BYTES] for i in range(0, len(message), PART_BYTES)]
        try:
            with self._lock:
                for part in (*parts, b""):
                    os.write(self._descriptor, part + b"\n")
        except OSError:
            os._exit(1)


def main() -> None:
    """Run the rank and end the process."""
    output = LineOutput(os.dup(1))
    os.dup2(2, 1)  # what a library prints is no message
    write_stacks()
    step = [os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in os.environ]
    output.send_bytes(json.dumps({"versions": versions(), "step": ".".join(step)}).encode())
    threading.Thread(target=_beat, args=(output,), daemon=True).start()
    try:
        _run(output)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the process group may still wait


def _run(output: LineOutput) -> None:
    """Run the trial, send its outcome, and wait for the peers, which may still read from here."""
    import torch.distributed as dist
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  (as in PRELOAD of launchers/local.py)

    from longseq_bench.core.model import Trial
    from longseq_bench.core.ranks import longseq_child_main
    from longseq_bench.worker.main import run_rank
    from longseq_bench.worker.messages import MessageSender

    trial = Trial.model_validate_json(os.environ[TRIAL])
    hosts = os.environ[HOSTS].split(",")
    place = read_place(os.environ, len(hosts))
    is_first_host = place.rank < place.local_ranks
    _select_interface(hosts[1] if is_first_host else hosts[0])
    sender = MessageSender(output)
    outcome = longseq_child_main(run_rank, trial, place, sender)
    sender.send_outcome(outcome)
    if outcome.status == "ok":
        with suppress(Exception):
            dist.barrier()


def read_place(environ: Mapping[str, str], hosts: int) -> RankInfo:
    """Return the place of this rank, by the variables of srun or of Open MPI's mpirun."""
    names = [names for shown_by, names in ENGINES.items() if shown_by in environ][-1]
    rank, size, local_rank = (int(environ[name]) for name in names)
    address, port = environ[HOSTS].split(",")[0], int(environ[PORT])
    of_run = json.loads(environ.get(RUN, "{}"))
    return RankInfo(rank, size, local_rank, address, port, size // hosts, **of_run)


def _beat(output: LineOutput) -> None:
    """Send the CPU seconds of the threads that issue work, each second."""
    process = psutil.Process()
    while True:
        output.send_bytes(b'{"beat": %f}' % issuing_threads_s(process))
        time.sleep(BEAT_S)


def _select_interface(peer: str) -> None:
    """Make gloo use the interface that leads to another host.

    By itself gloo takes the address of the host's name, which often is a loopback address.
    """
    family, *_, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in [one.address for one in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


if __name__ == "__main__":
    main()
