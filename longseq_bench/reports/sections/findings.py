"""Best rows of each workload; findings on figures to distrust; answers of searches in words."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_ratio, time_with_interval
from longseq_bench.reports.document import Finding, Section, format_ratio
from longseq_bench.reports.groups import (
    density_suffix,
    group_by_density,
    group_by_ranks,
    group_by_workload,
    ranks_suffix,
    split_by_sparsity,
)
from longseq_bench.reports.outcome_text import name_status
from longseq_bench.reports.wording import join_names, join_ties

FAILURES = "Failures"
"""Title of the section with the rows of `problems`."""


def problems(source: Source) -> Iterator[Finding]:
    """Yield findings on wrong outputs, thrashing and miscounted bytes."""
    wrong = [
        f"{source.label(r.trial)} at {format_tokens(r.trial.workload.seq_len)} tokens"
        for r in source.records
        if r.outcome.status == "wrong"
    ]
    thrashing = [f"{row.name} at {format_tokens(row.tokens)} tokens" for row in thrashes(source)]
    miscounted = [
        f"{row.name} at {format_tokens(row.tokens)} tokens" for row in source.rows
        if row.bytes_unlike
    ]  # fmt: skip
    found = (
        ("Wrong output, no speed is shown", wrong),
        ("CUDA's allocator freed its cache and retried (thrashing)", thrashing),
        ("Bytes sent differ from their formula", miscounted),
    )
    for words, names in found:
        if names:
            yield Finding(f"{words}: {_first(dict.fromkeys(names))}.", FAILURES)


def count_failed(source: Source) -> list[Finding]:
    """Return a finding that counts the trials that were not ok by status; none if all were ok."""
    failed = Counter(row.status for row in source.rows if row.status not in ("ok", "wrong"))
    counts = ", ".join(f"{n} {name_status(status)}" for status, n in failed.most_common())
    return [Finding(f"Swept trials that were not ok: {counts}.", FAILURES)] if failed else []


def thrashes(source: Source) -> list[SweepRow | SearchRow]:
    """Return the rows in which CUDA's allocator freed its cache and retried."""
    rows: list[SweepRow | SearchRow] = [*source.rows, *source.maxima]
    return [row for row in rows if row.alloc_retries]


def _first(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first}, and {len(others):,} more" if others else first


class Best(NamedTuple):
    """Rows of one workload, length and density that are compared, the fastest first."""

    where: str
    attention: str
    rows: list[SweepRow]


def best_by_workload(source: Source) -> Section:
    """Build the table of the fastest and of the least memory, where several rows are compared."""
    found = [
        Best(source.workload(group[0]), kind, rows)
        for group in group_by_workload(source.rows)
        for kind, rows in compare(group)
    ]
    explanation = (
        "At the longest length that several have. Sparse attention is compared at similar density, "
        "on equal numbers of ranks."
    )
    title = "≈: no significant difference"
    tables = [build_table(title, _BEST, found)] if found else []
    return Section("Best by workload", [explanation], tables=tables)


def compare(group: Iterable[SweepRow]) -> Iterator[tuple[str, list[SweepRow]]]:
    """Yield a name and the timed rows, the fastest first, of each comparison in a workload."""
    for kind, rows in split_by_sparsity(row for row in group if row.time_s).items():
        for some in group_by_ranks(rows).values() if kind == "sparse" else [rows]:
            for similar in _comparable(some):
                similar.sort(key=lambda row: require(row.time_s))
                at = ranks_suffix(similar[0].world_size) if kind == "sparse" else ""
                yield f"{kind}{density_suffix(similar)}{at}", similar


def _comparable(rows: list[SweepRow]) -> list[list[SweepRow]]:
    """Return groups of rows of similar density, at the longest length with several in a group."""
    for _, at in sorted(group_by(rows, lambda row: row.tokens).items(), reverse=True):
        if several := [similar for similar in group_by_density(at) if len(similar) > 1]:
            return several
    return []


