"""What the nodes of a launch say to each other: one connection from every other node to node 0.

JSON only, nothing that is read is ever run. Either end is heard at least every BEAT_S; who was not
heard for LOST_S is lost, whatever TCP still hopes for (a quarter of an hour). A node that lost its
connection may come again.

HMAC keeps out whoever does not know the key: by default strangers who connect by mistake; with a
secret in LONGSEQ_KEY on every node, everybody else too.
"""

from __future__ import annotations

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

from longseq_bench.core.cluster_env import Site
from longseq_bench.core.errors import LauncherError, UserError

BEAT_S = 1.0
LOST_S = 10.0

SHAKE_S = 5.0
"""How long one step of a greeting may take, and one write."""

RETRY_S = 0.2
MOST_BYTES = 2**26
"""Of one message: the longest is a rank's outcome."""

KEY_VARIABLE = "LONGSEQ_KEY"


@dataclass(frozen=True)
class Hello:
    """Who a node is. agreed: what has to be the same on all nodes, by a name for people.

    token: tells a node that comes again from another one with the same rank.
    """

    node: int
    host: str
    token: str
    agreed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


def differences(one: Hello, other: Hello) -> list[str]:
    """What two nodes do not agree on, a sentence each."""
    return [
        f"{name} is {one.agreed.get(name)} on {one} and {other.agreed.get(name)} on {other}"
        for name in {**one.agreed, **other.agreed}
        if one.agreed.get(name) != other.agreed.get(name)
    ]


class Channel:
    """One end of a connection. A thread reads and keeps the beat, so that whoever computes for a
    while is not taken for dead. `fileno` is for `ready`: there is something to receive."""

    def __init__(self, connected: socket.socket, connection: Connection) -> None:
        self._socket, self._connection = connected, connection
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)
        self._heard = time.monotonic()
        self.address = str(connected.getsockname()[0])
        """This host's own, on the way to the other end."""
        self.gone = ""
        """Why there is nobody at the other end; empty where somebody is."""
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell

    def send(self, **message: Any) -> None:
        """Say something, where somebody is there to hear it; `gone` tells where not."""
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.leave(words(error))

    def receive(self) -> list[dict[str, Any]]:
        """All that was said since the last time."""
        with suppress(BlockingIOError):
            os.read(self._bell, 2**16)
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    def silent_s(self) -> float:
        """How long ago it was last heard; endless where it is gone."""
        return float("inf") if self.gone else time.monotonic() - self._heard

    def close(self, why: str = "it was closed here") -> None:
        """Hang up, and be of no more use. For whoever receives from it, as no other thread can know
        when that is done with."""
        self.leave(why)
        self._closed.set()
        self._thread.join(SHAKE_S)
        if not self._thread.is_alive() and not self._connection.closed:
            self._connection.close()
            self._socket.close()
            os.close(self._bell)
            os.close(self._rope)

    def _keep(self) -> None:
        next_beat = time.monotonic() + BEAT_S
        try:
            while not self._closed.is_set() and not self.gone:
                if self._connection.poll(max(0.0, next_beat - time.monotonic())):
                    message = json.loads(self._connection.recv_bytes(MOST_BYTES))
                    self._heard = time.monotonic()
                    if "beat" not in message:
                        self._said.put(message)
                        self._ring()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self.send(beat=True)
        except (OSError, EOFError, ValueError) as error:
            self.leave(words(error))

    def leave(self, why: str) -> None:
        """Break the connection: what was said before can still be received, at both ends."""
        self.gone = self.gone or why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._ring()

    def _ring(self) -> None:
        # a number of a closed descriptor may be another one's by now
        if not self._closed.is_set():
            with suppress(OSError):
                os.write(self._rope, b".")


# ---- node 0 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeLink:
    """Another node, as node 0 sees it."""

    hello: Hello
    channel: Channel

    @property
    def lost(self) -> str:
        """Why it is lost; empty where it is not."""
        if self.channel.gone:
            return f"{self.hello} is gone: {self.channel.gone}"
        silent = self.channel.silent_s()
        return f"no word from {self.hello} for {silent:.0f} s" if silent > LOST_S else ""


