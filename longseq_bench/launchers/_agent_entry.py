"""The first steps of a host's agent, which starts its ranks of one trial: as of a child, and what
it prints goes to a file of its own.

Nothing heavy is imported at the top, since the parent names `enter` to start an agent.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from socket import socket

from longseq_bench.launchers import _child_entry


def enter(order: str, words: Connection, takes: socket, own: int) -> None:
    """Start the ranks that an order (JSON) asks this host for, and stay until they have ended.

    words: to say what becomes of them. takes: where a pipe to speak by and a descriptor to print
    to come from, of each rank, all pipes first. own: the agent's own descriptor to print to.
    """
    server = _child_entry.cut_off(own)

    from longseq_bench.launchers.fd_passing import receive_fds

    ranks = json.loads(order)["per"]
    with takes:
        descriptors = receive_fds(takes, 2 * ranks)
    pipes = [Connection(number, readable=False) for number in descriptors[:ranks]]
    words.send_bytes(b'{"server": %d}' % server)

    from longseq_bench.worker.elastic_ranks import run_agent

    run_agent(order, words, pipes, descriptors[ranks:])
