"""Pass any number of file descriptors to a running process.

A process can be started with about 250 descriptors at most (multiprocessing and Linux).
"""

import socket
from collections.abc import Sequence

BATCH = 128


def send_fds(over: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors to the other end. Raises OSError if it is closed."""
    for i in range(0, len(descriptors), BATCH):
        socket.send_fds(over, [b"."], descriptors[i : i + BATCH])


def receive_fds(over: socket.socket, count: int) -> list[int]:
    """Receive that many descriptors. Raises EOFError if the other end is closed."""
    found: list[int] = []
    while len(found) < count:
        data, some, _, _ = socket.recv_fds(over, 1, min(BATCH, count - len(found)))
        if not data:
            raise EOFError("the sender closed the connection: no more descriptors")
        found += some
    return found
