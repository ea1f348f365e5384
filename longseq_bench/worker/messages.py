"""What a trial's process says to its parent while it runs: small JSON messages over a pipe.

{"phase": "forward", "part": ""}    a phase begins
{"outcome": {...}, "at": 17...}     the end, and when, in ns since 1970
{"answer": ...}                     to a question that is no trial
"""

from __future__ import annotations

import json
import select
import time
from multiprocessing.connection import Connection
from typing import Any

from longseq_bench.core.model import Outcome, Phase


class MessageSender:
    """Says which phase has begun, so that the parent knows where a death happened, and the end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.phase: Phase = "start"

    def start_phase(self, phase: Phase, part: str = "") -> None:
        """A phase begins. `part` names what in it, for people."""
        self.phase = phase
        self._send({"phase": phase, "part": part})

    def send_outcome(self, outcome: Outcome) -> None:
        self._send({"outcome": outcome.model_dump(mode="json"), "at": time.time_ns()})

    def send_answer(self, value: Any) -> None:
        self._send({"answer": value})

    def wait_until_closed(self) -> None:
        """Stay until the parent has closed its end, which it does when every rank has spoken."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), 0)
        poll.poll()

    def _send(self, message: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())
