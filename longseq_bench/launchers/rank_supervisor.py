"""The state of the ranks of one trial: how long to wait for them, and the outcome of the trial.

This module starts no process and reads no clock. A launcher passes on messages and exits, with the
time, and asks how long to wait. Ranks may be processes of this host or of others.

A rank that fails also ends its peers, which then report "connection closed". So after a failure
the supervisor waits a moment for reports of the peers, and looks for the cause in all reports.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longseq_bench.core.model import Outcome, Phase, Trial, environment_failure
from longseq_bench.core.ranks import CONNECTING, OPENING, WAIT_FOR_DEVICE, WAIT_FOR_PEERS
from longseq_bench.launchers.exit_status import function_of, outcome_of_exit

PHASE_LIMIT_S = 900.0
"""Time limit of a phase without a time budget."""

MEET_S = 120.0
"""Time limit for ranks to connect to each other. It begins again when a rank begins to."""

GRACE_S = 1.0
"""Time beyond the budget in which a rank reports the excess itself; then the launcher ends it."""

EXACT_FACTOR = 4
"""Factor on the time budget of a pass with exact heap accounting, which is slower."""

PASSES = ("forward", "backward", "time")

PEERS_S = 1.0
"""Time limit for the peers of a failed rank to report."""

CAUSE_S = 3.0
"""The same limit if all reports so far are lost peers: the cause is not known yet."""

PAUSE_S = 3.0
"""A wait that takes this much longer than asked: the launcher itself was stopped."""

IDLE_SHARE = 0.2
"""A rank that uses less than this share of a core is waiting."""

_COMMUNICATION_LIBRARIES = ("torch/distributed/", "deepspeed/comm/")
"""Packages whose code waits for other ranks. Our own code is recognised by WAIT_FOR_PEERS."""


@dataclass(frozen=True)
class ProcessSample:
    """State of a rank's process: stopped by a signal or not, and the share of a core it uses."""

    stopped: bool
    busy: float = 0.0


@dataclass
class _Rank:
    """The state of one rank.

    ended_ns: its end by its host's clock. known_s: the report of it by the launcher's clock.
    phase_s: seconds in each phase until `since`, with the phase's part, without its number.
    """

    deadline: float
    since: float
    phase: Phase = "start"
    part: str = ""
    outcome: Outcome | None = None
    ended_ns: int = 0
    known_s: float = 0.0
    signal: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)

    def add_time(self, now: float) -> None:
        """Add the time since the last call to the present phase; after an outcome to `end`."""
        name = "end" if self.outcome else re.sub(r" \d+", "", f"{self.phase} {self.part}").strip()
        self.phase_s[name] = self.phase_s.get(name, 0.0) + now - self.since
        self.since = now


