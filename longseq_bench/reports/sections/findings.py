"""Sentences of a summary, each computed from the rows."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping

from longseq_bench.analysis.row import R, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import format_cell
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import (
    density_suffix,
    group_by_density,
    group_by_ranks,
    group_by_workload,
    has_several_ranks,
    ranks_suffix,
    split_by_sparsity,
)

MOST_SAID = 50
"""Maximum number of sentences of one kind, and of names in one sentence."""


def findings(source: Source) -> list[str]:
    """Return the sentences: runs, fastest, least memory, ranks, maxima, wrong outputs.

    At most MOST_SAID sentences of each kind.
    """
    kinds = (
        _of_groups(source), _of_maxima(source), _wrong(source.rows), _thrashing(source),
        _miscounted(source),
    )  # fmt: skip
    return [
        _what_was_run(source),
        *(sentence for kind in kinds for sentence in limit_sentences(kind)),
    ]


def limit_sentences(sentences: Iterable[str]) -> list[str]:
    """Return the first MOST_SAID sentences of one kind, then the number of further ones."""
    said = list(sentences)
    more = len(said) - MOST_SAID
    if more <= 0:
        return said
    return [*said[:MOST_SAID], f"… and {more:,} more of this kind; the tables have them."]


def join_names(names: Iterable[str], between: str = ", ") -> str:
    """Return the first MOST_SAID names of a sentence, then the number of further ones."""
    named = list(names)
    more = len(named) - MOST_SAID
    return between.join(named if more <= 0 else [*named[:MOST_SAID], f"… and {more:,} more"])


def _what_was_run(source: Source) -> str:
    statuses = Counter(record.outcome.status for record in source.records)
    processes = sum(record.processes for record in source.records)
    took = format_seconds(sum(record.wall_s for record in source.records))
    counts = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
    return (
        f"{_count(len(source.records), 'run')} in {_count(processes, 'process', 'processes')} "
        f"took {took}: {counts}."
    )


def _of_groups(source: Source) -> Iterator[str]:
    for group in group_by_workload(source.rows):
        where = source.workload(group[0])
        yield from _of_group(group, where)
        yield from _of_ranks(group, where)


def _of_group(group: list[SweepRow], where: str) -> Iterator[str]:
    timed = [row for row in group if row.status == "ok" and row.time_s]
    classes = split_by_sparsity(timed)
    for rows in _shared(classes.get("exact", [])):
        yield from _best(rows, where, " exact" if len(classes) > 1 else "")
    for ranks, some in group_by_ranks(classes.get("sparse", [])).items():
        for rows in _shared(some):
            yield from _best(rows, where, f" sparse{density_suffix(rows)}{ranks_suffix(ranks)}")
    if longest := _longest_ok(group):
        yield f"The longest lengths swept that were ok ({where}): {longest}."


def _shared(rows: list[SweepRow]) -> list[list[SweepRow]]:
    """Return groups of rows of similar density, at the longest length with several in a group."""
    by_length: dict[int, list[SweepRow]] = defaultdict(list)
    for row in rows:
        by_length[row.tokens].append(row)
    for _, at in sorted(by_length.items(), reverse=True):
        if several := [alike for alike in group_by_density(at) if len(alike) > 1]:
            return several
    return []


def _best(rows: list[SweepRow], where: str, kind: str) -> Iterator[str]:
    at = f"At {format_tokens(rows[0].tokens)} tokens ({where})"
    yield f"{at}, {_fastest(rows, kind)}"
    if lean := _leanest(rows, kind):
        yield f"{at}, {lean}"


def _fastest(rows: list[SweepRow], kind: str) -> str:
    """Name the fastest row; rows whose intervals overlap with it are a tie.

    kind: words for what all rows are.
    """
    ordered = sorted(rows, key=lambda row: require(row.time_s))
    first, second = ordered[:2]
    one, two = (
        f"{r.name} ({format_cell(time_with_interval(r), 'seconds')})" for r in (first, second)
    )
    if min(first.samples, second.samples) < 2:
        return (
            f"{one} took least of {len(rows)}{kind}, the next is {two}; single passes are among "
            f"them, so how far off that may be is not known."
        )
    alike = [
        r for r in ordered if r.samples > 1 and require(r.time_low_s) <= require(first.time_high_s)
    ]
    if len(alike) > 1:
        names = [f"{r.name} ({format_cell(time_with_interval(r), 'seconds')})" for r in alike]
        words = f"{', '.join(names[:-1])} and {names[-1]}"
        return f"{words} can't be told apart: their intervals overlap."
    ratio = format_cell(require(second.time_s) / require(first.time_s), "ratio")
    return f"{one} is the fastest of {len(rows)}{kind}, {ratio} as fast as the next, {two}."


def _leanest(rows: list[SweepRow], kind: str) -> str | None:
    known = sorted(
        (r for r in rows if r.peak_bytes is not None), key=lambda r: require(r.peak_bytes)
    )
    if len(known) < 2 or known[0].peak_bytes == known[1].peak_bytes:
        return None
    one, two = (f"{r.name} ({format_bytes(require(r.peak_bytes))})" for r in known[:2])
    a_rank = " a rank" if has_several_ranks(rows) else ""
    return f"{one} has the lowest peak memory{a_rank} of {len(known)}{kind}, the next is {two}."


def _of_ranks(group: list[SweepRow], where: str) -> Iterator[str]:
    """Describe each number of ranks at the longest length that several rows ran."""
    by_ranks: dict[int, dict[int, list[SweepRow]]] = defaultdict(lambda: defaultdict(list))
    for row in group:
        if row.world_size > 1 and row.time_s:
            by_ranks[row.world_size][row.tokens].append(row)
    for ranks, by_length in sorted(by_ranks.items()):
        shared = [tokens for tokens, rows in by_length.items() if len(rows) > 1]
        tokens = max(shared or by_length)
        at = f"At {format_tokens(tokens)} tokens on {ranks} ranks ({where})"
        for said in (_exposed, _scaled, _uneven):
            if sentence := said(by_length[tokens]):
                yield f"{at}, {sentence}"


def _exposed(rows: list[SweepRow]) -> str | None:
    """Name the row with the smallest share of exposed communication."""
    known = [r for r in rows if r.exposed_share is not None]
    known.sort(key=lambda r: require(r.exposed_share))
    words = {id(r): f"{r.label} ({_exposed_words(r)})" for r in known}
    if len(known) < 2:
        return f"communication shows in {words[id(known[0])]}." if known else None
    most = _bound(known[0], "exposed_high", 1.0)
    alike = [r for r in known if _bound(r, "exposed_low", 0.0) <= most]
    last = f"; most, {words[id(known[-1])]}" if len(alike) < len(known) > 2 else ""
    if len(alike) > 1:
        names = join_names(words[id(r)] for r in alike)
        return f"these expose least communication and can't be told apart: {names}{last}."
    one, two = (words[id(r)] for r in known[:2])
    return f"{one} exposes least communication of {len(known)}, the next is {two}{last}."


def _exposed_words(row: SweepRow) -> str:
    share = f"{format_share(require(row.exposed_share))} of its time"
    sent = row.bytes_sent
    return share if sent is None else f"{share}, {format_bytes(sent)} sent a rank"


def _scaled(rows: list[SweepRow]) -> str | None:
    """Name the row with the highest speed-up from its ranks."""
    known = [r for r in rows if r.speedup is not None]
    known.sort(key=lambda r: -require(r.speedup))
    words = {id(r): f"{r.label} ({_scaled_words(r)})" for r in known}
    if len(known) < 2:
        return f"{words[id(known[0])]} alone was run on one rank too." if known else None
    least = _bound(known[0], "speedup_low", 0.0)
    alike = [r for r in known if _bound(r, "speedup_high", math.inf) >= least]
    last = f"; worst, {words[id(known[-1])]}" if len(alike) < len(known) > 2 else ""
    if len(alike) > 1:
        names = join_names(words[id(r)] for r in alike)
        return f"these scale best and can't be told apart: {names}{last}."
    one, two = (words[id(r)] for r in known[:2])
    return f"{one} scales best of {len(known)}, the next is {two}{last}."


def _bound(row: SweepRow, name: str, otherwise: float) -> float:
    """Return a bound of a row, or the widest possible one for a single sample."""
    value: float | None = getattr(row, name)
    return otherwise if value is None else value


def _scaled_words(row: SweepRow) -> str:
    faster = format_cell(row.speedup, "ratio")
    return f"{faster} as fast as one rank, {format_share(require(row.efficiency))} efficiency"


def _uneven(rows: list[SweepRow]) -> str | None:
    """Name the row whose ranks' peaks differ most, if the difference is visible."""
    known = [row for row in rows if row.imbalance is not None]
    if not known:
        return None
    worst = max(known, key=lambda row: require(row.imbalance))
    ends = (
        f"{format_bytes(require(worst.peak_bytes))} and {format_bytes(worst.least_peak_bytes or 0)}"
    )
    apart = format_cell(worst.imbalance, "ratio")
    if apart == format_cell(1.0, "ratio"):
        return None
    return (
        f"memory is least even with {worst.label}, whose ranks' largest and least peak are "
        f"{ends} ({apart})."
    )


