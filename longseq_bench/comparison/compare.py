"""Compare two sets of records: times, memory, longest lengths and statuses.

Works on records alone, in SI units. A ratio is B over A. Times are tested in significance.py, and
the result becomes a report in document.py.

Trials match even if round, seed, repeats and time cap differ, searches even if their lengths do.
Machines match by hardware; their software may differ, because a comparison is often about software.
So may the file of an own function: before and after an edit.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

from longseq_bench.analysis.labels import index_short_labels, set_labels, short_name, short_names
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SEARCH_PURPOSES, SearchRow, merge_search
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import merge_trial
from longseq_bench.comparison.times import (
    Compared,
    Records,
    compare_times,
    differing_budgets,
    find_moves,
    find_unstable,
)
from longseq_bench.comparison.verdict import (
    CONTROL,
    NOISY,
    UNSTEADY,
    Change,
    Comparison,
    format_percent,
)
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes

LEVEL, MIN_CHANGE = 0.05, 0.01
"""Defaults: the family-wise error rate, and the smallest relative difference that is reported."""
MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES = 0.01, 64 * 2**10
"""Both must be exceeded. A peak on a CPU is counted in pages, and varies by a few of them."""
TIME_TOLERANCE = 0.1
"""Relative. The noise of single passes, which is unknown, moves a maximum limited by time."""
RecordsPair = tuple[Records, Records]


def compare(
    a: Sequence[Record],
    b: Sequence[Record],
    names: tuple[str, str] = ("A", "B"),
    level: float = LEVEL,
    min_change: float = MIN_CHANGE,
    any_machine: bool = False,
    is_paired: bool = False,
) -> Comparison:
    """Compare the second set of records with the first.

    level: family-wise error rate over all rows.  min_change: the smallest relative difference
    in time that is reported.  any_machine: compare trials of different machines too.
    is_paired: round i of A and of B were measured one after the other, in one run.
    Raises UserError if no trial is in both sets, or only on different machines.
    """
    pairs, elsewhere, *unmatched = match(a, b, any_machine)
    # pair by pair: as sets, two machines that swapped sides would be equal
    unlike = dict.fromkeys(
        f"{name} {value} and {other}"
        for runs_a, runs_b in elsewhere
        for name, value, other in find_differences(runs_a[:1], runs_b[:1], HARDWARE)
    )
    machines = f" ({'; '.join(unlike)})" if unlike else ""
    if not pairs and machines:
        problem = f"A and B were measured on different machines{machines}"
        raise UserError(f"{problem}; --across-machines compares them anyway")
    if not pairs:
        raise UserError("A and B have no trial in common; longseq show lists those of each")
    groups = [runs for runs, _ in pairs], *unmatched, [runs for runs, _ in elsewhere]

    def merge(runs: Records) -> Any:
        return merge_search(runs) if is_search(runs[0]) else merge_trial(runs)

    merged = [[*map(merge, some)] for some in groups]
    labels = index_short_labels([*chain(*merged)])
    rows, only_a, only_b, other_machines = (set_labels(side, labels) for side in merged)
    if is_paired:
        rows = [replace(row, label=" → ".join(short_names(names).values())) for row in rows]
    compared = [(pair, row, merge(pair[1])) for pair, row in zip(pairs, rows, strict=True)]
    trials = [one for one in compared if isinstance(one[1], SweepRow)]
    searches = compared[len(trials) :]
    records_a, records_b = ([r for pair in pairs for r in pair[i]] for i in (0, 1))
    started = [[r.started_at for r in side] for side in (records_a, records_b)]
    apart = max(started[0]) < min(started[1]) or max(started[1]) < min(started[0])
    times = compare_times(trials, level, min_change, is_paired)
    unsteady = [*find_unstable(compared), *find_moves(times, apart, min_change)]
    if any(not t.is_control for t in times):
        times = [replace(t, verdict=CONTROL) if t.is_control else t for t in times]
    if unsteady and not is_paired:
        times = [replace(t, verdict=NOISY) if t.is_raw else t for t in times]
    return Comparison(
        names,
        level,
        min_change,
        times,
        peaks=[peak for trial in trials for peak in _compare_peaks(*trial)],
        maxima=[_compare_maxima(row_a, row_b, bool(unsteady)) for _, row_a, row_b in searches],
        statuses=[*_compare_statuses(trials, bool(unsteady))],
        failed_alike=sum(x.status == y.status != "ok" for _, x, y in trials),
        only_a=only_a,
        only_b=only_b,
        other_machines=other_machines,
        machine_differences=machines,
        differences=find_differences(records_a, records_b, HARDWARE + SOFTWARE),
        caveats=[*unsteady, *_find_caveats(compared)],
        records=(records_a, records_b),
    )


def _compare_peaks(pair: RecordsPair, row_a: SweepRow, row_b: SweepRow) -> Iterator[Change]:
    a, b = ([p for r in runs if (p := r.outcome.largest("peak"))] for runs in pair)
    if row_a.is_ok and row_b.is_ok and a and b:
        verdict = "same"
        for word, peaks, others in (("more", b, a), ("less", a, b)):
            margin = max(MEMORY_TOLERANCE * max(others), MEMORY_TOLERANCE_BYTES)
            if min(peaks) >= max(others) + margin:
                verdict = word
        yield Change(row_a, row_b, verdict, max(b) / max(a))


def _compare_maxima(a: SearchRow, b: SearchRow, is_unsteady: bool) -> Change:
    ratio = b.max_tokens / a.max_tokens if a.max_tokens else math.inf
    shorter, longer = sorted((a.max_tokens, b.max_tokens))
    if longer < min(row.fails_from for row in (a, b)):
        return Change(a, b, "same", ratio)
    tolerance = math.inf if is_unsteady else 1 + TIME_TOLERANCE
    if "time" in (a.limited_by, b.limited_by) and longer < tolerance * max(shorter, 1):
        noise = f"with one search per side, {format_percent(TIME_TOLERANCE)} may be noise"
        noise = UNSTEADY if is_unsteady else noise
        return Change(a, b, "undecided", ratio, f"limited by time: {noise}")
    return Change(a, b, "longer" if ratio > 1 else "shorter", ratio)


def _compare_statuses(trials: Compared, is_unsteady: bool) -> Iterator[Change]:
    for _, a, b in trials:
        if a.status != b.status:
            verdict = "broken" if a.is_ok else "mended" if b.is_ok else "otherwise"
            lacking = (b.status if a.is_ok else a.status) in ("oom", "timeout")
            note = differing_budgets(a, b) if lacking else ""
            if is_unsteady and "timeout" in (a.status, b.status):
                note = UNSTEADY
            yield Change(a, b, verdict, note=note)


def _find_caveats(compared: Compared) -> Iterator[str]:
    records_a, records_b = ([r for pair, *_ in compared for r in pair[i]] for i in (0, 1))
    if records_a == records_b:
        yield "The compared records are the same on both sides: identical records can't differ."
    edited = {short_name(a.implementation): (a, b) for _, a, b in compared if a.source != b.source}
    for name, (a, b) in edited.items():
        yield f"The file of {name} differs: its hash is {a.source} in A and {b.source} in B."
    for name, records in (("A", records_a), ("B", records_b)):
        commits = dict.fromkeys(c for r in records if (c := r.environment.commit))
        if len(commits) > 1:
            yield f"{name} has records of {len(commits)} commits, merged: {', '.join(commits)}."


HARDWARE = ("host", "cpu", "cores", "memory_bytes", "gpus", "driver", "workers")
SOFTWARE = (
    *("commit", "longseq", "torch", "cuda", "cudnn", "nccl", "triton", "python", "os"),
    *("variables", "power_limits_w"),
)
"""Software and settings. Differences are reported, and don't keep trials from matching."""
_NAMES = {"memory_bytes": "memory", "gpus": "GPUs", "power_limits_w": "power limits in W"}
_NAMES |= {"cpu": "CPU", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "triton": "Triton"}
_NAMES |= {"workers": "trials side by side"}
SAME_MEMORY = 0.01  # relative: what a kernel reserves for itself changes with its version


