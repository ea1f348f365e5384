"""The control channel: one TCP connection from every other node to node 0.

Both ends prove that they know the key of the launch (launch_key.py) before they say anything else,
and authenticate every message (secure_connection.py). Messages are JSON that fits a model
(control_messages.py); nothing that is received is executed or unpickled. A node that sends
anything else is dropped and named.

Both ends send a heartbeat every HEARTBEAT_S. A node that is silent for LOST_S is lost (TCP alone
would take a quarter of an hour). A node that lost its connection may connect again.
"""

import os
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection as connections
from typing import Any

from pydantic import TypeAdapter

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.launchers.control_messages import (
    IDENTITY,
    NODE_MESSAGES,
    ORDERS,
    WELCOME,
    Heartbeat,
    NodeIdentity,
    Refusal,
    decode,
    encode,
)
from longseq_bench.launchers.endpoint import find_host, resolve
from longseq_bench.launchers.helper_start import raise_descriptor_limit
from longseq_bench.launchers.launch_key import KEY_VARIABLE
from longseq_bench.launchers.secure_connection import (
    AuthenticationError,
    SecureConnection,
    accept_client,
    connect_to_server,
)

HEARTBEAT_S = 1.0
LOST_S = 10.0

HANDSHAKE_TIMEOUT_S = 5.0
"""Time limit of a handshake."""

RETRY_S = 0.2
MAX_MESSAGE_BYTES = 2**24
"""The size limit of a message. The longest is a rank's outcome."""

MAX_IDENTITY_BYTES = 2**20
MAX_UNREAD = 10_000
"""Messages of a node that wait to be read; a node that sends more is dropped."""

MAX_HANDSHAKES = 128
"""Connections that may take part in a handshake at a time."""

MAX_STRANGERS = 100
"""Addresses of connections without the key that are counted."""

CLOCK_SAMPLES = 10


