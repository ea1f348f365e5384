"""A TCP connection whose ends prove that they know a key, and authenticate every message.

    client -> server    MAGIC, client's nonce
    server -> client    server's nonce
    client -> server    HMAC(key, "client" + both nonces)
    server -> client    HMAC(key, "server" + both nonces)

All four have a fixed size. The client proves first, so that a stranger who connects to the server
gets nothing with which to test guesses of the key. A wrong proof ends the connection without an
answer.

Both ends then derive a key for each direction. A message is its length, its bytes, and
HMAC(key of the direction, number of the message + bytes). So nobody else can forge, alter, replay,
reorder or reflect a message. Messages are not encrypted: who can read the wire can read them.
"""

import hmac
import secrets
import socket
import time
from contextlib import suppress
from multiprocessing.connection import wait

MAGIC = b"longseq2"
NONCE_BYTES = MAC_BYTES = 32
LENGTH_BYTES = 4

STEP_TIMEOUT_S = 5.0
"""Time limit of one read or write after the handshake."""


class AuthenticationError(Exception):
    """The other end does not know the key."""


class ForgedMessageError(ValueError):
    """A message whose authentication code is wrong: it was altered, replayed or made up."""


class SecureConnection:
    """One end of an authenticated connection. One thread may send while another one receives."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        sock.settimeout(STEP_TIMEOUT_S)
        self._socket, self._send_key, self._receive_key = sock, send_key, receive_key
        self._sent = self._received = 0
        self.address, self.peer_address = (
            str(name[0]) for name in (sock.getsockname(), sock.getpeername())
        )

    def send(self, data: bytes) -> None:
        """Send a message. Raises OSError if the connection is broken."""
        mac = hmac.digest(self._send_key, self._sent.to_bytes(8, "big") + data, "sha256")
        self._sent += 1
        rest = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data + mac)
        while rest:
            rest = rest[self._socket.send(rest) :]

    def receive(self, limit: int) -> bytes:
        """Return the next message.

        Raises:
            ForgedMessageError: its authentication code is wrong.
            ValueError: it is longer than `limit` bytes.
            EOFError, OSError: the connection is broken.
        """
        length = int.from_bytes(_receive_exactly(self._socket, LENGTH_BYTES), "big")
        if length > limit:
            raise ValueError(f"it sent a message of {length:,} bytes; the limit is {limit:,}")
        data = _receive_exactly(self._socket, length)
        expected = hmac.digest(
            self._receive_key, self._received.to_bytes(8, "big") + data, "sha256"
        )
        self._received += 1
        if not hmac.compare_digest(expected, _receive_exactly(self._socket, MAC_BYTES)):
            raise ForgedMessageError("a message was altered or is not from it")
        return data

    def poll(self, timeout_s: float) -> bool:
        """Return True if there is something to receive, at the latest after a timeout."""
        return bool(wait([self._socket], max(0.0, timeout_s)))

    def shut_down(self) -> None:
        """Break the connection, also for a thread that receives from it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def accept_client(sock: socket.socket, key: bytes, deadline: float) -> SecureConnection:
    """Authenticate the client of a connection.

    deadline: time limit of the whole handshake, as `time.monotonic()`.

    Raises:
        AuthenticationError: it does not know the key.
        ValueError: it does not speak this protocol.
        EOFError, OSError: it closed the connection, or is late.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = _receive_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise ValueError("it does not speak this protocol")
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own_nonce)
    nonces = hello[len(MAGIC) :] + own_nonce
    _check(key, b"client", nonces, _receive_exactly(sock, MAC_BYTES, deadline))
    sock.sendall(_prove(key, b"server", nonces))
    from_client, from_server = _derive_keys(key, nonces)
    return SecureConnection(sock, from_server, from_client)


def connect_to_server(sock: socket.socket, key: bytes, deadline: float) -> SecureConnection:
    """Authenticate the server of a connection. Raises as `accept_client` does."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    sock.sendall(MAGIC + own_nonce)
    nonces = own_nonce + _receive_exactly(sock, NONCE_BYTES, deadline)
    sock.sendall(_prove(key, b"client", nonces))
    try:
        proof = _receive_exactly(sock, MAC_BYTES, deadline)
    except (EOFError, ConnectionError):
        raise AuthenticationError from None  # the server refuses a wrong proof in this way
    _check(key, b"server", nonces, proof)
    from_client, from_server = _derive_keys(key, nonces)
    return SecureConnection(sock, from_client, from_server)


def _prove(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def _check(key: bytes, role: bytes, nonces: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(_prove(key, role, nonces), proof):
        raise AuthenticationError


def _derive_keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of messages from the client and from the server."""
    session = hmac.digest(key, b"session" + nonces, "sha256")
    return (
        hmac.digest(session, b"from the client", "sha256"),
        hmac.digest(session, b"from the server", "sha256"),
    )


def _receive_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Return `count` bytes. Raises EOFError, OSError, and TimeoutError after the deadline."""
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            # a limit of each read would give a slow sender as many limits as bytes
            if (remaining_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(remaining_s)
        part = sock.recv(min(count - len(data), 2**16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
