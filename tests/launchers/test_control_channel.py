"""The control channel between nodes: who may come, who is refused, who is lost; no process."""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.control_channel import (
    Channel,
    ControlServer,
    NodeIdentity,
    NodeLink,
    connect_to_node_0,
    wait_ready,
)

AGREED = {"torch": "2.13.0", "the command": "sweep a.yaml"}
ZERO = NodeIdentity(0, "alpha", "zero", AGREED)
ONE = NodeIdentity(1, "beta", "one", AGREED)

Join = Callable[[NodeIdentity], Channel]


@pytest.fixture
def site() -> NodeInfo:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return NodeInfo(3, 1, 0, "127.0.0.1", found.getsockname()[1])


@pytest.fixture
def hub(site: NodeInfo) -> Iterator[ControlServer]:
    hub = ControlServer(site, ZERO)
    yield hub
    hub.close()


@pytest.fixture
def come(site: NodeInfo) -> Iterator[Join]:
    came: list[Channel] = []

    def come(hello: NodeIdentity) -> Channel:
        came.append(connect_to_node_0(site, hello, 5.0))
        return came[-1]

    yield come
    for channel in came:
        channel.close()


def link(hub: ControlServer, node: int = 1) -> NodeLink:
    assert hub.missing([node], 5.0) == []
    return hub.links[node]


def heard(channel: Channel) -> list[dict[str, object]]:
    wait_ready([channel], 5.0)
    return channel.receive()


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- coming ------------------------------------------------------------------------------------


def test_nodes_that_agree_hear_each_other(hub: ControlServer, come: Join) -> None:
    channel = come(ONE)
    assert link(hub).hello == ONE
    assert (channel.address, link(hub).channel.address) == ("127.0.0.1", "127.0.0.1")
    channel.send(news={"rank": 1})
    channel.send(news={"rank": 2})
    until(lambda: link(hub).channel.silent_s() < 5)
    assert heard(link(hub).channel)[0] == {"news": {"rank": 1}}
    link(hub).channel.send(over="")
    assert heard(channel) == [{"over": ""}]


def test_whoever_waits_for_a_node_goes_on_when_it_comes(hub: ControlServer, come: Join) -> None:
    come(ONE)
    assert hub.missing([1, 2], 0.05) == [2]
    come(NodeIdentity(2, "gamma", "two", AGREED))
    assert hub.missing([1, 2], 5.0) == []


def test_nodes_that_differ_are_refused_on_both_sides(hub: ControlServer, come: Join) -> None:
    other = replace(ONE, agreed={**AGREED, "torch": "2.12.1", "python": "3.12"})
    with pytest.raises(UserError, match="node 0 refused: the nodes differ") as on_node_1:
        come(other)
    with pytest.raises(UserError, match="the nodes differ") as on_node_0:
        hub.missing([1], 5.0)
    for text in (str(on_node_1.value), str(on_node_0.value)):
        assert "torch is 2.13.0 on node 0 (alpha) and 2.12.1 on node 1 (beta)" in text
        assert "python is None on node 0 (alpha) and 3.12 on node 1 (beta)" in text
        assert "the command" not in text


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_is_taken_or_none_is_refused(hub: ControlServer, come: Join, rank: int) -> None:
    come(ONE)
    with pytest.raises(UserError, match=f"gamma connected with --node-rank {rank}, which"):
        come(NodeIdentity(rank, "gamma", "other", AGREED))
    assert link(hub).hello == ONE
    assert not link(hub).lost
    assert f"refused: gamma connected with --node-rank {rank}, which" in hub.describe_missing(
        [2], 1.0
    )


def test_a_node_that_comes_again_is_welcome(hub: ControlServer, come: Join) -> None:
    first = come(ONE)
    before = link(hub)
    come(ONE)
    until(lambda: before.lost)
    assert before.lost == "node 1 (beta) is gone: it lost its connection and connected again"
    assert not link(hub).lost
    until(lambda: first.gone)


