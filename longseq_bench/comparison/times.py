"""Compare times, by a control where there is one, and find signs that the machine was not steady.

A control is an implementation whose code, versions and options are the same on both sides. It ran
in the same rounds as the others, so a row's time over the control's, round by round, is free of the
machine's speed. Its definition: docs/decisions/0015-compare.md.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from longseq_bench.analysis.runs import (
    REMEDY,
    Runs,
    busy_threads,
    find_instability,
    group_by,
    per_iteration,
)
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.significance import estimate_ratios
from longseq_bench.comparison.verdict import Change, count, format_percent, name_row
from longseq_bench.core.model import SDPA, Record
from longseq_bench.core.units import format_bytes, format_seconds

CONTROLS = (SDPA, "fused", "dense", "ring")
"""Names that are not of a plug-in or of a library, whose versions records lack; best first."""
CPU_TOLERANCE = 0.1
"""Relative. On steady machines the CPU time of a second varies less between two runs."""

Records = list[Record]  # the runs of one trial, or of one search
Compared = Sequence[tuple[tuple[Records, Records], Any, Any]]
"""Trials and searches: the runs of A and of B, and the merged rows of both."""
Rounds = Mapping[Hashable, float]
"""The median pass of each process (s), by round."""


@dataclass(frozen=True, eq=False)
class _Timed:
    """A trial that was timed in every round of both sides."""

    runs: Records
    a: SweepRow
    b: SweepRow
    a_rounds: Rounds
    b_rounds: Rounds

    @property
    def is_same_code(self) -> bool:
        """True if the records show that its code and versions are the same on both sides."""
        if self.a.fingerprint != self.b.fingerprint:
            return False
        if self.a.source is not None or self.a.implementation == SDPA:
            return self.a.source == self.b.source
        commits = {r.environment.commit or "" for r in self.runs}
        is_known = len(commits) == 1 and "dirty" not in commits.pop()
        return is_known and self.a.implementation in CONTROLS


def compare_times(
    trials: Compared, level: float, min_change: float, is_paired: bool
) -> list[Change]:
    """Return the change of each trial that was timed, as `compare` does; controls come last."""
    timed = [
        _Timed([*runs_a, *runs_b], a, b, _median_passes(runs_a), _median_passes(runs_b))
        for (runs_a, runs_b), a, b in trials
    ]
    timed = [one for one in timed if one.a_rounds and one.b_rounds and not one.a.fit_only]
    controls = {} if is_paired else _find_controls(timed)
    timed.sort(key=lambda one: controls.get(one) is one)
    changes: list[Change] = []
    # controls are tested apart, so that they cost the others nothing
    for some in group_by(timed, lambda one: controls.get(one) is one).values():
        samples = [_sample(one, controls.get(one, one), is_paired) for one in some]
        tested = [pair for pair in samples if min(map(len, pair)) > 1]
        estimates = iter(estimate_ratios(tested, level))
        for one, (a, b) in zip(some, samples, strict=True):
            ratio, verdict, estimate, reason = median(b) / median(a), "undecided", None, ""
            if min(len(a), len(b)) > 1:
                estimate = next(estimates)
                ratio = estimate.ratio
                is_large = abs(math.log(ratio)) >= math.log1p(min_change)
                is_changed = estimate.adjusted_p <= level and is_large
                verdict = ("slower" if ratio > 1 else "faster") if is_changed else "same"
            else:
                alone = f"{'A' if len(a) == 1 else 'B'} has only one process"
                alone = "one process per side" if len(a) == len(b) else alone
                reason = f"{alone}; sweep with rounds: 3 or more"
            budgets = differing_budgets(one.a, one.b)
            control = controls[one].a.name if one in controls else ""
            values = verdict, ratio, reason, budgets, a, b, estimate, control
            changes.append(Change(one.a, one.b, *values))
    return changes


def _median_passes(runs: Records) -> Rounds:
    """Return the median of each process by its round; none if any has no valid time."""
    passes = [per_iteration(r, "time") for r in runs if r.outcome.status == "ok"]
    if len(passes) < len(runs) or not all(some and min(some) > 0 for some in passes):
        return {}
    rounds = [r.trial.round for r in runs]  # two commits may have the same ones
    keys = [(n, rounds[:i].count(n)) for i, n in enumerate(rounds)]
    return dict(zip(keys, map(median, passes), strict=True))


def _find_controls(timed: Sequence[_Timed]) -> dict[_Timed, _Timed]:
    """Return the control of each trial that has one, which ran in all of its rounds.

    A control has the same workload, length, ranks and threads, and has itself as its control.
    """

    def setting(one: _Timed) -> Hashable:
        a = one.a
        return a.workload_key, one.b.fingerprint, a.world_size, a.keep, a.allocator, a.timing

    controls: dict[_Timed, _Timed] = {}
    for trials in group_by(timed, setting).values():
        names = [*CONTROLS, *(one.a.implementation for one in trials)]
        same = [one for one in trials if one.is_same_code]
        for best in sorted(same, key=lambda one: names.index(one.a.implementation))[:1]:
            a, b = best.a_rounds.keys(), best.b_rounds.keys()
            those = (t for t in trials if t.a_rounds.keys() <= a and t.b_rounds.keys() <= b)
            controls |= dict.fromkeys(those, best)
    return controls


def _sample(
    one: _Timed, control: _Timed, is_paired: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times, or their ratios to those of another trial in the same rounds."""
    a, b = one.a_rounds, one.b_rounds
    if is_paired:
        b = {i: b[i] / a[i] for i in b if i in a}
        a = dict.fromkeys(b, 1.0)
    elif control is not one:
        a = {i: a[i] / control.a_rounds[i] for i in a}
        b = {i: b[i] / control.b_rounds[i] for i in b}
    return tuple(a.values()), tuple(b.values())


