"""The node of a host in a launch: from the options, else from srun, mpirun or torchrun."""

from collections.abc import Mapping

import pytest

from longseq_bench.core.cluster_env import LOOPBACK, NodeInfo, find_node, first_host, last_host
from longseq_bench.core.errors import UserError

SRUN = {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": "n[03-04]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "beta", "MASTER_PORT": "1234",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
"""Set by mpirun of MPICH, Intel MPI and MVAPICH."""
TORCHRUN = {
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "3",
    "MASTER_ADDR": "alpha", "MASTER_PORT": "29500",
}  # fmt: skip
BATCH_SCRIPT = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}


def test_the_default_is_one_node() -> None:
    assert find_node({}) == NodeInfo(1, 1, 0, LOOPBACK, 0)
    assert find_node({}, ranks_per_node=4) == NodeInfo(1, 4)
    assert find_node(BATCH_SCRIPT) == NodeInfo()
    assert find_node({}, nodes=1, node=0).ranks == 1


def test_values_of_options() -> None:
    found = find_node({}, 2, 4, 1, "alpha:29555")
    assert found == NodeInfo(2, 4, 1, "alpha", 29555)
    assert (found.ranks, found.endpoint) == (8, "alpha:29555")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("alpha", "alpha", 29400), ("10.0.0.1:80", "10.0.0.1", 80), ("[fe80::1]:5", "fe80::1", 5)],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    found = find_node({}, 2, 1, 0, text)
    assert (found.host, found.port) == (host, port)
    assert find_node({}, 2, 1, 0, found.endpoint) == found


def test_an_endpoint_without_a_port_gets_that_of_the_job() -> None:
    """Two jobs on one host would meet at a constant port."""
    assert find_node(SRUN, endpoint="beta").port == find_node(SRUN).port
    assert find_node(SRUN, endpoint="[fe80::1]").endpoint == f"[fe80::1]:{find_node(SRUN).port}"
    assert find_node(MPIRUN, endpoint="beta").port == 1234


@pytest.mark.parametrize(
    "text", ["alpha:", "alpha:ssh", "alpha:70000", "alpha:0", "", "a b:1", "a:" + "9" * 5000]
)
def test_an_invalid_endpoint(text: str) -> None:
    with pytest.raises(UserError, match="--rdzv-endpoint"):
        find_node({}, 2, 1, 0, text)


@pytest.mark.parametrize("host", ["node0..cluster", ".node0", "x" * 64, "münch..en", "\udcff"])
def test_an_endpoint_whose_name_no_host_can_have(host: str) -> None:
    with pytest.raises(UserError, match="has no valid host name: each part between dots has 1 to"):
        find_node({}, 2, 1, 0, f"{host}:29400")
    assert find_node({}, 2, 1, 0, "münchen.cluster.:29400").host == "münchen.cluster."


@pytest.mark.parametrize(
    ("environ", "other"),
    [(SRUN, {"SLURM_JOB_ID": "813"}), (SRUN, {"SLURM_STEP_ID": "1"}),
     (SRUN, {"SLURM_RESTART_COUNT": "1"}), (TORCHRUN, {"MASTER_PORT": "29501"}),
     (MPIRUN | {"PMIX_NAMESPACE": "a"}, {"PMIX_NAMESPACE": "b"})],
)  # fmt: skip
def test_a_launch_of_a_scheduler_is_told_from_others(
    environ: dict[str, str], other: dict[str, str]
) -> None:
    """Also if both have the same port, as by a template that sets MASTER_PORT."""
    named = environ if "MASTER_PORT" in other else environ | {"MASTER_PORT": "29500"}
    node_0 = dict.fromkeys(("SLURM_NODEID", "GROUP_RANK", "OMPI_COMM_WORLD_RANK"), "0")
    found = find_node(named)
    assert found.job
    assert found.job == find_node(named | {n: v for n, v in node_0.items() if n in named}).job
    assert found.job != find_node(named | other).job


def test_srun() -> None:
    found = find_node(SRUN)
    assert (found.nodes, found.ranks_per_node, found.node, found.host) == (2, 1, 1, "n03")
    assert 20000 <= found.port < 32768
    assert find_node({**SRUN, "SLURM_NODEID": "0"}).endpoint == found.endpoint
    assert find_node({**SRUN, "SLURM_JOB_ID": "813"}).port != found.port
    assert find_node({**SRUN, "SLURM_GPUS_ON_NODE": "8"}).ranks == 16
    assert find_node({**SRUN, "SLURM_STEP_NUM_NODES": "3"}).nodes == 3

    named = SRUN | {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}
    assert find_node(named) == NodeInfo(2, 1, 1, "alpha", 29500)
    assert find_node({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}) == found
    lists = {"SLURM_STEP_NODELIST": "n07", "SLURM_JOB_NODELIST": "n[01-09]"}
    assert find_node(SRUN | lists).host == "n07"
    assert find_node(BATCH_SCRIPT | {"SLURM_STEPID": "0"}) == find_node(SRUN)