class Channel:
    """One end of a connection.

    A thread reads messages and sends heartbeats, so that a busy node does not seem lost.
    `fileno` becomes readable when there is a message; see `wait_ready`.

    messages: the messages that the other end may send.
    address, peer_address: the numeric addresses of this host and of the other one.
    disconnect_reason: why the connection ended; empty while it is open.
    """

    def __init__(self, connection: SecureConnection, messages: TypeAdapter[Any]) -> None:
        self._connection, self._kind = connection, messages
        self._send_lock, self._closed = threading.Lock(), threading.Event()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clock_offsets: deque[int] = deque(maxlen=CLOCK_SAMPLES)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._last_received_s = time.monotonic()
        self.address, self.peer_address = connection.address, connection.peer_address
        self.disconnect_reason = ""
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is a message."""
        return self._wake_read

    def send(self, **message: Any) -> None:
        """Send a message. If the connection is broken, set `disconnect_reason` without raising."""
        try:
            with self._send_lock:
                self._connection.send(encode(message))
        except OSError as error:
            self.disconnect(describe_error(error))

    def receive(self) -> list[Any]:
        """Return all messages since the last call."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, 2**16)
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def silent_s(self) -> float:
        """Return the seconds since the last message; infinity if the connection ended."""
        return float("inf") if self.disconnect_reason else time.monotonic() - self._last_received_s

    @property
    def clock_offset_ns(self) -> int:
        """Nanoseconds to add to a time of the other host's clock, for one of this host's.

        Each heartbeat gives the offset plus the time that it travelled; the least is the best.
        """
        return min(list(self._clock_offsets), default=0)

    def close(self, reason: str = "it was closed here") -> None:
        """Close the connection. Call it only from the thread that receives messages."""
        self.disconnect(reason)
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(HANDSHAKE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run_thread(self) -> None:
        next_heartbeat = time.monotonic()
        try:
            while not self._closed.is_set() and not self.disconnect_reason:
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
                    self.send(heartbeat=time.time_ns())
                if self._connection.poll(next_heartbeat - time.monotonic()):
                    self._read()
        except (OSError, EOFError, ValueError) as error:
            self.disconnect(describe_error(error))

    def _read(self) -> None:
        """Read a message. Raises ValueError for one that is forged or malformed."""
        message = decode(self._connection.receive(MAX_MESSAGE_BYTES), self._kind)
        self._last_received_s = time.monotonic()
        if isinstance(message, Heartbeat):
            self._clock_offsets.append(time.time_ns() - message.heartbeat)
            return
        if self._messages.qsize() >= MAX_UNREAD:
            raise ValueError("it sent messages faster than they can be read")
        self._messages.put(message)
        self._wake()

    def disconnect(self, reason: str) -> None:
        """Break the connection. Earlier messages can still be received at both ends."""
        self.disconnect_reason = self.disconnect_reason or reason
        self._connection.shut_down()
        self._wake()

    def _wake(self) -> None:
        # after close the descriptor's number may belong to another file
        if not self._closed.is_set():
            with suppress(OSError):
                os.write(self._wake_write, b".")


# ---- node 0 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeLink:
    """The connection of node 0 to another node."""

    identity: NodeIdentity
    channel: Channel

    @property
    def lost_reason(self) -> str:
        """Reason why the node counts as lost; empty if it does not."""
        if self.channel.disconnect_reason:
            return f"{self.identity} is gone: {self.channel.disconnect_reason}"
        silent_s = self.channel.silent_s()
        return f"no message from {self.identity} for {silent_s:.0f} s" if silent_s > LOST_S else ""


class ControlServer:
    """The server of node 0. It listens at `cluster.endpoint` during the launch."""

    def __init__(self, cluster: NodeInfo, identity: NodeIdentity, key: bytes) -> None:
        self.cluster, self.identity, self._key = cluster, identity, key
        self._links: dict[int, NodeLink] = {}
        self._replaced_links: list[NodeLink] = []
        self._refusals: list[str] = []
        self._strangers: Counter[str] = Counter()
        self._handshakes: dict[socket.socket, str] = {}
        self._mismatch = ""
        self._changed = threading.Condition()
        self._closed = False
        self._obstacle = ""
        raise_descriptor_limit()  # three for each node
        self._listener = self._listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self) -> socket.socket:
        """Return the listening socket. Raises UserError if it can't be opened."""
        try:
            family, address = resolve(find_host(self.cluster), self.cluster.port)
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # at that address only: other networks of this host have no business here, and a
            # node 0 on the wrong host fails at once
            listener.bind(address)
            listener.listen(self.cluster.nodes + MAX_HANDSHAKES)
        except OSError as error:
            raise UserError(
                f"node 0 can't listen at {self.cluster.endpoint}: {describe_error(error)}; "
                f"--rdzv-endpoint is an address of node 0 and a port that is free there"
            ) from None
        return listener

    @property
    def links(self) -> dict[int, NodeLink]:
        """Return the links to all nodes that have connected, lost or not."""
        with self._changed:
            return dict(self._links)

    def wait_for_nodes(self, nodes: Iterable[int], timeout_s: float) -> list[int]:
        """Wait until nodes are connected; return those that are still missing at the timeout.

        Raises:
            UserError: a node connected with `must_match` values that differ from node 0's.
        """
        expected, end = list(nodes), time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._mismatch:
                    raise UserError(self._mismatch)
                linked = {node for node, link in self._links.items() if not link.lost_reason}
                missing = [node for node in expected if node not in linked]
                if not missing or time.monotonic() >= end:
                    return missing
                # wake up regularly: no event announces that a node is lost
                self._changed.wait(min(HEARTBEAT_S, max(0.01, end - time.monotonic())))

    def describe_missing(self, missing: Sequence[int], timeout_s: float) -> str:
        """Return a sentence about nodes that did not connect, and what to check."""
        names = ", ".join(str(node) for node in missing)
        connected = self.cluster.nodes - len(missing)
        text = (
            f"{connected} of {self.cluster.nodes} nodes connected to {self.cluster.endpoint} "
            f"within {timeout_s:.3g} s; missing: node {names}"
        )
        refusals = list(self._refusals)
        if self._strangers:
            sources = ", ".join(address for address, _ in self._strangers.most_common(3))
            count = sum(self._strangers.values())
            refusals.append(f"{count} connection(s) without the key, from {sources}")
        if self._obstacle:
            return f"{text}; node 0 could not accept connections: {self._obstacle}"
        if refusals:
            return f"{text}; refused: {'; '.join(refusals)}"
        return (
            f"{text}. Is longseq launch running there, with the same --rdzv-endpoint, and does a "
            f"firewall let it through?"
        )

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in (*self.links.values(), *self._replaced_links):
            link.channel.close()

    def _accept(self) -> None:
        """Accept connections until the server is closed, also if descriptors or threads run out."""
        while not self._closed:
            try:
                sock, source = self._listener.accept()
                host, self._obstacle = str(source[0]), ""
                with self._changed:
                    self._make_room()
                    self._handshakes[sock] = host
                # one thread per connection: a silent one must not block the others
                threading.Thread(target=self._admit, args=(sock, host), daemon=True).start()
            except (OSError, RuntimeError) as error:
                self._obstacle = describe_error(error)
                time.sleep(0.0 if self._closed else RETRY_S)

    def _make_room(self) -> None:
        """Drop a connection if there are too many: the oldest of the host that has most."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            ((busiest, _),) = Counter(self._handshakes.values()).most_common(1)
            dropped = next(sock for sock, host in self._handshakes.items() if host == busiest)
            del self._handshakes[dropped]
            with suppress(OSError):
                dropped.shutdown(socket.SHUT_RDWR)

    def _admit(self, sock: socket.socket, host: str) -> None:
        """Authenticate a connection and add its node. Who does not know the key gets no answer."""
        connection, is_added = None, False
        try:
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
            connection = accept_client(sock, self._key, deadline)
            identity = decode(connection.receive(MAX_IDENTITY_BYTES), IDENTITY)
            with self._changed:
                is_added = self._add_node(identity, connection)
        except (OSError, EOFError, AuthenticationError, ValueError) as error:
            with self._changed:
                self._note_failure(host, connection is not None, error)
        finally:
            with self._changed:
                self._handshakes.pop(sock, None)
                self._changed.notify_all()
            if not is_added:
                sock.close()

    def _note_failure(self, host: str, knows_key: bool, error: Exception) -> None:
        """Keep a failed handshake for `describe_missing`; strangers must not displace nodes."""
        if knows_key:
            self._refuse(f"a node on {host} that did not identify itself ({describe_error(error)})")
        elif host in self._strangers or len(self._strangers) < MAX_STRANGERS:
            self._strangers[host] += 1

    def _add_node(self, identity: NodeIdentity, connection: SecureConnection) -> bool:
        """Answer a node that knows the key. Returns True if it can take part."""
        if refusal := self._find_refusal(identity):
            connection.send(encode({"refused": refusal}))
            return False
        connection.send(encode(self.identity.model_dump()))
        if existing := self._links.get(identity.node):
            existing.channel.disconnect("it lost its connection and connected again")
            self._replaced_links.append(existing)
        self._links[identity.node] = NodeLink(identity, Channel(connection, NODE_MESSAGES))
        return True

    def _refuse(self, refusal: str) -> str:
        self._refusals = [*self._refusals[-3:], refusal]
        return refusal

    def _find_refusal(self, identity: NodeIdentity) -> str:
        """Return why a node can't take part, or an empty string."""
        if differences := self.identity.differences(identity):
            refusal = f"the nodes differ: {differences}"
            # if another node with this rank was accepted before, only this one is refused
            self._mismatch = self._mismatch or ("" if identity.node in self._links else refusal)
            return refusal
        existing = self._links.get(identity.node)
        is_same = existing and existing.identity.token == identity.token
        is_rank_in_use = existing and not existing.lost_reason and not is_same
        if not (0 < identity.node < self.cluster.nodes) or is_rank_in_use:
            holder = existing.identity if existing else self.identity
            return self._refuse(
                f"{identity.host} connected with --node-rank {identity.node}, which {holder.host} "
                f"has already; give every node a different --node-rank"
            )
        return ""


