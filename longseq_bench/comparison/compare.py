"""Compare two sets of records: times, memory, longest lengths and statuses.

Works on records alone, in SI units. A ratio is B over A. Trials are matched in trial_matching.py,
times are tested in significance.py, and the result becomes a report in document.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

from longseq_bench.analysis.labels import index_short_labels, set_labels, short_names
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.searches import SearchRow, merge_search
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import merge_trial
from longseq_bench.comparison.caveats import find_caveats
from longseq_bench.comparison.model import Change, Comparison, format_percent
from longseq_bench.comparison.significance import estimate_ratios
from longseq_bench.comparison.trial_matching import (
    HARDWARE,
    SOFTWARE,
    Pair,
    Runs,
    find_differences,
    is_search,
    match,
)
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports.wording import join_names

LEVEL, MIN_CHANGE = 0.05, 0.01
"""Defaults: the family-wise error rate, and the smallest relative difference that is reported."""
MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES = 0.01, 64 * 2**10
"""Both must be exceeded. A peak on a CPU is counted in pages, and varies by a few of them."""
TIME_TOLERANCE = 0.1
"""Relative. The noise of single passes, which is unknown, moves a maximum limited by time."""
MORE_ROUNDS = "sweep with rounds: 3 or more"
MAX_NAMES = 6
"""Names in a list of a sentence."""


def compare(
    a: Sequence[Record], b: Sequence[Record], names: tuple[str, str] = ("A", "B"),
    level: float = LEVEL, min_change: float = MIN_CHANGE, any_machine: bool = False,
) -> Comparison:  # fmt: skip
    """Compare the second set of records with the first.

    level: family-wise error rate over all rows.  min_change: the smallest relative difference
    in time that is reported.  any_machine: compare trials of different machines too.
    Raises UserError if no trial is in both sets, or only on different machines.
    """
    matched = match(a, b, any_machine)
    # pair by pair: as sets, two machines that swapped sides would be equal
    unlike = dict.fromkeys(
        f"{name} {value} and {other}"
        for runs_a, runs_b in matched.different_machines
        for name, value, other in find_differences(runs_a[:1], runs_b[:1], HARDWARE)
    )
    machines = f" ({join_names(unlike, '; ', MAX_NAMES)})" if unlike else ""
    if not matched.pairs and machines:
        raise UserError(
            f"A and B were measured on different machines{machines}; --across-machines compares "
            "them anyway"
        )
    if not matched.pairs:
        in_common = f"A has {_contents(a)}; B has {_contents(b)}"
        raise UserError(f"A and B have no trial in common: {in_common}")
    elsewhere = [runs for runs, _ in matched.different_machines]
    groups = [runs for runs, _ in matched.pairs], matched.only_a, matched.only_b, elsewhere
    merged = [[*map(_merge, some)] for some in groups]
    labels = index_short_labels([*chain(*merged)])
    rows, only_a, only_b, other_machines = (set_labels(side, labels) for side in merged)
    compared = [(pair, row, _merge(pair[1])) for pair, row in zip(matched.pairs, rows, strict=True)]
    trials = [one for one in compared if isinstance(one[1], SweepRow)]
    searches = compared[len(trials) :]
    times = list(_compare_times(trials, level, min_change))
    records_a, records_b = ([r for pair in matched.pairs for r in pair[i]] for i in (0, 1))
    return Comparison(
        names,
        level,
        min_change,
        times,
        peaks=[peak for trial in trials for peak in _compare_peaks(*trial)],
        maxima=[_compare_maxima(row_a, row_b) for _, row_a, row_b in searches],
        statuses=[_status_change(x, y) for _, x, y in trials if x.status != y.status],
        failed_alike=sum(x.status == y.status != "ok" for _, x, y in trials),
        only_a=only_a,
        only_b=only_b,
        other_machines=other_machines,
        machine_differences=machines,
        differences=find_differences(records_a, records_b, HARDWARE + SOFTWARE),
        caveats=[*find_caveats(compared, [t.ratio for t in times], min_change)],
        records=(records_a, records_b),
    )


def _merge(runs: Runs) -> Any:
    return merge_search(runs) if is_search(runs[0]) else merge_trial(runs)


def _compare_times(
    trials: Sequence[tuple[Pair, SweepRow, SweepRow]], level: float, min_change: float
) -> Iterator[Change]:
    """Compare the trials timed on both sides; test those with several processes together."""
    timed = [
        (row_a, row_b, medians) for pair, row_a, row_b in trials
        if not row_a.fit_only and all(medians := (_medians(pair[0]), _medians(pair[1])))
    ]  # fmt: skip
    tested = [medians for *_, medians in timed if min(map(len, medians)) > 1]
    estimates = iter(estimate_ratios(tested, level))
    for row_a, row_b, (a, b) in timed:
        ratio = math.exp(fmean(map(math.log, b)) - fmean(map(math.log, a)))
        verdict, estimate, reason = "undecided", None, ""
        if min(len(a), len(b)) > 1:
            estimate = next(estimates)
            is_small = abs(math.log(ratio)) < math.log1p(min_change)
            if estimate.adjusted_p > level or is_small:
                verdict = "same"
            else:
                verdict = "slower" if ratio > 1 else "faster"
        elif len(a) == len(b) == 1:
            reason = f"one process per side; {MORE_ROUNDS}"
        else:
            reason = f"{'A' if len(a) == 1 else 'B'} has only one process; {MORE_ROUNDS}"
        budgets = _differing_budgets(row_a, row_b)
        yield Change(row_a, row_b, verdict, ratio, reason, budgets, a, b, estimate)


def _medians(runs: Runs) -> tuple[float, ...]:
    """Return the median pass of each process (s); none unless all ended ok with valid times."""
    times = [per_iteration(r, "time") if r.outcome.status == "ok" else [] for r in runs]
    is_valid = all(one and all(0 < s < math.inf for s in one) for one in times)
    return tuple(map(median, times)) if is_valid else ()


def _compare_peaks(pair: Pair, row_a: SweepRow, row_b: SweepRow) -> Iterator[Change]:
    """Compare the peaks of a trial that was ok on both sides; nothing if they are unknown."""
    a, b = ([p for r in runs if (p := r.outcome.largest("peak"))] for runs in pair)
    if row_a.is_ok and row_b.is_ok and a and b:
        verdict = "same"
        for word, peaks, others in (("more", b, a), ("less", a, b)):
            margin = max(MEMORY_TOLERANCE * max(others), MEMORY_TOLERANCE_BYTES)
            if min(peaks) >= max(others) + margin:
                verdict = word
        yield Change(row_a, row_b, verdict, max(b) / max(a))


def _compare_maxima(a: SearchRow, b: SearchRow) -> Change:
    ratio = b.max_tokens / a.max_tokens if a.max_tokens else math.inf
    shorter, longer = sorted((a.max_tokens, b.max_tokens))
    if longer < min(row.first_failure or math.inf for row in (a, b)):
        return Change(a, b, "same", ratio)
    if "time" in (a.limited_by, b.limited_by) and longer < (1 + TIME_TOLERANCE) * shorter:
        noise = f"with one search per side, {format_percent(TIME_TOLERANCE)} may be noise"
        return Change(a, b, "undecided", ratio, f"limited by time: {noise}")
    return Change(a, b, "longer" if ratio > 1 else "shorter", ratio)


def _status_change(a: SweepRow, b: SweepRow) -> Change:
    """Return the change; with budgets only if the trial failed for lack of memory or time."""
    verdict = "broken" if a.is_ok else "mended" if b.is_ok else "otherwise"
    failed = b.status if a.is_ok else a.status
    budgets = _differing_budgets(a, b) if failed in ("oom", "timeout") else ""
    return Change(a, b, verdict, note=budgets)


def _differing_budgets(a: SweepRow, b: SweepRow) -> str:
    """Return the budgets that differ, as text; "" if none does."""
    words = []
    for name, write in (("memory", format_bytes), ("time", format_seconds)):
        values = [getattr(row, f"{name}_budget") for row in (a, b)]
        if values[0] != values[1]:
            one, other = ("none" if value is None else write(value) for value in values)
            words.append(f"{name} budgets {one} and {other}")
    return "; ".join(words)


def _contents(records: Sequence[Record]) -> str:
    short = short_names(r.trial.implementation for r in records).values()
    lengths = sorted({r.trial.workload.seq_len for r in records if r.purpose == "measure"})
    names, texts = (
        join_names(some, max_names=MAX_NAMES) for some in (short, map(format_tokens, lengths))
    )
    return f"{names} at {texts} tokens" if lengths else f"searches of {names}"