@pytest.mark.parametrize(
    ("text", "gpus", "ranks", "reason"),
    [
        ("8", 8, 8, "SLURM_GPUS_ON_NODE is 8"),
        ("8", 0, 8, "SLURM_GPUS_ON_NODE is 8"),
        ("2", 8, 2, "SLURM_GPUS_ON_NODE is 2"),
        (None, 4, 4, "SLURM_GPUS_ON_NODE is not set, and 4 GPU(s) are visible here"),
        (None, 0, 1, "SLURM_GPUS_ON_NODE is not set, and no GPU is visible here"),
        ("x", 4, 4, "SLURM_GPUS_ON_NODE is 'x', and 4 GPU(s) are visible here"),
        # two ranks can't share a GPU
        ("8", 1, 1, "SLURM_GPUS_ON_NODE is 8, and 1 GPU(s) are visible here"),
    ],
)
def test_the_ranks_of_a_host_under_srun_have_a_reason(
    text: str | None, gpus: int, ranks: int, reason: str
) -> None:
    environ = SRUN if text is None else SRUN | {"SLURM_GPUS_ON_NODE": text}
    found = find_node(environ, gpus=gpus)
    assert (found.ranks_per_node, found.ranks_reason) == (ranks, reason)
    given = find_node(environ, ranks_per_node=3, gpus=gpus)
    assert (given.ranks_per_node, given.ranks_reason) == (3, "--nproc-per-node")


def test_unused_gpus_of_a_host_are_said() -> None:
    assert find_node({}, gpus=1).ranks_reason == ""
    assert "this host has 4 GPUs, --nproc-per-node 4 uses all" in find_node({}, gpus=4).ranks_reason
    assert "has 4 GPUs" in find_node(TORCHRUN, gpus=4).ranks_reason


@pytest.mark.parametrize(
    ("nodes", "first", "last"),
    [
        ("alpha", "alpha", "alpha"),
        ("alpha,beta", "alpha", "beta"),
        ("n[03-05,9],gpu1", "n03", "gpu1"),
        ("n[9,03-05]", "n9", "n05"),
        ("gpu1,n[03-05]", "gpu1", "n05"),
        ("n[003]", "n003", "n003"),
        ("rack[1-2]node[07-08]-ib", "rack1node07-ib", "rack2node08-ib"),
        ("c1.example.org,c2", "c1.example.org", "c2"),
    ],
)
def test_the_first_and_the_last_host_of_a_list(nodes: str, first: str, last: str) -> None:
    assert first_host(nodes, "SLURM_NODELIST") == first
    assert last_host(nodes, "SLURM_NODELIST") == last
    found = find_node(SRUN | {"SLURM_NODELIST": nodes})
    assert (found.host, found.peer) == (first, last)


@pytest.mark.parametrize("nodes", ["n[03-05", "n]3[", "n[]", "n[a-b]", ",n1", "n1 n2", "n[1--2]"])
def test_an_invalid_host_list(nodes: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_NODELIST is .* not a list of hosts"):
        find_node(SRUN | {"SLURM_NODELIST": nodes})


def test_mpirun_and_torchrun() -> None:
    assert find_node(MPIRUN) == NodeInfo(2, 1, 1, "beta", 1234)
    assert find_node(SRUN | MPIRUN) == find_node(MPIRUN)
    assert find_node({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "MASTER_ADDR": ""}) == NodeInfo()
    found = find_node(TORCHRUN)
    assert (found.nodes, found.ranks_per_node, found.node, found.host) == (3, 1, 1, "alpha")
    # port 29500 belongs to torchrun's own store
    assert found.port != 29500
    assert find_node({**TORCHRUN, "GROUP_RANK": "2"}).endpoint == found.endpoint


def test_variables_of_pmi_are_no_reason_to_refuse_what_is_known() -> None:
    for environ in (SRUN, MPIRUN, TORCHRUN):
        assert find_node(environ | HYDRA) == find_node(environ)
    assert find_node({"PMI_RANK": "0", "PMI_SIZE": "1"}) == NodeInfo()
    assert find_node(HYDRA, nodes=1) == NodeInfo()
    assert find_node(HYDRA, 2, 1, 1, "alpha:9").endpoint == "alpha:9"


def test_options_have_priority_over_the_environment() -> None:
    assert find_node(SRUN, ranks_per_node=4).ranks_per_node == 4
    assert find_node(SRUN, endpoint="beta:9").endpoint == "beta:9"
    assert find_node(SRUN, node=0).node == 0
    assert find_node(SRUN, nodes=1) == NodeInfo()
    # an invalid variable is not read if all values are given
    assert find_node({"GROUP_RANK": "x"}, 2, 1, 1, "beta:9").node == 1


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        ({}, {"nodes": 2}, "--nnodes 2 needs --node-rank, different on each node: 0 to 1"),
        ({}, {"nodes": 2, "node": 1}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({}, {"nodes": 2, "node": 2}, "--node-rank 2 is not one of --nnodes 2: 0 to 1"),
        ({}, {"node": 1}, "--node-rank 1 is not one of --nnodes 1"),
        (SRUN, {"nodes": 3}, "--nnodes 3 needs --node-rank"),
        ({**SRUN, "SLURM_LOCALID": "1"}, {}, "srun started several .*--ntasks-per-node=1"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, {}, "mpirun started several"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, {}, "torchrun started several"),
        # also the first one of a host: else it would run everything alone
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, {}, "srun started several"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,3"}, {}, "srun started several"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {}, "mpirun started several"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, {}, "torchrun started several"),
        ({**MPIRUN, "MASTER_ADDR": ""}, {}, "MASTER_ADDR is not set"),
        ({**MPIRUN, "MASTER_PORT": "70000"}, {}, "MASTER_PORT is 70000; ports are 1 to 65535"),
        # each process would run everything alone
        (HYDRA, {}, r"only Open MPI's mpirun is recognised; .* --node-rank \$PMI_RANK"),
        (BATCH_SCRIPT | HYDRA, {}, "only Open MPI's mpirun is recognised"),
        ({**SRUN, "SLURM_NODEID": "1_0"}, {}, "SLURM_NODEID is '1_0', not a whole number"),
        ({**SRUN, "SLURM_NODELIST": ""}, {}, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_invalid_or_missing_values(
    environ: Mapping[str, str], given: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find_node(environ, **given)
