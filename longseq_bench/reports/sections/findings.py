"""Sentences of a summary, each computed from the rows."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import format_time
from longseq_bench.reports.document import format_ratio
from longseq_bench.reports.groups import (
    density_suffix,
    group_by_density,
    group_by_ranks,
    has_several_ranks,
    longest_shared,
    ranks_suffix,
    split_by_sparsity,
)
from longseq_bench.reports.wording import describe_best, find_ties, join_names, limit_findings


def findings(source: Source) -> list[str]:
    """Return the sentences: runs, fastest, least memory, ranks, maxima, wrong outputs.

    At most MAX_FINDINGS of each kind.
    """
    one_rank = index_one_rank(source.maxima)
    kinds = (
        (
            sentence for where, group in source.workloads(source.rows)
            for sentence in (*_of_group(group, where), *_of_ranks(group, where))
        ),
        (describe_search(row, one_rank, source.where(row)) for row in source.maxima),
        _wrong(source.rows), _thrashing(source), _miscounted(source),
    )  # fmt: skip
    return [_runs(source), *(sentence for kind in kinds for sentence in limit_findings(kind))]


def _runs(source: Source) -> str:
    statuses = Counter(record.outcome.status for record in source.records)
    processes = sum(record.processes for record in source.records)
    took = format_seconds(sum(record.wall_s for record in source.records))
    counts = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
    return (
        f"{_count(len(source.records), 'run')} in {_count(processes, 'process', 'processes')} "
        f"took {took}: {counts}."
    )


def _of_group(group: list[SweepRow], where: str) -> Iterator[str]:
    classes = split_by_sparsity(row for row in group if row.time_s)
    for rows in _comparable(classes.get("exact", [])):
        yield from _best(rows, where, " exact" if len(classes) > 1 else "")
    for ranks, some in group_by_ranks(classes.get("sparse", [])).items():
        for rows in _comparable(some):
            yield from _best(rows, where, f" sparse{density_suffix(rows)}{ranks_suffix(ranks)}")
    if longest := join_names(_longest_ok(group), "; "):
        yield f"Longest swept lengths that were ok{where}: {longest}."


def _comparable(rows: list[SweepRow]) -> list[list[SweepRow]]:
    """Return groups of rows of similar density, at the longest length with several in a group."""
    for _, at in sorted(group_by(rows, lambda row: row.tokens).items(), reverse=True):
        if several := [similar for similar in group_by_density(at) if len(similar) > 1]:
            return several
    return []


def _best(rows: list[SweepRow], where: str, kind: str) -> Iterator[str]:
    """Name the fastest row, and the one with the lowest peak.  kind: words for all of the rows."""
    at = f"At {format_tokens(rows[0].tokens)} tokens{where}"
    ordered = sorted(rows, key=lambda row: require(row.time_s))
    first, second = ordered[:2]

    def timed(row: SweepRow) -> str:
        return f"{row.name} ({format_time(row)})"

    if min(first.samples, second.samples) < 2:
        yield (
            f"{at}, {timed(first)} took the least time of {len(rows)}{kind}, the next is "
            f"{timed(second)}; a single pass has no interval, so the order is uncertain."
        )
    else:
        ties = find_ties([r for r in ordered if r.samples > 1], "time_low_s", "time_high_s")
        ratio = format_ratio(require(second.time_s) / require(first.time_s))
        after, verbs = f"{ratio} as fast as the next, ", ("is the fastest", "are the fastest")
        yield f"{at}, {describe_best(ordered, ties, verbs, timed, kind, after)}."

    by_peak = [row for row in rows if row.peak_bytes is not None]
    by_peak.sort(key=lambda row: require(row.peak_bytes))
    if len(by_peak) > 1 and by_peak[0].peak_bytes != by_peak[1].peak_bytes:
        verb = "has the lowest peak memory" + (" a rank" if has_several_ranks(rows) else "")

        def words(row: SweepRow) -> str:
            return f"{row.name} ({format_bytes(require(row.peak_bytes))})"

        yield f"{at}, {describe_best(by_peak, by_peak[:1], (verb, ''), words, kind)}."


def _of_ranks(group: list[SweepRow], where: str) -> Iterator[str]:
    """Describe each number of ranks at the longest length that several rows ran."""
    several = (row for row in group if row.world_size > 1 and row.time_s)
    for ranks, some in group_by_ranks(several).items():
        rows = longest_shared(some)
        at = f"At {format_tokens(rows[0].tokens)} tokens on {ranks} ranks{where}"
        for describe in (_exposed, _scaled, _imbalance):
            if sentence := describe(rows):
                yield f"{at}, {sentence}."


def _exposed(rows: list[SweepRow]) -> str | None:
    """Name the row with the smallest share of exposed communication."""
    known = [r for r in rows if r.exposed_share is not None]
    known.sort(key=lambda r: require(r.exposed_share))

    def words(row: SweepRow) -> str:
        sent = "" if row.bytes_sent is None else f", {format_bytes(row.bytes_sent)} sent a rank"
        return f"{row.label} ({format_share(require(row.exposed_share))} of its time{sent})"

    if len(known) < 2:
        return f"exposed communication: {words(known[0])}" if known else None
    ties = find_ties(known, "exposed_low", "exposed_high")
    verbs = "exposes the least communication", "expose the least communication"
    last = f"; the most: {words(known[-1])}" if len(ties) < len(known) > 2 else ""
    return describe_best(known, ties, verbs, words) + last


def _scaled(rows: list[SweepRow]) -> str | None:
    """Name the row with the highest speed-up from its ranks."""
    known = [r for r in rows if r.speedup is not None]
    known.sort(key=lambda r: -require(r.speedup))

    def words(row: SweepRow) -> str:
        efficiency = format_share(require(row.efficiency))
        faster = format_ratio(require(row.speedup))
        return f"{row.label} ({faster} as fast as one rank, {efficiency} efficiency)"

    if len(known) < 2:
        return f"only {words(known[0])} was also timed on one rank" if known else None
    ties = find_ties(known, "speedup_low", "speedup_high", largest=True)
    last = f"; the worst: {words(known[-1])}" if len(ties) < len(known) > 2 else ""
    return describe_best(known, ties, ("scales best", "scale best"), words) + last


def _imbalance(rows: list[SweepRow]) -> str | None:
    """Name the row whose ranks' peaks differ most, if the difference is visible."""
    worst = find_largest_imbalance(rows)
    if worst is None:
        return None
    largest, smallest = require(worst.peak_bytes), worst.min_peak_bytes or 0
    return (
        f"the memory imbalance is largest with {worst.label}: peaks of its ranks from "
        f"{format_bytes(smallest)} to {format_bytes(largest)} "
        f"({format_ratio(require(worst.imbalance))})"
    )


