"""Messages from a trial's process to its parent: small JSON objects over a pipe.

{"phase": "forward", "part": ""}    a phase begins
{"outcome": {...}, "at": 17...}     the outcome, and the time in ns since 1970
{"answer": ...}                     the answer to a request that is not a trial

The process that forks the children sends {"server": ...} first (launchers/_child_entry.py).
"""

import json
import select
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

from longseq_bench.core.model import Outcome, Phase


class Output(Protocol):
    """Takes messages: a pipe, or the lines of a distant rank (worker/host_rank.py)."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send a message."""


class MessageSender:
    """Reports each phase, so that the parent knows where a process died, and the outcome."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.phase: Phase = "start"

    def start_phase(self, phase: Phase, part: str = "") -> None:
        """Report that a phase begins. part: a detail of it, for progress output."""
        self.phase = phase
        self._send({"phase": phase, "part": part})

    def send_outcome(self, outcome: Outcome) -> None:
        """Report the outcome of this rank."""
        self._send({"outcome": outcome.model_dump(mode="json"), "at": time.time_ns()})

    def send_answer(self, value: Any) -> None:
        """Answer a request that is not a trial. value: anything that JSON can express."""
        self._send({"answer": value})

    def wait_until_closed(self) -> None:
        """Block until the parent closes its end of a pipe, once every rank has reported."""
        assert isinstance(self._output, Connection)
        poll = select.poll()
        poll.register(self._output.fileno(), 0)
        poll.poll()

    def _send(self, message: dict[str, Any]) -> None:
        # a lone surrogate, which no record can hold, becomes "?": an error may have any text
        self._output.send_bytes(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
