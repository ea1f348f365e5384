"""Descriptors handed to a process."""

import os
import socket
import threading

import pytest

from longseq_bench.launchers.fd_passing import BATCH, receive_fds, send_fds


@pytest.mark.parametrize("count", [0, 1, BATCH, 3 * BATCH + 1])
def test_as_many_as_there_are_come_in_their_order(count: int) -> None:
    here, there = socket.socketpair()
    pipes = [os.pipe() for _ in range(count)]
    for i, (_, writes) in enumerate(pipes):
        os.write(writes, f"{i}".encode())
    reads = [one for one, _ in pipes]
    sending = threading.Thread(target=send_fds, args=(here, reads))
    sending.start()
    taken = receive_fds(there, count)
    sending.join()
    assert [os.read(one, 9) for one in taken] == [f"{i}".encode() for i in range(count)]
    for one in (*taken, *sum(pipes, ())):
        os.close(one)
    here.close()
    there.close()


def test_who_hands_no_more_is_told_of() -> None:
    here, there = socket.socketpair()
    here.close()
    with pytest.raises(EOFError, match="no more"):
        receive_fds(there, 1)
    there.close()