def _longest_ok(group: list[SweepRow]) -> str:
    passed: dict[str, int] = {}
    failed: dict[str, SweepRow] = {}
    for row in sorted(group, key=lambda row: int(row.tokens)):
        if row.status == "ok":
            passed[row.name] = row.tokens
    for row in sorted(group, key=lambda row: -int(row.tokens)):
        if row.status != "ok" and row.tokens > passed.get(row.name, 0):
            failed[row.name] = row
    reached = (
        f"{name} {format_tokens(tokens)}{_then(failed.get(name))}"
        for name, tokens in passed.items()
    )
    return join_names(reached, "; ")


def _then(failure: SweepRow | None) -> str:
    if failure is None:
        return ""
    return f" ({failure.status} at {format_tokens(failure.tokens)})"


def _of_maxima(source: Source) -> Iterator[str]:
    for row in source.maxima:
        yield describe_search(row, source.maxima, source.workload(row))


def index_one_rank(maxima: Iterable[R]) -> Mapping[Hashable, R]:
    """Index the maxima on one rank by search, to compare those on several ranks with them."""
    alone: dict[Hashable, R] = {}
    for row in maxima:
        if row.world_size == 1:
            alone.setdefault(row.ranks_key, row)
    return alone


def describe_search(row: SearchRow, maxima: Iterable[SearchRow], where: str = "") -> str:
    """Return the answer of a search as a sentence; where: its workload, if not stated nearby."""
    name, where = row.name, f" ({where})" if where else ""
    if not row.max_tokens:
        return f"{name} passed at no length{where}; {describe_limit(row)}."
    if row.fit_only:
        tokens = format_tokens(row.max_tokens)
        return f"{name}: memory holds {tokens} tokens{where}; nothing was computed there."
    floor = ""
    if row.fraction_of_floor is not None:
        floor = f", {format_share(row.fraction_of_floor)} of the floor"
    again = row.confirmations
    sure = (
        f"confirmed by {_count(again, 'further run')}" if again else "not confirmed by a second run"
    )
    return (
        f"{name} takes {format_tokens(row.max_tokens)} tokens{where}{floor}"
        f"{_grown(row, index_one_rank(maxima))}, {sure}; {describe_limit(row)}."
    )


