"""Key figures of a report: the longest, the fastest, the least memory, what ranks bring.

Each is a function of the records that yields figures; kinds.py lists them per kind. A best row is
named only if its interval does not overlap with those of others.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import HIGH_EFFICIENCY, maxima_on_ranks
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import KeyFigure, Spread, format_cell, format_ratio
from longseq_bench.reports.groups import (
    common_length,
    format_limit,
    group_by_density,
    has_several_ranks,
    in_brackets,
    most_shared,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.sections import growth, modes
from longseq_bench.reports.sections.failures import index_one_rank
from longseq_bench.reports.sections.gains import speedup
from longseq_bench.reports.sections.ranks import (
    find_bottleneck,
    find_compared,
    find_over_ranks,
    find_timed,
    most_timed,
)
from longseq_bench.reports.sections.recommendations import TIE, find_longest_ties
from longseq_bench.reports.wording import find_ties, format_range, join_names, name_unconfirmed

Figures = Iterator[KeyFigure]


# ---- how long ------------------------------------------------------------------------------------


def longest(source: Source) -> Figures:
    """Yield the longest lengths of searches, of exact and of sparse attention; else of sweeps."""
    found = split_by_sparsity(r for r in source.maxima if r.is_full_pass and r.max_tokens)
    if not found:
        yield from _longest_swept(source)
    for kind, rows in found.items():
        best = max(rows, key=lambda row: row.max_tokens)
        ties = find_longest_ties([row for row in rows if table_key(row) == table_key(best)])
        names = join_names(row.name for row in ties) + (f": {TIE}" if len(ties) > 1 else "")
        words = f"{names}{source.where(ties[0])}, {_cause(ties[0])}"
        tokens = f"{format_tokens(ties[0].max_tokens)} tokens"
        yield KeyFigure(f"Longest{_kind(kind, found)}", tokens, words)


def _kind(kind: str, found: Iterable[str]) -> str:
    """Return ", exact" or ", sparse" for a label if there are figures of both."""
    return f", {kind}" if len({*found}) > 1 else ""


def _cause(row: SearchRow) -> str:
    """Return what limits a search: "stopped by memory", "stopped by the 30 s limit; ..."."""
    if row.first_failure is None:
        return f"no longer length failed{name_unconfirmed(row)}"
    limit = f"stopped by {row.limited_by}"
    if row.limited_by == "time" and row.time_budget:
        limit = f"stopped by the {format_limit(row.time_budget)} limit"
    fits = row.fits_tokens or 0
    more = f"; {format_tokens(fits)} would fit in memory" if fits > row.max_tokens else ""
    return limit + more + name_unconfirmed(row)


def _longest_swept(source: Source) -> Figures:
    """Yield the longest length at which a row of the most shared workload was ok."""
    rows = most_shared(row for row in source.rows if row.is_full_pass)
    if tokens := max((row.tokens for row in rows if row.is_ok), default=0):
        names = join_names(row.name for row in rows if row.is_ok and row.tokens == tokens)
        failed = any(row.tokens > tokens for row in rows)
        end = "all longer ones failed" if failed else "the longest tried"
        words = f"{names}{source.where(rows[0])}; {end}"
        yield KeyFigure("Longest swept", f"{format_tokens(tokens)} tokens", words)


def memory_alone(source: Source) -> Figures:
    """Yield the longest length that fits in memory, if searches without times found one."""
    fits = [row for row in source.maxima if row.fit_only and row.max_tokens]
    if fits:
        best = max(fits, key=lambda row: row.max_tokens)
        name = best.name.replace(" (fit only)", "")
        where = in_brackets(source.workload(best, ("memory_budget",)))
        words = f"{name}{where}, not timed"
        yield KeyFigure("Memory alone", f"{format_tokens(best.max_tokens)} tokens", words)


def minimum_sparsity(source: Source) -> Figures:
    """Yield the lowest sparsities with which a length passed, of the first two searches."""
    for row in source.minima[:2]:
        at = f"{row.name} at {format_tokens(row.tokens)} tokens, limited by {row.limited_by}"
        value = growth.format_sparsity(row.least_sparsity, math.ceil) or "none"
        yield KeyFigure("Minimum sparsity", value, at)


# ---- how fast, in what memory: at the length and workload that most implementations share --------


def _shared(source: Source) -> list[SweepRow]:
    rows = common_length(most_shared(row for row in source.rows if row.is_full_pass))
    return [row for row in rows if row.is_ok]


def fastest(source: Source) -> Figures:
    """Yield the least time of exact and of sparse attention."""
    found = split_by_sparsity(row for row in _shared(source) if row.time_s)
    for kind, rows in found.items():
        words = f"{describe_fastest(rows)}{source.where(rows[0])}"
        value = format_time(min(rows, key=lambda row: require(row.time_s)))
        yield KeyFigure(f"Fastest{_kind(kind, found)}", value, words)


def describe_fastest(rows: Iterable[SweepRow]) -> str:
    """Name the fastest of timed rows of one length; all ties where intervals overlap."""
    first, *others = sorted(rows, key=lambda row: require(row.time_s))
    density = f" ({format_share(first.token_density)} seen)" if first.token_density else ""
    at = f"{density if first.is_sparse else ''} at {format_tokens(first.tokens)}"
    groups = group_by_density([first, *others])
    same = next(group for group in groups if first in group)
    words = f"{first.name}{at}"
    if not others:
        words += ", the only one timed"
    elif first.samples < 2:
        words += ", one pass, no interval"
    elif len(same) > 1 and same[1].samples < 2:
        words += f"; the next, {same[1].name}, is one pass"
    elif len(same) > 1:
        ties = find_ties([row for row in same if row.samples > 1], "time_low_s", "time_high_s")
        ratio = format_ratio(require(same[1].time_s) / require(first.time_s))
        words += f", {ratio} as fast as {same[1].name}"
        if len(ties) > 1:
            words = f"{join_names(row.name for row in ties)}{at}: {TIE}"
    return words + (f", of {len(groups)} densities" if len(groups) > 1 else "")


def least_memory(source: Source) -> Figures:
    """Yield the lowest peak."""
    if known := [row for row in _shared(source) if row.peak_bytes]:
        peak = min(require(row.peak_bytes) for row in known)
        names = join_names(row.name for row in known if row.peak_bytes == peak)
        value = f"{format_bytes(peak)}{' a rank' if has_several_ranks(known) else ''}"
        words = f"{names} at {format_tokens(known[0].tokens)}{source.where(known[0])}"
        yield KeyFigure("Least memory", value, words)


def most_exact(source: Source) -> Figures:
    """Yield the smallest error against float64."""
    errors = {row.name: row.max_error for row in _shared(source) if row.max_error is not None}
    if finite := list(filter(math.isfinite, errors.values())):
        names = join_names(name for name, error in errors.items() if error == min(finite))
        yield KeyFigure("Smallest error", format_cell(min(finite), "error"), names)


# ---- what ranks bring ----------------------------------------------------------------------------


def best_speedup(source: Source) -> Figures:
    """Yield the highest speed-up over one rank, at the longest length that most share."""
    rows = find_compared(source)
    if not rows:
        return
    ties, best = find_ties(rows, "speedup_low", "speedup_high", largest=True), rows[0]
    ratio = require(speedup(best))
    interval = "(one pass, no interval)"
    if isinstance(ratio, Spread):
        interval = f"({format_ratio(ratio.low)} to {format_ratio(ratio.high)})"
    words = f"{best.name} at {format_tokens(best.tokens)}{source.where(best)}"
    if len(ties) > 1:
        words += f"; no significant difference from {len(ties) - 1} more"
    if (efficiency := require(best.efficiency)) > HIGH_EFFICIENCY:
        words += f"; {format_share(efficiency)} efficiency, more than the ranks explain"
    label = "Best speed-up" if require(best.speedup) >= 1 else "Least slow-down"
    yield KeyFigure(label, f"{format_ratio(require(best.speedup))} {interval}", words)


def rank_memory(source: Source) -> Figures:
    """Yield the least share of one rank's memory that a rank of several needs."""
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    known = [
        (row.peak_bytes / peak, row)
        for row in find_compared(source)
        if row.peak_bytes and (peak := one_rank[row.ranks_key].peak_bytes)
    ]
    if known:
        least = min(share for share, _ in known)
        best = [row for share, row in known if share == least]
        names = join_names(row.name for row in best)
        words = f"{format_bytes(require(best[0].peak_bytes))} with {names}"
        yield KeyFigure("Least share of one rank's memory", format_share(least), words)


