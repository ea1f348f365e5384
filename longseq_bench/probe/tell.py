"""What a trial's process says to its parent while it runs: small JSON messages over a pipe."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from longseq_bench.model import Outcome, Phase


class Teller:
    """Says which phase has begun, so that the parent knows where a death happened, and the end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.phase: Phase = "start"

    def enter(self, phase: Phase, part: str = "") -> None:
        """A phase begins. `part` names what in it, for people."""
        self.phase = phase
        self._send({"phase": phase, "part": part})

    def end(self, outcome: Outcome) -> None:
        self._send({"outcome": outcome.model_dump(mode="json")})

    def answer(self, value: Any) -> None:
        self._send({"answer": value})

    def _send(self, message: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())
