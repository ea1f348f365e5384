"""The control channel: which nodes are accepted, refused or lost. No process is started."""

import errno
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.launchers import control_channel, endpoint, secure_connection
from longseq_bench.launchers.control_channel import (
    Channel,
    ControlServer,
    NodeLink,
    connect_to_node_0,
    wait_ready,
)
from longseq_bench.launchers.control_messages import Interrupted, NodeIdentity, Ready, Shutdown
from longseq_bench.launchers.secure_connection import (
    MAGIC,
    SecureConnection,
    accept_client,
    connect_to_server,
)

AGREED = {"torch": "2.13.0", "the command": "sweep a.yaml"}


def identity(node: int, host: str, token: str, must_match: dict[str, str] = AGREED) -> NodeIdentity:
    return NodeIdentity(node=node, host=host, token=token, must_match=must_match)


KEY = b"a key of the tests"
ZERO, ONE = identity(0, "alpha", "zero"), identity(1, "beta", "one")

Connect = Callable[[NodeIdentity], Channel]


@pytest.fixture
def cluster() -> NodeInfo:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return NodeInfo(3, 1, 0, "127.0.0.1", found.getsockname()[1])


@pytest.fixture
def server(cluster: NodeInfo) -> Iterator[ControlServer]:
    server = ControlServer(cluster, ZERO, KEY)
    yield server
    server.close()


@pytest.fixture
def connect(cluster: NodeInfo) -> Iterator[Connect]:
    channels: list[Channel] = []

    def connect(identity: NodeIdentity) -> Channel:
        channels.append(connect_to_node_0(cluster, identity, KEY, 5.0))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()


def link(server: ControlServer, node: int = 1) -> NodeLink:
    assert server.wait_for_nodes([node], 5.0) == []
    return server.links[node]


def received(channel: Channel) -> list[Any]:
    wait_ready([channel], 5.0)
    return channel.receive()


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Room for a few more open files, and a hard limit as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = len(os.listdir("/proc/self/fd")) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- connecting ----------------------------------------------------------------------------------


def test_nodes_that_match_exchange_messages(server: ControlServer, connect: Connect) -> None:
    channel = connect(ONE)
    assert link(server).identity == ONE
    assert (channel.address, link(server).channel.address) == ("127.0.0.1", "127.0.0.1")
    channel.send(ready={"cpu": "a CPU"})
    channel.send(interrupted=True)
    assert received(link(server).channel)[0] == Ready(ready={"cpu": "a CPU"})
    link(server).channel.send(shutdown="", interrupted=False)
    assert received(channel) == [Shutdown(shutdown="", interrupted=False)]


def test_waiting_ends_when_the_node_connects(server: ControlServer, connect: Connect) -> None:
    connect(ONE)
    assert server.wait_for_nodes([1, 2], 0.05) == [2]
    connect(identity(2, "gamma", "two"))
    assert server.wait_for_nodes([1, 2], 5.0) == []


def test_a_difference_is_an_error_on_both_nodes(server: ControlServer, connect: Connect) -> None:
    other = identity(1, "beta", "one", {**AGREED, "torch": "2.12.1", "python": "3.12"})
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
        connect(identity(rank, "gamma", "other"))
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
    connect(identity(1, "gamma", "new"))
    assert link(server).identity.host == "gamma"


def test_a_replacement_that_differs_is_refused(server: ControlServer, connect: Connect) -> None:
    connect(ONE).close()
    until(lambda: 1 in server.links and server.links[1].lost_reason)
    with pytest.raises(UserError, match="the nodes differ"):
        connect(identity(1, "beta", "new", {}))
    assert server.wait_for_nodes([1], 0.05) == [1]


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_node_0_raises_the_limit_of_open_files(cluster: NodeInfo, few_descriptors: None) -> None:
    """Each node takes three at either end, here 60 in all."""
    many = replace(cluster, nodes=11)
    server, channels = ControlServer(many, ZERO, KEY), []
    try:
        for node in range(1, 11):
            one = identity(node, f"host{node}", f"token{node}")
            channels.append(connect_to_node_0(many, one, KEY, 5.0))
        assert server.wait_for_nodes(range(1, 11), 5.0) == []
    finally:
        for channel in channels:
            channel.close()
        server.close()


