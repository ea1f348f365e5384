"""Descriptors handed to a process that is there: as many as there are, which those that it is
started with may not be (multiprocessing and Linux end at some 250)."""

from __future__ import annotations

import socket
from collections.abc import Sequence

BATCH = 128


def send_fds(over: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors to the other end. Raises OSError where nobody takes them."""
    for i in range(0, len(descriptors), BATCH):
        socket.send_fds(over, [b"."], descriptors[i : i + BATCH])


def receive_fds(over: socket.socket, count: int) -> list[int]:
    """Receive as many. Raises EOFError where the other end is gone."""
    found: list[int] = []
    while len(found) < count:
        said, some, _, _ = socket.recv_fds(over, 1, min(BATCH, count - len(found)))
        if not said:
            raise EOFError("no more descriptors come")
        found += some
    return found
