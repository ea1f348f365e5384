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
from longseq_bench.analysis.scaling import maxima_on_ranks
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import time_with_interval
from longseq_bench.reports.document import KeyFigure, Spread, format_cell, format_ratio
from longseq_bench.reports.groups import (
    common_length,
    format_limit,
    group_by_density,
    has_several_ranks,
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
from longseq_bench.reports.wording import (
    TIE,
    UNCONFIRMED,
    find_longest_ties,
    find_ties,
    format_range,
    join_names,
)

Figures = Iterator[KeyFigure]


# ---- how long ------------------------------------------------------------------------------------


def longest(source: Source) -> Figures:
    """Yield the longest lengths of searches, of exact and of sparse attention; else of sweeps."""
    found = split_by_sparsity(r for r in source.maxima if r.is_full_pass and r.max_tokens)
    for kind, rows in found.items():
        best = max(rows, key=lambda row: row.max_tokens)
        ties = find_longest_ties([row for row in rows if table_key(row) == table_key(best)])
        names = join_names(row.name for row in ties) + (f": {TIE}" if len(ties) > 1 else "")
        words = f"{names}{source.where(ties[0])}, {_cause(ties[0])}"
        tokens = f"{format_tokens(ties[0].max_tokens)} tokens"
        yield KeyFigure(f"Longest{_kind(kind, found)}", tokens, words)
    if found:
        return
    swept = most_shared(row for row in source.rows if row.is_full_pass)
    if most := max((row.tokens for row in swept if row.is_ok), default=0):
        names = join_names(row.name for row in swept if row.is_ok and row.tokens == most)
        failed = any(row.tokens > most for row in swept)
        end = "all longer ones failed" if failed else "the longest tried"
        words = f"{names}{source.where(swept[0])}; {end}"
        yield KeyFigure("Longest swept", f"{format_tokens(most)} tokens", words)


def _kind(kind: str, found: Iterable[str]) -> str:
    """Return ", exact" or ", sparse" for a label if there are figures of both."""
    return f", {kind}" if len({*found}) > 1 else ""


def _cause(row: SearchRow) -> str:
    """Return what limits a search: "stopped by memory", "stopped by the 30 s limit; ..."."""
    words = "no longer length failed"
    if row.first_failure is not None:
        is_limit = row.limited_by == "time" and row.time_budget
        limit = f"the {format_limit(require(row.time_budget))} limit" if is_limit else ""
        words = f"stopped by {limit or row.limited_by}"
    if (row.fits_tokens or 0) > row.max_tokens:
        words += f"; {format_tokens(require(row.fits_tokens))} would fit in memory"
    return words if row.confirmations else f"{words}, {UNCONFIRMED}"


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
        best = min(rows, key=lambda row: require(row.time_s))
        value = format_cell(time_with_interval(best), "seconds")
        yield KeyFigure(f"Fastest{_kind(kind, found)}", value, words)


def describe_fastest(rows: Iterable[SweepRow]) -> str:
    """Name the fastest of timed rows of one length; all ties where intervals overlap.

    It is compared with the rows of similar density that were timed more than once.
    """
    first, *others = sorted(rows, key=lambda row: require(row.time_s))
    density = f" ({format_share(first.token_density)} seen)" if first.token_density else ""
    at = f"{density if first.is_sparse else ''} at {format_tokens(first.tokens)}"
    if first.samples < 2:
        return f"{first.name}{at}, one pass, no interval"
    same = next(group for group in group_by_density([first, *others]) if first in group)
    timed = [row for row in same if row.samples > 1]
    ties = find_ties(timed, "time_low_s", "time_high_s")
    if len(ties) > 1:
        return f"{join_names(row.name for row in ties)}{at}: {TIE}"
    if len(timed) == 1:
        return f"{first.name}{at}, the only one timed"
    ratio = format_ratio(require(timed[1].time_s) / require(first.time_s))
    return f"{first.name}{at}, {ratio} as fast as {timed[1].name}"


def least_memory(source: Source) -> Figures:
    """Yield the lowest peak."""
    if known := [row for row in _shared(source) if row.peak_bytes]:
        peak = min(require(row.peak_bytes) for row in known)
        names = join_names(row.name for row in known if row.peak_bytes == peak)
        value = f"{format_bytes(peak)}{' a rank' if has_several_ranks(known) else ''}"
        words = f"{names} at {format_tokens(known[0].tokens)}{source.where(known[0])}"
        yield KeyFigure("Least memory", value, words)


# ---- what ranks bring ----------------------------------------------------------------------------


def on_ranks(source: Source) -> Figures:
    """Yield the highest speed-up over one rank, the least share of its memory, the exposed time.

    They are of the longest length that most share.
    """
    rows = find_compared(source)
    if rows:
        yield _best_speedup(source, rows)
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    shares = [
        (row.peak_bytes / peak, row.peak_bytes, row.name)
        for row in rows
        if row.peak_bytes and (peak := one_rank[row.ranks_key].peak_bytes)
    ]
    if shares:
        least, peak, _ = min(shares)
        names = join_names(name for share, _, name in shares if share == least)
        words = f"{format_bytes(peak)} with {names}"
        yield KeyFigure("Least share of one rank's memory", format_share(least), words)
    rows = rows or most_timed(r for r in source.rows if r.world_size > 1 and r.time_s)
    exposed = [(row.exposed_share, row.name) for row in rows if row.exposed_share is not None]
    if exposed:
        _, most = max(exposed)
        value = format_range([share for share, _ in exposed], format_share)
        words = f"most with {most}" if len(exposed) > 1 else most
        yield KeyFigure("Waiting for communication (exposed)", f"{value} of the time", words)


def _best_speedup(source: Source, rows: Sequence[SweepRow]) -> KeyFigure:
    ties, best = find_ties(rows, "speedup_low", "speedup_high", largest=True), rows[0]
    ratio = require(speedup(best))
    interval = "(one pass, no interval)"
    if isinstance(ratio, Spread):
        interval = f"({format_ratio(ratio.low)} to {format_ratio(ratio.high)})"
    words = f"{best.name} at {format_tokens(best.tokens)}{source.where(best)}"
    if len(ties) > 1:
        words += f"; {TIE} from {len(ties) - 1} more"
    label = "Best speed-up" if require(best.speedup) >= 1 else "Least slow-down"
    return KeyFigure(label, f"{format_ratio(require(best.speedup))} {interval}", words)


def growth_with_ranks(source: Source) -> Figures:
    """Yield the growth of the longest length with ranks, and the most frequent limit.

    The growth is of the series that reaches farthest; without searches over ranks, the limit is the
    bottleneck of trials on several ranks, or that of other searches.
    """
    scaled, timed = maxima_on_ranks(find_over_ranks(source)), find_timed(source)
    passed = group_by((one for one in scaled if one.actual), attrgetter("label")).values()
    if series := [some for some in passed if len(some) > 1]:
        first, *_, last = max(series, key=lambda some: some[-1].actual)
        doublings = math.log2(last.world_size / first.world_size)
        limits = " then ".join(dict.fromkeys(str(one.limited_by) for one in (first, last)))
        words = f"{last.label}, {first.world_size} to {last.world_size} ranks, {limits} limit"
        rate = (last.actual / first.actual) ** (1 / doublings)
        yield KeyFigure("Tokens per doubling of ranks", format_ratio(rate), words)
    if scaled or not timed:
        searches = scaled or source.maxima
        kind, causes = "searches", Counter(str(one.limited_by) for one in searches)
    else:
        kind, causes = "trials on several ranks", Counter(map(find_bottleneck, timed))
    for cause, count in causes.most_common(1):
        yield KeyFigure("Limit", cause, f"in {count:,} of {causes.total():,} {kind}")


# ---- what works ----------------------------------------------------------------------------------


def working(source: Source) -> Figures:
    """Yield the number of implementations without a failure, the largest error, wrong outputs."""
    if verdicts := modes.judge_implementations(source).values():
        signs = [{verdict.sign for verdict in one.values()} for one in verdicts]
        count = sum(not found & {modes.FAILS, modes.PARTIAL} for found in signs)
        words = "implementations, wherever they had memory and time"
        yield KeyFigure("Work in all that was run", f"{count} of {len(signs)}", words)
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    if known:
        worst = max(known, key=lambda row: require(row.max_error))
        words = f"{worst.name}, {worst.mode}, {worst.dtype}"
        yield KeyFigure("Largest error of a sweep", format_cell(worst.max_error, "error"), words)
    names = Counter(row.name for row in source.rows if row.status == "wrong")
    if names:
        (name, _), *_ = names.most_common(1)
        yield KeyFigure("Wrong outputs", f"{names.total():,} trials", f"most with {name}")
