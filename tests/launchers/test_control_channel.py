"""The control channel: which nodes are accepted, refused or lost. No process is started."""

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

Connect = Callable[[NodeIdentity], Channel]


@pytest.fixture
def cluster() -> NodeInfo:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return NodeInfo(3, 1, 0, "127.0.0.1", found.getsockname()[1])


@pytest.fixture
def server(cluster: NodeInfo) -> Iterator[ControlServer]:
    server = ControlServer(cluster, ZERO)
    yield server
    server.close()


@pytest.fixture
def connect(cluster: NodeInfo) -> Iterator[Connect]:
    channels: list[Channel] = []

    def connect(identity: NodeIdentity) -> Channel:
        channels.append(connect_to_node_0(cluster, identity, 5.0))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()


def link(server: ControlServer, node: int = 1) -> NodeLink:
    assert server.wait_for_nodes([node], 5.0) == []
    return server.links[node]


def received(channel: Channel) -> list[dict[str, object]]:
    wait_ready([channel], 5.0)
    return channel.receive()


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- connecting ----------------------------------------------------------------------------------


def test_nodes_that_match_exchange_messages(server: ControlServer, connect: Connect) -> None:
    channel = connect(ONE)
    assert link(server).identity == ONE
    assert (channel.address, link(server).channel.address) == ("127.0.0.1", "127.0.0.1")
    channel.send(event={"rank": 1})
    channel.send(event={"rank": 2})
    until(lambda: link(server).channel.silent_s() < 5)
    assert received(link(server).channel)[0] == {"event": {"rank": 1}}
    link(server).channel.send(shutdown="")
    assert received(channel) == [{"shutdown": ""}]


def test_waiting_ends_when_the_node_connects(server: ControlServer, connect: Connect) -> None:
    connect(ONE)
    assert server.wait_for_nodes([1, 2], 0.05) == [2]
    connect(NodeIdentity(2, "gamma", "two", AGREED))
    assert server.wait_for_nodes([1, 2], 5.0) == []


def test_a_difference_is_an_error_on_both_nodes(server: ControlServer, connect: Connect) -> None:
    other = replace(ONE, must_match={**AGREED, "torch": "2.12.1", "python": "3.12"})
    with pytest.raises(UserError, match="node 0 refused: the nodes differ") as on_node_1:
        connect(other)
    with pytest.raises(UserError, match="the nodes differ") as on_node_0:
        server.wait_for_nodes([1], 5.0)
    for text in (str(on_node_1.value), str(on_node_0.value)):
        assert "torch is 2.13.0 on node 0 (alpha) and 2.12.1 on node 1 (beta)" in text
        assert "python is None on node 0 (alpha) and 3.12 on node 1 (beta)" in text
        assert "the command" not in text


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_wrong_node_rank_is_refused(server: ControlServer, connect: Connect, rank: int) -> None:
    connect(ONE)
    with pytest.raises(UserError, match=f"gamma connected with --node-rank {rank}, which"):
        connect(NodeIdentity(rank, "gamma", "other", AGREED))
    assert link(server).identity == ONE
    assert not link(server).lost_reason
    assert f"refused: gamma connected with --node-rank {rank}, which" in server.describe_missing(
        [2], 1.0
    )


def test_a_node_can_connect_again(server: ControlServer, connect: Connect) -> None:
    first = connect(ONE)
    before = link(server)
    connect(ONE)
    until(lambda: before.lost_reason)
    assert before.lost_reason == "node 1 (beta) is gone: it lost its connection and connected again"
    assert not link(server).lost_reason
    until(lambda: first.disconnect_reason)


def test_a_lost_node_can_be_replaced(server: ControlServer, connect: Connect) -> None:
    connect(ONE).close()
    until(lambda: 1 in server.links and server.links[1].lost_reason)
    assert server.wait_for_nodes([1], 0.05) == [1]
    connect(NodeIdentity(1, "gamma", "new", AGREED))
    assert link(server).identity.host == "gamma"


