"""Use cases by length: the approach that can take it here, with its measurements."""

from collections.abc import Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.base import SEARCH, Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import SAME_TABLE, format_limit, group_by_density
from longseq_bench.reports.sections.findings import describe_limit
from longseq_bench.reports.wording import find_ties

USES = (
    ("a conversation", 8 * 1024),
    ("a long article", 32 * 1024),
    ("a book", 256 * 1024),
    ("a code repository", 1024**2),
    ("a shelf of books", 8 * 1024**2),
)
"""Assumed lengths of use cases; they are round figures, not measurements."""

_COLUMNS = (
    Column("Use case"), Column("Tokens", "tokens"), Column("Exact attention"),
    Column("Its evidence"), Column("Its maximum"), Column("Sparse attention"),
    Column("Its evidence"), Column("Its maximum"),
)  # fmt: skip
_EXPLANATION = (
    "Lengths of use cases are assumptions. The table names the fastest approach at the shortest "
    "sufficient length that was timed more than once, and ties with it; without times, the one "
    "with the longest maximum. Of sparse attention, only the densest rows (within 10 %) are "
    "compared; it does not compute what exact attention does, and its quality is not measured. "
    "Maximum: of a search, or the longest swept length if that is longer."
)
_SAME = [n for n in SAME_TABLE if n not in ("memory_budget", "time_budget", "fit_only")]
_without_budgets = attrgetter(*_SAME)


def uses(source: Source) -> Section:
    """Build a table per workload, over all budgets: use case, approach, maximum, evidence."""
    known: list[Row] = [row for row in source.maxima if row.max_tokens and row.is_full_pass]
    known += [row for row in source.rows if row.status == "ok" and row.is_full_pass]
    tables = []
    for group in group_by(known, _without_budgets).values():
        swept = [row for row in group if isinstance(row, SweepRow)]
        found = [row for row in group if isinstance(row, SearchRow)]
        rows = tuple(_use(name, tokens, swept, found) for name, tokens in USES)
        if any(row[2] or row[5] for row in rows):
            title = source.title(group[0], _SAME)
            tables.append(Table(title, _COLUMNS, rows))
    missing = f"length of {format_tokens(USES[0][1])} tokens or more", SEARCH
    return Section("Use case, approach, maximum", [_EXPLANATION], tables=tables, missing=missing)


def _use(
    name: str, tokens: int, swept: Sequence[SweepRow], found: Sequence[SearchRow]
) -> tuple[Cell, ...]:
    cells: list[Cell] = [name, tokens]
    for sparse in (False, True):
        ran = [r for r in swept if r.is_sparse == sparse and r.tokens >= tokens]
        reached = [r for r in found if r.is_sparse == sparse and r.tokens >= tokens]
        best, evidence = _approach(ran, reached)
        names = dict.fromkeys(row.name for row in best)
        maxima = [_maximum(one, swept, found) for one in names]
        approach = " or ".join(row.name for row in best)
        cells += [approach or None, evidence, ", ".join(filter(None, maxima)) or None]
    return tuple(cells)


def _approach(
    ran: Sequence[SweepRow], reached: Sequence[SearchRow]
) -> tuple[Sequence[Row], str | None]:
    """Return the fastest rows at the shortest length timed that is long enough, with evidence.

    Rows whose intervals overlap with the fastest are included. Without times: the longest.
    """
    if timed := [r for r in ran if r.time_s and r.samples > 1]:
        shortest = min(r.tokens for r in timed)
        at = group_by_density(r for r in timed if r.tokens == shortest)[0]
        at.sort(key=lambda r: require(r.time_s))
        best = find_ties(at, "time_low_s", "time_high_s")
        peaks = [f", peak {format_bytes(r.peak_bytes)}" if r.peak_bytes else "" for r in best]
        pairs = zip(best, peaks, strict=True)
        words = ", ".join(f"{format_time(r)}{peak}{_density(r)}" for r, peak in pairs)
        tie = "; tie: their intervals overlap" if len(best) > 1 else ""
        return best, f"ran at {format_tokens(shortest)}: {words}{tie}"
    if reached:
        farthest = max(group_by_density(reached)[0], key=attrgetter("tokens"))
        words = f"takes {_tokens(farthest)}{_density(farthest)}; {describe_limit(farthest)}"
        return [farthest], words
    if ran:
        row = max(group_by_density(ran)[0], key=attrgetter("tokens"))
        return [row], f"ran at {format_tokens(row.tokens)}{_density(row)}, not timed more than once"
    return [], None


def _maximum(name: str, swept: Sequence[SweepRow], found: Sequence[SearchRow]) -> str | None:
    """Describe the longest known length of an implementation."""
    searched = max((r for r in found if r.name == name), key=attrgetter("tokens"), default=None)
    longest = max((r.tokens for r in swept if r.name == name), default=0)
    if searched is not None and searched.max_tokens >= longest:
        return _tokens(searched)
    return f"{format_tokens(longest)} swept" if longest else None


def _tokens(row: SearchRow) -> str:
    memory = f" under {format_bytes(row.memory_budget)} a rank" if row.memory_budget else ""
    time = f", {format_limit(row.time_budget)} limit" if row.time_budget else ""
    return f"{row.max_tokens:,} tokens{memory}{time}"


def _density(row: Row) -> str:
    return f", density {format_share(row.density)}" if row.is_sparse else ""
