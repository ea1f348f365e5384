"""The first screen of the kind `extreme`: how long a sequence can be, and what limits it."""

from collections.abc import Iterator, Sequence

from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import charts, maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import (
    MAX_FINDING_WORDS,
    Answer,
    Chart,
    Finding,
    KeyFigure,
    format_ratio,
)
from longseq_bench.reports.groups import (
    SAME_TABLE,
    group_by_workload,
    in_brackets,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.outcome_text import name_status
from longseq_bench.reports.sections import use_cases
from longseq_bench.reports.sections.recommendations import (
    TIE,
    RankedLength,
    find_longest_ties,
    name_ties,
    rank_lengths,
)
from longseq_bench.reports.wording import join_names, name_unconfirmed

TITLE = "Extreme lengths"
Known = use_cases.Known
_LIMITS = ("mode", "dtype", "memory_budget", "time_budget")
"""Fields of a workload that are named where all of its words are too many."""


def answer(source: Source) -> Answer:
    """Return the first screen."""
    longest = _find_longest(source)
    figures = [*(_figure(source, ties) for ties in longest), *_memory_alone(source)]
    findings = [*(_reach(source, ties) for ties in longest), *_fastest(source)]
    chart = next(_charts(source), None)
    known = [finding for finding in findings if finding]
    return Answer(figures, known, chart, use_cases.ranges(source))


def _charts(source: Source) -> Iterator[Chart]:
    """Yield the longest lengths, else the speed over dense, else times."""
    yield from maxima_charts.by_limit(source)
    for build in (charts.speed_over_dense, charts.time):
        yield from charts.of_each_workload(source, source.rows, build)


def _find_longest(source: Source) -> list[Sequence[Known]]:
    """Return the longest row of sparse and of exact attention, each with its ties.

    Searches count; without any of a kind, the longest swept length does.
    """
    found = [row for row in source.maxima if row.max_tokens and row.is_full_pass]
    searched = split_by_sparsity(found)
    swept = split_by_sparsity(row for row in source.rows if row.is_ok and row.is_full_pass)
    longest: list[Sequence[Known]] = []
    for kind in ("sparse", "exact"):
        rows: list[Known] = [*(searched.get(kind) or swept.get(kind) or [])]
        if rows:
            best = max(rows, key=lambda row: row.tokens)
            longest.append(_find_ties(best, rows))
    return longest


def _find_ties(best: Known, rows: Sequence[Known]) -> Sequence[Known]:
    """Return the rows of the workload and ranks of the best that are as long."""
    same = [r for r in rows if table_key(r) == table_key(best) and r.world_size == best.world_size]
    searches = [row for row in same if isinstance(row, SearchRow)]
    return find_longest_ties(searches) if searches else [r for r in same if r.tokens == best.tokens]


def _figure(source: Source, ties: Sequence[Known]) -> KeyFigure:
    best = ties[0]
    kind = "sparse" if best.is_sparse else "exact"
    others = f" and {len(ties) - 1} more" * (len(ties) > 1)
    words = [best.name + others, source.workload(best, ("time_budget",))]
    label = "Longest" if isinstance(best, SearchRow) else "Longest swept"
    value = f"{format_tokens(best.tokens)} tokens"
    return KeyFigure(f"{label}, {kind}", value, ", ".join(filter(None, words)))


def _memory_alone(source: Source) -> Iterator[KeyFigure]:
    """Yield the longest length that fits in memory, if searches without times found one."""
    fits = [row for row in source.maxima if row.fit_only and row.max_tokens]
    if fits:
        best = max(fits, key=lambda row: row.max_tokens)
        value = f"{format_tokens(best.max_tokens)} tokens"
        words = [best.name.replace(" (fit only)", ""), source.workload(best, ("memory_budget",))]
        yield KeyFigure("Memory alone", value, ", ".join([*filter(None, words), "not timed"]))


def _reach(source: Source, ties: Sequence[Known]) -> Finding | None:
    """Say how far a kind reaches, and why not farther."""
    best = ties[0]
    kind = "Sparse" if best.is_sparse else "Exact"
    tokens = f"{format_tokens(best.tokens)} tokens"
    if isinstance(best, SweepRow):
        begin = f"{kind}: {join_names(row.name for row in ties)} ran at {tokens}"
        return _shortest(source, best, begin, _describe_failure(source, best), "Lengths swept")
    begin = f"{kind}: {name_ties(ties)} {'reach' if len(ties) > 1 else 'reaches'} {tokens}"
    end = ""
    if best.first_failure is not None:
        end = f", limited by {best.limited_by} at {format_tokens(best.first_failure)}"
    if best.fits_tokens and best.limited_by == "time":
        end += f"; memory alone allows {format_tokens(best.fits_tokens)}"
    return _shortest(source, best, begin, end + name_unconfirmed(best), "Longest lengths")


def _describe_failure(source: Source, best: SweepRow) -> str:
    """Return the first failure of a row above its length; else that nothing longer was swept."""
    failed = [
        row
        for row in source.rows
        if row.tokens > best.tokens and row.name == best.name and table_key(row) == table_key(best)
    ]
    if not failed:
        return ", the longest swept length"
    first = min(failed, key=lambda row: row.tokens)
    return f"; {name_status(first.status)} at {format_tokens(first.tokens)}"


def _shortest(source: Source, row: Known, begin: str, end: str, rows: str) -> Finding | None:
    """Return a finding with the workload in brackets, with as many fields as there is room for."""
    for fields in (SAME_TABLE, _LIMITS, ()):
        text = f"{begin}{in_brackets(source.workload(row, fields))}{end}."
        if len(text.split()) <= MAX_FINDING_WORDS:
            return Finding(text, rows)
    return None


def _fastest(source: Source) -> Iterator[Finding | None]:
    """Say which is the fastest at the longest compared length of the table's workload."""
    swept = [row for row in use_cases.most_searched(source) if isinstance(row, SweepRow)]
    compared = [one for group in group_by_workload(swept) for one in rank_lengths(group)]
    for kind in ("exact", "sparse"):
        known = [one for one in compared if one.rows[0].is_sparse == (kind == "sparse")]
        if known:
            one = max(known, key=lambda one: (one.tokens, -one.rows[0].world_size))
            yield _describe_fastest(source, one, kind)


def _describe_fastest(source: Source, length: RankedLength, kind: str) -> Finding | None:
    ties, rows = length.fastest_rows, length.rows
    best, title = rows[0], "Fastest by length"
    density = f" of density {format_share(best.density)}" if best.is_sparse else ""
    at, of = f"At {format_tokens(length.tokens)}", f"the fastest of {len(rows)} {kind}{density}"
    if len(ties) == 1:
        ratio = format_ratio((rows[1].time_s or 0) / (best.time_s or 1))
        begin = f"{at}, {best.name} is {of}: {format_time(best)}"
        return _shortest(source, best, begin, f", {ratio} as fast as the next", title)
    end = f": {TIE}, {format_time(best)}"
    names = join_names(row.name for row in ties)
    named = _shortest(source, best, f"{at}, {names} are {of}", end, title)
    among = f"{at}, {TIE} among the fastest {len(ties)} of {len(rows)} {kind}{density}"
    return named or _shortest(source, best, among, f": {format_time(best)}", title)