def join_fastest(ordered: list[SweepRow]) -> str:
    """Name the fastest row, or the rows that tie for it."""
    return join_ties(ordered, "time_low_s", "time_high_s")


def _lowest(rows: list[SweepRow]) -> list[SweepRow]:
    """Return the rows with the lowest peak; none if all are equal."""
    known = [row for row in rows if row.peak_bytes]
    least = min((require(row.peak_bytes) for row in known), default=0)
    lowest = [row for row in known if row.peak_bytes == least]
    return lowest if len(lowest) < len(known) else []


_BEST = (
    ValueColumn("Workload", "text", lambda best: best.where or None, 9),
    ValueColumn("Attention", "text", lambda best: best.attention, 7),
    ValueColumn("Tokens", "tokens", lambda best: best.rows[0].tokens),
    ValueColumn("Compared", "count", lambda best: len(best.rows)),
    ValueColumn("Fastest", "text", lambda best: join_fastest(best.rows), 8),
    ValueColumn("Time", "seconds", lambda best: time_with_interval(best.rows[0]), 6),
    ValueColumn("Next", "text", lambda best: best.rows[1].name),
    ValueColumn("Next takes", "ratio", lambda best: time_ratio(best.rows[1], best.rows[0]), 5),
    ValueColumn(
        "Least memory", "text",
        lambda best: join_names(row.name for row in _lowest(best.rows)) or None,
    ),
    ValueColumn(
        "Peak memory", "bytes",
        lambda best: next((row.peak_bytes for row in _lowest(best.rows)), None),
    ),
)  # fmt: skip


def find_largest_imbalance(rows: Iterable[SweepRow]) -> SweepRow | None:
    """Return the row whose ranks' peaks differ most; None where no difference is visible."""
    known = [row for row in rows if row.imbalance is not None]
    worst = max(known, key=lambda row: require(row.imbalance), default=None)
    if worst is None or format_ratio(require(worst.imbalance)) == format_ratio(1.0):
        return None
    return worst


def index_one_rank(maxima: Iterable[R]) -> Mapping[Hashable, R]:
    """Index the maxima on one rank by search, to compare those on several ranks with them."""
    by_search = group_by((row for row in maxima if row.world_size == 1), lambda row: row.ranks_key)
    return {key: rows[0] for key, rows in by_search.items()}


def describe_search(row: SearchRow, one_rank: Mapping[Hashable, SearchRow], where: str = "") -> str:
    """Return the answer of a search as a sentence.

    one_rank: from `index_one_rank`.  where: its workload in brackets, if not stated nearby.
    """
    name = row.name
    if not row.max_tokens:
        return f"{name}: no length passed{where}; {describe_limit(row)}."
    if row.fit_only:
        tokens = format_tokens(row.max_tokens)
        return f"{name}: {tokens} tokens fit in memory{where}; not checked or timed."
    floor = gain = ""
    if row.fraction_of_floor is not None:
        floor = f", {format_share(row.fraction_of_floor)} of the floor"
    one = one_rank.get(row.ranks_key) if row.world_size > 1 else None
    if one is not None and one.max_tokens:
        gain = f", {format_ratio(row.max_tokens / one.max_tokens)} one rank's"
    confirmed = "not confirmed by a second run"
    if row.confirmations:
        confirmed = f"confirmed by {_count(row.confirmations, 'further run')}"
    return (
        f"{name} takes {format_tokens(row.max_tokens)} tokens{where}{floor}{gain}, {confirmed}; "
        f"{describe_limit(row)}."
    )


def describe_limit(row: SearchRow) -> str:
    """Describe the cause that ended a search, and its length."""
    if row.first_failure is None:
        return "no longer length failed: this is where the search stopped, not a limit"
    phase = f" in {row.failure_phase}" if row.failure_phase else ""
    return f"limited by {row.limited_by}{phase} at {format_tokens(row.first_failure)}"


def _count(n: int, one: str) -> str:
    return f"{n:,} {one}{'s' * (n != 1)}"
