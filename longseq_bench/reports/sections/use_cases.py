"""Use cases by their length: which approach takes it here, and what it was measured at."""

from __future__ import annotations

from collections.abc import Sequence

from longseq_bench.analysis.rows import Row
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports.assemble import wanting
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.groups import as_dense, capital, is_sparse, name_of, workload_words
from longseq_bench.reports.sections.findings import limit_words, time_of
from longseq_bench.reports.sections.recommendations import confirmed

USES = (
    ("a conversation", 8 * 1024),
    ("a long article", 32 * 1024),
    ("a book", 256 * 1024),
    ("a code repository", 1024**2),
    ("a shelf of books", 8 * 1024**2),
)
"""Lengths as this report takes them; they are round figures and no measurements."""

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
_SAME = (
    "fingerprint", "device", "mode", "dtype", "causal", "batch", "heads", "kv_heads", "head_dim",
    "threads",
)  # fmt: skip


def uses(source: Source) -> Section:
    """A table a workload: use case, approach, maximum, with its evidence."""
    tables = []
    for title, swept, found in _workloads(source):
        rows = tuple(_use(name, tokens, swept, found) for name, tokens in USES)
        if any(row[2] or row[5] for row in rows):
            tables.append(Table(title, _COLUMNS, rows))
    if not tables:
        return wanting(
            "Use case, approach, maximum", f"length of {format_tokens(USES[0][1])} tokens or more",
            "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
        )  # fmt: skip
    return Section("Use case, approach, maximum", [_SAID], tables=tables)


def _workloads(source: Source) -> list[tuple[str, list[Row], list[Row]]]:
    """Rows and maxima of each workload, whatever the budget, which the evidence names."""
    swept = [row for row in source.rows if row["status"] == "ok" and confirmed(row)]
    found = [row for row in source.maxima if row["max_tokens"] and confirmed(row)]
    together: dict[tuple[object, ...], tuple[list[Row], list[Row]]] = {}
    for which, rows in ((1, found), (0, swept)):
        for row in rows:
            key = tuple(row[name] for name in _SAME)
            together.setdefault(key, ([], []))[which].append(row)
    return [(_title(key, source), *both) for key, both in together.items()]


def _title(key: tuple[object, ...], source: Source) -> str:
    row = dict(zip(_SAME, key, strict=True)) | {"memory_budget": None, "time_budget": None}
    return capital(workload_words(row, source.machines))


def _use(name: str, tokens: int, swept: Sequence[Row], found: Sequence[Row]) -> tuple[Cell, ...]:
    cells: list[Cell] = [name, tokens]
    for sparse in (False, True):
        ran = [r for r in swept if is_sparse(r) == sparse and r["tokens"] >= tokens]
        reached = [r for r in found if is_sparse(r) == sparse and r["max_tokens"] >= tokens]
        best, evidence = _approach(ran, reached)
        cells += [" or ".join(map(name_of, best)) or None, evidence, _maxima(best, swept, found)]
    return tuple(cells)


def _approach(ran: Sequence[Row], reached: Sequence[Row]) -> tuple[list[Row], str | None]:
    """Those that took least at the shortest length timed that is long enough, as far as they can be
    told apart; else the one that reached farthest."""
    timed = [r for r in ran if r["time_s"] and r["samples"] > 1]
    if timed:
        shortest = min(r["tokens"] for r in timed)
        at = as_dense(r for r in timed if r["tokens"] == shortest)[0]
        at.sort(key=lambda r: float(r["time_s"]))
        best = [r for r in at if r["time_low_s"] <= at[0]["time_high_s"]]
        words = ", ".join(f"{format_cell(time_of(r), 'seconds')}{_held(r)}" for r in best)
        alike = "; they can't be told apart" if len(best) > 1 else ""
        return best, f"ran at {format_tokens(shortest)}: {words}{alike}"
    if reached:
        row = max(as_dense(reached)[0], key=_length)
        return [row], f"takes {_reach(row)}{_seen(row)}; {limit_words(row)}"
    if ran:
        row = max(as_dense(ran)[0], key=lambda r: int(r["tokens"]))
        return [row], f"ran at {format_tokens(row['tokens'])}{_seen(row)}, not timed more than once"
    return [], None


def _maxima(best: Sequence[Row], swept: Sequence[Row], found: Sequence[Row]) -> str | None:
    """The longest that each of the named is known to take."""
    names = dict.fromkeys(map(name_of, best))
    return ", ".join(filter(None, (_maximum(name, swept, found) for name in names))) or None


def _maximum(name: str, swept: Sequence[Row], found: Sequence[Row]) -> str | None:
    searched = max((r for r in found if name_of(r) == name), key=_length, default=None)
    longest = max((r["tokens"] for r in swept if name_of(r) == name), default=0)
    if searched is not None and searched["max_tokens"] >= longest:
        return _reach(searched)
    return f"{format_tokens(longest)} swept" if longest else None


def _length(row: Row) -> int:
    return int(row["max_tokens"])


def _reach(row: Row) -> str:
    budget = row["memory_budget"]
    return f"{row['max_tokens']:,} tokens" + (
        f" under {format_bytes(budget)} a rank" if budget else ""
    )


def _seen(row: Row) -> str:
    density = row["density_achieved"]
    return f", density {format_share(density)}" if density is not None and density < 1 else ""


def _held(row: Row) -> str:
    peak = f", peak {format_bytes(row['peak_bytes'])}" if row["peak_bytes"] else ""
    return peak + _seen(row)
