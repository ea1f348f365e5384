"""Recommendations: rules over the rows of a report, each with the figures that support it.

No rule depends on the name of an implementation. Exact and sparse attention compute different
things, so a sentence that recommends one instead of the other always says so.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import format_ratio
from longseq_bench.reports.groups import (
    SAME_TABLE,
    density_suffix,
    group_by_density,
    group_by_ranks,
    ranks_suffix,
    split_by_sparsity,
)
from longseq_bench.reports.sections.findings import describe_limit
from longseq_bench.reports.wording import find_ties, join_names

HIGH_FLOOR_SHARE = 0.9
"""Fraction of floor from which the memory overhead of a maximum is not reported."""


def longest(source: Source) -> Iterator[str]:
    """Recommend the longest of each workload and budget, exact and sparse."""
    unsuccessful = _count_unsuccessful(source)
    for where, group in source.workloads(source.maxima):
        found = [row for row in group if row.max_tokens and row.is_full_pass]
        for kind, rows in split_by_sparsity(found).items():
            for ranks, some in group_by_ranks(rows).items():
                others = unsuccessful.get((_search_settings(some[0]), kind == "sparse"), 0)
                yield _longest(some, f"{kind} attention{ranks_suffix(ranks)}", where, others)


_search_settings = attrgetter("world_size", *(name for name in SAME_TABLE if name != "fit_only"))


def _count_unsuccessful(source: Source) -> dict[tuple[object, bool], int]:
    """Count the searches without a confirmed length, by workload, ranks and sparsity.

    The other rows of an implementation show whether it is sparse where none of its lengths passed.
    """
    sparse_names = {r.implementation for r in chain(source.rows, source.maxima) if r.is_sparse}
    searched: dict[tuple[object, bool], dict[object, bool]] = defaultdict(dict)
    for row in source.maxima:
        known = row.density_achieved is not None
        sparse = row.is_sparse if known else row.implementation in sparse_names
        keep = "all" if row.keep == "nothing" else row.keep
        settings = row.implementation, row.options_key, keep, row.allocator
        named = searched[_search_settings(row), sparse]
        found = bool(row.max_tokens and row.is_full_pass)
        named[settings] = named.get(settings, False) or found
    return {key: sum(not found for found in named.values()) for key, named in searched.items()}


def _longest(rows: Sequence[SearchRow], category: str, where: str, others: int) -> str:
    ordered = sorted(rows, key=lambda row: -row.max_tokens)
    most = ordered[0].max_tokens
    # rows whose bracket does not exclude this length
    ties = [r for r in ordered if r.max_tokens >= most or (r.first_failure or most + 1) > most]
    words = join_names(map(_maximum, ties))
    begin = f"Longest sequence by {category}{where}:"
    if len(ties) > 1:
        return f"{begin} {words}; tie: their brackets overlap."
    if len(ordered) == 1:
        only = f"of {others + 1:,} with a confirmed length" if others else "that was searched"
        return f"{begin} {words}, the only one {only}."
    times = format_ratio(most / ordered[1].max_tokens)
    return f"{begin} {words}, {times} the next, {_maximum(ordered[1])}."


def _maximum(row: SearchRow) -> str:
    density = f", density {format_share(row.density)}" if row.is_sparse else ""
    return f"{row.name} ({row.max_tokens:,} tokens{density}, {describe_limit(row)})"


class RankedLength(NamedTuple):
    """Rows of one length that are compared; each was timed more than once; the fastest is first."""

    tokens: int
    rows: list[SweepRow]

    @property
    def fastest_rows(self) -> list[SweepRow]:
        """The fastest row, and the rows whose intervals overlap with its interval."""
        return find_ties(self.rows, "time_low_s", "time_high_s")


Failed = dict[str, dict[int, str]]
"""Lengths at which a row was not ok, with the status, by name of the row."""


def fastest(source: Source) -> Iterator[str]:
    """Recommend the fastest of each workload by length, exact and sparse."""
    for where, group in source.workloads(source.rows):
        failed = _failed(group)
        for kind, rows in split_by_sparsity(group).items():
            for some in group_by_ranks(rows).values():
                for lengths in _rank_lengths(some):
                    for span in _split_lengths(lengths, failed):
                        yield _fastest(span, kind, where)


def _failed(rows: Sequence[SweepRow]) -> Failed:
    found: Failed = defaultdict(dict)
    for row in rows:
        if row.status != "ok":
            found[row.name][row.tokens] = row.status
    return found


def _rank_lengths(rows: Sequence[SweepRow]) -> list[list[RankedLength]]:
    """Return the compared lengths of each density, in ascending order.

    Only rows of similar density are compared, because density is an input and not a choice. All
    exact rows have the same density.
    """
    timed = [row for row in rows if row.time_s and row.samples > 1]
    timed.sort(key=lambda row: (row.tokens, require(row.time_s)))
    found: list[list[RankedLength]] = []
    for tokens, some in group_by(timed, attrgetter("tokens")).items():
        for similar in group_by_density(some):
            if len(similar) < 2:
                continue
            near = (one for one in found if len(group_by_density([*_rows(one), *similar])) == 1)
            lengths = next(near, None)
            if lengths is None:
                found.append(lengths := [])
            lengths.append(RankedLength(tokens, similar))
    return found


def _rows(lengths: Sequence[RankedLength]) -> list[SweepRow]:
    return [row for length in lengths for row in length.rows]


def _split_lengths(lengths: Sequence[RankedLength], failed: Failed) -> list[list[RankedLength]]:
    """Split lengths into spans with the same fastest rows and without a failure in between."""

    def continues(one: RankedLength, other: RankedLength) -> bool:
        names = [row.name for row in one.fastest_rows]
        failures = (tokens for name in names for tokens in failed.get(name, ()))
        has_failed = any(one.tokens < tokens < other.tokens for tokens in failures)
        return names == [row.name for row in other.fastest_rows] and not has_failed

    spans: list[list[RankedLength]] = []
    for length in lengths:
        if spans and continues(spans[-1][-1], length):
            spans[-1].append(length)
        else:
            spans.append([length])
    return spans


def _fastest(lengths: Sequence[RankedLength], kind: str, where: str) -> str:
    begin, end = format_tokens(lengths[0].tokens), format_tokens(lengths[-1].tokens)
    first, second = lengths[-1].rows[:2]
    ties = lengths[-1].fastest_rows
    category = f"{kind} attention{density_suffix(_rows(lengths))}{ranks_suffix(first.world_size)}"
    span = f"From {begin} to {end} tokens" if len(lengths) > 1 else f"At {end} tokens"
    words = join_names(f"{row.label} ({format_time(row)})" for row in ties)
    at = f" at {end}" if len(lengths) > 1 else ""
    if len(ties) > 1:
        return f"{span}, a tie for the fastest {category}{where}: {words}{at}."
    ratio = format_ratio(require(second.time_s) / require(first.time_s))
    return (
        f"{span}, {first.label} is the fastest {category}{where}: {words}{at}, {ratio} as fast "
        f"as the next, {second.label}."
    )


def overhead(source: Source) -> Iterator[str]:
    """Name the maxima whose floor is less than 90 % of the budget, with their overhead."""
    for where, group in source.workloads(source.maxima):
        inefficient = [
            (share, row)
            for row in group
            if row.is_full_pass and row.limited_by == "memory" and row.max_tokens
            if (share := row.fraction_of_floor) is not None and share < HIGH_FLOOR_SHARE
        ]
        if inefficient:
            words = join_names(
                f"{row.name} ({format_share(1 - share)} overhead: {row.max_tokens:,} of "
                f"{row.floor_tokens:,} tokens)"
                for share, row in sorted(inefficient, key=lambda pair: pair[0])
            )
            yield f"The floor is less than 90 % of the budget{where}: {words}."
