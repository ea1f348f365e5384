"""Compare two sets of records: times, memory, longest lengths and statuses.

Works on records alone, in SI units. A ratio is B over A. Trials are matched in trial_matching.py,
times are tested in significance.py, and the result becomes a report in document.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Literal

from longseq_bench.analysis.labels import index_short_labels, set_labels, short_names
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.searches import SearchRow, merge_search
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import merge_trial, sweep_rows
from longseq_bench.comparison.caveats import find_caveats
from longseq_bench.comparison.model import (
    Bracket,
    Comparison,
    Difference,
    LengthComparison,
    MemoryComparison,
    StatusChange,
    TimeComparison,
    is_valid_time,
    status_of,
    worst_run,
)
from longseq_bench.comparison.significance import bounded_exp, estimate_ratios
from longseq_bench.comparison.trial_matching import (
    HARDWARE,
    SOFTWARE,
    MatchedPair,
    find_differences,
    match_searches,
    match_trials,
)
from longseq_bench.comparison.wording import (
    ComparedRow,
    format_percent,
    format_value,
    join_words,
    name_field,
)
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens

LEVEL, MIN_CHANGE = 0.05, 0.01
"""Defaults: the family-wise error rate, and the smallest relative difference that is reported."""
MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES = 0.01, 64 * 2**10
"""Both must be exceeded. A peak on a CPU is counted in pages, and varies by a few of them."""
TIME_TOLERANCE = 0.1
"""Relative. The noise of single passes, which is unknown, moves a maximum limited by time."""
MORE_ROUNDS = "sweep with rounds: 3 or more"


def compare(
    a: Sequence[Record], b: Sequence[Record], names: tuple[str, str] = ("A", "B"),
    level: float = LEVEL, min_change: float = MIN_CHANGE, any_machine: bool = False,
) -> Comparison:  # fmt: skip
    """Compare the second set of records with the first.

    level: family-wise error rate over all rows.  min_change: the smallest relative difference
    in time that is reported.  any_machine: compare trials of different machines too.
    Raises UserError if no trial is in both sets, or only on different machines.
    """
    trials, searches = match_trials(a, b, any_machine), match_searches(a, b, any_machine)
    pairs = [*trials.pairs, *searches.pairs]
    machines = _describe_machines([*trials.different_machines, *searches.different_machines])
    if not pairs and machines:
        raise UserError(
            f"A and B were measured on different machines{machines}; --across-machines compares "
            "them anyway"
        )
    if not pairs:
        in_common = f"A has {_contents(a)}; B has {_contents(b)}"
        raise UserError(f"A and B have no trial in common: {in_common}")
    trial_rows = [_trial_row(p.a) for p in trials.pairs]
    search_rows = [merge_search(p.a) for p in searches.pairs]
    unmatched: list[list[ComparedRow]] = [
        [*map(_trial_row, of_trials), *map(merge_search, of_searches)]
        for of_trials, of_searches in (
            (trials.only_a, searches.only_a),
            (trials.only_b, searches.only_b),
            [[p.a for p in found.different_machines] for found in (trials, searches)],
        )
    ]
    labels = index_short_labels([*trial_rows, *search_rows, *chain(*unmatched)])
    trial_rows, search_rows = set_labels(trial_rows, labels), set_labels(search_rows, labels)
    only_a, only_b, other_machines = (tuple(set_labels(rows, labels)) for rows in unmatched)
    compared = list(zip(trials.pairs, trial_rows, strict=True))
    times = tuple(_compare_times(compared, level, min_change))
    sides = tuple(r for p in pairs for r in p.a), tuple(r for p in pairs for r in p.b)
    return Comparison(
        *names,
        level,
        min_change,
        times,
        peaks=tuple(p for one in compared if (p := _compare_peaks(*one))),
        maxima=tuple(map(_compare_maxima, searches.pairs, search_rows)),
        status_changes=tuple(t for one in compared if (t := _status_change(*one))),
        failed_alike=sum(status_of(p.a) == status_of(p.b) != "ok" for p in trials.pairs),
        only_a=only_a,
        only_b=only_b,
        other_machines=other_machines,
        machine_differences=machines,
        differences=tuple(
            Difference(name_field(name), *(format_value(name, side) for side in values))
            for name, values in find_differences(*sides, (*HARDWARE, *SOFTWARE)).items()
        ),
        caveats=tuple(find_caveats(a, b, pairs, compared, times, min_change)),
        records=sides,
    )


def _compare_times(
    compared: Sequence[tuple[MatchedPair, SweepRow]], level: float, min_change: float
) -> Iterator[TimeComparison]:
    """Compare the trials timed on both sides; test those with several processes together."""
    sides = [(row, pair, _timed(pair.a), _timed(pair.b)) for pair, row in compared]
    timed = [
        (row, pair, (runs_a, runs_b), (_medians(runs_a), _medians(runs_b)))
        for row, pair, runs_a, runs_b in sides if runs_a and runs_b and not row.fit_only
    ]  # fmt: skip
    tested = [medians for *_, medians in timed if min(map(len, medians)) > 1]
    estimates = iter(estimate_ratios(tested, level))
    for row, pair, runs, (a, b) in timed:
        ratio = bounded_exp(fmean(map(math.log, b)) - fmean(map(math.log, a)))
        verdict: Literal["slower", "faster", "same", "undecided"] = "undecided"
        estimate, reason = None, ""
        if min(len(a), len(b)) > 1:
            estimate = next(estimates)
            verdict = "slower" if estimate.ratio > 1 else "faster"
            is_small = abs(math.log(estimate.ratio)) < math.log1p(min_change)
            if estimate.adjusted_p > level or is_small:
                verdict = "same"
        elif len(a) == len(b) == 1:
            reason = f"one process per side; {MORE_ROUNDS}"
        else:
            reason = f"{'A' if len(a) == 1 else 'B'} has only one process; {MORE_ROUNDS}"
        note = _differing_budgets(pair)
        row_a, row_b = map(merge_trial, runs)
        yield TimeComparison(row, row_a, row_b, a, b, ratio, estimate, verdict, reason, note)


def _timed(runs: Sequence[Record]) -> list[Record]:
    """Return the runs with valid times; nothing if any run of the trial failed."""
    if status_of(runs) != "ok":
        return []
    times = ((record, per_iteration(record, "time")) for record in runs)
    return [record for record, found in times if found and all(map(is_valid_time, found))]


def _medians(runs: Sequence[Record]) -> tuple[float, ...]:
    """Return the median pass of each process (s)."""
    return tuple(median(per_iteration(record, "time")) for record in runs)


def _compare_peaks(pair: MatchedPair, row: SweepRow) -> MemoryComparison | None:
    if not status_of(pair.a) == status_of(pair.b) == "ok":
        return None
    a, b = (
        [p for r in side if (p := r.outcome.largest("peak")) and math.isfinite(p)]
        for side in (pair.a, pair.b)
    )
    if not a or not b:
        return None
    verdict: Literal["more", "less", "same"] = "same"
    if _takes_more(b, a):
        verdict = "more"
    elif _takes_more(a, b):
        verdict = "less"
    return MemoryComparison(row, round(max(a)), round(max(b)), max(b) / max(a), verdict)


def _takes_more(peaks: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if all peaks (B) exceed all the others by both tolerances."""
    margin = max(MEMORY_TOLERANCE * max(others), MEMORY_TOLERANCE_BYTES)
    return min(peaks) >= max(others) + margin


