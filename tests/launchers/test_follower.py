"""Orders of node 0 that a node obeys or refuses. No rank is started."""

import re
from typing import Any
from unittest.mock import Mock

import pytest

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Trial
from longseq_bench.launchers import follower as follower_module
from longseq_bench.launchers.control_messages import ORDERS, NodeIdentity
from longseq_bench.launchers.follower import Follower
from longseq_bench.launchers.own_command import CHOSEN_BY_SEARCH, CHOSEN_BY_SWEEP, OwnCommand
from tests.launchers.test_ranks import ranks_trial

TRIAL = ranks_trial("ring", 4)
NAMED = TRIAL.replace(workload=TRIAL.workload.model_copy(update={"model": "another"}))
CLUSTER = NodeInfo(2, 2, 1, "10.0.0.1", 29400)
NODE_0 = "10.0.0.1"


def command(chosen: frozenset[str] = CHOSEN_BY_SWEEP, *trials: Trial) -> OwnCommand:
    own = OwnCommand(lambda catalogue: trials or [TRIAL], chosen)
    own.read(Catalogue(implementations={}, devices={}))
    return own


def order(trial: Trial = TRIAL, **changes: Any) -> Any:
    job = {
        "run_id": "zero-1", "trial": trial.model_dump(mode="json"), "nodes": 2,
        "ranks_per_node": 2, "host": NODE_0, "port": 20000, "timeout_s": 60.0, "node": 1,
        "address": NODE_0,
    }  # fmt: skip
    return ORDERS.validate_python({"start": job | changes})


@pytest.fixture
def follower() -> Follower:
    identity = NodeIdentity(node=1, host="beta", token="one")
    made = Follower(CLUSTER, identity, b"", command(), 1.0, print, print)
    made._ranks = Mock()
    return made


@pytest.fixture
def channel() -> Mock:
    return Mock(address="10.0.0.2", peer_address=NODE_0)


def test_ctrl_c_while_a_node_loads_torch_is_told_to_node_0(
    follower: Follower, channel: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "connect_to_node_0", lambda *_: channel)
    monkeypatch.setattr(follower._local, "catalogue", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        follower.follow()
    channel.send.assert_called_once_with(interrupted=True)
    channel.close.assert_called_once_with()


def test_an_order_of_the_command_is_obeyed(follower: Follower, channel: Mock) -> None:
    follower._handle(channel, order(TRIAL.replace(round=1, memory_budget=2**40)))
    (job,) = follower._ranks.start.call_args.args
    assert (job.ranks, job.address, job.store) == (range(2, 4), "10.0.0.2", f"{NODE_0}:20000")
    assert job.trial == TRIAL.replace(round=1, memory_budget=2**40).model_dump(mode="json")
    channel.send.assert_not_called()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks_per_node": 64}, r"64 rank\(s\) on each of 2 node\(s\) are not a part"),
        ({"nodes": 1}, r"on each of 1 node\(s\) are not a part"),
        ({"node": 0}, "it is for node 0"),
        ({"host": "203.0.113.7"}, "would meet at 203.0.113.7, and node 0 is 10.0.0.1"),
        ({"trial": TRIAL.replace(world_size=64)}, "64 ranks are more than the 4 of this launch"),
        ({"trial": TRIAL.replace(implementation="usp")}, "implementation is usp, here ring"),
        ({"trial": TRIAL.at(2**20)}, "seq_len is 1048576, here"),
        ({"trial": TRIAL.replace(seed=7)}, "seed is 7, here 0"),
        ({"trial": NAMED}, "model is another, here "),
    ],
)
def test_another_order_is_refused(
    follower: Follower, channel: Mock, changes: dict[str, Any], reason: str
) -> None:
    follower._handle(channel, order(**changes) if "trial" in changes else order(TRIAL, **changes))
    follower._ranks.start.assert_not_called()
    failed = channel.send.call_args.kwargs["event"]["failed"]
    assert failed.startswith("node 1 (beta) refused the trial: ")
    assert re.search(reason, failed), failed


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"repeats": 3, "fit_only": True, "time_budget": None, "round": 2}, False),
        ({"options": {**TRIAL.options, "sparsity": 0.5}}, True),
        ({"threads": 7}, True),
        ({"device": "cuda"}, True),
    ],
)
def test_a_search_chooses_lengths_and_repetitions_only(
    changes: dict[str, Any], is_refused: bool
) -> None:
    asked = TRIAL.at(2**16).replace(**changes)
    assert bool(command(CHOSEN_BY_SEARCH).refusal(asked)) == is_refused
    assert not command(CHOSEN_BY_SEARCH | {"sparsity"}).refusal(
        TRIAL.replace(options={**TRIAL.options, "sparsity": 0.5})
    )


def test_a_mistake_in_the_command_refuses_everything() -> None:
    def plan(catalogue: Catalogue) -> list[Trial]:
        raise UserError("there is no config a.yaml")

    own = OwnCommand(plan, CHOSEN_BY_SWEEP)
    assert "has not read its own command" in own.refusal(TRIAL)
    own.read(Catalogue(implementations={}, devices={}))
    assert own.refusal(TRIAL) == "the command can't run here: there is no config a.yaml"
