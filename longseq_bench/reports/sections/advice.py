"""Recommendations of a first screen: which attention at which length, from measured rows alone.

Rows are those of the workload that most implementations share. A row is called faster only where
its interval is apart from the other's. Sparse attention is set against exact attention only with
the share of the pairs that it leaves out.
"""

from collections.abc import Iterator
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import format_ratio
from longseq_bench.reports.groups import (
    USUAL,
    ends_first,
    find_ties,
    format_range,
    group_by_workload,
    in_brackets,
    join_names,
    most_shared,
    name_status,
    split_by_sparsity,
)
from longseq_bench.reports.sections.ranks import FASTER, SLOWER, find_compared, find_gains, middle

MAX_RECOMMENDED = 3
"""Names among which a sentence leaves the choice; more are no recommendation."""
FARTHER = 1.25
"""Factor by which sparse attention must get farther than exact attention to be named for it."""


def _rows(source: Source) -> list[SweepRow]:
    return most_shared(row for row in source.rows if row.is_full_pass)


def _timed(source: Source) -> dict[int, list[SweepRow]]:
    """Return the steady rows timed more than once by length, each from the fastest on."""
    timed = (row for row in _rows(source) if row.is_ok and row.time_s and row.samples > 1)
    steady = (row for row in timed if not row.unstable)
    found = group_by(sorted(steady, key=lambda row: require(row.time_s)), attrgetter("tokens"))
    return dict(sorted(found.items()))


def _best(rows: list[SweepRow]) -> list[SweepRow]:
    """Return the fastest of timed rows and its ties, a usual one first, then the surest."""
    ties = find_ties(rows, "time_low_s", "time_high_s") if rows else []
    return sorted(ties, key=lambda row: (row.label not in USUAL, ends_first(row)))


def fastest_exact(source: Source) -> Iterator[str]:
    """Yield the fastest exact attention of each range of lengths, the longest ranges first."""
    ranges: list[tuple[list[str], list[int], str]] = []
    for tokens, rows in _timed(source).items():
        exact = [row for row in rows if not row.is_sparse]
        ties = _best(exact)
        slower = next((row for row in exact if row not in ties), None)
        if slower is None:
            continue
        names, lengths = [row.name for row in ties], [tokens]
        if ranges and (both := [name for name in ranges[-1][0] if name in names]):
            names, lengths = both, [*ranges.pop()[1], tokens]
        best = next(row for row in ties if row.name == names[0])
        ratio = format_ratio(require(slower.time_s) / require(best.time_s))
        ending = f"{slower.name} takes {ratio} the time at {format_tokens(tokens)}"
        ranges.append((names, lengths, ending + source.where(best)))
    for names, lengths, ending in reversed(ranges):
        if len(names) <= MAX_RECOMMENDED:
            at = format_range(lengths, lambda value: format_tokens(int(value)))
            unbeaten = " or ".join(names)
            yield f"Exact, {at} tokens: none is faster for certain than {unbeaten}; {ending}."


def _pairs_seen(row: Row) -> float:
    """Return the share of the pairs that a row computes; of the blocks where that is unknown."""
    pairs = row.token_density if isinstance(row, SweepRow) else None
    return row.density if pairs is None else pairs


def _densest(rows: list[SweepRow]) -> SweepRow:
    return max(rows, key=_pairs_seen)


def _left_out(row: Row) -> str:
    return f"{format_share(1 - _pairs_seen(row))} of the pairs"


def sparse_over_exact(source: Source) -> Iterator[str]:
    """Yield what the quickest and the densest sparse attention gain over the fastest exact one.

    They are compared at the longest length at which both were timed, on as many ranks.
    """
    for tokens, rows in reversed(_timed(source).items()):
        exact = next(iter(_best([row for row in rows if not row.is_sparse])), None)
        sparse = [r for r in rows if r.is_sparse and exact and r.world_size == exact.world_size]
        if exact is None or not sparse:
            continue
        if faster := [r for r in sparse if require(r.time_high_s) < require(exact.time_low_s)]:
            chosen = {row.name: row for row in (min(faster, key=ends_first), _densest(faster))}
            gains = [
                f"{row.name} is {format_ratio(require(exact.time_s) / require(row.time_s))} as "
                f"fast as {exact.name}, without {_left_out(row)}"
                for row in chosen.values()
            ]
            words = f"{'; '.join(gains)}{source.where(exact)}"
            yield f"Sparse, {format_tokens(tokens)} tokens: {words}."
        return


def beyond_exact(source: Source) -> Iterator[str]:
    """Yield the lengths that only sparse attention passed, under the same limits."""
    swept = _rows(source)
    passed = [row for row in swept if row.is_ok]
    exact = max((r for r in passed if not r.is_sparse), key=attrgetter("tokens"), default=None)
    if exact:
        longer = [r for r in swept if r.name == exact.name and r.tokens > exact.tokens]
        failed = min(longer, key=attrgetter("tokens"), default=None)
        sparse = [r for r in passed if r.is_sparse and failed and r.tokens >= failed.tokens]
        if failed and sparse:
            most = max(row.tokens for row in sparse)
            best = _densest([row for row in sparse if row.tokens == most])
            why = f"{name_status(failed.status)} at {format_tokens(failed.tokens)}"
            yield _farther(source, exact, exact.tokens, why, best, best.tokens)
    for group in group_by_workload(row for row in source.maxima if row.is_full_pass):
        kinds = split_by_sparsity(row for row in group if row.max_tokens)
        if len(kinds) == 2:
            one, other = (max(rows, key=attrgetter("max_tokens")) for rows in kinds.values())
            length, most = one.max_tokens, other.max_tokens
            if one.limited_by and most > FARTHER * one.fails_from:
                yield _farther(source, one, length, one.limited_by, other, most)


def _farther(source: Source, exact: Row, passed: int, why: str, sparse: Row, longest: int) -> str:
    return (
        f"Exact attention passed up to {format_tokens(passed)} tokens ({exact.name}: {why}); "
        f"{sparse.name} passed {format_tokens(longest)}, without {_left_out(sparse)}"
        f"{source.where(sparse)}."
    )


def several_ranks(source: Source) -> Iterator[str]:
    """Yield which attention is faster on several ranks than on one, and which is slower."""
    compared = {row.ranks_key for row in most_shared(find_compared(source))}
    rows = [row for row in source.rows if row.ranks_key in compared]
    gains = find_gains(rows)
    if not rows or not gains:
        return
    faster, slower = ([g for g in gains if g.verdict == one] for one in (FASTER, SLOWER))
    since = (
        f"{one.name} from {format_tokens(one.since or one.tokens)} tokens "
        f"({format_ratio(middle(one.ratio))})"
        for one in faster
    )
    words = f"Faster on several ranks than on one: {join_names(since) or 'none'}"
    if slower:
        words += f"; slower: {join_names(gain.name for gain in slower)}"
    yield f"{words}{in_brackets(source.workload(rows[0]))}."
