"""Ranks and hosts of a launch; hosts from the variables of torchrun, srun and Open MPI's mpirun.

RankInfo describes one rank. NodeInfo describes one host, for `longseq launch`, which runs once on
each host and starts the ranks there.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from longseq_bench.core.errors import UserError

LOOPBACK = "127.0.0.1"

DEFAULT_PORT = 29400
"""Port of an endpoint that names none, without a scheduler; as in torchrun."""

_PORTS = range(20000, 32768)
"""Range of derived ports, below those that the system hands out."""

_ITEMS = re.compile(r"\[([^\[\]]*)\]")
_NUMBERS = re.compile(r"(\d+)(-\d+)?(,\d+(-\d+)?)*")
_COUNTS = re.compile(r"\b\d{1,9}\b")


@dataclass(frozen=True)
class RankInfo:
    """One rank among `size`; rank 0 serves a store at address:port.

    store_is_up: another process serves the store, for example torch's agent.
    local_ranks: number of ranks on this host; 0 if all ranks are on it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = LOOPBACK
    port: int = 0
    store_is_up: bool = False
    local_ranks: int = 0


@dataclass(frozen=True)
class NodeInfo:
    """Node `node` of `nodes`, which starts `ranks_per_node` ranks; node 0 listens at host:port.

    ranks_reason: why there are `ranks_per_node` ranks; empty if it is the plain default.
    peer: another host of the nodes; empty if the scheduler names none.
    job: what the scheduler calls this launch, which no other launch is called at that time; or "".
    is_scheduled: srun, Open MPI's mpirun or torchrun started the nodes.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    node: int = 0
    host: str = LOOPBACK
    port: int = 0
    ranks_reason: str = field(default="", compare=False)
    peer: str = field(default="", compare=False)
    job: str = field(default="", compare=False)
    is_scheduled: bool = field(default=False, compare=False)

    @property
    def ranks(self) -> int:
        """Number of ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def endpoint(self) -> str:
        """Text of the option --rdzv-endpoint."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def split(ranks: int, cluster: NodeInfo) -> tuple[int, int]:
    """Return the number of nodes that a world of `ranks` takes, and the ranks on each.

    Raises:
        ValueError: the launch has fewer ranks, or the ranks do not fill complete nodes.
    """
    per_node = cluster.ranks_per_node
    if ranks <= per_node:
        return 1, ranks
    if ranks > cluster.ranks:
        raise ValueError(
            f"{ranks} ranks are more than the {cluster.ranks} of this launch, {per_node} on each "
            f"of {cluster.nodes} node(s)"
        )
    if ranks % per_node:
        raise ValueError(
            f"{ranks} ranks do not fill nodes of {per_node} ranks; use up to {per_node}, or a "
            f"multiple of {per_node}"
        )
    return ranks // per_node, per_node


def find_node(
    environ: Mapping[str, str],
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    node: int | None = None,
    endpoint: str | None = None,
    gpus: int = 0,
) -> NodeInfo:
    """Return the node of this process in its launch; the default is one node alone.

    Given values have priority over those of srun, Open MPI's mpirun and torchrun.
    gpus: number of GPUs that are visible on this host.

    Raises:
        UserError: a value is missing or invalid.
    """
    complete = None not in (nodes, node, endpoint) or nodes == 1
    detected = None if complete else _detect_node(environ, gpus)
    if detected is None and nodes is None and node is None:
        _check_no_other_mpirun(environ)
    default = detected or NodeInfo()
    reason = "--nproc-per-node" if ranks_per_node else default.ranks_reason or _default_reason(gpus)
    nodes = default.nodes if nodes is None else nodes
    ranks_per_node = default.ranks_per_node if ranks_per_node is None else ranks_per_node
    found = _complete_node(default, detected is not None, nodes, node, endpoint)
    return replace(
        found, ranks_per_node=ranks_per_node, ranks_reason=reason, peer=default.peer,
        job=default.job, is_scheduled=detected is not None,
    )  # fmt: skip


def _default_reason(gpus: int) -> str:
    if gpus <= 1:
        return ""
    return f"the default; this host has {gpus} GPUs, --nproc-per-node {gpus} uses all"


def _complete_node(
    default: NodeInfo, is_detected: bool, nodes: int, node: int | None, endpoint: str | None
) -> NodeInfo:
    """Return the node with its rank and endpoint. Raises UserError as `find_node` does."""
    if node is None:
        if nodes != default.nodes:
            raise UserError(
                f"--nnodes {nodes} needs --node-rank, different on each node: 0 to {nodes - 1}"
            )
        node = default.node
    if not 0 <= node < nodes:
        raise UserError(f"--node-rank {node} is not one of --nnodes {nodes}: 0 to {nodes - 1}")
    if nodes == 1:
        return NodeInfo()
    if endpoint:
        # jobs that share a host need different ports
        host, port = _parse_endpoint(endpoint, default.port or DEFAULT_PORT)
        return NodeInfo(nodes, node=node, host=host, port=port)
    if is_detected:
        return NodeInfo(nodes, node=node, host=default.host, port=default.port)
    raise UserError(
        f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, an address of node 0 for all nodes"
    )


def _detect_node(environ: Mapping[str, str], gpus: int) -> NodeInfo | None:
    """Return the node that torchrun, Open MPI's mpirun or srun describes; None without them.

    mpirun has priority over srun, because it also runs inside allocations of Slurm.
    """
    if "GROUP_RANK" in environ:
        return _from_torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_mpirun(environ)
    # a batch script has a SLURM_PROCID but no step
    if "SLURM_PROCID" in environ and _has_step(environ):
        return _from_srun(environ, gpus)
    return None


def _has_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ


def _check_no_other_mpirun(environ: Mapping[str, str]) -> None:
    """Raise UserError under the mpirun of MPICH and its relatives: each process would run alone."""
    size = environ.get("PMI_SIZE", "")
    if re.fullmatch("[0-9]{1,9}", size) and int(size) > 1:
        raise UserError(
            f"PMI_SIZE is {size}, but only Open MPI's mpirun is recognised; give --rdzv-endpoint, "
            f"--nnodes and --node-rank, for example --nnodes $PMI_SIZE --node-rank $PMI_RANK"
        )


def describe_missing_srun(environ: Mapping[str, str]) -> str:
    """Return a line if this is a Slurm job of several nodes without srun; else an empty string."""
    nodes = environ.get("SLURM_NNODES", "")
    if _has_step(environ) or not re.fullmatch("[0-9]{1,9}", nodes) or int(nodes) < 2:
        return ""
    return (
        f"this Slurm job has {nodes} nodes, but the command runs on this one only; start it with "
        f"srun --ntasks-per-node 1 to use all"
    )


def _from_torchrun(environ: Mapping[str, str]) -> NodeInfo:
    size = "LOCAL_WORLD_SIZE"
    _check_one_per_host(environ, "LOCAL_RANK", size, "torchrun", "--nproc-per-node 1")
    host = _require(environ, "MASTER_ADDR")
    # MASTER_PORT belongs to torchrun's own store
    job = f"{host}:{_require(environ, 'MASTER_PORT')}"
    nodes, node = _require_int(environ, "GROUP_WORLD_SIZE"), _require_int(environ, "GROUP_RANK")
    return NodeInfo(nodes, 1, node, host, _derive_port(job), job=job)


def _from_mpirun(environ: Mapping[str, str]) -> NodeInfo:
    index, size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    _check_one_per_host(environ, index, size, "mpirun", "--map-by ppr:1:node")
    nodes = _require_int(environ, "OMPI_COMM_WORLD_SIZE")
    if nodes == 1:
        return NodeInfo()
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    node, host = _require_int(environ, "OMPI_COMM_WORLD_RANK"), _require(environ, "MASTER_ADDR")
    return NodeInfo(nodes, 1, node, host, _find_port(environ, job), job=job)


def _from_srun(environ: Mapping[str, str], visible_gpus: int) -> NodeInfo:
    """Return the node in a Slurm step; node 0 is the first host of the step's list."""
    counts = "SLURM_STEP_TASKS_PER_NODE"
    _check_one_per_host(environ, "SLURM_LOCALID", counts, "srun", "--ntasks-per-node=1")
    ranks, reason = _ranks_of_slurm(environ.get("SLURM_GPUS_ON_NODE", ""), visible_gpus)
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = next((name for name in lists if environ.get(name)), lists[-1])
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    listed, job = _require(environ, hosts), f"{_require(environ, 'SLURM_JOB_ID')}.{step}"
    name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    return NodeInfo(
        nodes=_require_int(environ, name),
        ranks_per_node=ranks,
        node=_require_int(environ, "SLURM_NODEID"),
        host=environ.get("MASTER_ADDR") or first_host(listed, hosts),
        port=_find_port(environ, job),
        ranks_reason=reason,
        peer=last_host(listed, hosts),
        # a node of the job before its requeue may still be there
        job=f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}",
    )


