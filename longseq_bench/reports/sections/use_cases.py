"""Use cases by length: the approach that can take it here, with its measurements."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import group_by_density
from longseq_bench.reports.sections.findings import describe_limit

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
_SAID = (
    "The lengths of use cases are chosen by this report. An approach is named where a search "
    "found a maximum of at least that length, or a sweep ran it there. Of those that were timed "
    "more than once it is the fastest at the shortest length that is long enough, or all that "
    "can't be told from it; else the one that reached farthest. Of sparse attention only what "
    "skips least is looked at, to within a tenth of its density; it does not compute what exact "
    "attention does, and whether it serves is not measured here. Its maximum is a search's, or "
    "the longest length swept where that is longer."
)
_same = attrgetter(
    "fingerprint", "device", "mode", "dtype", "causal", "batch", "heads", "kv_heads", "head_dim",
    "threads",
)  # fmt: skip


def uses(source: Source) -> Section:
    """Build a table per workload: use case, approach, maximum, evidence."""
    tables = []
    for title, swept, found in _workloads(source):
        rows = tuple(_use(name, tokens, swept, found) for name, tokens in USES)
        if any(row[2] or row[5] for row in rows):
            tables.append(Table(title, _COLUMNS, rows))
    if not tables:
        return missing_section(
            "Use case, approach, maximum", f"length of {format_tokens(USES[0][1])} tokens or more",
            "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
        )  # fmt: skip
    return Section("Use case, approach, maximum", [_SAID], tables=tables)


def _workloads(source: Source) -> list[tuple[str, list[SweepRow], list[SearchRow]]]:
    """Group rows and maxima by workload, over all budgets."""
    swept = [row for row in source.rows if row.status == "ok" and row.is_full_pass]
    found = [row for row in source.maxima if row.max_tokens and row.is_full_pass]
    together: dict[Hashable, tuple[list[SweepRow], list[SearchRow]]] = {}
    first: dict[Hashable, Row] = {}
    for maximum in found:
        together.setdefault(_same(maximum), ([], []))[1].append(maximum)
        first.setdefault(_same(maximum), maximum)
    for row in swept:
        together.setdefault(_same(row), ([], []))[0].append(row)
        first.setdefault(_same(row), row)
    return [(_title(first[key], source), *both) for key, both in together.items()]


def _title(row: Row, source: Source) -> str:
    without = replace(row, memory_budget=None, time_budget=None)
    return source.title(without)


def _use(
    name: str, tokens: int, swept: Sequence[SweepRow], found: Sequence[SearchRow]
) -> tuple[Cell, ...]:
    cells: list[Cell] = [name, tokens]
    for sparse in (False, True):
        ran = [r for r in swept if r.is_sparse == sparse and r.tokens >= tokens]
        reached = [r for r in found if r.is_sparse == sparse and r.max_tokens >= tokens]
        best, evidence = _approach(ran, reached)
        cells += [
            " or ".join(row.name for row in best) or None,
            evidence,
            _maxima(best, swept, found),
        ]
    return tuple(cells)


def _approach(
    ran: Sequence[SweepRow], reached: Sequence[SearchRow]
) -> tuple[Sequence[Row], str | None]:
    """Return the fastest rows at the shortest length timed that is long enough, with evidence.

    Rows whose intervals overlap with the fastest are included. Without times: the longest.
    """
    timed = [r for r in ran if r.time_s and r.samples > 1]
    if timed:
        shortest = min(r.tokens for r in timed)
        at = group_by_density(r for r in timed if r.tokens == shortest)[0]
        at.sort(key=lambda r: require(r.time_s))
        best = [r for r in at if require(r.time_low_s) <= require(at[0].time_high_s)]
        words = ", ".join(
            f"{format_cell(time_with_interval(r), 'seconds')}{_held(r)}" for r in best
        )
        alike = "; they can't be told apart" if len(best) > 1 else ""
        return best, f"ran at {format_tokens(shortest)}: {words}{alike}"
    if reached:
        farthest = max(group_by_density(reached)[0], key=_length)
        words = f"takes {_reach(farthest)}{_seen(farthest)}; {describe_limit(farthest)}"
        return [farthest], words
    if ran:
        row = max(group_by_density(ran)[0], key=lambda r: int(r.tokens))
        return [row], f"ran at {format_tokens(row.tokens)}{_seen(row)}, not timed more than once"
    return [], None


def _maxima(
    best: Sequence[Row], swept: Sequence[SweepRow], found: Sequence[SearchRow]
) -> str | None:
    """Describe the longest known length of each implementation in `best`."""
    names = dict.fromkeys(row.name for row in best)
    return ", ".join(filter(None, (_maximum(name, swept, found) for name in names))) or None


def _maximum(name: str, swept: Sequence[SweepRow], found: Sequence[SearchRow]) -> str | None:
    searched = max((r for r in found if r.name == name), key=_length, default=None)
    longest = max((r.tokens for r in swept if r.name == name), default=0)
    if searched is not None and searched.max_tokens >= longest:
        return _reach(searched)
    return f"{format_tokens(longest)} swept" if longest else None


def _length(row: SearchRow) -> int:
    return int(row.max_tokens)


def _reach(row: SearchRow) -> str:
    budget = row.memory_budget
    return f"{row.max_tokens:,} tokens" + (
        f" under {format_bytes(budget)} a rank" if budget else ""
    )


def _seen(row: Row) -> str:
    density = row.density_achieved
    return f", density {format_share(density)}" if density is not None and density < 1 else ""


def _held(row: SweepRow) -> str:
    peak = f", peak {format_bytes(row.peak_bytes)}" if row.peak_bytes else ""
    return peak + _seen(row)