def differing_budgets(a: SweepRow, b: SweepRow) -> str:
    """Return the budgets of two rows that differ, as text."""
    words = []
    for name, write in (("memory", format_bytes), ("time", format_seconds)):
        one, other = (getattr(row, f"{name}_budget") for row in (a, b))
        if one != other:
            texts = ("none" if value is None else write(value) for value in (one, other))
            words.append(f"{name} budgets {' and '.join(texts)}")
    return "; ".join(words)


# ---- signs that the machine was not steady -------------------------------------------------------


def find_unstable(compared: Compared) -> Iterator[str]:
    """Yield a sentence per side with trials that are unstable, or had less of the CPU."""
    trials = [one for one in compared if isinstance(one[1], SweepRow) and not one[1].fit_only]
    for i, side in enumerate("AB"):
        busy = busy_threads(record for pair, *_ in trials for record in pair[i])
        found = []
        for pair, *rows in trials:
            if rows[i].is_ok:
                reason = find_instability(Runs(pair[i]), busy[rows[i].fingerprint])
                reason = reason or (_cpu_change(*pair) if i else "")
                found += [f"{name_row(rows[0])} ({reason})"] if reason else []
        if found:
            yield f"Unstable in {side}: {_first(found)}; {REMEDY}."


def _cpu_change(a: Records, b: Records) -> str:
    """Return the change of CPU time per second in words; empty if it is small."""
    shares = []
    for runs in (a, b):
        each = [(sum(per_iteration(r, "cpu_time")), sum(per_iteration(r, "time"))) for r in runs]
        shares.append(median([cpu / wall for cpu, wall in each if wall] or [0.0]))
    ratio = shares[1] / shares[0] if all(shares) and a[0].trial.device == "cpu" else 1.0
    if abs(math.log(ratio)) < math.log1p(CPU_TOLERANCE):
        return ""
    change = f"{format_percent(abs(ratio - 1))} {'higher' if ratio > 1 else 'lower'}"
    return f"CPU time per second is {change} than in A"


def find_moves(times: Sequence[Change], apart: bool, least: float) -> Iterator[str]:
    """Yield sentences if controls changed, and if all other times changed alike.

    apart: one side was measured first; sides that took turns had the same machine.
    least: the smallest relative change.
    """
    moved = [t for t in times if t.is_control and t.verdict in ("slower", "faster")]
    found = [f"{name_row(t.a)} is {format_percent(abs(t.ratio - 1))} {t.verdict}" for t in moved]
    if found:
        yield f"The machine changed: {_first(found)} in B, with the same code."
    logs = [math.log(t.ratio) for t in times if not t.control]
    middle = median(logs) if apart and len(logs) > 2 else 0.0
    if abs(middle) >= math.log1p(least) and all(0.5 <= x / middle <= 2 for x in logs):
        shift = f"{format_percent(math.expm1(abs(middle)))} {'slower' if middle > 0 else 'faster'}"
        yield f"All {len(logs)} trials changed by a similar ratio; by the median B is {shift}."


def _first(found: Sequence[str]) -> str:
    more = f" and {count(len(found) - 1, 'more trial')}" if len(found) > 1 else ""
    return f"{found[0]}{more}"
