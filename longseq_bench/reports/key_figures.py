"""Key figures of a report: the longest, the fastest, the least memory, what ranks bring.

A best row is named only if its interval does not overlap with those of others.
"""

import math
from collections.abc import Iterable, Iterator

from longseq_bench.analysis.row import require
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import time_with_interval
from longseq_bench.reports.document import MAX_FIGURES, KeyFigure, Spread, format_cell, format_ratio
from longseq_bench.reports.groups import (
    common_length,
    format_limit,
    group_by_density,
    has_several_ranks,
    most_shared,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.sections.gains import speedup
from longseq_bench.reports.sections.growth import format_sparsity
from longseq_bench.reports.sections.ranks import find_shared
from longseq_bench.reports.wording import TIE, UNCONFIRMED, find_longest_ties, find_ties, join_names

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
    """Yield the lowest sparsity with which a length passed, of the first search."""
    for row in source.minima[:1]:
        at = f"{row.name} at {format_tokens(row.tokens)} tokens, limited by {row.limited_by}"
        value = format_sparsity(row.least_sparsity, math.ceil) or "none"
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


def best_speedup(source: Source) -> Figures:
    """Yield the highest speed-up over one rank, at the length and workload that most share."""
    rows = find_shared(source)
    if not rows:
        return
    ties, best = find_ties(rows, "speedup_low", "speedup_high", largest=True), rows[0]
    ratio = require(speedup(best))
    interval = "(one pass, no interval)"
    if isinstance(ratio, Spread):
        interval = f"({format_ratio(ratio.low)} to {format_ratio(ratio.high)})"
    words = f"{best.name} at {format_tokens(best.tokens)}{source.where(best)}"
    if len(ties) > 1:
        words += f"; {TIE} from {len(ties) - 1} more"
    label = "Best speed-up" if require(best.speedup) >= 1 else "Least slow-down"
    yield KeyFigure(label, f"{format_ratio(require(best.speedup))} {interval}", words)


def key_figures(source: Source) -> list[KeyFigure]:
    """Return the answer of a report in at most MAX_FIGURES figures."""
    found = longest, fastest, best_speedup, least_memory, minimum_sparsity
    return [figure for find in found for figure in find(source)][:MAX_FIGURES]
