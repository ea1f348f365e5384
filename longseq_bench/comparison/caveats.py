"""Find causes of a difference other than the code: load, order, drift, an edited file."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from longseq_bench.analysis.labels import short_name
from longseq_bench.analysis.stability import REMEDY, busy_threads, find_instability
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.model import count, format_percent, name_row
from longseq_bench.core.model import Record

MAX_LOAD_DIFFERENCE = 0.5  # difference in load, as a share of the cores, that is reported

Compared = Sequence[tuple[tuple[Sequence[Record], Sequence[Record]], Any, Any]]
"""Trials and searches: the runs of A and of B, and the merged rows of both."""


def find_caveats(compared: Compared, ratios: Sequence[float], min_change: float) -> Iterator[str]:
    """Yield a sentence for each caveat.

    ratios: of times, B over A.  min_change: the smallest relative difference that is reported.
    """
    records_a, records_b = ([r for pair, *_ in compared for r in pair[i]] for i in (0, 1))
    if records_a == records_b:
        yield "The compared records are the same on both sides: identical records can't differ."
    logs = [math.log(ratio) for ratio in ratios]
    middle = median(logs) if len(logs) > 2 else 0.0
    if abs(middle) >= math.log1p(min_change) and all(0.5 <= x / middle <= 2 for x in logs):
        shift = f"{format_percent(math.expm1(abs(middle)))} {'slower' if middle > 0 else 'faster'}"
        yield (
            f"All {len(logs)} trials changed by a similar ratio; by the median B is {shift}. "
            "The cause may be the machine rather than the code."
        )  # fmt: skip
    yield from _order_and_load(records_a, records_b)
    yield from _unstable(compared)
    edited = {
        short_name(row_a.implementation): f"{row_a.source} in A and {row_b.source} in B"
        for _, row_a, row_b in compared
        if row_a.source != row_b.source
    }
    for name, hashes in edited.items():
        yield f"The file of {name} differs: its hash is {hashes}."
    for name, records in (("A", records_a), ("B", records_b)):
        commits = dict.fromkeys(c for r in records if (c := r.environment.commit))
        if len(commits) > 1:
            yield f"{name} has records of {len(commits)} commits, merged: {', '.join(commits)}."


def _order_and_load(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    times_a, times_b = ([r.started_at for r in side] for side in (a, b))
    is_apart = {"A": max(times_a) < min(times_b), "B": max(times_b) < min(times_a)}
    for first, other in ("AB", "BA"):
        if is_apart[first]:
            yield (
                f"All of {first} was measured before {other} (A from {min(times_a)}, B from "
                f"{min(times_b)}): the ratios include any drift of the machine."
            )
    loads = [[r.environment.load[0] for r in side if r.environment.load] for side in (a, b)]
    load_a, load_b = (median(side or [math.nan]) for side in loads)
    if abs(load_a - load_b) > MAX_LOAD_DIFFERENCE * a[0].environment.cores:
        yield (
            f"The machine's load was {load_a:.1f} with A and {load_b:.1f} with B (1 minute, "
            "median): other work may have slowed one of them."
        )


def _unstable(compared: Compared) -> Iterator[str]:
    """Report trials that were measured on a machine that was not steady."""
    trials = [one for one in compared if isinstance(one[1], SweepRow) and not one[1].fit_only]
    for i, side in enumerate("AB"):
        busy = busy_threads(record for pair, *_ in trials for record in pair[i])
        found = [
            f"{name_row(rows[0])} ({reason})"
            for pair, *rows in trials
            if rows[i].is_ok and (reason := find_instability(pair[i], busy[rows[i].fingerprint]))
        ]
        if found:
            others = f" and {count(len(found) - 1, 'more trial')}" if len(found) > 1 else ""
            yield f"Unstable in {side}: {found[0]}{others}; {REMEDY}."