def _ranks_of_slurm(text: str, visible: int) -> tuple[int, str]:
    """Return the number of ranks of a host, one per GPU, and the reason for it.

    Two ranks can't share a GPU, so there are never more ranks than visible GPUs.
    text: the value of SLURM_GPUS_ON_NODE.  visible: the number of visible GPUs.
    """
    name = "SLURM_GPUS_ON_NODE"
    setting = f"{name} is {text!r}" if text else f"{name} is not set"
    if re.fullmatch("[0-9]{1,9}", text) and int(text):
        if not visible or int(text) <= visible:
            return int(text), f"{name} is {text}"
        setting = f"{name} is {text}"
    if visible:
        return visible, f"{setting}, and {visible} GPU(s) are visible here"
    return 1, f"{setting}, and no GPU is visible here"


def _check_one_per_host(
    environ: Mapping[str, str], index: str, counts: str, launcher: str, remedy: str
) -> None:
    """Raise UserError in every process of a host that has several.

    index: the variable with the index of this process on its host. counts: the one with the number
    of processes on a host, or of all hosts, such as "2(x3),1".
    """
    several = any(int(count) > 1 for count in _COUNTS.findall(environ.get(counts, "")))
    if _require_int(environ, index) > 0 or several:
        raise UserError(
            f"{launcher} started several longseq launch on a host; start one per host "
            f"({remedy}) and set the number of ranks with --nproc-per-node"
        )