def test_node_0_names_its_own_limit(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for another file it would blame the network."""
    listener = Mock(wraps=server._listener)
    listener.accept.side_effect = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(server, "_listener", listener)
    with suppress(OSError), socket.create_connection((server.cluster.host, server.cluster.port)):
        until(lambda: server._obstacle)
    reason = server.describe_missing([1], 5.0)
    assert reason.endswith("node 0 could not accept connections: too many open files")


def test_a_node_names_the_endpoint_that_does_not_answer(cluster: NodeInfo) -> None:
    with pytest.raises(LauncherError) as error:
        connect_to_node_0(cluster, ONE, KEY, 0.1)
    text = str(error.value)
    assert f"no answer from node 0 at {cluster.endpoint} within 0.1 s (connection refused)" in text
    assert "firewall" in text
    assert "the same on every node" in text


def test_another_program_listens_at_the_endpoint(cluster: NodeInfo) -> None:
    with (
        socket.create_server((cluster.host, cluster.port)),
        pytest.raises(LauncherError, match="another program seems to listen at this address"),
    ):
        connect_to_node_0(cluster, ONE, KEY, 0.3)


def test_node_0_cannot_listen(server: ControlServer) -> None:
    with pytest.raises(UserError, match=r"can't listen at 127.*: address already in use"):
        ControlServer(server.cluster, ZERO, KEY)
    # an address reserved for documentation; no host has it
    with pytest.raises(UserError, match=r"can't listen at 192\.0\.2\.1:29400"):
        ControlServer(NodeInfo(2, 1, 0, "192.0.2.1", 29400), ZERO, KEY)


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
    there.send(shutdown="interrupted", interrupted=False)
    there.close()
    until(lambda: channel.disconnect_reason)
    assert channel.receive() == [Shutdown(shutdown="interrupted", interrupted=False)]
    channel.send(ready={})
    assert channel.silent_s() == float("inf")


# ---- strangers -----------------------------------------------------------------------------------


def test_strangers_learn_nothing_and_block_no_node(
    server: ControlServer, connect: Connect, cluster: NodeInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "MAX_HANDSHAKES", 4)
    strangers = [socket.create_connection((cluster.host, cluster.port)) for _ in range(12)]
    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(22))
    assert strangers[-1].recv(100) == b""
    strangers[-2].sendall(MAGIC + bytes(31))
    connect(ONE)
    strangers[-2].sendall(bytes(1))
    nonce = strangers[-2].recv(100)
    strangers[-2].sendall(bytes(32))
    assert (len(nonce), strangers[-2].recv(100)) == (32, b"")
    assert not link(server).lost_reason
    until(lambda: server._strangers["127.0.0.1"] >= 10)
    text = server.describe_missing([2], 1.0)
    assert "without the key, from 127.0.0.1" in text
    for stranger in strangers:
        stranger.close()


def test_a_slow_handshake_has_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each byte."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    here, there = socket.socketpair()
    here.settimeout(5)
    with here, there:
        for count in range(3):
            there.sendall(b"x")
            if count < 2:
                assert secure_connection._receive_exactly(here, 1, 1.5) == b"x"
            now += 1.0
        with pytest.raises(TimeoutError):
            secure_connection._receive_exactly(here, 1, 1.5)


def test_a_node_with_another_key_is_refused(server: ControlServer, cluster: NodeInfo) -> None:
    with pytest.raises(LauncherError, match=r"its key differs: .*LONGSEQ_KEY must be the same"):
        connect_to_node_0(cluster, ONE, b"another", 0.1)
    assert server.links == {}


def test_a_fake_node_0_gets_no_identity(cluster: NodeInfo) -> None:
    sent = []

    def play(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sock.settimeout(5)
                with sock:
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64))
                    sent.append(sock.recv(2**16))
                    sent.append(sock.recv(2**16))

    with socket.create_server((cluster.host, cluster.port)) as listener:
        thread = threading.Thread(target=play, args=(listener,))
        thread.start()
        with pytest.raises(LauncherError, match="its key differs"):
            connect_to_node_0(cluster, ONE, KEY, 0.1)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert len(b"".join(sent[:2])) == len(MAGIC) + 32 + 32
    assert not any(b"sweep" in data or b"beta" in data for data in sent)


def pair() -> tuple[SecureConnection, SecureConnection, socket.socket, socket.socket]:
    """A client and a server that authenticated each other, and their sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client_socket = socket.create_connection(listener.getsockname())
        server_socket, _ = listener.accept()
    found, end = [], time.monotonic() + 5
    accepting = threading.Thread(
        target=lambda: found.append(accept_client(server_socket, KEY, end))
    )
    accepting.start()
    client = connect_to_server(client_socket, KEY, end)
    accepting.join()
    return client, found[0], client_socket, server_socket


@pytest.mark.parametrize("attack", ["flip", "replay", "swap", "reflect", "cut"])
def test_an_altered_message_is_noticed(attack: str) -> None:
    client, server, raw_client, raw_server = pair()
    with raw_client, raw_server:
        client.send(b"first")
        client.send(b"other")
        frames = raw_server.recv(82, socket.MSG_WAITALL)
        first, other = frames[:41], frames[41:]
        hostile = {
            "flip": bytes([*first[:6], first[6] ^ 1, *first[7:]]), "replay": first + first,
            "swap": other + first, "reflect": b"", "cut": first[:20],
        }[attack]  # fmt: skip
        if attack == "reflect":
            raw_server.sendall(first)
            server = client
        else:
            raw_client.sendall(hostile)
            raw_client.shutdown(socket.SHUT_WR)
        if attack == "replay":
            assert server.receive(100) == b"first"
        with pytest.raises((ValueError, EOFError)) as error:
            server.receive(100)
        assert attack == "cut" or "altered" in str(error.value)


def test_a_long_message_is_not_read() -> None:
    client, server, raw_client, raw_server = pair()
    with raw_client, raw_server:
        client.send(bytes(101))
        with pytest.raises(ValueError, match="101 bytes; the limit is 100"):
            server.receive(100)


@pytest.mark.parametrize(
    "data", [b"[]", b"{", b'{"ready": 1}', b"[" * 10**6, b'{"event": "\xff"}', b"1e999"]
)
def test_a_node_with_a_malformed_message_is_dropped_and_named(
    server: ControlServer, connect: Connect, data: bytes
) -> None:
    channel = connect(ONE)
    with channel._send_lock:  # not in the middle of a heartbeat
        channel._connection.send(data)
    until(lambda: link_reason(server))
    assert link_reason(server).startswith(
        "node 1 (beta) is gone: it sent a message that can't be read ("
    )
    assert len(link_reason(server)) < 400


def link_reason(server: ControlServer) -> str:
    return server.links[1].lost_reason if 1 in server.links else ""


def test_a_node_that_floods_is_dropped(
    server: ControlServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "MAX_UNREAD", 10)
    channel = connect(ONE)
    for _ in range(20):
        channel.send(interrupted=True)
    until(lambda: link_reason(server))
    assert "faster than they can be read" in link_reason(server)
    assert server.links[1].channel.receive() == [Interrupted(interrupted=True)] * 10


def test_the_difference_of_clocks_is_known(server: ControlServer, connect: Connect) -> None:
    """The clock of the other host is an hour behind."""
    channel = connect(ONE)
    hour_ns = 3600 * 10**9
    for late_ns in (5 * 10**9, 10**6):  # one message was on the way for seconds
        channel.send(heartbeat=time.time_ns() - hour_ns - late_ns)
    there = link(server).channel
    until(lambda: len(there._clock_offsets) >= 3)
    offsets = [offset for offset in there._clock_offsets if offset > 10**9]
    there._clock_offsets = deque(offsets)  # without its own heartbeat, which has the right time
    assert len(offsets) == 2
    assert abs(there.clock_offset_ns - hour_ns) < 10**9


# ---- addresses -----------------------------------------------------------------------------------


def test_nodes_connect_over_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as found:
        cluster = NodeInfo(2, 1, 0, "::1", found.getsockname()[1])
    server = ControlServer(cluster, ZERO, KEY)
    channel = connect_to_node_0(cluster, ONE, KEY, 5.0)
    assert (channel.address, channel.peer_address) == ("::1", "::1")
    channel.close()
    server.close()


def test_node_0_listens_at_the_address_of_the_endpoint_only(server: ControlServer) -> None:
    found = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [a.ip for a in found if a.port == server.cluster.port] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("own", "found"),
    [(["127.0.0.1", "10.1.2.3"], "10.1.2.3"), (["10.1.2.3", "10.9.0.1"], None), ([], None)],
)
def test_a_name_that_means_loopback_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch, own: list[str], found: str | None
) -> None:
    """As on Debian, which resolves the host's own name to 127.0.1.1."""
    cluster = NodeInfo(2, 1, 0, "alpha", 29400)
    resolved = [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: resolved)
    monkeypatch.setattr(endpoint, "_own_addresses", lambda: own)
    if found:
        assert endpoint.find_host(cluster) == found
        return
    with pytest.raises(UserError, match="alpha is a loopback address on this host"):
        ControlServer(cluster, ZERO, KEY)


def test_a_name_that_does_not_resolve_is_named() -> None:
    cluster = NodeInfo(2, 1, 0, "nowhere.invalid", 29400)
    with pytest.raises(UserError, match=r"can't listen at nowhere\.invalid:29400: \w+"):
        ControlServer(cluster, ZERO, KEY)
    with pytest.raises(LauncherError, match=r"no answer from node 0 at nowhere\.invalid:29400"):
        connect_to_node_0(cluster, ONE, KEY, 0.1)
