"""The control channel: one TCP connection from every other node to node 0.

Messages are JSON; nothing that is received is ever executed. Both ends send at least every BEAT_S.
A node that is silent for LOST_S is lost (TCP alone would take a quarter of an hour). A node that
lost its connection may connect again.

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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing import connection as connections
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError

BEAT_S = 1.0
LOST_S = 10.0

SHAKE_S = 5.0
"""Time limit of one step of the handshake, and of one write."""

RETRY_S = 0.2
MOST_BYTES = 2**26
"""The size limit of a message. The longest is a rank's outcome."""

KEY_VARIABLE = "LONGSEQ_KEY"


@dataclass(frozen=True)
class NodeIdentity:
    """The identity of a node.

    token: distinguishes a node that connects again from another one with the same node rank.
    agreed: values that must be equal on all nodes, by their name in messages.
    """

    node: int
    host: str
    token: str
    agreed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


class Channel:
    """One end of a connection.

    A thread reads messages and sends heartbeats, so that a busy node is not taken for lost.
    `fileno` becomes readable when there is a message; see `wait_ready`.

    address: this host's own address on the way to the other end.
    gone: why the other end is gone, or an empty string.
    """

    def __init__(self, connected: socket.socket, connection: Connection) -> None:
        self._socket, self._connection = connected, connection
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._heard = time.monotonic()
        self.address = str(connected.getsockname()[0])
        self.gone = ""
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is a message."""
        return self._wake_read

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, set `gone` instead of raising."""
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.leave(describe_error(error))

    def receive(self) -> list[dict[str, Any]]:
        """Return all messages since the last call."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, 2**16)
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def silent_s(self) -> float:
        """Return the seconds since the last message; infinity if the other end is gone."""
        return float("inf") if self.gone else time.monotonic() - self._heard

    def close(self, why: str = "it was closed here") -> None:
        """Close the connection. Call it only from the thread that receives messages."""
        self.leave(why)
        self._closed.set()
        self._thread.join(SHAKE_S)
        if not self._thread.is_alive() and not self._connection.closed:
            self._connection.close()
            self._socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run_thread(self) -> None:
        next_beat = time.monotonic() + BEAT_S
        try:
            while not self._closed.is_set() and not self.gone:
                if self._connection.poll(max(0.0, next_beat - time.monotonic())):
                    message = json.loads(self._connection.recv_bytes(MOST_BYTES))
                    self._heard = time.monotonic()
                    if "beat" not in message:
                        self._messages.put(message)
                        self._wake()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self.send(beat=True)
        except (OSError, EOFError, ValueError) as error:
            self.leave(describe_error(error))

    def leave(self, why: str) -> None:
        """Break the connection. Earlier messages can still be received at both ends."""
        self.gone = self.gone or why
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
    """Another node, seen from node 0."""

    hello: NodeIdentity
    channel: Channel

    @property
    def lost(self) -> str:
        """Return why the node is lost, or an empty string."""
        if self.channel.gone:
            return f"{self.hello} is gone: {self.channel.gone}"
        silent = self.channel.silent_s()
        return f"no message from {self.hello} for {silent:.0f} s" if silent > LOST_S else ""


class ControlServer:
    """The server of node 0. It listens at the site's endpoint during the launch."""

    def __init__(self, site: NodeInfo, hello: NodeIdentity) -> None:
        self.site, self.hello, self._key = site, hello, _key()
        self._links: dict[int, NodeLink] = {}
        self._former: list[NodeLink] = []
        self._refused: list[str] = []
        self._fatal = ""
        self._changed = threading.Condition()
        self._listener = self._listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self) -> socket.socket:
        """Return the listening socket. Raises UserError if it can't be opened."""
        site = self.site
        try:
            family, _, _, _, address = socket.getaddrinfo(
                site.host, site.port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # listen at that address only, so that a node 0 on the wrong host fails at once; but
            # some hosts resolve their own name to a loopback address, which no other host reaches
            is_local = site.host.startswith(("127.", "local"))
            by_name = str(address[0]).startswith("127.") and not is_local
            listener.bind(("", site.port) if by_name else address)
            listener.listen(site.nodes + 8)
        except OSError as error:
            raise UserError(
                f"node 0 can't listen at {site.endpoint}: {describe_error(error)}; --rdzv-endpoint "
                f"is an address of node 0 and a port that is free there"
            ) from None
        return listener

    @property
    def links(self) -> dict[int, NodeLink]:
        """Return the links to all nodes that have connected, lost or not."""
        with self._changed:
            return dict(self._links)

    def missing(self, nodes: Iterable[int], patience: float) -> list[int]:
        """Wait for nodes for `patience` seconds; return those that are still away.

        Raises:
            UserError: a node connected whose values differ from node 0's.
        """
        wanted, end = list(nodes), time.monotonic() + patience
        with self._changed:
            while True:
                if self._fatal:
                    raise UserError(self._fatal)
                away = [n for n in wanted if n not in self._links or self._links[n].lost]
                if not away or time.monotonic() >= end:
                    return away
                # no event announces that a node is lost
                self._changed.wait(min(BEAT_S, max(0.01, end - time.monotonic())))

    def describe_missing(self, away: Iterable[int], patience: float) -> str:
        """Return a sentence about nodes that did not connect, and what to check."""
        names = ", ".join(str(node) for node in away)
        came = self.site.nodes - len(list(away))
        text = (
            f"{came} of {self.site.nodes} nodes connected to {self.site.endpoint} within "
            f"{patience:.3g} s; missing: node {names}"
        )
        if self._refused:
            return f"{text}; refused: {'; '.join(self._refused)}"
        return (
            f"{text}. Is longseq launch running there, with the same --rdzv-endpoint, and does a "
            f"firewall let it through?"
        )

    def close(self) -> None:
        """Close all connections and stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in (*self.links.values(), *self._former):
            link.channel.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                accepted, _ = self._listener.accept()
                # one thread per connection: a silent one must not block the others
                threading.Thread(target=self._handshake, args=(accepted,), daemon=True).start()

    def _handshake(self, accepted: socket.socket) -> None:
        connection = _connection(accepted, SHAKE_S)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = NodeIdentity(**json.loads(connection.recv_bytes(MOST_BYTES)))
            with self._changed:
                refusal = self._refusal(hello)
                answer = {"refused": refusal} if refusal else {"host": self.hello.host}
                connection.send_bytes(json.dumps(answer).encode())
                if not refusal:
                    if known := self._links.get(hello.node):
                        known.channel.leave("it lost its connection and connected again")
                        self._former.append(known)
                    self._links[hello.node] = NodeLink(hello, Channel(accepted, connection))
                self._changed.notify_all()
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError) as error:
            refusal = f"a connection that did not identify itself ({describe_error(error)})"
            self._refused = [*self._refused[-3:], refusal]
        if refusal:
            connection.close()
            accepted.close()

    def _refusal(self, hello: NodeIdentity) -> str:
        """Return why a node can't take part, or an empty string."""
        own, other = self.hello.agreed, hello.agreed
        if found := [
            f"{name} is {own.get(name)} on {self.hello} and {other.get(name)} on {hello}"
            for name in {**own, **other}
            if own.get(name) != other.get(name)
        ]:
            refusal = "the nodes differ: " + "; ".join(found)
            # if another node with this rank was accepted before, only this one is refused
            self._fatal = self._fatal or ("" if hello.node in self._links else refusal)
            return refusal
        known = self._links.get(hello.node)
        taken = known is not None and not known.lost and known.hello.token != hello.token
        if not (0 < hello.node < self.site.nodes) or taken:
            holder = known.hello if known else self.hello
            refusal = (
                f"{hello.host} connected with --node-rank {hello.node}, which {holder.host} has "
                f"already; give every node a different --node-rank"
            )
            self._refused.append(refusal)
            return refusal
        return ""


# ---- the other nodes ---------------------------------------------------------------------------


def connect_to_node_0(
    site: NodeInfo,
    hello: NodeIdentity,
    patience: float,
    log: Callable[[str], None] = lambda text: None,
) -> Channel:
    """Connect to node 0; retry until it answers.

    Raises:
        UserError: node 0 refuses this node.
        LauncherError: node 0 does not answer within `patience` seconds.
    """
    end, why = time.monotonic() + patience, ""
    while True:
        try:
            limit = max(0.1, min(SHAKE_S, end - time.monotonic()))
            channel, name = _try_connect(site, hello, limit)
            log(f"node {hello.node}: joined node 0 ({name}) at {site.endpoint}")
            return channel
        except AuthenticationError:
            why = f"its key differs: {KEY_VARIABLE} must be the same on every node"
        except (EOFError, ValueError, BlockingIOError):
            why = "another program seems to listen at this address"
        except OSError as error:
            why = describe_error(error)
        if time.monotonic() >= end:
            raise LauncherError(
                f"node {hello.node} got no answer from node 0 at {site.endpoint} within "
                f"{patience:.3g} s ({why}). Is longseq launch running there as --node-rank 0, is "
                f"--rdzv-endpoint the same on every node, and does a firewall let it through?"
            )
        time.sleep(RETRY_S)


def _try_connect(site: NodeInfo, hello: NodeIdentity, limit: float) -> tuple[Channel, str]:
    """Return the channel to node 0, and its host's name. Raises UserError if it refuses."""
    connected = socket.create_connection((site.host, site.port), timeout=limit)
    connection = _connection(connected, limit)
    try:
        answer_challenge(connection, _key())
        deliver_challenge(connection, _key())
        connection.send_bytes(json.dumps(asdict(hello)).encode())
        answer: dict[str, str] = json.loads(connection.recv_bytes(MOST_BYTES))
        if "refused" in answer:
            raise UserError(f"node 0 refused: {answer['refused']}")
        _limit_io(connected, SHAKE_S)
        return Channel(connected, connection), answer["host"]
    except BaseException:
        connection.close()
        connected.close()
        raise


# ---- both --------------------------------------------------------------------------------------


def wait_ready(handles: Iterable[Any], seconds: float) -> list[Any]:
    """Wait for channels, pipes and sentinels; return those that are ready within `seconds`."""
    return list(connections.wait(list(handles), max(0.0, seconds)))


def _connection(connected: socket.socket, limit: float) -> Connection:
    """Wrap a socket in a Connection, which sends messages instead of bytes."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit_io(connected, limit)
    return Connection(os.dup(connected.fileno()))


def _limit_io(connected: socket.socket, seconds: float) -> None:
    """Limit the time of each read and write in the kernel.

    Python's own timeout makes the descriptor non-blocking, which a Connection does not support.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


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
