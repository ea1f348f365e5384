"""The first steps of a host's agent, which starts its ranks of one trial: as of a child, and what
it prints goes to a file that has no name any more.

Nothing heavy is imported at the top, since the parent names `enter` to start an agent.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from longseq_bench.launchers import _child


def enter(
    order: str, words: Connection, pipes: list[Connection], outputs: list[str], own: str
) -> None:
    """Start the ranks that an order (JSON) asks this host for, and stay until they have ended.

    words: to say what becomes of them. pipes, outputs: a rank each; own: the agent's own output.
    """
    os.setsid()
    _child._die_with_parent()
    files = [_open(path) for path in outputs]
    _child._redirect(own)
    words.send_bytes(b'{"server": %d}' % os.getppid())

    from longseq_bench.probe.elastic import supervise

    supervise(order, words, pipes, files)


def _open(path: str) -> int:
    """The parent has it open too; so nothing is left behind, however either ends."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.unlink(path)
    return file