class RankSupervisor:
    """State of all ranks of a trial, from start to outcome.

    Every `now` is in seconds of the launcher's monotonic clock. `name` formats a rank for a reason.
    cause_s: time for the cause to be reported, when all reports so far are of lost peers.
    """

    def __init__(
        self, trial: Trial, now: float, name: Callable[[int], str] = "rank {}".format,
        cause_s: float = CAUSE_S,
    ) -> None:  # fmt: skip
        self.trial, self.name, self._cause_s = trial, name, cause_s
        self._ranks = [_Rank(now + PHASE_LIMIT_S, now) for _ in range(trial.world_size)]
        self._verdict: tuple[int, Outcome] | None = None
        self._paused_s = 0.0

    # ---- events --------------------------------------------------------------------------------

    def add_message(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Process a message of a rank (worker/messages.py): a phase or its outcome."""
        if "phase" in message:
            state, phase = self._ranks[rank], message["phase"]
            # backward is part of the pass that began with forward
            if phase != "backward":
                limit, budget = PHASE_LIMIT_S, self.trial.time_budget
                if phase in PASSES and budget is not None:
                    factor = EXACT_FACTOR if message["part"] == "exact" else 1
                    limit = budget * factor + GRACE_S
                state.deadline = now + limit
            state.add_time(now)
            state.phase, state.part = phase, message["part"]
            if state.part == CONNECTING:
                self._begin_to_meet(now)
        elif "outcome" in message:
            outcome = Outcome.model_validate(message["outcome"])
            self.add_outcome(rank, outcome, now, message.get("at", 0))

    def _begin_to_meet(self, now: float) -> None:
        """Limit the time of ranks that connect, unless one opens its device, which takes long."""
        if all(state.part not in ("", OPENING) for state in self._ranks):
            for state in self._ranks:
                state.deadline = now + MEET_S if state.part == CONNECTING else state.deadline

    def add_exit(
        self, rank: int, exitcode: int, printed: str, kernel_killed: bool, now: float, ended_ns: int
    ) -> None:
        """Process the exit of a rank (outcome_of_exit). ended_ns: when it exited, since 1970."""
        phase = self._ranks[rank].phase
        if self._ranks[rank].outcome is None:
            self._ranks[rank].signal = max(0, -exitcode)
        self.add_outcome(
            rank, outcome_of_exit(exitcode, phase, printed, kernel_killed), now, ended_ns
        )

    def add_environment_failure(self, rank: int, reason: str, now: float, ended_ns: int) -> None:
        """Process the end of a rank by something that is no part of the trial."""
        self.add_outcome(rank, environment_failure(reason, self._ranks[rank].phase), now, ended_ns)

    def add_outcome(self, rank: int, outcome: Outcome, now: float, ended_ns: int) -> None:
        """Set the outcome of a rank, unless it has one already."""
        state = self._ranks[rank]
        if state.outcome is None:
            state.add_time(now)
            state.outcome, state.known_s, state.ended_ns = outcome, now, ended_ns

    def add_wait(self, asked_s: float, took_s: float) -> None:
        """Note how long a wait for events took.

        A scheduler that suspends a job stops the launcher with its ranks. Their time limits go on,
        so a trial that is late then is run again.
        """
        if took_s - asked_s > PAUSE_S:
            self._paused_s += took_s - asked_s

    # ---- how long to wait ----------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """Return the ranks that have no outcome yet."""
        return [rank for rank, state in enumerate(self._ranks) if state.outcome is None]

    @property
    def failed(self) -> list[int]:
        """Return the ranks whose outcome is not ok, the most likely cause first."""
        ended = {rank: state.outcome for rank, state in enumerate(self._ranks) if state.outcome}
        bad = [rank for rank, outcome in ended.items() if outcome.status != "ok"]
        return sorted(bad, key=lambda rank: (self._weight(rank), self._ranks[rank].ended_ns))

    @property
    def deadline(self) -> float:
        """Return the time until which the launcher should wait for the next event, in s."""
        if not (failed := self.failed):
            return min((self._ranks[rank].deadline for rank in self.running), default=0.0)
        causes = [rank for rank in failed if not self._lost_peer(rank)]
        first = min(self._ranks[rank].known_s for rank in causes or failed)
        return first + (PEERS_S if causes else self._cause_s)

    def is_done(self, now: float) -> bool:
        """Return True if all ranks ended, or one failed and its peers had time to report."""
        return not self.running or (bool(self.failed) and now >= self.deadline)

    def is_late(self, now: float) -> bool:
        """Return True if a rank is over its limit and none failed: sample and diagnose them."""
        return bool(self.running) and not self.failed and now >= self.deadline

    # ---- a rank is late ------------------------------------------------------------------------

    def is_hang(self, samples: Mapping[int, ProcessSample]) -> bool:
        """Return True if the trial will never end: a rank is stopped, or all ranks wait."""
        if self._stopped_ranks(samples):
            return True
        return len(self._ranks) > 1 and all(
            rank in samples and samples[rank].busy < IDLE_SHARE for rank in self.running
        )

    def diagnose(
        self, samples: Mapping[int, ProcessSample], stacks: Mapping[int, Sequence[str]]
    ) -> None:
        """Decide the outcome of a trial that is late: a hang or a timeout.

        Ranks that wait for their devices are late: these compute, or wait for other ranks.
        stacks: for a hang, the stack of each rank, as `exit_status.stack_lines` returns it.
        """
        if all(self._ranks[rank].part == CONNECTING for rank in self.running):
            reason = "the ranks did not connect to each other; do their hosts reach each other at "
            outcome = Outcome(status="error", reason=f"{reason}every port?", phase="start")
            self._verdict = self.running[0], outcome
            return
        stopped = self._stopped_ranks(samples)
        facts = {"stacks": {str(rank): list(lines) for rank, lines in stacks.items()}}
        on_device = [
            rank
            for rank in self.running
            if not stopped and WAIT_FOR_DEVICE in map(function_of, stacks.get(rank, ()))
        ]
        if on_device or not self.is_hang(samples):
            root, outcome = self._timed_out(samples, on_device or self.running)
            if on_device:
                reason = f"{outcome.reason}; its device computes, or waits for other ranks"
                outcome = outcome.model_copy(update={"reason": reason, "facts": facts})
            self._verdict = root, outcome
            return
        where = {rank: self._phase_of(rank, stacks.get(rank, ())) for rank in self.running}
        not_communicating = [rank for rank in self.running if where[rank] != "communication"]
        root = (stopped or not_communicating or self.running)[0]
        reason, phase = self._hang_reason(samples, where), where[root]
        outcome = Outcome(status="hang", reason=reason, phase=phase, facts=facts)
        self._verdict = root, outcome

    def _timed_out(
        self, samples: Mapping[int, ProcessSample], ranks: Sequence[int]
    ) -> tuple[int, Outcome]:
        """Return the rank to blame, the busiest of `ranks` over its limit, and the outcome."""
        over = min(self._ranks[rank].deadline for rank in ranks) + GRACE_S
        late = [rank for rank in ranks if self._ranks[rank].deadline <= over]
        root = max(late, key=lambda rank: samples[rank].busy if rank in samples else 0.0)
        phase, budget = self._ranks[root].phase, self.trial.time_budget
        if budget and phase in PASSES:
            reason = f"one pass took longer than the {budget:.3g} s allowed"
        else:
            reason = f"{phase} took longer than {PHASE_LIMIT_S:.0f} s"
        reason = f"{self.name(root)}: {reason}" if len(self._ranks) > 1 else reason
        return root, Outcome(status="timeout", reason=reason, phase=phase)

    def _hang_reason(self, samples: Mapping[int, ProcessSample], where: Mapping[int, Phase]) -> str:
        if len(self._ranks) == 1:
            return f"the process is stopped (SIGSTOP) in {where[0]}"
        stopped = self._stopped_ranks(samples)
        doing: dict[str, list[str]] = {}
        for rank in sorted(range(len(self._ranks)), key=lambda r: (r not in stopped, r)):
            state = "done" if rank not in where else "busy"
            if rank in stopped:
                state = "stopped (SIGSTOP)"
            elif rank in samples and samples[rank].busy < IDLE_SHARE:
                state = "waiting"
            state += f" in {where[rank]}" if rank in where else ""
            doing.setdefault(state, []).append(self.name(rank))
        return "; ".join(f"{', '.join(names)}: {state}" for state, names in doing.items())

    def _stopped_ranks(self, samples: Mapping[int, ProcessSample]) -> list[int]:
        return [rank for rank in self.running if rank in samples and samples[rank].stopped]

    def _phase_of(self, rank: int, stack: Sequence[str]) -> Phase:
        """Return the phase that a rank is in; `communication` if its stack shows it waits."""
        waits = any(
            function_of(line) == WAIT_FOR_PEERS or line.startswith(_COMMUNICATION_LIBRARIES)
            for line in stack
        )
        return "communication" if waits else self._ranks[rank].phase

    # ---- the outcome --------------------------------------------------------------------------

    @property
    def signal_number(self) -> int:
        """Return the signal that killed the rank to blame, or 0."""
        return self._ranks[self.failed[0]].signal if self.failed else 0

    def outcome(self, now: float | None = None) -> Outcome:
        """Return the outcome of the trial: ok if all ranks are, else that of the rank to blame.

        now: the time at which its processes have ended, for the fact `phase_s` of that rank.
        """
        root = self._verdict[0] if self._verdict else [*self.failed, 0][0]
        outcome = self._outcome(root)
        if now is not None:
            self._ranks[root].add_time(now)
            phase_s = {name: round(s, 3) for name, s in self._ranks[root].phase_s.items()}
            outcome = outcome.model_copy(update={"facts": {**outcome.facts, "phase_s": phase_s}})
        if self._paused_s and outcome.status in ("hang", "timeout"):
            stopped = f"the launcher was stopped for {self._paused_s:.0f} s, as by a suspended job"
            return environment_failure(f"{stopped} ({outcome.reason})", outcome.phase)
        return outcome

    def _outcome(self, root: int) -> Outcome:
        chosen = self._verdict[1] if self._verdict else self._ranks[root].outcome
        if chosen is None:
            raise ValueError("the trial is still running")
        if len(self._ranks) == 1:
            return chosen
        facts = dict(chosen.facts)
        if failed := self.failed:
            reports = {str(rank): self._report(rank) for rank in sorted((*failed, *self.running))}
            same = len(reports) == len(self._ranks) and len(set(reports.values())) == 1
            facts |= {} if same else {"ranks": reports}
            if not same:
                reason = f"{self.name(root)}: {chosen.reason}"
            elif chosen.status == "unsupported":
                reason = chosen.reason or ""  # about the trial, not about its ranks
            else:
                reason = f"every rank: {chosen.reason}"
            chosen = chosen.model_copy(update={"reason": reason})
        measured = [
            replace(m, rank=rank)
            for rank, state in enumerate(self._ranks)
            for m in (state.outcome.measurements if state.outcome else ())
        ]
        return chosen.model_copy(update={"measurements": tuple(measured), "facts": facts})

    def _report(self, rank: int) -> str:
        state = self._ranks[rank]
        if state.outcome is None:
            return f"no report after {state.phase} began"
        where = f" in {state.outcome.phase}" if state.outcome.phase else ""
        return f"{state.outcome.status}{where}: {state.outcome.reason}"

    def _weight(self, rank: int) -> int:
        """Return a rank's priority as the cause: 0 out of memory, 1 others, 2 a lost peer."""
        outcome = self._ranks[rank].outcome
        if outcome and outcome.status == "oom":
            return 0
        return 2 if self._lost_peer(rank) else 1

    def _lost_peer(self, rank: int) -> bool:
        outcome = self._ranks[rank].outcome
        return bool(outcome and outcome.facts.get("lost_peer"))