def test_a_node_that_is_gone_may_be_replaced(hub: ControlServer, come: Join) -> None:
    come(ONE).close()
    until(lambda: 1 in hub.links and hub.links[1].lost)
    assert hub.missing([1], 0.05) == [1]
    come(NodeIdentity(1, "gamma", "new", AGREED))
    assert link(hub).hello.host == "gamma"


def test_one_that_differs_later_is_refused_alone(hub: ControlServer, come: Join) -> None:
    come(ONE).close()
    until(lambda: 1 in hub.links and hub.links[1].lost)
    with pytest.raises(UserError, match="the nodes differ"):
        come(replace(ONE, token="new", agreed={}))
    assert hub.missing([1], 0.05) == [1]


def test_a_stranger_is_kept_out_and_keeps_nobody_out(
    hub: ControlServer, come: Join, site: NodeInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "SHAKE_S", 60.0)
    with socket.create_connection((site.host, site.port)) as silent:
        come(ONE)
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not link(hub).lost
    monkeypatch.setenv(control_channel.KEY_VARIABLE, "another")
    with pytest.raises(LauncherError, match="LONGSEQ_KEY must be the same on every node"):
        connect_to_node_0(site, NodeIdentity(2, "gamma", "two", AGREED), 0.1)


# ---- nobody there ------------------------------------------------------------------------------


def test_node_0_says_who_did_not_come(hub: ControlServer, come: Join, site: NodeInfo) -> None:
    come(ONE)
    text = hub.describe_missing(hub.missing([1, 2], 0.05), 0.05)
    assert f"2 of 3 nodes connected to {site.endpoint} within 0.05 s; missing: node 2" in text
    assert "firewall" in text
    assert "--rdzv-endpoint" in text


def test_the_others_say_where_nobody_answers(site: NodeInfo) -> None:
    with pytest.raises(LauncherError) as error:
        connect_to_node_0(site, ONE, 0.1)
    text = str(error.value)
    assert f"no answer from node 0 at {site.endpoint} within 0.1 s (connection refused)" in text
    assert "firewall" in text
    assert "the same on every node" in text


def test_something_else_listens_there(site: NodeInfo) -> None:
    with (
        socket.create_server((site.host, site.port)),
        pytest.raises(LauncherError, match="another program seems to listen at this address"),
    ):
        connect_to_node_0(site, ONE, 0.3)


def test_node_0_can_not_listen(hub: ControlServer, site: NodeInfo) -> None:
    with pytest.raises(UserError, match=f"can't listen at {site.endpoint}: address already in use"):
        ControlServer(site, ZERO)
    # an address of documentation, of no host at all
    with pytest.raises(UserError, match=r"can't listen at 192\.0\.2\.1:29400"):
        ControlServer(NodeInfo(2, 1, 0, "192.0.2.1", 29400), ZERO)


# ---- being lost --------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "BEAT_S", 0.05)
    monkeypatch.setattr(control_channel, "LOST_S", 0.5)


def test_a_node_that_is_not_heard_is_lost(hub: ControlServer, come: Join, quick: None) -> None:
    """As with a cable that is cut: nothing is closed, and no byte comes."""
    channel = come(ONE)
    assert not link(hub).lost
    channel.send = lambda **message: None  # type: ignore[method-assign]
    until(lambda: hub.links[1].lost)
    assert hub.links[1].lost.startswith("no message from node 1 (beta) for ")
    assert hub.missing([1], 0.05) == [1]


def test_a_node_that_computes_is_not_lost(hub: ControlServer, come: Join, quick: None) -> None:
    channel = come(ONE)
    time.sleep(1.0)
    assert not link(hub).lost
    assert channel.silent_s() < control_channel.LOST_S


def test_what_was_said_last_arrives(hub: ControlServer, come: Join) -> None:
    channel = come(ONE)
    there = link(hub).channel
    there.send(over="interrupted")
    there.close()
    until(lambda: channel.gone)
    assert channel.receive() == [{"over": "interrupted"}]
    channel.send(news={})
    assert channel.silent_s() == float("inf")
