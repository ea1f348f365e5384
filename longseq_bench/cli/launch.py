"""`longseq launch -- sweep|maxlen|scaling ...`: run a command over several hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.core import bounds
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.units import format_tokens

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.cluster_env import NodeInfo
    from longseq_bench.core.model import Outcome, Trial
    from longseq_bench.launchers.control_messages import NodeIdentity
    from longseq_bench.launchers.launch_key import LaunchKey

COMMANDS = ("sweep", "maxlen", "scaling")


def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            help="sweep, maxlen or scaling, with its own arguments.", metavar="COMMAND …"
        ),
    ],
    nnodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_RANKS,
            help="Number of hosts. Default: from srun, Open MPI's mpirun or torchrun, else 1.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_RANKS,
            help="Ranks on each host. Default: under srun one per GPU that Slurm or the driver "
            "shows, else 1.",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Index of this host, from 0; node 0 writes the records. Default: from srun, "
            "Open MPI's mpirun or torchrun.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of node 0, reachable from all hosts. Default: from srun, "
            "Open MPI's mpirun or torchrun; they also give a missing port, which is else 29400."
        ),
    ] = None,
    rdzv_timeout: Annotated[
        float,
        typer.Option(min=0.1, max=bounds.MAX_SECONDS, help="Seconds to wait for the other hosts."),
    ] = 60.0,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of the launch, which only you can read (chmod 600), the same "
            "on all hosts; node 0 creates it if it is missing. Default: the variable LONGSEQ_KEY; "
            "without it a file of yours on loopback and under a scheduler, else a key that node 0 "
            "makes up and prints.",
        ),
    ] = None,
) -> int:
    """Run a sweep, maxlen or scaling over several hosts.

    Start the same command on each host, with its own --node-rank; node 0 writes the records:

    `longseq launch --nnodes 2 --nproc-per-node 8 --node-rank 0 --rdzv-endpoint host0 -- sweep FILE`

    Under srun, Open MPI's mpirun and torchrun, with one process per host, no option is needed. A
    trial has all ranks unless world_size is lower; torch's elastic agents start them.

    Hosts prove to each other that they know a key. Without --key-file or LONGSEQ_KEY, node 0 prints
    the command for the other hosts, with a key for this launch.
    """
    import os

    from longseq_bench.api.machine import LaunchTarget, use_launch_target
    from longseq_bench.core import cluster_env
    from longseq_bench.core.gpus import read_visible_gpus
    from longseq_bench.launchers.base import LaunchSettings, create_launcher

    if math.isnan(rdzv_timeout):  # it is neither below the minimum nor above the maximum
        raise UserError(f"--rdzv-timeout {rdzv_timeout} is not a number of seconds")
    gpus = 0 if nproc_per_node else len(read_visible_gpus().visible)
    cluster = cluster_env.find_node(
        os.environ, nnodes, nproc_per_node, node_rank, rdzv_endpoint, gpus
    )
    parsed = _parse(command)
    for line in filter(None, _remark(cluster, nnodes, nproc_per_node)):
        _print(line)
    identity = _identify(cluster, command, parsed.params)
    key = _find_key(cluster, key_file, rdzv_timeout)
    if cluster.node:
        return _follow(cluster, identity, key.secret, parsed, rdzv_timeout)
    if key.is_new:
        for line in _describe_other_nodes(cluster, command, key, rdzv_timeout):
            _print(line)
    settings = LaunchSettings(cluster, identity, key.secret, rdzv_timeout, _print)
    target = LaunchTarget(
        lambda: create_launcher("elastic", settings), cluster.ranks, cluster.ranks_per_node
    )
    with use_launch_target(target), parsed:
        return int(parsed.command.invoke(parsed) or 0)


def _parse(command: list[str]) -> Any:
    """Return the click context of the command with its parsed arguments.

    A mistake ends every host with the usual message, before they wait for each other.
    """
    from typer.main import get_command

    from longseq_bench.cli import app

    name, *arguments = command
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS, "longseq launch")
    found: Any = get_command(app)
    return found.commands[name].make_context(f"longseq {name}", arguments)


def _remark(cluster: NodeInfo, nnodes: int | None, nproc_per_node: int | None) -> Iterator[str]:
    """Yield what a user may not expect of the hosts and ranks that were found."""
    import os

    from longseq_bench.core.cluster_env import describe_missing_srun

    if nnodes is None and cluster.nodes == 1 and not cluster.is_scheduled:
        yield describe_missing_srun(os.environ)
    if not nproc_per_node and cluster.ranks_reason:
        yield f"{cluster.ranks_per_node} rank(s) on each host: {cluster.ranks_reason}"
    yield _describe_few_cores(cluster)


def _describe_few_cores(cluster: NodeInfo) -> str:
    """Return a line if a scheduler gave this host fewer cores than ranks; else an empty string.

    Slurm gives a task one core unless it is asked for more.
    """
    import os

    from longseq_bench.environment import count_cores

    cores, ranks = count_cores(), cluster.ranks_per_node
    if not cluster.is_scheduled or cores >= min(max(ranks, 2), os.cpu_count() or 1):
        return ""
    return (
        f"{ranks} rank(s) have {cores} of the {os.cpu_count()} cores of this host: give them more, "
        f"by srun --cpus-per-task or sbatch --exclusive, or by mpirun --bind-to none"
    )


def _find_key(cluster: NodeInfo, key_file: Path | None, timeout_s: float) -> LaunchKey:
    """Return the key of the launch. Raises UserError if there is none that is safe."""
    import os

    from longseq_bench.launchers.endpoint import stays_on_host
    from longseq_bench.launchers.launch_key import LaunchKey, find_key

    if cluster.nodes == 1:
        return LaunchKey(b"")
    uses_file_of_user = cluster.is_scheduled or stays_on_host(cluster)
    found = find_key(os.environ, key_file, not cluster.node, uses_file_of_user, timeout_s)
    return found.bound_to(cluster.job)


def _describe_other_nodes(
    cluster: NodeInfo, command: list[str], key: LaunchKey, timeout_s: float
) -> list[str]:
    """Return the command for the other nodes. The key is not an argument, which `ps` would show."""
    import shlex

    from longseq_bench.launchers.launch_key import KEY_VARIABLE

    words = [
        "longseq", "launch", "--nnodes", str(cluster.nodes),
        "--nproc-per-node", str(cluster.ranks_per_node), "--node-rank", "1",
        "--rdzv-endpoint", cluster.endpoint, "--rdzv-timeout", f"{timeout_s:g}", "--", *command,
    ]  # fmt: skip
    ranks = f", with --node-rank 1 to {cluster.nodes - 1}" if cluster.nodes > 2 else ""
    return [
        f"node 0: paste this on every other host{ranks}; its key admits whoever has it:",
        f"{KEY_VARIABLE}={key.secret.decode()} {shlex.join(words)}",
    ]


def _follow(
    cluster: NodeInfo, identity: NodeIdentity, key: bytes, parsed: Any, timeout_s: float
) -> int:
    """Run the trials that node 0 sends and print a line for each."""
    from longseq_bench.launchers.follower import Follower
    from longseq_bench.launchers.own_command import CHOSEN_BY_SEARCH, CHOSEN_BY_SWEEP, OwnCommand

    def report(number: int, trial: Trial, outcome: Outcome) -> None:
        label = f"{trial.implementation} {format_tokens(trial.workload.seq_len)}"
        reason = f": {outcome.reason}" if outcome.reason else ""
        _print(f"node {cluster.node}: trial {number}, {label}: {outcome.status}{reason}")

    chosen = CHOSEN_BY_SWEEP if parsed.command.name == "sweep" else CHOSEN_BY_SEARCH
    if parsed.params.get("sparsity"):
        chosen |= {"sparsity"}
    command = OwnCommand(lambda catalogue: _plan(parsed, cluster, catalogue), chosen)
    Follower(cluster, identity, key, command, timeout_s, _print, report).follow()
    return 0


def _plan(parsed: Any, cluster: NodeInfo, here: Catalogue) -> tuple[Trial, ...]:
    """Return the trials of a command by running it up to the point where it would run them."""
    from longseq_bench.api.machine import LaunchTarget, use_launch_target
    from longseq_bench.launchers.elastic import catalogue_of_launch
    from longseq_bench.launchers.own_command import PlannedTrials, PlanningLauncher

    launcher = PlanningLauncher(catalogue_of_launch(here, cluster))
    target = LaunchTarget(lambda: launcher, cluster.ranks, cluster.ranks_per_node)
    with use_launch_target(target), parsed:
        try:
            parsed.command.invoke(parsed)
        except PlannedTrials as planned:
            return planned.trials
    return ()


def _print(text: str) -> None:
    from longseq_bench.cli.session import print_lines

    print_lines([text])


def _identify(cluster: NodeInfo, command: list[str], parameters: Mapping[str, Any]) -> NodeIdentity:
    """Return the identity of this node, with the values that must be equal on all nodes."""
    import hashlib
    import platform
    import shlex
    import socket
    import uuid

    from longseq_bench import __version__
    from longseq_bench.core.own_functions import canonical_name, is_own
    from longseq_bench.core.user_files import read_file
    from longseq_bench.environment import commit_of, installed_version
    from longseq_bench.launchers.control_messages import NodeIdentity

    must_match = {
        "longseq": f"{__version__}, commit {commit_of(Path(__file__).parents[1]) or 'unknown'}",
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "--nnodes": str(cluster.nodes),
        "--nproc-per-node": str(cluster.ranks_per_node),
        "the command": shlex.join(command),
    }
    config, names = parameters.get("config"), list(parameters.get("impl") or ())
    if config is not None:
        try:
            text = read_file(Path(config))
        except (OSError, UserError):
            text = b""  # the command itself reports this error
        must_match["the hash of the config"] = hashlib.sha256(text).hexdigest()[:12]
        names = _names_in(Path(config))
    for name in filter(is_own, names):
        try:
            content = read_file(Path(canonical_name(name).rpartition(":")[0]))
        except (OSError, UserError):
            content = b""  # a module, or a mistake that the command reports
        must_match[f"the hash of the file of {name}"] = hashlib.sha256(content).hexdigest()[:16]
    return NodeIdentity(
        node=cluster.node, host=socket.gethostname(), token=uuid.uuid4().hex, must_match=must_match
    )


def _names_in(config: Path) -> list[str]:
    """Return the implementations of a config; none if it can't be read, which the command says."""
    from longseq_bench.config.trials import load_config

    try:
        file = load_config(config).file
    except UserError:
        return []
    return [name for item in file.implementations for name in item]
