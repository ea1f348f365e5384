"""A job of a real Slurm cluster that is cancelled; tests/campaigns/slurm.py does more."""

from collections.abc import Iterator

import pytest

from longseq_bench.store import RECORDS, load
from tests.launchers import slurm_cluster
from tests.launchers.slurm_cluster import Cluster

REASON = slurm_cluster.unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=str(REASON))]

SWEEP = """\
memory_budget: 64MiB
workload: {heads: 1, head_dim: 16}
tokens: [256, 4k]
implementations: rank-waits
rounds: 1
repeats: 0
threads: 1
device: cpu
"""
"""The second trial waits for ever."""

JOB = "#!/bin/sh\nexec longseq launch --nproc-per-node 1 -- sweep sweep.yaml --out out\n"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    try:
        cluster = Cluster()
    except TimeoutError as error:  # its daemons do not run everywhere, such as in a container
        pytest.skip(f"no Slurm cluster came up: {error}")
    yield cluster
    cluster.close()


def test_a_cancelled_job_keeps_its_records_and_leaves_nothing(cluster: Cluster) -> None:
    (cluster.work / "sweep.yaml").write_text(SWEEP)
    (cluster.work / "job.sh").write_text(JOB)
    job = cluster.submit("--nodes=2", "--exclusive", "--output=out-%j", "job.sh")
    records, printed = cluster.work / "out" / RECORDS, cluster.work / f"out-{job}"
    cluster.wait_until(lambda: records.exists() and records.read_text().endswith("\n"))
    cluster.run("scancel", job)
    cluster.wait_until(lambda: cluster.job_state(job) == "CANCELLED")
    assert cluster.left() == []
    shown = printed.read_text()
    assert "ranks: 1 on each of n1, n2 by srun" in shown
    assert "longseq: interrupted by SIGTERM; every finished record is on disk" in shown
    assert "Traceback" not in shown
    (record,) = load(records).records
    assert (record.outcome.status, record.outcome.facts["hosts"]) == ("ok", ["n1", "n2"])
    assert record.outcome.facts["launcher"] == "srun"
