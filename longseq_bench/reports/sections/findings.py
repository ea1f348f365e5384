"""Findings on figures to distrust, and answers of searches in words."""

from collections.abc import Hashable, Iterable, Iterator, Mapping

from longseq_bench.analysis.row import R
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import format_ratio
from longseq_bench.reports.wording import UNCONFIRMED


def problems(source: Source) -> Iterator[str]:
    """Yield sentences on wrong outputs, thrashing, miscounted bytes and unstable times."""
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
    unstable = [
        f"{row.name} at {format_tokens(row.tokens)} tokens" for row in source.rows if row.unstable
    ]
    found = (
        ("Wrong output, no speed is shown", wrong),
        ("CUDA's allocator freed its cache and retried (thrashing)", thrashing),
        ("Bytes sent differ from their formula", miscounted),
        ("Unstable times, run these again on an idle machine", unstable),
    )
    for words, names in found:
        if names:
            yield f"{words}: {_first(dict.fromkeys(names))}; see Failures."


def thrashes(source: Source) -> list[SweepRow | SearchRow]:
    """Return the rows in which CUDA's allocator freed its cache and retried."""
    rows: list[SweepRow | SearchRow] = [*source.rows, *source.maxima]
    return [row for row in rows if row.alloc_retries]


def _first(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first}, and {len(others):,} more" if others else first


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
    confirmed = UNCONFIRMED
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
    adds = row.failure_phase and row.failure_phase != row.limited_by
    phase = f" in {row.failure_phase}" if adds else ""
    return f"limited by {row.limited_by}{phase} at {format_tokens(row.first_failure)}"


def _count(n: int, one: str) -> str:
    return f"{n:,} {one}{'s' * (n != 1)}"
