"""Find causes of a difference other than the code: load, order, drift, shared or bad records."""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from longseq_bench.analysis.labels import short_name
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.stability import REMEDY, busy_threads, find_instability
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.model import TimeComparison, is_valid_time, status_of
from longseq_bench.comparison.trial_matching import MatchedPair
from longseq_bench.comparison.wording import count, format_percent, join_words, name_row
from longseq_bench.core.model import Record

MAX_LOAD_DIFFERENCE = 0.5  # difference in load, as a share of the cores, that is reported
MAX_CPU_TIME_DIFFERENCE = 0.05
"""Relative difference in processor time per second of a pass that is reported."""

Compared = Sequence[tuple[MatchedPair, SweepRow]]


def find_caveats(
    a: Sequence[Record], b: Sequence[Record], pairs: Sequence[MatchedPair], compared: Compared,
    times: Sequence[TimeComparison], min_change: float,
) -> Iterator[str]:  # fmt: skip
    """Yield a sentence for each caveat.

    a, b: all records.  pairs: those that are compared.  compared: the trials among them.
    min_change: the smallest relative difference that is reported.
    """
    sides = [r for pair in pairs for r in pair.a], [r for pair in pairs for r in pair.b]
    yield from _shared_records(pairs)
    yield from _invalid_times(compared)
    yield from _common_shift(times, min_change)
    yield from _order(*sides)
    yield from _load(*sides)
    yield from _cpu_time(compared)
    yield from _unstable(compared)
    yield from _edited_files(pairs)
    for name, side in zip("AB", sides, strict=True):
        commits = list(dict.fromkeys(c for r in side if (c := r.environment.commit)))
        if len(commits) > 1:
            named = join_words(commits)
            yield f"{name} has records of {len(commits)} commits, merged: {named}."
    if skipped := sum(r.purpose == "density" for r in (*a, *b)):
        yield f"Searches for the minimum sparsity are not compared ({skipped} records)."


def _unstable(compared: Compared) -> Iterator[str]:
    """Report trials that were measured on a machine that was not steady."""
    for name in "AB":
        sides = [(pair.a if name == "A" else pair.b, row) for pair, row in compared]
        busy = busy_threads(record for side, _ in sides for record in side)
        found = [
            (row, reason)
            for side, row in sides
            if status_of(side) == "ok" and not row.fit_only
            and (reason := find_instability(side, busy[side[0].environment.fingerprint]))
        ]  # fmt: skip
        if found:
            (first, reason), more = found[0], len(found) - 1
            others = f" and {count(more, 'more trial', 'more trials')}" if more else ""
            yield f"Unstable in {name}: {name_row(first)} ({reason}){others}; {REMEDY}."


def _shared_records(pairs: Sequence[MatchedPair]) -> Iterator[str]:
    alone = "identical records can't differ"
    shared = equal = 0
    for pair in pairs:
        if not {r.started_at for r in pair.a}.isdisjoint(r.started_at for r in pair.b):
            # compared as text, because NaN is not equal to itself
            in_a, in_b = ({repr(r) for r in side} for side in (pair.a, pair.b))
            shared += bool(in_a & in_b)
            equal += in_a == in_b
    if equal == len(pairs):
        yield f"The compared records are the same on both sides: {alone}."
    elif shared:
        yield (
            f"{shared} of {count(len(pairs), 'trial or search', 'trials and searches')} "
            f"{'has' if shared == 1 else 'have'} records that are on both sides: {alone}."
        )


def _edited_files(pairs: Sequence[MatchedPair]) -> Iterator[str]:
    """Report own functions whose file differs between the sides."""
    edited = {
        short_name(pair.a[0].trial.implementation): (pair.a[0].trial.source, pair.b[0].trial.source)
        for pair in pairs
        if pair.a[0].trial.source != pair.b[0].trial.source
    }
    for name, (in_a, in_b) in edited.items():
        yield f"The file of {name} differs: its hash is {in_a} in A and {in_b} in B."


def _invalid_times(compared: Compared) -> Iterator[str]:
    """Report processes whose passes were timed, but not all with a valid time."""

    def invalid(runs: Sequence[Record]) -> int:
        if status_of(runs) != "ok":
            return 0
        return sum(not all(map(is_valid_time, per_iteration(record, "time"))) for record in runs)

    counts = {
        name_row(row): (invalid(pair.a), invalid(pair.b))
        for pair, row in compared if not row.fit_only
    }  # fmt: skip
    if names := [name for name, both in counts.items() if any(both)]:
        in_a, in_b = map(sum, zip(*counts.values(), strict=True))
        yield (
            f"Left out of the times: {count(in_a, 'process', 'processes')} of A and {in_b} of B "
            f"({join_words(names)}). The time of a pass is not a finite number above zero."
        )


def _common_shift(times: Sequence[TimeComparison], min_change: float) -> Iterator[str]:
    """Report a shift of all rows: every row within half and twice the median shift."""
    logs = [math.log(t.ratio) for t in times]
    if len(logs) < 3 or abs(middle := median(logs)) < math.log1p(min_change):
        return
    if all(0.5 <= x / middle <= 2 for x in logs):
        shift = f"{format_percent(math.expm1(abs(middle)))} {'slower' if middle > 0 else 'faster'}"
        yield (
            f"All {len(logs)} trials changed by a similar ratio; by the median B is {shift}. "
            "The cause may be the machine rather than the code."
        )  # fmt: skip


def _order(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    times_a, times_b = ([r.started_at for r in side] for side in (a, b))
    first = "A" if max(times_a) < min(times_b) else "B" if max(times_b) < min(times_a) else None
    if first:
        other = "AB".replace(first, "")
        yield (
            f"All of {first} was measured before {other} (A from {min(times_a)}, B from "
            f"{min(times_b)}): the ratios include any drift of the machine."
        )


def _load(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    loads = [[r.environment.load[0] for r in side if r.environment.load] for side in (a, b)]
    if not all(loads):
        return
    load_a, load_b = map(median, loads)
    if abs(load_a - load_b) > MAX_LOAD_DIFFERENCE * a[0].environment.cores:
        yield (
            f"The machine's load was {load_a:.1f} with A and {load_b:.1f} with B (1 minute, "
            "median): other work may have slowed one of them."
        )


def _cpu_time(compared: Compared) -> Iterator[str]:
    """Report a change of the processor time per second of a pass: less if other work took it.

    Not on a GPU, which the processor waits for.
    """

    def rate(runs: Sequence[Record]) -> float:
        if runs[0].trial.device != "cpu":
            return 0.0
        used, seconds = (
            [x for r in runs for x in per_iteration(r, name)] for name in ("cpu_time", "time")
        )
        return median(used) / median(seconds) if used and seconds and median(seconds) else 0.0

    rates = [(rate(pair.a), rate(pair.b)) for pair, _ in compared]
    ratios = [rate_b / rate_a for rate_a, rate_b in rates if rate_a and rate_b]
    if ratios and abs(change := median(ratios) - 1) > MAX_CPU_TIME_DIFFERENCE:
        yield (
            f"CPU time per second of a pass is {format_percent(abs(change))} "
            f"{'lower' if change < 0 else 'higher'} with B than with A (median trial): "
            f"{'B' if change < 0 else 'A'} waited, or ran on a different number of cores."
        )