def exposed(source: Source) -> Figures:
    """Yield the share of the time that communication adds."""
    rows: Sequence[SweepRow] = find_compared(source)
    rows = rows or most_timed(r for r in source.rows if r.world_size > 1 and r.time_s)
    if known := [row for row in rows if row.exposed_share is not None]:
        most = max(known, key=lambda row: require(row.exposed_share))
        value = format_range([require(row.exposed_share) for row in known], format_share)
        words = f"most with {most.name}" if len(known) > 1 else most.name
        yield KeyFigure("Waiting for communication (exposed)", f"{value} of the time", words)


def longest_on_ranks(source: Source) -> Figures:
    """Yield the longest length on several ranks, next to that on one."""
    rows = find_over_ranks(source)
    one_rank = {row.label: row.max_tokens for row in rows if row.world_size == 1 and row.max_tokens}
    several = [row for row in rows if row.world_size > 1 and row.label in one_rank]
    if several:
        best = max(several, key=lambda row: row.max_tokens)
        ties = find_longest_ties([row for row in several if row.world_size == best.world_size])
        times = best.max_tokens / one_rank[best.label]
        names = best.name if len(ties) == 1 else f"{TIE}: {join_names(r.name for r in ties)}"
        linear = format_share(times / best.world_size)
        words = f"{names}, {format_ratio(times)} one rank, {linear} of linear"
        yield KeyFigure("Longest on several ranks", f"{best.max_tokens:,} tokens", words)