def _compare_maxima(pair: MatchedPair, row: SearchRow) -> LengthComparison:
    found = [merge_search(side) for side in (pair.a, pair.b)]
    a, b = (Bracket(r.max_tokens, r.first_failure, r.limited_by or "") for r in found)
    ratio = b.max_tokens / a.max_tokens if a.max_tokens else None
    if max(a.max_tokens, b.max_tokens) < min(a.end, b.end):
        return LengthComparison(row, a, b, ratio, "same")
    shorter, longer = sorted((a.max_tokens, b.max_tokens))
    if "time" in (a.limited_by, b.limited_by) and longer < (1 + TIME_TOLERANCE) * shorter:
        share = format_percent(TIME_TOLERANCE)
        reason = f"limited by time: with one search per side, {share} may be noise"
        return LengthComparison(row, a, b, ratio, "undecided", reason)
    verdict: Literal["longer", "shorter"] = "longer" if b.max_tokens > a.max_tokens else "shorter"
    return LengthComparison(row, a, b, ratio, verdict)


def _status_change(pair: MatchedPair, row: SweepRow) -> StatusChange | None:
    a, b = (worst_run(side).outcome for side in (pair.a, pair.b))
    if a.status == b.status:
        return None
    verdict: Literal["broken", "mended", "otherwise"] = "otherwise"
    if "ok" in (a.status, b.status):
        verdict = "broken" if a.status == "ok" else "mended"
    failed = b.status if a.status == "ok" else a.status
    budgets = failed in ("oom", "timeout") and bool(_differing_budgets(pair))
    return StatusChange(row, a.status, b.status, a.reason, b.reason, verdict, budgets)


def _differing_budgets(pair: MatchedPair) -> str:
    """Return the budgets that differ, as text; "" if none does."""
    words = []
    for name, write in (("memory", format_bytes), ("time", format_seconds)):
        values = [getattr(side[0].trial, f"{name}_budget") for side in (pair.a, pair.b)]
        if values[0] != values[1]:
            one, other = ("none" if value is None else write(value) for value in values)
            words.append(f"{name} budgets {one} and {other}")
    return "; ".join(words)


def _trial_row(runs: Sequence[Record]) -> SweepRow:
    return sweep_rows(runs[:1])[0]


def _describe_machines(pairs: Sequence[MatchedPair]) -> str:
    """Return the differences between the machines of the pairs, in brackets; "" for no pairs.

    Compared pair by pair: as sets, two machines that swapped sides would be equal.
    """
    machines = {
        tuple(one.environment.fingerprint for one in (pair.a[0], pair.b[0])): pair for pair in pairs
    }
    words = dict.fromkeys(
        f"{name_field(name)} {format_value(name, one)} and {format_value(name, other)}"
        for pair in machines.values()
        for name, (one, other) in find_differences(pair.a[:1], pair.b[:1], HARDWARE).items()
    )
    return f" ({join_words(list(words), separator='; ')})" if words else ""


def _contents(records: Sequence[Record]) -> str:
    names = join_words(list(short_names(r.trial.implementation for r in records).values()))
    lengths = sorted({r.trial.workload.seq_len for r in records if r.purpose == "measure"})
    if not lengths:
        return f"searches of {names}"
    return f"{names} at {join_words([format_tokens(n) for n in lengths])} tokens"
