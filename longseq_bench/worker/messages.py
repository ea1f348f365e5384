"""Messages from a trial's process to its parent, and the log of what it measures.

Messages are small JSON objects over a pipe:

{"phase": "forward", "part": ""}    a phase begins
{"outcome": {...}, "at": 17...}     the outcome, and the time in ns since 1970
{"answer": ...}                     the answer to a request that is not a trial

The process that forks the children sends {"server": ...} first (launchers/_child_entry.py).
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from longseq_bench.core.model import Measurement, Outcome, Phase
from longseq_bench.core.ranks import COLLECTIVE, COLLECTIVE_FOLLOWS, COLLECTIVE_WAITS


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

    def merge(self, other: MeasurementLog) -> None:
        """Add the measurements, the facts and the pass of another log."""
        self.measurements += other.measurements
        self.facts |= other.facts
        self.own_pass_s, self.pass_s = other.own_pass_s, other.pass_s
        self.compile_s = other.compile_s

    def attach_to(self, outcome: Outcome) -> Outcome:
        """Return the outcome with these measurements and facts added."""
        return outcome.model_copy(
            update={
                "measurements": (*outcome.measurements, *self.measurements),
                "facts": {**self.facts, **outcome.facts},
            }
        )


def samples_of(measurements: Sequence[Measurement], name: str) -> list[float]:
    """Return all samples of a name."""
    return [s for m in measurements if m.name == name for s in m.samples]


# ---- the oldest unfinished collective, for a hang ------------------------------------------------
# SIGUSR1 makes every rank write its stack (core/ranks.py). In a hang on CUDA the stack only shows
# that the rank waits for its device. So a thread also writes a line on the collective in which the
# device waits, from NCCL's flight recorder in torch. It reads the recorder twice: a collective that
# has started and is the same in both readings waits for other ranks.

BETWEEN_READINGS_S = 0.3
Entries = Sequence[dict[str, Any]]


def enable_flight_recorder() -> None:
    """Switch the recorder on, and write a line at SIGUSR1. Call this before NCCL is used."""
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the default in torch 2.13
    # else a collective is never known to have started
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    answer_signal(lambda: json.loads(_dump_nccl_trace_json()).get("entries", []))


def answer_signal(read: Callable[[], Entries]) -> None:
    """Start a thread that writes the collective after each SIGUSR1. Call it in the main thread.

    read: returns the recorded operations of NCCL, oldest first.

    The main thread may wait in torch, where no Python handler runs. So faulthandler's handler, in
    C, calls Python's, whose C part wakes the thread through a pipe.
    """
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)
    threading.Thread(target=_answer, args=(wakes, read), daemon=True).start()


def _answer(wakes: int, read: Callable[[], Entries]) -> None:
    while number := os.read(wakes, 1):
        if number[0] != signal.SIGUSR1:
            continue
        try:
            before = read()
            _write(COLLECTIVE_FOLLOWS)
            time.sleep(BETWEEN_READINGS_S)
            _write(COLLECTIVE + describe(before, read()))
        except Exception as error:
            _write(f"{COLLECTIVE}unknown ({type(error).__name__}: {error})")


def _write(line: str) -> None:
    # in one call to the file of faulthandler
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


def describe(before: Entries, after: Entries) -> str:
    """Return the oldest collective that has started and not ended, and if it waits; or "none".

    Sends and receives that start together are `scheduled` for ever: a later entry has their state.
    """

    def launch(entry: dict[str, Any]) -> tuple[int, bool, int]:
        """Return a key that is equal for operations that were launched together."""
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        return entry["pg_id"], entry["is_p2p"], number

    one = next((entry for entry in after if entry["state"] == "started"), None)
    if one is None:
        return "none"
    together = (e["profiling_name"] for e in after if launch(e) == launch(one))
    names = dict.fromkeys(n.removeprefix("nccl:") for n in together if n != "nccl:coalesced")
    is_same = (one["record_id"], "started") in [(e["record_id"], e["state"]) for e in before]
    name = f"{' and '.join(names) or 'operations'} #{launch(one)[2]}"
    return f"{name} {COLLECTIVE_WAITS if is_same else 'makes progress'}"
