"""Key figures of a report: the fastest, the longest, the least memory, the most exact row."""

from collections.abc import Iterable, Sequence
from math import ceil, isfinite

from longseq_bench.analysis.row import require
from longseq_bench.analysis.searches import DensityRow, SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import KeyFigure, format_cell, format_ratio
from longseq_bench.reports.groups import (
    SAME_TABLE,
    format_limit,
    group_by_density,
    has_several_ranks,
)
from longseq_bench.reports.sections import multi_rank
from longseq_bench.reports.sections.growth import format_sparsity
from longseq_bench.reports.sections.recommendations import TIE, find_longest_ties
from longseq_bench.reports.wording import (
    MAX_NAMES,
    find_ties,
    format_range,
    join_names,
    name_unconfirmed,
)


def fastest(label: str, rows: Iterable[SweepRow]) -> KeyFigure | None:
    """Return the least time of rows of one length; without a winner where intervals overlap."""
    ordered = sorted((row for row in rows if row.time_s), key=lambda row: require(row.time_s))
    if not ordered:
        return None
    first = ordered[0]
    value, at = format_time(first), f" at {format_tokens(first.tokens)}"
    density = "" if first.token_density is None else f" ({format_share(first.token_density)} seen)"
    density = density if first.is_sparse else ""
    name, groups = f"{first.name}{density}{at}", group_by_density(ordered)
    same = next(group for group in groups if first in group)
    others = f", of {len(groups)} densities" if len(groups) > 1 else ""
    if len(ordered) == 1:
        words = f"{name}, the only one timed"
    elif first.samples < 2:
        words = f"{name}, one pass, no interval"
    elif len(same) == 1:
        words = name
    elif same[1].samples < 2:
        words = f"{name}; the next, {same[1].name}, is one pass"
    else:
        ties = find_ties([row for row in same if row.samples > 1], "time_low_s", "time_high_s")
        ratio = format_ratio(require(same[1].time_s) / require(first.time_s))
        words = f"{name}, {ratio} as fast as {same[1].name}"
        if len(ties) > 1:
            words = f"{join_names(row.name for row in ties)}{density}{at}: {TIE}"
    return KeyFigure(label, value, words + others)


def least_memory(rows: Iterable[SweepRow]) -> KeyFigure | None:
    """Return the lowest peak of rows of one length."""
    known = [row for row in rows if row.is_ok and row.peak_bytes]
    if not known:
        return None
    peak = min(require(row.peak_bytes) for row in known)
    names = join_names(row.name for row in known if row.peak_bytes == peak)
    value = f"{format_bytes(peak)}{' a rank' if has_several_ranks(known) else ''}"
    return KeyFigure("Least memory", value, f"{names} at {format_tokens(known[0].tokens)}")


def most_exact(rows: Iterable[SweepRow]) -> KeyFigure | None:
    """Return the smallest error against float64 of rows of one length."""
    errors = {r.name: r.max_error for r in rows if r.is_ok and r.max_error is not None}
    least = min(filter(isfinite, errors.values()), default=None)
    if least is None:
        return None
    names = (name for name, error in errors.items() if error == least)
    return KeyFigure("Smallest error", format_cell(least, "error"), join_names(names))


def longest(
    source: Source, label: str, rows: Iterable[SearchRow], is_stated: bool
) -> KeyFigure | None:
    """Return the longest length of searches of one workload, with its limit.

    is_stated: the workload is stated nearby.
    """
    found = [row for row in rows if row.max_tokens]
    if not found:
        return None
    ties = find_longest_ties(found)
    first = ties[0]
    names = join_names(row.name for row in ties) + (f": {TIE}" if len(ties) > 1 else "")
    named = [name for name in SAME_TABLE if name != "time_budget" or first.limited_by != "time"]
    where = "" if is_stated else source.workload(first, named)
    words = ", ".join(filter(None, (names, where, describe_cause(first))))
    return KeyFigure(label, f"{format_tokens(first.max_tokens)} tokens", words)


def describe_cause(row: SearchRow) -> str:
    """Return what limits a search: "stopped by memory", "stopped by the 30 s limit; ..."."""
    if row.first_failure is None:
        return f"no longer length failed{name_unconfirmed(row)}"
    limit = f"stopped by {row.limited_by}"
    if row.limited_by == "time" and row.time_budget:
        limit = f"stopped by the {format_limit(row.time_budget)} limit"
    fits = row.fits_tokens or 0
    more = f"; {format_tokens(fits)} would fit in memory" if fits > row.max_tokens else ""
    return limit + more + name_unconfirmed(row)


def swept_end(rows: Sequence[SweepRow]) -> KeyFigure | None:
    """Return the longest length at which a row of a sweep was ok, and the outcome above it."""
    passed = [row for row in rows if row.is_ok]
    if not passed:
        return None
    tokens = max(row.tokens for row in passed)
    names = [row.name for row in passed if row.tokens == tokens]
    names = names if len(names) <= MAX_NAMES else [f"{len(names):,} rows"]
    failed = any(row.tokens > tokens for row in rows)
    above = "all longer ones failed" if failed else "the longest tried"
    return KeyFigure(
        "Longest swept", f"{format_tokens(tokens)} tokens", f"{', '.join(names)}; {above}"
    )


def two_ranks(source: Source, rows: Sequence[SweepRow]) -> KeyFigure | None:
    """Return the speed and the tokens of two ranks over those of one, lowest to highest.

    rows: of one shape, which is stated nearby; the tokens are of any searches.
    """
    speeds = [row.speedup for row in rows if row.world_size == 2 and row.speedup]
    maxima = multi_rank.find_over_ranks(source)
    one = {row.label: row.max_tokens for row in maxima if row.world_size == 1 and row.max_tokens}
    times = [r.max_tokens / one[r.label] for r in maxima if r.world_size == 2 and r.label in one]
    tokens = (
        f"{format_range(times, format_ratio)} as many tokens, equal memory a rank" if times else ""
    )
    if not speeds:
        return KeyFigure("Two ranks over one", tokens) if tokens else None
    return KeyFigure(
        "Two ranks over one", f"{format_range(speeds, format_ratio)} the speed", tokens
    )


def minimum_sparsity(row: DensityRow) -> KeyFigure:
    """Return the lowest sparsity with which a length passed."""
    at = f"{row.name} at {format_tokens(row.tokens)} tokens, limited by {row.limited_by}"
    return KeyFigure("Minimum sparsity", format_sparsity(row.least_sparsity, ceil) or "none", at)
