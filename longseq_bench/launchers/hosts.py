"""The hosts of `longseq launch`, and the engine that starts ranks there: srun or mpirun."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError

COUNTS = {
    "GROUP_WORLD_SIZE": "torchrun",
    "LOCAL_WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""Variables with a number of processes, and what sets them."""


@dataclass(frozen=True)
class Hosts:
    """Hosts with equally many ranks each; this process runs on the first one.

    engine: srun or mpirun; empty for this host alone.  cores: those of a host, 0 if unknown.
    """

    engine: str = ""
    names: tuple[str, ...] = ("localhost",)
    ranks_per_host: int = 1
    cores: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks of all hosts."""
        return len(self.names) * self.ranks_per_host

    def take(self, ranks: int) -> tuple[str, ...]:
        """Return the hosts of a world of so many ranks: the first one alone, or whole hosts.

        Raises ValueError for more ranks than there are, or ranks that do not fill hosts.
        """
        per_host, count = self.ranks_per_host, len(self.names)
        if ranks > self.ranks:
            there = f"the {self.ranks} of this launch, {per_host} on each of {count} host(s)"
            raise ValueError(f"{ranks} ranks are more than {there}")
        if ranks > per_host and ranks % per_host:
            remedy = f"use up to {per_host}, or a multiple of {per_host}"
            raise ValueError(f"{ranks} ranks do not fill hosts of {per_host} ranks; {remedy}")
        return self.names[: max(1, ranks // per_host)]

    def describe_devices(self, here: Catalogue) -> Catalogue:
        """Return this host's catalogue with the CUDA devices of all hosts, which are equal.

        CUDA is unavailable if two ranks would share a GPU.
        """
        cuda, ranks = here.devices["cuda"], self.ranks_per_host
        changes: dict[str, object] = {"count": self.ranks}
        if ranks > cuda.count and not cuda.unavailable:
            reason = f"{ranks} ranks on a host with {cuda.count} GPU(s), and two can't share one"
            changes = {"unavailable": reason, "remedy": f"use --nproc-per-node {cuda.count}"}
        devices = here.devices | {"cuda": cuda.model_copy(update=changes)}
        return here.model_copy(update={"devices": devices})


def refuse_several_tasks(environ: Mapping[str, str]) -> None:
    """Raise UserError in each of several processes that torchrun, srun or mpirun started."""
    for name, engine in COUNTS.items():
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            count = environ[name]
            once = (
                "longseq launch -- sweep CONFIG in an allocation of salloc or sbatch, or "
                "longseq launch --hosts a:8,b:8 -- sweep CONFIG on host a"
            )
            if environ.get("GROUP_WORLD_SIZE") == "1":
                once = f"longseq launch --nproc-per-node {count} -- sweep CONFIG"
            raise UserError(
                f"{engine} started several processes of longseq ({name} is {count}), which starts "
                f"ranks itself; run it once: {once}"
            )


def find_hosts(
    environ: Mapping[str, str], hosts: str | None = None, ranks_per_host: int | None = None,
    gpus: int = 0,
) -> Hosts:  # fmt: skip
    """Return the hosts of a launch, from options and what Slurm says.

    gpus: number of GPUs that are visible here.  Raises UserError with what to write instead.
    """
    engine = "mpirun" if hosts else "srun" if "SLURM_JOB_ID" in environ else ""
    found = {"localhost": 0}
    if engine:
        found = _parse(hosts) if hosts else _hosts_of_slurm(environ["SLURM_JOB_NODELIST"])
    names, slots = tuple(found), min(found.values())
    ranks = ranks_per_host or slots or gpus or 1
    if len(names) == 1:
        return Hosts(names=names, ranks_per_host=ranks)
    if not shutil.which(engine):
        raise UserError(f"{engine} is not installed here, or not in PATH; it starts the ranks")
    if not _is_this_host(names[0]):
        raise UserError(
            f"this host is not {names[0]}, the first of the hosts, which the records describe; run "
            "longseq launch there (in salloc: srun --nodes 1 --ntasks 1 --pty bash)"
        )
    # such as 16(x2),8: cores of two hosts, then of one
    cores = re.findall(r"\b(\d+)(?:\(|,|$)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return Hosts(engine, names, ranks, min(map(int, cores), default=0))


def _parse(hosts: str) -> dict[str, int]:
    """Return the ranks of each host of a text such as a:8,b:8; 0 where none is given."""
    found: dict[str, int] = {}
    for item in hosts.split(","):
        match = re.fullmatch(r"\s*([\w.-]+)(?::(\d{1,5}))?\s*", item)
        if not match or match[1] in found:
            raise UserError(f"--hosts {hosts!r}: {item!r} can't be read; write a:8,b:8, each once")
        found[match[1]] = int(match[2] or 0)
    if len(set(found.values())) > 1:
        raise UserError(f"--hosts {hosts!r}: all hosts need the same number of ranks")
    return found


def _hosts_of_slurm(nodelist: str) -> dict[str, int]:
    """Return the hosts of a list of Slurm, such as n[1-2],gpu7."""
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{' '.join(command)} failed: {error}") from None
    return dict.fromkeys(done.stdout.split(), 0)


def _is_this_host(name: str) -> bool:
    """Return True if a name, or the address that it means, is one of this host."""
    import psutil  # reports, which read records only, do not need it

    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    try:
        return bool({str(found[4][0]) for found in socket.getaddrinfo(name, None)} & own)
    except OSError:
        raise UserError(f"the host {name} is not known here: its name has no address") from None