def growth_with_ranks(source: Source) -> Figures:
    """Yield the growth of the longest length with ranks, of the series that reaches farthest."""
    scaled = maxima_on_ranks(find_over_ranks(source))
    passed = group_by((one for one in scaled if one.actual), attrgetter("label")).values()
    if series := [some for some in passed if len(some) > 1]:
        first, *_, last = max(series, key=lambda some: some[-1].actual)
        doublings = math.log2(last.world_size / first.world_size)
        limits = " then ".join(dict.fromkeys(str(one.limited_by) for one in (first, last)))
        words = f"{last.label}, {first.world_size} to {last.world_size} ranks, {limits} limit"
        rate = (last.actual / first.actual) ** (1 / doublings)
        yield KeyFigure("Tokens per doubling of ranks", format_ratio(rate), words)


def exponent_of_time(source: Source) -> Figures:
    """Yield the fit of time over length of most points."""
    for group, fits in growth.find_fits(source):
        if best := growth.find_best_fit(group, fits):
            words = f"{best.label}, {best.points} points{source.where(group[0])}"
            value = str(growth.format_exponent(best.tokens))
            yield KeyFigure("Exponent of time over length", value, words)
            return


def most_frequent_limit(source: Source) -> Figures:
    """Yield the most frequent limit of searches over ranks, else bottleneck of trials, or limit."""
    scaled = maxima_on_ranks(find_over_ranks(source))
    timed = find_timed(source)
    kind = "searches shown" if scaled else "trials on several ranks" if timed else "searches"
    causes = Counter(str(one.limited_by) for one in scaled or ([] if timed else source.maxima))
    causes.update(() if scaled else map(find_bottleneck, timed))
    for cause, count in causes.most_common(1):
        yield KeyFigure("Limit", cause, f"in {count:,} of {causes.total():,} {kind}")


# ---- what works ----------------------------------------------------------------------------------


def working(source: Source) -> Figures:
    """Yield the number of implementations without a failure."""
    if rows := modes.build_matrix(source).rows:
        verdicts = [{cell.split(" ")[0] for cell in row[1:]} for row in rows]
        count = sum(not found & {modes.FAILS, modes.PARTIAL} for found in verdicts)
        words = "implementations, wherever they had memory and time"
        yield KeyFigure("Work in all that was run", f"{count} of {len(rows)}", words)


def largest_error(source: Source) -> Figures:
    """Yield the largest error against float64 of a sweep, and the number of wrong outputs."""
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    if known:
        worst = max(known, key=lambda row: require(row.max_error))
        words = f"{worst.name}, {worst.mode}, {worst.dtype}"
        yield KeyFigure("Largest error of a sweep", format_cell(worst.max_error, "error"), words)
    names = Counter(row.name for row in source.rows if row.status == "wrong")
    if names:
        (name, _), *_ = names.most_common(1)
        yield KeyFigure("Wrong outputs", f"{names.total():,} trials", f"most with {name}")