def find_largest_imbalance(rows: Iterable[SweepRow]) -> SweepRow | None:
    """Return the row whose ranks' peaks differ most; None where no difference is visible."""
    known = [row for row in rows if row.imbalance is not None]
    worst = max(known, key=lambda row: require(row.imbalance), default=None)
    if worst is None or format_ratio(require(worst.imbalance)) == format_ratio(1.0):
        return None
    return worst


def _longest_ok(group: list[SweepRow]) -> Iterator[str]:
    """Yield the longest length of each row that was ok, and the first failed one above it."""
    for name, rows in group_by(sorted(group, key=lambda r: r.tokens), lambda r: r.name).items():
        passed = max((row.tokens for row in rows if row.status == "ok"), default=0)
        failed = [row for row in rows if row.status != "ok" and row.tokens > passed]
        then = f" ({failed[0].status} at {format_tokens(failed[0].tokens)})" if failed else ""
        if passed:
            yield f"{name} {format_tokens(passed)}{then}"


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


def _wrong(rows: list[SweepRow]) -> Iterator[str]:
    for row in rows:
        if row.status == "wrong":
            yield (
                f"{row.name} gave a wrong output at {format_tokens(row.tokens)} tokens "
                f"({row.reason or 'no reason was recorded'}); no speed is shown for it."
            )


def _thrashing(source: Source) -> Iterator[str]:
    rows: list[SweepRow | SearchRow] = [*source.rows, *source.maxima]
    for row in rows:
        if retries := row.alloc_retries:
            yield (
                f"{row.name} at {format_tokens(row.tokens)} tokens: the CUDA allocator freed its "
                f"cache and retried {_count(round(retries), 'time')} (thrashing)."
            )


def _miscounted(source: Source) -> Iterator[str]:
    for row in source.rows:
        for (counted, stated), unlike in group_by(row.bytes_unlike or (), lambda u: u[1:]).items():
            ranks = ", ".join(str(rank) for rank, *_ in unlike)
            which = f"rank {ranks}" if len(unlike) == 1 else f"each of ranks {ranks}"
            yield (
                f"{row.name} at {format_tokens(row.tokens)} tokens{source.where(row)} sent "
                f"{counted:,} B from {which} in a pass; the formula gives {stated:,} B."
            )


def _count(n: int, one: str, several: str = "") -> str:
    return f"{n:,} {one if n == 1 else several or one + 's'}"
