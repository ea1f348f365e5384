"""The control channel: one TCP connection from every other node to node 0.

Messages are JSON; nothing that is received is executed. Both ends send one every HEARTBEAT_S.
A node that is silent for LOST_S is lost (TCP alone would take a quarter of an hour). A node that
lost its connection may connect again. elastic.py lists the messages.

Both ends prove that they know a key (HMAC). The default key keeps out programs that connect by
mistake; a secret in LONGSEQ_KEY on every node keeps out everybody else.
"""

import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing import connection as connections
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError

HEARTBEAT_S = 1.0
LOST_S = 10.0

HANDSHAKE_TIMEOUT_S = 5.0
"""Time limit of one step of the handshake, and of one write."""

RETRY_S = 0.2
MAX_MESSAGE_BYTES = 2**26
"""The size limit of a message. The longest is a rank's outcome."""

KEY_VARIABLE = "LONGSEQ_KEY"


@dataclass(frozen=True)
class NodeIdentity:
    """The identity of a node, the first message that it sends.

    token: distinguishes a node that connects again from another one with the same node rank.
    must_match: values that must be equal on all nodes, by their name in error messages.
    """

    node: int
    host: str
    token: str
    must_match: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


class Channel:
    """One end of a connection.

    A thread reads messages and sends heartbeats, so that a busy node does not seem lost.
    `fileno` becomes readable when there is a message; see `wait_ready`.

    address: this host's own address on this connection.
    disconnect_reason: why the connection ended; empty while it is open.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._socket, self._connection = sock, connection
        self._send_lock, self._closed = threading.Lock(), threading.Event()
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._last_received_s = time.monotonic()
        self.address = str(sock.getsockname()[0])
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
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.disconnect(describe_error(error))

    def receive(self) -> list[dict[str, Any]]:
        """Return all messages since the last call."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, 2**16)
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def silent_s(self) -> float:
        """Return the seconds since the last message; infinity if the connection ended."""
        return float("inf") if self.disconnect_reason else time.monotonic() - self._last_received_s

    def close(self, reason: str = "it was closed here") -> None:
        """Close the connection. Call it only from the thread that receives messages."""
        self.disconnect(reason)
        self._closed.set()
        self._thread.join(HANDSHAKE_TIMEOUT_S)
        if not self._thread.is_alive() and not self._connection.closed:
            self._connection.close()
            self._socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run_thread(self) -> None:
        next_heartbeat = time.monotonic() + HEARTBEAT_S
        try:
            while not self._closed.is_set() and not self.disconnect_reason:
                if self._connection.poll(max(0.0, next_heartbeat - time.monotonic())):
                    message = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
                    self._last_received_s = time.monotonic()
                    if "heartbeat" not in message:
                        self._messages.put(message)
                        self._wake()
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
                    self.send(heartbeat=True)
        except (OSError, EOFError, ValueError) as error:
            self.disconnect(describe_error(error))

    def disconnect(self, reason: str) -> None:
        """Break the connection. Earlier messages can still be received at both ends."""
        self.disconnect_reason = self.disconnect_reason or reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
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

    def __init__(self, cluster: NodeInfo, identity: NodeIdentity) -> None:
        self.cluster, self.identity, self._key = cluster, identity, _key()
        self._links: dict[int, NodeLink] = {}
        self._replaced_links: list[NodeLink] = []
        self._refusals: list[str] = []
        self._mismatch = ""
        self._changed = threading.Condition()
        self._listener = self._listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self) -> socket.socket:
        """Return the listening socket. Raises UserError if it can't be opened."""
        host, port = self.cluster.host, self.cluster.port
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # listen at that address only, so that a node 0 on the wrong host fails at once. But
            # some hosts resolve their own name to a loopback address, which no other host reaches
            is_local = host.startswith(("127.", "local"))
            is_loopback = str(address[0]).startswith("127.") and not is_local
            listener.bind(("", port) if is_loopback else address)
            listener.listen(self.cluster.nodes + 8)
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
        if self._refusals:
            return f"{text}; refused: {'; '.join(self._refusals)}"
        return (
            f"{text}. Is longseq launch running there, with the same --rdzv-endpoint, and does a "
            f"firewall let it through?"
        )

    def close(self) -> None:
        """Close all connections and stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in (*self.links.values(), *self._replaced_links):
            link.channel.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                sock, _ = self._listener.accept()
                # one thread per connection: a silent one must not block the others
                threading.Thread(target=self._handshake, args=(sock,), daemon=True).start()

    def _handshake(self, sock: socket.socket) -> None:
        connection = _wrap_socket(sock, HANDSHAKE_TIMEOUT_S)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            identity = NodeIdentity(**json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES)))
            with self._changed:
                refusal = self._find_refusal(identity)
                answer = {"refused": refusal} if refusal else {"host": self.identity.host}
                connection.send_bytes(json.dumps(answer).encode())
                if not refusal:
                    if existing := self._links.get(identity.node):
                        existing.channel.disconnect("it lost its connection and connected again")
                        self._replaced_links.append(existing)
                    self._links[identity.node] = NodeLink(identity, Channel(sock, connection))
                self._changed.notify_all()
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError) as error:
            refusal = f"a connection that did not identify itself ({describe_error(error)})"
            self._refusals = [*self._refusals[-3:], refusal]
        if refusal:
            connection.close()
            sock.close()

    def _find_refusal(self, identity: NodeIdentity) -> str:
        """Return why a node can't take part, or an empty string."""
        own, other = self.identity.must_match, identity.must_match
        if differences := [
            f"{name} is {own.get(name)} on {self.identity} and {other.get(name)} on {identity}"
            for name in {**own, **other}
            if own.get(name) != other.get(name)
        ]:
            refusal = "the nodes differ: " + "; ".join(differences)
            # if another node with this rank was accepted before, only this one is refused
            self._mismatch = self._mismatch or ("" if identity.node in self._links else refusal)
            return refusal
        existing = self._links.get(identity.node)
        is_same = existing and existing.identity.token == identity.token
        is_rank_in_use = existing and not existing.lost_reason and not is_same
        if not (0 < identity.node < self.cluster.nodes) or is_rank_in_use:
            holder = existing.identity if existing else self.identity
            refusal = (
                f"{identity.host} connected with --node-rank {identity.node}, which {holder.host} "
                f"has already; give every node a different --node-rank"
            )
            self._refusals.append(refusal)
            return refusal
        return ""