def _grown(row: SearchRow, alone: Mapping[Hashable, SearchRow]) -> str:
    """Describe the maximum relative to that on one rank, if one rank was searched too."""
    if row.world_size == 1:
        return ""
    one = alone.get(row.ranks_key)
    if one is None or not one.max_tokens:
        return ""
    return f", {format_cell(row.max_tokens / one.max_tokens, 'ratio')} one rank's"


def describe_limit(row: SearchRow) -> str:
    """Describe the cause that ended a search, and its length."""
    if row.first_failure is None:
        return "no longer length failed, so this is where the search stopped, not a limit"
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
            tokens = format_tokens(row.tokens)
            yield (
                f"{row.name} at {tokens} tokens made the allocator give back its cached memory "
                f"and ask again {_count(round(retries), 'time')} (thrashing)."
            )


def _miscounted(source: Source) -> Iterator[str]:
    for row in source.rows:
        unlike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for rank, counted, stated in row.bytes_unlike or ():
            unlike[counted, stated].append(str(rank))
        for (counted, stated), ranks in unlike.items():
            which = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {', '.join(ranks)}"
            yield (
                f"{row.name} at {format_tokens(row.tokens)} tokens "
                f"({source.workload(row)}) sent {counted:,} B from {which} in a "
                f"pass; its formula says {stated:,} B."
            )


def _count(n: int, one: str, several: str = "") -> str:
    return f"{n:,} {one if n == 1 else several or one + 's'}"