def test_a_replacement_that_differs_is_refused(server: ControlServer, connect: Connect) -> None:
    connect(ONE).close()
    until(lambda: 1 in server.links and server.links[1].lost_reason)
    with pytest.raises(UserError, match="the nodes differ"):
        connect(replace(ONE, token="new", must_match={}))
    assert server.wait_for_nodes([1], 0.05) == [1]


def test_other_programs_and_wrong_keys_are_refused_and_block_no_node(
    server: ControlServer, connect: Connect, cluster: NodeInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "HANDSHAKE_TIMEOUT_S", 60.0)
    with socket.create_connection((cluster.host, cluster.port)) as silent:
        connect(ONE)
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not link(server).lost_reason
    monkeypatch.setenv(control_channel.KEY_VARIABLE, "another")
    with pytest.raises(LauncherError, match="LONGSEQ_KEY must be the same on every node"):
        connect_to_node_0(cluster, NodeIdentity(2, "gamma", "two", AGREED), 0.1)


# ---- no connection -------------------------------------------------------------------------------


def test_node_0_names_missing_nodes(server: ControlServer, connect: Connect) -> None:
    connect(ONE)
    text = server.describe_missing(server.wait_for_nodes([1, 2], 0.05), 0.05)
    assert (
        f"2 of 3 nodes connected to {server.cluster.endpoint} within 0.05 s; missing: node 2"
        in text
    )
    assert "firewall" in text
    assert "--rdzv-endpoint" in text


def test_a_node_names_the_endpoint_that_does_not_answer(cluster: NodeInfo) -> None:
    with pytest.raises(LauncherError) as error:
        connect_to_node_0(cluster, ONE, 0.1)
    text = str(error.value)
    assert f"no answer from node 0 at {cluster.endpoint} within 0.1 s (connection refused)" in text
    assert "firewall" in text
    assert "the same on every node" in text


def test_another_program_listens_at_the_endpoint(cluster: NodeInfo) -> None:
    with (
        socket.create_server((cluster.host, cluster.port)),
        pytest.raises(LauncherError, match="another program seems to listen at this address"),
    ):
        connect_to_node_0(cluster, ONE, 0.3)


def test_node_0_cannot_listen(server: ControlServer) -> None:
    with pytest.raises(UserError, match=r"can't listen at 127.*: address already in use"):
        ControlServer(server.cluster, ZERO)
    # an address reserved for documentation; no host has it
    with pytest.raises(UserError, match=r"can't listen at 192\.0\.2\.1:29400"):
        ControlServer(NodeInfo(2, 1, 0, "192.0.2.1", 29400), ZERO)


# ---- lost nodes ----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(control_channel, "LOST_S", 0.5)


def test_a_silent_node_is_lost(server: ControlServer, connect: Connect, quick: None) -> None:
    """As when a cable is cut: the connection stays open, and no byte arrives."""
    channel = connect(ONE)
    assert not link(server).lost_reason
    channel.send = lambda **message: None  # type: ignore[method-assign]
    until(lambda: server.links[1].lost_reason)
    assert server.links[1].lost_reason.startswith("no message from node 1 (beta) for ")
    assert server.wait_for_nodes([1], 0.05) == [1]


def test_a_busy_node_is_not_lost(server: ControlServer, connect: Connect, quick: None) -> None:
    channel = connect(ONE)
    time.sleep(1.0)
    assert not link(server).lost_reason
    assert channel.silent_s() < control_channel.LOST_S


def test_messages_before_a_close_arrive(server: ControlServer, connect: Connect) -> None:
    channel = connect(ONE)
    there = link(server).channel
    there.send(shutdown="interrupted")
    there.close()
    until(lambda: channel.disconnect_reason)
    assert channel.receive() == [{"shutdown": "interrupted"}]
    channel.send(event={})
    assert channel.silent_s() == float("inf")
