"""Messages from a trial's process to its parent, and the log of what it measures.

Messages are small JSON objects over a pipe:

{"phase": "forward", "part": ""}    a phase begins
{"outcome": {...}, "at": 17...}     the outcome, and the time in ns since 1970
{"answer": ...}                     the answer to a request that is not a trial

The process that forks the children sends {"server": ...} first (launchers/_child_entry.py).
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from longseq_bench.core.model import Measurement, Outcome, Phase


class MessageSender:
    """Reports each phase, so that the parent knows where a process died, and the outcome.

    output: has `send_bytes`: a pipe, or the lines of a distant rank (worker/host_rank.py).
    """

    def __init__(self, output: Any) -> None:
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
        """Answer a request that is not a trial, with anything that JSON can express."""
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


@dataclass
class MeasurementLog:
    """Everything measured so far. It is kept even if the trial fails later.

    own_pass_s: seconds of the pass under the budget on this rank; pass_s: on the slowest rank.
    compile_s: longest compilation of a rank in that pass; 0: none.
    exact: if that pass had exact heap accounting.
    slowest: seconds of the slowest rank, one for each timed pass.
    """

    rank: int = 0
    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    own_pass_s: float = 0.0
    pass_s: float = 0.0
    slowest: list[float] = field(default_factory=list)
    exact: bool = False
    compile_s: float = 0.0

    def add(self, name: str, unit: str, *samples: float) -> None:
        """Add samples of this rank."""
        self.measurements.append(Measurement(name=name, unit=unit, samples=samples, rank=self.rank))

    def extend(self, measurements: Iterable[Measurement]) -> None:
        """Add the measurements of a meter as those of this rank."""
        self.measurements += [replace(m, rank=self.rank) for m in measurements]

    def attach_to(self, outcome: Outcome) -> Outcome:
        """Return the outcome with these measurements and facts added."""
        measurements = (*outcome.measurements, *self.measurements)
        facts = self.facts | outcome.facts
        return outcome.model_copy(update={"measurements": measurements, "facts": facts})


def samples_of(measurements: Sequence[Measurement], name: str) -> list[float]:
    """Return all samples of a name."""
    return [s for m in measurements if m.name == name for s in m.samples]
