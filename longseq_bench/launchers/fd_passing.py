"""Pass any number of file descriptors to a running process.

multiprocessing can pass at most about 250 descriptors at the start of a process (limit of Linux).
"""

import socket
from collections.abc import Sequence

BATCH = 128


def send_fds(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors to the other end. Raises OSError if it is closed."""
    for i in range(0, len(descriptors), BATCH):
        socket.send_fds(sock, [b"."], descriptors[i : i + BATCH])


def receive_fds(sock: socket.socket, count: int) -> list[int]:
    """Receive that many descriptors. Raises EOFError if the other end is closed."""
    descriptors: list[int] = []
    while len(descriptors) < count:
        data, received, _, _ = socket.recv_fds(sock, 1, min(BATCH, count - len(descriptors)))
        if not data:
            raise EOFError("the sender closed the connection: no more descriptors")
        descriptors += received
    return descriptors
