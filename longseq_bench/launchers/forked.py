"""One host: each trial in a fresh child of a fork server that has torch loaded.

A child is ready in hundredths of a second, and nothing of an earlier trial is in it. The parent
owns the clock: it kills the child's whole session when a phase outlasts its limit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

import psutil

from longseq_bench.catalogue import Catalogue
from longseq_bench.errors import LauncherError, UserError
from longseq_bench.launchers import _child
from longseq_bench.launchers.base import Launched, Launcher, OnPhase
from longseq_bench.launchers.deaths import kernel_kills, memory_may_be_why, outcome_of_exit
from longseq_bench.model import Outcome, Phase, Trial
from longseq_bench.units import format_bytes

PRELOAD = [
    "longseq_bench.launchers._server",
    "longseq_bench.probe.worker",
    "torch.fx.experimental.symbolic_shapes",
    "__main__",
]
"""symbolic_shapes, because torch imports it in its first backward (0.2 s); `__main__`, because
every child imports the main script: so each is imported once, before any fork."""

PHASE_LIMIT_S = 900.0
"""For phases that no time budget covers, and for passes without one."""

GRACE_S = 1.0
"""A pass that ends just over its budget says so itself; after this the parent does."""

EXACT_FACTOR = 4
"""How much longer a pass with exact accounting of the heap may take: no time is judged by it."""

PASSES = ("forward", "backward", "time")
RETRY_FACTOR, RETRY_ROOM, RETRY_SHARE = 4, 2 * 2**30, 0.9
"""How much more a second opinion gets, and the share of free memory it stays in."""


@dataclass
class _Child:
    """One running child and what it has said so far."""

    process: BaseProcess
    pipe: Connection
    output: IO[bytes]
    phase: Phase = "start"
    server: int | None = None
    outcome: Outcome | None = None
    answer: Any = None
    deadline: float = field(default_factory=lambda: time.monotonic() + PHASE_LIMIT_S)


class Forked(Launcher):
    """Launcher for one host."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._catalogue: Catalogue | None = None

    def catalogue(self) -> Catalogue:
        if self._catalogue is None:
            self._catalogue = Catalogue.model_validate(self._ask("catalogue", ""))
        return self._catalogue

    def check(self, trials: Sequence[Trial]) -> None:
        # lengths, budgets and rounds make no difference to whether options make sense
        distinct = {(t.implementation, str(t.options)): t for t in trials}
        asked = json.dumps([t.model_dump(mode="json") for t in distinct.values()])
        for mistake in self._ask("check", asked):
            if mistake:
                raise UserError(mistake)

    def run(self, trial: Trial, on_phase: OnPhase) -> Launched:
        outcome, signal_number = self._attempt(trial, on_phase)
        if not trial.memory_budget or not memory_may_be_why(outcome, signal_number):
            return Launched(outcome)
        return Launched(self._second_opinion(trial, outcome, on_phase), processes=2)

    def _second_opinion(self, trial: Trial, first: Outcome, on_phase: OnPhase) -> Outcome:
        """Fused kernels do not check every allocation: the same pass with room tells a lack of
        memory from a real fault."""
        assert trial.memory_budget
        larger = max(RETRY_FACTOR * trial.memory_budget, trial.memory_budget + RETRY_ROOM)
        if trial.device == "cpu":
            here = int(psutil.virtual_memory().available * RETRY_SHARE)
            larger = max(trial.memory_budget, min(larger, here))
        again, _ = self._attempt(trial.but(memory_budget=larger, repeats=0), on_phase)
        if again.status != "ok":
            same = f"{first.reason}; with {format_bytes(larger)} it ended {again.status} too"
            return first.model_copy(update={"reason": same})
        reason = (
            f"{first.reason} under {format_bytes(trial.memory_budget)}, passes under "
            f"{format_bytes(larger)}: an allocation that nobody checked failed"
        )
        return first.model_copy(update={"status": "oom", "reason": reason})

    def _ask(self, request: str, payload: str) -> Any:
        """A child's answer to a question. Raises LauncherError where none comes."""
        child = self._start(request, payload)
        try:
            self._follow(child, None, lambda phase, part: None)
        finally:
            printed, _ = self._end(child)
        if child.answer is None:
            last = printed.strip().splitlines()[-1:] or ["it said nothing"]
            raise LauncherError(f"a child process can't be started here: {last[0]}")
        return child.answer

    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        """One child's outcome, and the signal that killed it (0: none)."""
        kills = kernel_kills()
        child = self._start("trial", trial.model_dump_json())
        late = False
        try:
            late = self._follow(child, trial.time_budget, on_phase)
        finally:
            printed, strays = self._end(child)
        code = child.process.exitcode or 0
        if child.outcome is not None:
            outcome = child.outcome
        elif late:
            return _timed_out(trial, child.phase), 0
        else:
            outcome = outcome_of_exit(code, child.phase, printed, kernel_kills() > kills)
        if strays:
            left = f"left {len(strays)} process(es) behind, killed: {', '.join(strays)}"
            reason = f"{outcome.reason}; {left}" if outcome.reason else left
            outcome = outcome.model_copy(update={"reason": reason})
        return outcome, -code if code < 0 and child.outcome is None else 0

    def _start(self, request: str, payload: str) -> _Child:
        receiver, sender = self._context.Pipe(duplex=False)
        handle, output = tempfile.mkstemp(prefix="longseq-", suffix=".out")
        process = self._context.Process(
            target=_child.enter, args=(request, payload, sender, output), daemon=False
        )
        try:
            process.start()
        except OSError as error:
            os.close(handle)
            os.unlink(output)
            raise LauncherError(f"the fork server can't be started: {error}") from error
        finally:
            sender.close()
        return _Child(process, receiver, os.fdopen(handle, "rb"))

    def _follow(self, child: _Child, budget: float | None, on_phase: OnPhase) -> bool:
        """Listen until the child ends or is late; True where a phase outlasted its limit."""
        while True:
            left = child.deadline - time.monotonic()
            if left <= 0:
                return True
            ready = wait([child.pipe, child.process.sentinel], timeout=left)
            if child.pipe in ready:
                try:
                    message = json.loads(child.pipe.recv_bytes())
                except (EOFError, OSError, ValueError):
                    child.process.join(timeout=GRACE_S)
                    return False
                self._hear(child, message, budget, on_phase)
                if child.outcome is not None or child.answer is not None:
                    return False
            elif ready:
                return False

    def _hear(
        self, child: _Child, message: dict[str, Any], budget: float | None, on_phase: OnPhase
    ) -> None:
        if "phase" in message:
            # backward belongs to the pass that forward began
            if message["phase"] != "backward":
                limit = PHASE_LIMIT_S
                if message["phase"] in PASSES and budget is not None:
                    limit = budget * (EXACT_FACTOR if message["part"] == "exact" else 1) + GRACE_S
                child.deadline = time.monotonic() + limit
            child.phase = message["phase"]
            on_phase(message["phase"], message["part"])
        elif "outcome" in message:
            child.outcome = Outcome.model_validate(message["outcome"])
        elif "answer" in message:
            child.answer = message["answer"]
        elif "server" in message:
            child.server = message["server"]

    def _end(self, child: _Child) -> tuple[str, list[str]]:
        """Kill what is left; returns the end of its output and the names of what it left behind."""
        finished = child.outcome is not None or child.answer is not None
        if finished:
            child.process.join(timeout=GRACE_S)
        if child.process.pid and child.process.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
        child.process.join()
        strays = _kill_strays(child.server)
        child.pipe.close()
        with child.output:
            printed = child.output.read().decode(errors="replace")[-4000:]
        return printed, strays


def _timed_out(trial: Trial, phase: Phase) -> Outcome:
    if trial.time_budget and phase in PASSES:
        reason = f"one pass took longer than the {trial.time_budget:.3g} s allowed"
    else:
        reason = f"{phase} took longer than {PHASE_LIMIT_S:.0f} s"
    return Outcome(status="timeout", reason=reason, phase=phase)


def _kill_strays(server: int | None) -> list[str]:
    """End every process that a trial left to the fork server; one trial runs at a time."""
    if server is None:
        return []
    with suppress(psutil.NoSuchProcess):
        strays = psutil.Process(server).children(recursive=True)
        names = []
        for stray in strays:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{stray.name()} ({stray.pid})")
                stray.kill()
        psutil.wait_procs(strays, timeout=GRACE_S)
        return names
    return []
