"""The ranks of one trial: what each has said, how long to wait for it, what it all comes to.

Pure: no process, no clock, no device. A launcher passes on what it hears and sees, with the time,
and asks how long to listen. Ranks may be processes here or on other hosts.

A rank that fails takes its peers with it, and a peer's own word is then "connection closed": so
after a failure all get a moment to say theirs, and the cause is looked for among all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longseq_bench.core.model import Outcome, Phase, Trial
from longseq_bench.core.stack_markers import WAIT_FOR_PEERS
from longseq_bench.launchers.exit_status import function_of, outcome_of_exit

PHASE_LIMIT_S = 900.0
"""For phases that no time budget covers, and for passes without one."""

GRACE_S = 1.0
"""A pass that ends just over its budget says so itself; after this the launcher does."""

EXACT_FACTOR = 4
"""How much longer a pass with exact accounting of the heap may take: no time is judged by it."""

PASSES = ("forward", "backward", "time")

PEERS_S = 1.0
"""How long the peers of a rank that failed may take to say what became of them."""

CAUSE_S = 3.0
"""The same where all that is known is that somebody lost a peer: the cause is still to come."""

IDLE_SHARE = 0.2
"""A rank that used less of a core than this is waiting."""

_COMMUNICATION_LIBRARIES = ("torch/distributed/", "deepspeed/comm/")
"""Packages whose code waits for other ranks. Our own code is recognised by WAIT_FOR_PEERS."""


@dataclass(frozen=True)
class ProcessSample:
    """A rank seen from outside: stopped by a signal; the share of a core that it used of late."""

    stopped: bool
    busy: float = 0.0


@dataclass
class _Rank:
    """What is known of one rank. `at`: when it ended by its own clock, ns; `known`: by ours, s."""

    deadline: float
    phase: Phase = "start"
    outcome: Outcome | None = None
    at: int = 0
    known: float = 0.0
    signal: int = 0


class RankSupervisor:
    """Follows the ranks of a trial to their end.

    now: seconds of the launcher's steady clock. name: what a rank is called in a reason.
    """

    def __init__(
        self, trial: Trial, now: float, name: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.trial, self.name = trial, name
        self._ranks = [_Rank(now + PHASE_LIMIT_S) for _ in range(trial.world_size)]
        self._verdict: tuple[int, Outcome] | None = None

    # ---- what happens --------------------------------------------------------------------------

    def hear(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """A rank says that a phase begins, or what it came to."""
        if "phase" in message:
            self._enter(self._ranks[rank], message["phase"], message["part"], now)
        elif "outcome" in message:
            outcome = Outcome.model_validate(message["outcome"])
            self.came_to(rank, outcome, now, message.get("at", 0))

    def ended(
        self, rank: int, exitcode: int, printed: str, kernel_killed: bool, now: float, at: int
    ) -> None:
        """A rank's process is gone. printed: the end of its output; at: when, ns since 1970."""
        phase = self._ranks[rank].phase
        if self._ranks[rank].outcome is None:
            self._ranks[rank].signal = max(0, -exitcode)
        self.came_to(rank, outcome_of_exit(exitcode, phase, printed, kernel_killed), now, at)

    def came_to(self, rank: int, outcome: Outcome, now: float, at: int) -> None:
        """A rank's end; the first word on it counts."""
        one = self._ranks[rank]
        if one.outcome is None:
            one.outcome, one.known, one.at = outcome, now, at

    def _enter(self, one: _Rank, phase: Phase, part: str, now: float) -> None:
        # backward belongs to the pass that forward began
        if phase != "backward":
            limit, budget = PHASE_LIMIT_S, self.trial.time_budget
            if phase in PASSES and budget is not None:
                limit = budget * (EXACT_FACTOR if part == "exact" else 1) + GRACE_S
            one.deadline = now + limit
        one.phase = phase

    # ---- how long to listen --------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """Ranks that have neither said what they came to nor ended."""
        return [rank for rank, one in enumerate(self._ranks) if one.outcome is None]

    @property
    def failed(self) -> list[int]:
        """Ranks that came to anything but ok, the likeliest cause of it all first."""
        bad = [r for r, one in enumerate(self._ranks) if one.outcome and one.outcome.status != "ok"]
        return sorted(bad, key=lambda rank: (self._weight(rank), self._ranks[rank].at))

    @property
    def deadline(self) -> float:
        """Until when there is something to wait for."""
        if not (failed := self.failed):
            return min((self._ranks[rank].deadline for rank in self.running), default=0.0)
        causes = [rank for rank in failed if not self._lost_peer(rank)]
        first = min(self._ranks[rank].known for rank in causes or failed)
        return first + (PEERS_S if causes else CAUSE_S)

    def done(self, now: float) -> bool:
        """Whether every rank has ended, or one has failed and its peers had time to say theirs."""
        return not self.running or (bool(self.failed) and now >= self.deadline)

    def late(self, now: float) -> bool:
        """Whether no rank has failed and one has outlasted its limit: look, then judge."""
        return bool(self.running) and not self.failed and now >= self.deadline

    # ---- a rank is late ------------------------------------------------------------------------

    def hangs(self, looks: Mapping[int, ProcessSample]) -> bool:
        """Whether it will never end: a rank is stopped, or each of several waits for the others."""
        if self._stopped(looks):
            return True
        return len(self._ranks) > 1 and all(
            rank in looks and looks[rank].busy < IDLE_SHARE for rank in self.running
        )

    def judge(
        self, looks: Mapping[int, ProcessSample], stacks: Mapping[int, Sequence[str]]
    ) -> None:
        """The end of a trial that is late. stacks: of a hang, where each rank is, innermost first,
        as `deaths.stack_lines` reads them."""
        if not self.hangs(looks):
            self._verdict = self._timed_out(looks)
            return
        stopped = self._stopped(looks)
        where = {rank: self._where(rank, stacks.get(rank, ())) for rank in self.running}
        elsewhere = [rank for rank in self.running if where[rank] != "communication"]
        root = (stopped or elsewhere or self.running)[0]
        outcome = Outcome(
            status="hang",
            reason=self._why_it_hangs(looks, where),
            phase=where[root],
            facts={"stacks": {str(rank): list(lines) for rank, lines in stacks.items()}},
        )
        self._verdict = root, outcome

    def _timed_out(self, looks: Mapping[int, ProcessSample]) -> tuple[int, Outcome]:
        """Named for the rank that is over its limit; where several are, the busiest of them."""
        over = min(self._ranks[rank].deadline for rank in self.running) + GRACE_S
        late = [rank for rank in self.running if self._ranks[rank].deadline <= over]
        root = max(late, key=lambda rank: looks[rank].busy if rank in looks else 0.0)
        phase, budget = self._ranks[root].phase, self.trial.time_budget
        if budget and phase in PASSES:
            reason = f"one pass took longer than the {budget:.3g} s allowed"
        else:
            reason = f"{phase} took longer than {PHASE_LIMIT_S:.0f} s"
        reason = f"{self.name(root)}: {reason}" if len(self._ranks) > 1 else reason
        return root, Outcome(status="timeout", reason=reason, phase=phase)

    def _why_it_hangs(self, looks: Mapping[int, ProcessSample], where: Mapping[int, Phase]) -> str:
        if len(self._ranks) == 1:
            return f"the process is stopped (SIGSTOP) in {where[0]}"
        stopped = self._stopped(looks)
        doing: dict[tuple[str, str], list[str]] = {}
        for rank in sorted(range(len(self._ranks)), key=lambda r: (r not in stopped, r)):
            if rank not in where:
                verbs = "is done", "are done"
            elif rank in stopped:
                verbs = "is stopped (SIGSTOP)", "are stopped (SIGSTOP)"
            elif rank in looks and looks[rank].busy < IDLE_SHARE:
                verbs = f"waits in {where[rank]}", f"wait in {where[rank]}"
            else:
                verbs = f"is busy in {where[rank]}", f"are busy in {where[rank]}"
            doing.setdefault(verbs, []).append(self.name(rank))
        return "; ".join(
            f"{_listed(names)} {verbs[len(names) > 1]}" for verbs, names in doing.items()
        )

    def _stopped(self, looks: Mapping[int, ProcessSample]) -> list[int]:
        return [rank for rank in self.running if rank in looks and looks[rank].stopped]

    def _where(self, rank: int, stack: Sequence[str]) -> Phase:
        """The phase that a rank is in, seen from its stack too: most of one is not ours."""
        waits = any(
            function_of(line) == WAIT_FOR_PEERS or line.startswith(_COMMUNICATION_LIBRARIES)
            for line in stack
        )
        return "communication" if waits else self._ranks[rank].phase

    # ---- what it came to -----------------------------------------------------------------------

    @property
    def signal_number(self) -> int:
        """The signal that killed the rank that is the cause; 0 where none did."""
        return self._ranks[self.failed[0]].signal if self.failed else 0

    def outcome(self) -> Outcome:
        """One outcome of all ranks: ok where all are, else that of the rank that is the cause."""
        root, chosen = self._chosen()
        if len(self._ranks) == 1:
            return chosen
        facts = dict(chosen.facts)
        if failed := self.failed:
            words = {str(rank): self._words(rank) for rank in sorted((*failed, *self.running))}
            alike = len(words) == len(self._ranks) and len(set(words.values())) == 1
            facts |= {} if alike else {"ranks": words}
            reason = self._named(root, chosen, alike)
            chosen = chosen.model_copy(update={"reason": reason})
        measured = [
            replace(m, rank=rank)
            for rank, one in enumerate(self._ranks)
            for m in (one.outcome.measurements if one.outcome else ())
        ]
        return chosen.model_copy(update={"measurements": tuple(measured), "facts": facts})

    def _chosen(self) -> tuple[int, Outcome]:
        if self._verdict:
            return self._verdict
        root = self.failed[0] if self.failed else 0
        chosen = self._ranks[root].outcome
        if chosen is None:
            raise ValueError("the trial is still going on")
        return root, chosen

    def _named(self, root: int, chosen: Outcome, alike: bool) -> str | None:
        """The reason, with the rank that it is about."""
        if not alike:
            return f"{self.name(root)}: {chosen.reason}"
        # what can't be done at all is about the trial, not about its ranks
        return chosen.reason if chosen.status == "unsupported" else f"every rank: {chosen.reason}"

    def _words(self, rank: int) -> str:
        one = self._ranks[rank]
        if one.outcome is None:
            return f"said no more after {one.phase} began"
        where = f" in {one.outcome.phase}" if one.outcome.phase else ""
        return f"{one.outcome.status}{where}: {one.outcome.reason}"

    def _weight(self, rank: int) -> int:
        """0 for memory, 2 for what a peer's end looks like, 1 for all the rest."""
        outcome = self._ranks[rank].outcome
        if outcome and outcome.status == "oom":
            return 0
        return 2 if self._lost_peer(rank) else 1

    def _lost_peer(self, rank: int) -> bool:
        outcome = self._ranks[rank].outcome
        return bool(outcome and outcome.facts.get("lost_peer"))


def _listed(words: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