class ControlServer:
    """Node 0's end: listens at the site's endpoint for as long as the launch goes on."""

    def __init__(self, site: Site, hello: Hello) -> None:
        self.site, self.hello, self._key = site, hello, _key()
        self._links: dict[int, NodeLink] = {}
        self._former: list[NodeLink] = []
        self._refused: list[str] = []
        self._fatal = ""
        self._changed = threading.Condition()
        self._listener = _listen(site)
        threading.Thread(target=self._accept, daemon=True).start()

    def link(self, node: int) -> NodeLink | None:
        """The other node of that rank, lost or not; None where it never came."""
        with self._changed:
            return self._links.get(node)

    @property
    def links(self) -> list[NodeLink]:
        """Nodes that have come, lost or not."""
        with self._changed:
            return list(self._links.values())

    def missing(self, nodes: Iterable[int], patience: float) -> list[int]:
        """Those of the nodes that are not there, after waiting for them this many seconds. Raises
        UserError where one came that does not suit."""
        wanted, end = list(nodes), time.monotonic() + patience
        with self._changed:
            while True:
                if self._fatal:
                    raise UserError(self._fatal)
                away = [n for n in wanted if n not in self._links or self._links[n].lost]
                if not away or time.monotonic() >= end:
                    return away
                # who is lost is known by the clock alone
                self._changed.wait(min(BEAT_S, max(0.01, end - time.monotonic())))

    def who_is_missing(self, away: Iterable[int], patience: float) -> str:
        """A sentence about nodes that did not come, with what to check."""
        names = ", ".join(str(node) for node in away)
        came = self.site.nodes - len(list(away))
        said = (
            f"{came} of {self.site.nodes} nodes came to {self.site.endpoint} within "
            f"{patience:.3g} s; missing: node {names}"
        )
        if self._refused:
            return f"{said}; refused: {'; '.join(self._refused)}"
        return (
            f"{said}. Is longseq launch running there, with the same --rdzv-endpoint, and does a "
            f"firewall let it through?"
        )

    def close(self) -> None:
        """Hang up on everybody, and listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in (*self.links, *self._former):
            link.channel.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                # a thread each: one that says nothing must not keep the others out
                threading.Thread(target=self._greet, args=(accepted,), daemon=True).start()

    def _greet(self, accepted: socket.socket) -> None:
        connection = _connection(accepted, SHAKE_S)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = Hello(**json.loads(connection.recv_bytes(MOST_BYTES)))
            with self._changed:
                refusal = self._refusal(hello)
                answer = {"refused": refusal} if refusal else {"host": self.hello.host}
                connection.send_bytes(json.dumps(answer).encode())
                if not refusal:
                    if known := self._links.get(hello.node):
                        known.channel.leave("it lost its connection and came again")
                        self._former.append(known)
                    self._links[hello.node] = NodeLink(hello, Channel(accepted, connection))
                self._changed.notify_all()
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError) as error:
            refusal = f"a connection that could not say who it is ({words(error)})"
            self._refused = [*self._refused[-3:], refusal]
        if refusal:
            connection.close()
            accepted.close()

    def _refusal(self, hello: Hello) -> str:
        """Why a node can't take part; empty where it can."""
        if found := differences(self.hello, hello):
            refusal = "the nodes differ: " + "; ".join(found)
            # one that comes later than the others is refused alone
            self._fatal = self._fatal or ("" if hello.node in self._links else refusal)
            return refusal
        known = self._links.get(hello.node)
        taken = known is not None and not known.lost and known.hello.token != hello.token
        if not (0 < hello.node < self.site.nodes) or taken:
            holder = known.hello if known else self.hello
            refusal = (
                f"{hello.host} came as node {hello.node}, which is {holder.host} already; every "
                f"node needs a --node-rank of its own"
            )
            self._refused.append(refusal)
            return refusal
        return ""


def _listen(site: Site) -> socket.socket:
    """The socket at which node 0 is to be found. Raises UserError where there can be none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            site.host, site.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # at that address alone, so that a node 0 on the wrong host is told at once; but some hosts
        # know their own name as a loopback address, which no other one could reach
        by_name = str(address[0]).startswith("127.") and not site.host.startswith(("127.", "local"))
        listener.bind(("", site.port) if by_name else address)
        listener.listen(site.nodes + 8)
    except OSError as error:
        raise UserError(
            f"node 0 can't listen at {site.endpoint}: {words(error)}; --rdzv-endpoint is an "
            f"address of node 0 and a port that is free there"
        ) from None
    return listener


# ---- the other nodes ---------------------------------------------------------------------------


def join(
    site: Site, hello: Hello, patience: float, tell: Callable[[str], None] = lambda text: None
) -> Channel:
    """The connection to node 0, which is asked until it answers.

    Raises UserError where node 0 refuses, LauncherError where it does not answer for so long.
    """
    end, why = time.monotonic() + patience, ""
    while True:
        try:
            channel, answer = _ask_in(site, hello, max(0.1, min(SHAKE_S, end - time.monotonic())))
        except AuthenticationError:
            why = f"it has another key: {KEY_VARIABLE} has to be the same on every node"
        except (EOFError, ValueError, BlockingIOError):
            why = "what listens there does not answer as longseq does"
        except OSError as error:
            why = words(error)
        else:
            if channel:
                tell(f"node {hello.node}: joined node 0 ({answer['host']}) at {site.endpoint}")
                return channel
            raise UserError(f"node 0 refused: {answer['refused']}")
        if time.monotonic() >= end:
            raise LauncherError(
                f"node {hello.node} got no answer from node 0 at {site.endpoint} within "
                f"{patience:.3g} s ({why}). Is longseq launch running there as --node-rank 0, is "
                f"--rdzv-endpoint the same on every node, and does a firewall let it through?"
            )
        time.sleep(RETRY_S)


def _ask_in(site: Site, hello: Hello, limit: float) -> tuple[Channel | None, dict[str, str]]:
    connected = socket.create_connection((site.host, site.port), timeout=limit)
    connection = _connection(connected, limit)
    try:
        answer_challenge(connection, _key())
        deliver_challenge(connection, _key())
        connection.send_bytes(json.dumps(asdict(hello)).encode())
        answer: dict[str, str] = json.loads(connection.recv_bytes(MOST_BYTES))
    except BaseException:
        connection.close()
        connected.close()
        raise
    if "refused" in answer:
        connection.close()
        connected.close()
        return None, answer
    _limit(connected, SHAKE_S)
    return Channel(connected, connection), answer


# ---- both --------------------------------------------------------------------------------------


def ready(handles: Iterable[Any], seconds: float) -> list[Any]:
    """Those of channels, pipes and sentinels of which there is news, after so long at most."""
    return list(connections.wait(list(handles), max(0.0, seconds)))


def _connection(connected: socket.socket, limit: float) -> Connection:
    """The same connection, with messages instead of bytes."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit(connected, limit)
    return Connection(os.dup(connected.fileno()))


def _limit(connected: socket.socket, seconds: float) -> None:
    """No read and no write takes longer: the kernel's limit, as a timeout of Python's would make
    the descriptor non-blocking, which a Connection can't have."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _key() -> bytes:
    return os.environ.get(KEY_VARIABLE, "longseq").encode()


def words(error: Exception) -> str:
    """An error of the network in a few words."""
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, BlockingIOError):
        return "it did not answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) or type(error).__name__
