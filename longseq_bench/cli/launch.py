"""`longseq launch -- sweep|maxlen|scaling ...`: run a command over several hosts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from longseq_bench.core import units
from longseq_bench.core.errors import UnknownNameError

COMMANDS = ("sweep", "maxlen", "scaling")


def launch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND …")],
    hosts: str | None = None,
    nproc_per_node: Annotated[int | None, typer.Option(min=1, max=units.MAX_RANKS)] = None,
) -> int:
    """Run a sweep, maxlen or scaling over several hosts.

    In an allocation of Slurm (salloc, sbatch): `longseq launch -- sweep FILE`. Elsewhere, on host
    a: `longseq launch --hosts a:8,b:8 -- sweep FILE`, with Open MPI on all hosts.

    A trial has all ranks unless world_size is lower. For each trial mpirun starts them on --hosts,
    srun in an allocation of Slurm; else all are on this host.

    Options:
        command: sweep, maxlen or scaling, with its own arguments.
        hosts: Hosts for mpirun with their ranks, a:8,b:8; the first is this one. Default: none.
        nproc_per_node: Ranks on each host. Default: as in --hosts, else one per visible GPU, else
            1.
    """
    import os

    from longseq_bench.api.machine import use_hosts
    from longseq_bench.cli.session import print_lines
    from longseq_bench.core.gpus import read_visible_gpus
    from longseq_bench.launchers.hosts import find_hosts, refuse_several_tasks

    refuse_several_tasks(os.environ)
    parsed = _parse(command)
    gpus = 0 if nproc_per_node else len(read_visible_gpus().visible)
    found = find_hosts(os.environ, hosts, nproc_per_node, gpus)
    by = f" by {found.engine}" if found.engine else ""
    print_lines([f"ranks: {found.ranks_per_host} on each of {', '.join(found.names)}{by}"])
    with use_hosts(found), parsed:
        return int(parsed.command.invoke(parsed) or 0)


def _parse(command: list[str]) -> Any:
    """Return the click context of the command with its parsed arguments."""
    from typer.main import get_command

    from longseq_bench.cli import app

    name, *arguments = command
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS, "longseq launch")
    found: Any = get_command(app)
    return found.commands[name].make_context(f"longseq {name}", arguments)
