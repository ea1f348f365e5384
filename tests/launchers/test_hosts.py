"""Two hosts with a cable between them: a sweep, a maxlen, and the cable cut in a trial."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longseq_bench.core.environment_failure import is_environment_failure
from longseq_bench.store import load
from tests.launchers import netns
from tests.launchers.nodes import Nodes

REASON = netns.unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=str(REASON))]

SWEEP = """\
memory_budget: 64MiB
time_budget: 5min
workload: {heads: 1, head_dim: 16}
tokens: [256, 4k, 512]
implementations: rank-waits
rounds: 1
repeats: 0
threads: 1
"""
"""The one of 4k waits for ever, for what nobody sends."""

LOST_SOON = (
    "import longseq_bench.launchers.control_channel as control; "
    "control.HEARTBEAT_S, control.LOST_S = 0.2, 2.0"
)
MAXLEN = (
    "maxlen", "--impl", "ring", "--memory-budget", "4MiB", "--ceiling", "6k", "--heads", "1",
    "--head-dim", "16", "--threads", "1", "--json", "--out", "out",
)  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[netns.Hosts]:
    hosts = netns.Hosts()
    yield hosts
    hosts.close()


@pytest.fixture
def nodes(hosts: netns.Hosts, tmp_path: Path) -> Iterator[Nodes]:
    endpoint = f"{hosts.addresses[0]}:29400"
    nodes = Nodes(tmp_path, endpoint, hosts.on, (LOST_SOON, LOST_SOON), key="a key of the tests")
    yield nodes
    nodes.close()


def wait_for_lines(nodes: Nodes, text: str) -> Callable[[int], None]:
    """Return a function that waits until node 1 has printed a text so many times."""
    return lambda times: nodes.wait_until(lambda: nodes.err(1).count(text) == times)


def test_a_trial_whose_cable_is_cut_ends_named_and_the_next_is_ok(
    nodes: Nodes, hosts: netns.Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    waits = tmp_path / "waits"
    monkeypatch.setenv("LONGSEQ_TEST_WAITS", str(waits))
    nodes.start("sweep", "sweep.yaml", "--out", "out")
    lost = wait_for_lines(nodes, "lost node 0")
    # the trial runs once more when the host is back
    for times in (1, 2):
        nodes.wait_until(waits.exists)
        hosts.cut()
        lost(times)
        time.sleep(1)  # node 0 has lost the other one too
        waits.unlink()
        hosts.mend()
    assert nodes.wait() == [3, 0]
    found = load(tmp_path / "out").records
    reasons = [r.outcome.reason for r in found]
    assert [r.outcome.status for r in found] == ["ok", "error", "ok"], reasons
    assert is_environment_failure(found[1].outcome)
    assert "rank 1 (node 1): no message from node 1 (" in (found[1].outcome.reason or "")
    assert found[0].outcome.facts["hosts"] == found[2].outcome.facts["hosts"]
    assert "lost node 0 (no message for 2 s)" in nodes.err(1)
    assert nodes.err(1).count(f"joined node 0 ({found[0].environment.host})") == 3
    assert nodes.left() == []


def test_a_search_over_two_hosts(nodes: Nodes) -> None:
    nodes.start(*MAXLEN)
    assert nodes.wait() == [0, 0], nodes.err(0)
    (found,) = json.loads(nodes.out(0))["results"]
    assert (found["world_size"], found["max_tokens"], found["limited_by"]) == (2, 6144, "ceiling")
    assert nodes.left() == []