def is_search(record: Record) -> bool:
    """Return True for a step of a search for the longest length."""
    return record.purpose in SEARCH_PURPOSES


def match(
    a: Iterable[Record], b: Iterable[Record], any_machine: bool = False
) -> tuple[list[RecordsPair], list[RecordsPair], list[Records], list[Records]]:
    """Match trials and searches with the same environment, else on the same machine.

    Budgets do not change a time: a trial matches one with other budgets if none has the same.
    Where a side has several candidates, the one measured last is used.
    any_machine: also match trials of different machines, if the same machine has none.
    Returns pairs, pairs that match in all but their machine, and the runs of A only and of B only;
    in each the trials come first.
    """
    sides = [
        sorted((r for r in side if r.purpose == "measure" or is_search(r)), key=is_search)
        for side in (a, b)
    ]
    machines: dict[str, Record] = {}
    for fingerprint, one in {r.environment.fingerprint: r for r in (*sides[0], *sides[1])}.items():
        alike = (r for r in machines.values() if not find_differences([r], [one], HARDWARE))
        machines[fingerprint] = next(alike, one)

    def key(record: Record, place: str, any_file: bool, any_budget: bool) -> Hashable:
        fingerprint = record.environment.fingerprint
        places = {"environment": fingerprint, "machine": id(machines[fingerprint]), "any": None}
        return places[place], _identity(record, any_file, any_budget)

    first = ("environment", False, False)
    left = [list(group_by(side, lambda r: key(r, *first)).values()) for side in sides]
    for groups in left:
        groups.sort(key=lambda runs: max(r.started_at for r in runs))
    pairs, different_machines = list[RecordsPair](), list[RecordsPair]()
    for step in (first, *product(("machine", "any"), (False, True), (False, True))):
        by_key_a, by_key_b = ({key(runs[0], *step): runs for runs in side} for side in left)
        matched = [(runs, by_key_b[k]) for k, runs in by_key_a.items() if k in by_key_b]
        target = different_machines if step[0] == "any" and not any_machine else pairs
        target += matched
        taken = {id(runs) for pair in matched for runs in pair}
        left = [[runs for runs in side if id(runs) not in taken] for side in left]
    order = {id(record): i for side in sides for i, record in enumerate(side)}
    for found in (pairs, different_machines):
        found.sort(key=lambda pair: order[id(pair[0][0])])
    only_a, only_b = (sorted(side, key=lambda runs: order[id(runs[0])]) for side in left)
    return pairs, different_machines, only_a, only_b