def first_host(nodes: str, name: str) -> str:
    """Return the first host of a Slurm host list: n03 of `n[03-05,9],gpu1`.

    Raises:
        UserError: the text is not a host list; the message names the variable `name`.
    """
    return _host_at_end(nodes, name, 0)


def last_host(nodes: str, name: str) -> str:
    """Return the last host of a Slurm host list: n9 of `gpu1,n[03-05,9]`.

    Raises:
        UserError: as `first_host`.
    """
    return _host_at_end(nodes, name, -1)


def _host_at_end(nodes: str, name: str, index: int) -> str:
    """Return the host at index 0 or -1 of a Slurm host list. Raises UserError."""
    part = re.split(r",(?![^\[\]]*\])", nodes.strip())[index]
    items = _ITEMS.findall(part)
    host = _ITEMS.sub(lambda found: re.split("[-,]", found[1])[index], part)
    if not re.fullmatch(r"[\w.-]+", host) or not all(_NUMBERS.fullmatch(i) for i in items):
        raise UserError(f"{name} is {nodes!r}, not a list of hosts such as n[03-05,9],gpu1")
    return host


def _find_port(environ: Mapping[str, str], job: str = "") -> int:
    """Return MASTER_PORT, or a port that every process of the job derives equally."""
    if job and "MASTER_PORT" not in environ:
        return _derive_port(job)
    port = _require_int(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT is {port}; ports are 1 to {2**16 - 1}")
    return port


def _derive_port(job: str) -> int:
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _require_int(environ: Mapping[str, str], name: str) -> int:
    text = _require(environ, name)
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise UserError(f"{name} is {text!r}, not a whole number")
    return int(text)


def _require(environ: Mapping[str, str], name: str) -> str:
    if not (value := environ.get(name, "").strip()):
        raise UserError(f"{name} is not set, but this process is one of several; set it")
    return value


def _parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Parse HOST:PORT, HOST or [ADDRESS]:PORT into host and port."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", text.strip())
    port = int(found[3] or default_port) if found else 0
    if not found or not 0 < port < 2**16:
        raise UserError(
            f"--rdzv-endpoint {text!r} can't be read; write HOST:PORT, e.g. node0:29400"
        )
    host = found[1] or found[2]
    try:
        host.encode("idna")  # as each look-up of the name does
    except UnicodeError:
        raise UserError(
            f"--rdzv-endpoint {text!r} has no valid host name: each part between dots has 1 to 63 "
            "characters; write HOST:PORT, e.g. node0:29400"
        ) from None
    return host, port
