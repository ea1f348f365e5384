"""Where torchrun, mpirun and srun put a rank, from their variables alone."""

from collections.abc import Mapping

import pytest

from longseq_bench.core.cluster_env import LOOPBACK, RankInfo, first_host, rank_from_environment
from longseq_bench.core.errors import UserError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "MASTER_ADDR": "alpha", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0", "SLURM_NODELIST": "n[03-05,9],gpu1",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "beta", "MASTER_PORT": "1234",
}  # fmt: skip


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nobody_started_this_process() -> None:
    assert rank_from_environment({}) is None
    assert (
        rank_from_environment({"MASTER_ADDR": "alpha", "SLURM_JOB_ID": "812", "WORLD_SIZE": "4"})
        is None
    )


def test_torchrun() -> None:
    assert rank_from_environment(TORCHRUN) == RankInfo(5, 8, 1, "alpha", 29500)
    agent = rank_from_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent == RankInfo(5, 8, 1, "alpha", 29500, store_is_up=True)


def test_mpirun() -> None:
    assert rank_from_environment(MPIRUN) == RankInfo(1, 2, 1, "beta", 1234)
    alone = without(MPIRUN, "MASTER_ADDR") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert rank_from_environment(alone) == RankInfo(1, 2, 1, LOOPBACK, 1234)


def test_srun() -> None:
    found = rank_from_environment(SRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.address) == (3, 4, 1, "n03")
    assert 20000 <= found.port < 32768
    named = SRUN | {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}
    assert rank_from_environment(named) == RankInfo(3, 4, 1, "alpha", 29500)


def test_every_rank_of_a_step_derives_one_port_and_other_steps_another() -> None:
    def port(**fields: str) -> int:
        found = rank_from_environment(SRUN | fields)
        assert found is not None
        return found.port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0")
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="813")}) == 3


def test_a_batch_script_is_no_rank() -> None:
    """It has SLURM_PROCID=0 and SLURM_NTASKS=4, and nobody runs beside it."""
    assert rank_from_environment(without(SRUN, "SLURM_STEP_ID")) is None
    assert rank_from_environment(
        without(SRUN, "SLURM_STEP_ID") | {"SLURM_STEPID": "0"}
    ) == rank_from_environment(SRUN)


def test_the_innermost_starter_wins() -> None:
    assert rank_from_environment(SRUN | MPIRUN) == rank_from_environment(MPIRUN)
    assert rank_from_environment(SRUN | MPIRUN | TORCHRUN) == rank_from_environment(TORCHRUN)


def test_the_list_of_a_step_comes_before_that_of_its_job() -> None:
    found = rank_from_environment(
        SRUN | {"SLURM_STEP_NODELIST": "n07", "SLURM_JOB_NODELIST": "n[01-09]"}
    )
    assert found is not None
    assert found.address == "n07"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("n[03-05,9],gpu1", "n03"),
        ("n[9,03-05]", "n9"),
        ("gpu1,n[03-05]", "gpu1"),
        ("n[003]", "n003"),
        ("rack[1-2]node[07-08]-ib", "rack1node07-ib"),
        ("c1.example.org,c2", "c1.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["n[03-05", "n]3[", "n[]", "n[a-b]", ",n1", "n1 n2", "n[1--2]"])
def test_what_is_no_list_of_hosts_is_refused(nodes: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_NODELIST is .* no list of hosts"):
        rank_from_environment(SRUN | {"SLURM_NODELIST": nodes})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "RANK"), "RANK is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        (TORCHRUN | {"RANK": "one"}, "RANK is 'one', which is no whole number"),
        (TORCHRUN | {"RANK": "1_0"}, "RANK is '1_0', which is no whole number"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8: 0 to 7"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is -1, but WORLD_SIZE is 8"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, "LOCAL_RANK is 8, but WORLD_SIZE is 8"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; there is one rank or more"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports are 1 to 65535"),
        (without(SRUN, "SLURM_NTASKS"), "SLURM_NTASKS is not set"),
        (without(SRUN, "SLURM_NODELIST"), "SLURM_JOB_NODELIST is not set"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID is 4, but SLURM_NTASKS is 4: 0 to 3"),
        (without(MPIRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(MPIRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        rank_from_environment(environ)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