def _identity(record: Record, any_file: bool, any_budget: bool) -> Hashable:
    """Return a key of the trial, or of the search, which has budgets but no length of its own."""
    trial = record.trial.at(1) if is_search(record) else record.trial
    same: dict[str, Any] = {"round": 0, "seed": 0, "repeats": 0, "time_cap": 1.0}
    if any_budget and not is_search(record):
        same |= {"memory_budget": None, "time_budget": None}
    if any_file and trial.source is not None:
        same |= {"implementation": f"own:{short_name(trial.implementation)}", "source": None}
    return is_search(record), trial.model_copy(update=same).key


def find_differences(
    a: Sequence[Record], b: Sequence[Record], fields: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return name, values of A and values of B, as text, of each field of machines that differs."""
    found = []
    for field in fields:
        values = [getattr(record.environment, field) for record in (*a, *b)]
        if field == "memory_bytes" and min(values) >= (1 - SAME_MEMORY) * max(values):
            continue
        texts = [_format_value(field, value) for value in values]
        one, other = dict.fromkeys(texts[: len(a)]), dict.fromkeys(texts[len(a) :])
        if one.keys() != other.keys():
            found.append((_NAMES.get(field, field), "; ".join(one), "; ".join(other)))
    return found


def _format_value(field: str, value: Any) -> str:
    if field == "memory_bytes":
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return ", ".join(f"{n} × {one}" for one, n in Counter(value).items()) or "none"
    return str(value or "none")
