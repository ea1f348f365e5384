"""The first steps of a host's agent, which starts the host's ranks of one trial.

The parent imports this module to start an agent, so nothing heavy is imported at the top.
"""

import json
from multiprocessing.connection import Connection
from socket import socket

from longseq_bench.launchers import _child_entry


def enter(job_json: str, events: Connection, descriptors_socket: socket, output: int) -> None:
    """Start this host's ranks, and return when they have ended.

    Args:
        job_json: a HostJob of host_agent.py.
        events: for reports about the ranks.
        descriptors_socket: delivers a message pipe for each rank, then an output file for each.
        output: the descriptor that the agent itself prints to.
    """
    server = _child_entry.detach(output)

    from longseq_bench.launchers.fd_passing import receive_fds

    ranks = json.loads(job_json)["per"]
    with descriptors_socket:
        descriptors = receive_fds(descriptors_socket, 2 * ranks)
    pipes = [Connection(number, readable=False) for number in descriptors[:ranks]]
    events.send_bytes(b'{"server": %d}' % server)

    from longseq_bench.worker.elastic_ranks import run_agent

    run_agent(job_json, events, pipes, descriptors[ranks:])
