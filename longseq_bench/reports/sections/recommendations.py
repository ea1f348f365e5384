"""Recommendations: rules over the rows of a report, each with the figures that support it.

No rule depends on the name of an implementation. Exact and sparse attention compute different
things, so a sentence that recommends one instead of the other always says so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import format_cell
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import (
    SAME_TABLE,
    density_suffix,
    group_by_density,
    group_by_ranks,
    group_by_workload,
    ranks_suffix,
    split_by_sparsity,
)
from longseq_bench.reports.sections.findings import describe_limit, join_names


class Gain(NamedTuple):
    """A speed ratio: the lowest, the median and the highest that the intervals allow.

    note: source of the reference time, if it was not measured.
    """

    low: float
    middle: float
    high: float
    note: str = ""


Gains = dict[int, Gain]
"""Gains by length in tokens."""

MOST_FLOOR = 0.9
"""Share of the floor's tokens from which a maximum's memory overhead is not reported."""


def longest(source: Source) -> Iterator[str]:
    """Recommend the longest of each workload and budget, exact and sparse."""
    without = _without(source)
    for group in group_by_workload(source.maxima):
        where = source.workload(group[0])
        found = [row for row in group if row.max_tokens and row.is_full_pass]
        for what, rows in split_by_sparsity(found).items():
            for ranks, some in group_by_ranks(rows).items():
                others = without.get((_searched_on(some[0]), what == "sparse"), 0)
                yield _longest(some, f"{what} attention{ranks_suffix(ranks)}", where, others)


_searched_on = attrgetter("world_size", *(name for name in SAME_TABLE if name != "fit_only"))


def _without(source: Source) -> dict[tuple[object, bool], int]:
    """Count the searches without a confirmed length, by workload, ranks and sparsity.

    The other rows of an implementation show whether it is sparse where none of its lengths passed.
    """
    skips = {r.implementation for r in chain(source.rows, source.maxima) if r.is_sparse}
    searched: dict[tuple[object, bool], dict[object, bool]] = defaultdict(dict)
    for row in source.maxima:
        known = row.density_achieved is not None
        sparse = row.is_sparse if known else row.implementation in skips
        keep = "all" if row.keep == "nothing" else row.keep
        options = repr(sorted(row.options.items()))
        who = (row.implementation, options, keep, row.allocator)
        named = searched[_searched_on(row), sparse]
        named[who] = named.get(who, False) or bool(row.max_tokens and row.is_full_pass)
    return {key: sum(not found for found in named.values()) for key, named in searched.items()}


def _longest(rows: Sequence[SearchRow], what: str, where: str, others: int) -> str:
    ordered = sorted(rows, key=lambda row: -int(row.max_tokens))
    first = ordered[0]
    alike = [row for row in ordered if _reaches(row, first.max_tokens)]
    words = join_names(f"{r.name} ({_maximum_words(r)})" for r in alike)
    begin = f"For the longest sequence by {what} ({where}):"
    if len(alike) > 1:
        return f"{begin} {words}; their brackets overlap, so none is named the longest."
    rest = ordered[len(alike) :]
    if not rest:
        of = f"of {others + 1:,} searched that reached a confirmed length"
        return f"{begin} {words}, the only one {of if others else 'that was searched'}."
    times = format_cell(first.max_tokens / rest[0].max_tokens, "ratio")
    return f"{begin} {words}, {times} the next, {rest[0].name} ({_maximum_words(rest[0])})."


def _reaches(row: SearchRow, tokens: int) -> bool:
    """Return True if the bracket allows that this length fits."""
    failed = row.first_failure
    return bool(row.max_tokens >= tokens or failed is None or failed > tokens)


def _maximum_words(row: SearchRow) -> str:
    density = row.density_achieved
    seen = f", density {format_share(density)}" if density is not None and density < 1 else ""
    return f"{row.max_tokens:,} tokens{seen}, {describe_limit(row)}"


class Contest(NamedTuple):
    """Rows of one length that are compared; each was timed more than once; the fastest is first."""

    tokens: int
    rows: list[SweepRow]

    @property
    def winners(self) -> list[SweepRow]:
        """The fastest row, and the rows whose intervals overlap with its interval."""
        return [
            row for row in self.rows if require(row.time_low_s) <= require(self.rows[0].time_high_s)
        ]


Failed = dict[str, dict[int, str]]
"""Lengths at which a row was not ok, with the status, by name of the row."""


def fastest(source: Source) -> Iterator[str]:
    """Recommend the fastest of each workload by length, exact and sparse."""
    for group in group_by_workload(source.rows):
        where, failed = source.workload(group[0]), _failed(group)
        for what, rows in split_by_sparsity(group).items():
            for some in group_by_ranks(rows).values():
                for contests in _contests(some):
                    for run in _runs(contests, failed):
                        yield _fastest(run, what, where)


def _failed(rows: Sequence[SweepRow]) -> Failed:
    found: Failed = defaultdict(dict)
    for row in rows:
        if row.status != "ok":
            found[row.name][row.tokens] = row.status
    return found


def _contests(rows: Sequence[SweepRow]) -> list[list[Contest]]:
    """Return the contests of each density, by ascending length.

    Only rows of similar density are compared, because density is an input and not a choice. All
    exact rows have the same density.
    """
    found: list[tuple[list[Contest], list[SweepRow]]] = []  # with its extremes of density
    for tokens, timed in sorted(_timed(rows).items()):
        for alike in group_by_density(timed):
            if len(alike) < 2:
                continue
            near = (one for one in found if len(group_by_density([*one[1], *alike])) == 1)
            contests, ends = next(near, ([], []))
            if not contests:
                found.append((contests, ends))
            contests.append(Contest(tokens, alike))
            each = sorted([*ends, *alike], key=lambda row: row.density)
            ends[:] = each[0], each[-1]
    return [contests for contests, _ in found]


def _all_of(contests: Sequence[Contest]) -> list[SweepRow]:
    return [row for contest in contests for row in contest.rows]


def _timed(rows: Sequence[SweepRow]) -> dict[int, list[SweepRow]]:
    """Return rows by length, the fastest first, of those with several samples."""
    found: dict[int, list[SweepRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: float(row.time_s or 0)):
        if row.time_s and row.samples > 1:
            found[row.tokens].append(row)
    return found


def _runs(contests: Sequence[Contest], failed: Failed) -> list[list[Contest]]:
    """Join successive lengths with the same winners, without a failure in between."""
    runs: list[list[Contest]] = []
    for contest in contests:
        if runs and _goes_on(runs[-1][-1], contest, failed):
            runs[-1].append(contest)
        else:
            runs.append([contest])
    return runs


def _goes_on(one: Contest, other: Contest, failed: Failed) -> bool:
    names = [row.name for row in one.winners]
    between = (n for name in names for n in failed.get(name, ()) if one.tokens < n < other.tokens)
    return names == [row.name for row in other.winners] and not any(between)


def _fastest(run: Sequence[Contest], what: str, where: str) -> str:
    first, last = run[0].tokens, run[-1]
    whom = f"{what} attention{density_suffix(_all_of(run))}{ranks_suffix(last.rows[0].world_size)}"
    words = join_names(
        f"{row.label} ({format_cell(time_with_interval(row), 'seconds')})" for row in last.winners
    )
    at = f" at {format_tokens(last.tokens)}" if len(run) > 1 else ""
    span = _span(first, last.tokens)
    if len(last.winners) > 1:
        return f"{span}, the fastest {whom} can't be told apart ({where}): {words}{at}."
    winner, after = last.rows[:2]
    ratio = format_cell(require(after.time_s) / require(winner.time_s), "ratio")
    return (
        f"{span}, {winner.label} is the fastest {whom} ({where}): {words}{at}, {ratio} as fast "
        f"as the next, {after.label}."
    )


def _span(first: int, last: int) -> str:
    if first == last:
        return f"At {format_tokens(last)} tokens"
    return f"From {format_tokens(first)} to {format_tokens(last)} tokens"


def ranks_pay(source: Source) -> Iterator[str]:
    """Name the length from which several ranks are faster than one, per workload."""
    yield from _paying(source, "one rank", _speedup)


def sparse_pays(source: Source) -> Iterator[str]:
    """Name the length from which sparse attention is faster than dense on the same inputs."""
    yield from _paying(source, "dense attention", _over_dense)


def _paying(source: Source, against: str, gain: Callable[[SweepRow], Gain | None]) -> Iterator[str]:
    for group in group_by_workload(source.rows):
        where, failed = source.workload(group[0]), _failed(group)
        told: dict[str, list[str]] = defaultdict(list)
        for name, gains in _series(group, gain).items():
            verdict, words = _pays(gains, failed.get(name, {}), against)
            told[verdict].append(f"{name} ({words})")
        for verdict, names in sorted(told.items()):
            yield f"{verdict} ({where}): {join_names(names)}."


def _series(rows: Sequence[SweepRow], gain: Callable[[SweepRow], Gain | None]) -> dict[str, Gains]:
    """Return the known gains by name and ascending length."""
    found: dict[str, Gains] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: int(row.tokens)):
        if known := gain(row):
            found[row.name][row.tokens] = known
    return found


def _speedup(row: SweepRow) -> Gain | None:
    if row.world_size == 1 or row.speedup_low is None:
        return None
    return Gain(require(row.speedup_low), require(row.speedup), require(row.speedup_high))


def _over_dense(row: SweepRow) -> Gain | None:
    if not row.is_sparse or row.share_low is None:
        return None
    low, high = (
        require(row.dense_low_s) / require(row.time_high_s),
        require(row.dense_high_s) / require(row.time_low_s),
    )
    source = str(row.dense_source)
    known = "computed" if source.startswith("computed") else source
    note = "" if source == "measured" else f", dense time {known}"
    return Gain(low, require(row.speed_over_dense), high, note)


def _pays(gains: Gains, failed: dict[int, str], against: str) -> tuple[str, str]:
    """Return a verdict and its figures.

    Faster means: faster by its interval at every length run from some shortest one on.
    """
    last = max(gains)
    slow = {n for n, one in gains.items() if one.low <= 1} | {n for n in failed if n < last}
    faster = [n for n in gains if n > max(slow, default=0)]
    first = min(faster, default=last)
    words = ", ".join(
        f"{format_cell(gains[n].middle, 'ratio')} at {format_tokens(n)} tokens{gains[n].note}"
        for n in sorted({first, last})
    )
    above = min((n for n in failed if n > last), default=None)
    if faster and above is not None:
        words += f", {failed[above]} at {format_tokens(above)}"
    if faster:
        since = ", the shortest timed more than once" if first == min(gains) else ""
        return f"Faster than {against} from {format_tokens(first)} tokens{since}", words
    if all(one.high < 1 for one in gains.values()):
        return f"Slower than {against} at every length timed more than once", words
    return (
        f"Not known to be faster than {against} at the longest length timed more than once",
        words,
    )


def leanest(source: Source) -> Iterator[str]:
    """Name the maxima whose floor fills less than nine tenths of the budget."""
    for group in group_by_workload(source.maxima):
        wasteful = [row for row in group if row.is_full_pass and _wastes(row)]
        if wasteful:
            where = source.workload(group[0])
            words = join_names(
                f"{row.name} ({format_share(1 - require(row.fraction_of_floor))}: "
                f"{row.max_tokens:,} tokens of {row.floor_tokens:,})"
                for row in sorted(wasteful, key=lambda row: require(row.fraction_of_floor))
            )
            yield f"Leave their budget to other things than the floor ({where}): {words}."


def _wastes(row: SearchRow) -> bool:
    share = row.fraction_of_floor
    by_memory = row.limited_by == "memory" and row.max_tokens
    return bool(by_memory and share is not None and share < MOST_FLOOR)