# ---- the other nodes ---------------------------------------------------------------------------


def connect_to_node_0(
    cluster: NodeInfo,
    identity: NodeIdentity,
    timeout_s: float,
    log: Callable[[str], None] = lambda text: None,
) -> Channel:
    """Connect to node 0; retry until it answers.

    Raises:
        UserError: node 0 refuses this node.
        LauncherError: node 0 does not answer within `timeout_s`.
    """
    end, reason = time.monotonic() + timeout_s, ""
    while True:
        try:
            step_timeout_s = max(0.1, min(HANDSHAKE_TIMEOUT_S, end - time.monotonic()))
            channel, host = _try_connect(cluster, identity, step_timeout_s)
            log(f"node {identity.node}: joined node 0 ({host}) at {cluster.endpoint}")
            return channel
        except AuthenticationError:
            reason = f"its key differs: {KEY_VARIABLE} must be the same on every node"
        except (EOFError, ValueError, BlockingIOError):
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
    cluster: NodeInfo, identity: NodeIdentity, timeout_s: float
) -> tuple[Channel, str]:
    """Return the channel to node 0, and the name of its host. Raises UserError if it refuses."""
    sock = socket.create_connection((cluster.host, cluster.port), timeout=timeout_s)
    connection = _wrap_socket(sock, timeout_s)
    try:
        answer_challenge(connection, _key())
        deliver_challenge(connection, _key())
        connection.send_bytes(json.dumps(asdict(identity)).encode())
        answer: dict[str, str] = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
        if "refused" in answer:
            raise UserError(f"node 0 refused: {answer['refused']}")
        _limit_io(sock, HANDSHAKE_TIMEOUT_S)
        return Channel(sock, connection), answer["host"]
    except BaseException:
        connection.close()
        sock.close()
        raise


# ---- both --------------------------------------------------------------------------------------


def wait_ready(handles: Iterable[Any], timeout_s: float) -> list[Any]:
    """Wait for channels, pipes and sentinels; return those that are ready in time."""
    return list(connections.wait(list(handles), max(0.0, timeout_s)))


def _wrap_socket(sock: socket.socket, timeout_s: float) -> Connection:
    """Wrap a socket in a Connection, which sends messages instead of bytes."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit_io(sock, timeout_s)
    return Connection(os.dup(sock.fileno()))


def _limit_io(sock: socket.socket, timeout_s: float) -> None:
    """Limit the time of each read and write in the kernel.

    Python's own timeout makes the descriptor non-blocking, which a Connection does not support.
    """
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _key() -> bytes:
    return os.environ.get(KEY_VARIABLE, "longseq").encode()


def describe_error(error: Exception) -> str:
    """Return a short description of a network error."""
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, BlockingIOError):
        return "it did not answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) or type(error).__name__
