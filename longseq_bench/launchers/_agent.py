"""The first steps of a host's agent, which starts its ranks of one trial: as of a child, and what
it prints goes to a file of its own.

Nothing heavy is imported at the top, since the parent names `enter` to start an agent.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from longseq_bench.launchers import _child


def enter(
    order: str, words: Connection, pipes: list[Connection], outputs: list[int], own: int
) -> None:
    """Start the ranks that an order (JSON) asks this host for, and stay until they have ended.

    words: to say what becomes of them. pipes, outputs: a rank each; own: the agent's own output.
    Outputs are descriptors.
    """
    os.setsid()
    _child._die_with_parent()
    _child._redirect(own)
    words.send_bytes(b'{"server": %d}' % os.getppid())

    from longseq_bench.probe.elastic import supervise

    supervise(order, words, pipes, outputs)