# ---- the other nodes ---------------------------------------------------------------------------


def connect_to_node_0(
    cluster: NodeInfo,
    identity: NodeIdentity,
    key: bytes,
    timeout_s: float,
    log: Callable[[str], None] = lambda text: None,
) -> Channel:
    """Connect to node 0; retry until it answers.

    Raises:
        UserError: node 0 refuses this node, or differs from it.
        LauncherError: node 0 does not answer within `timeout_s`, or does not know the key.
    """
    end, reason = time.monotonic() + timeout_s, ""
    while True:
        try:
            deadline = time.monotonic() + max(0.1, min(HANDSHAKE_TIMEOUT_S, end - time.monotonic()))
            channel, host = _try_connect(cluster, identity, key, deadline)
            log(f"node {identity.node}: joined node 0 ({host}) at {cluster.endpoint}")
            return channel
        except AuthenticationError:
            reason = (
                f"its key differs: --key-file or {KEY_VARIABLE} must be the same on every node, or "
                f"the home folder shared; or it belongs to another job"
            )
        except (EOFError, ValueError, TimeoutError):
            reason = "another program seems to listen at this address"
        except OSError as error:
            reason = describe_error(error)
        if time.monotonic() >= end:
            raise LauncherError(
                f"node {identity.node} got no answer from node 0 at {cluster.endpoint} within "
                f"{timeout_s:.3g} s ({reason}). Is longseq launch running there as --node-rank 0, "
                f"is --rdzv-endpoint the same on every node, and does a firewall let it through?"
            )
        time.sleep(RETRY_S)


def _try_connect(
    cluster: NodeInfo, identity: NodeIdentity, key: bytes, deadline: float
) -> tuple[Channel, str]:
    """Return the channel to node 0, and the name of its host. Raises UserError if it refuses."""
    address = (find_host(cluster), cluster.port)
    try:
        sock = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        # no program is there; connect_to_node_0 takes a later silence for another program
        raise OSError("the connection timed out") from None
    try:
        connection = connect_to_server(sock, key, deadline)
        connection.send(encode(identity.model_dump()))
        answer = decode(connection.receive(MAX_IDENTITY_BYTES), WELCOME)
        if isinstance(answer, Refusal):
            raise UserError(f"node 0 refused: {answer.refused}")
        if differences := answer.differences(identity):
            raise UserError(f"the nodes differ: {differences}")
        return Channel(connection, ORDERS), answer.host
    except BaseException:
        sock.close()
        raise


# ---- both --------------------------------------------------------------------------------------


def wait_ready(handles: Iterable[Any], timeout_s: float) -> list[Any]:
    """Wait for channels, pipes and sentinels; return those that are ready in time."""
    return list(connections.wait(list(handles), max(0.0, timeout_s)))


def describe_error(error: Exception) -> str:
    """Return a short description of a network error."""
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, (BlockingIOError, TimeoutError)) and not error.errno:
        return "it did not answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) or type(error).__name__
