"""Recommendations: rules over the rows of a report, each with the figures that it rests on.

Nothing here knows an implementation by its name: other rows give other sentences. Exact attention
and sparse attention compute different things, so neither is ever recommended in the other's place
without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from longseq_bench.reports.base import Source
from longseq_bench.reports.document import format_cell
from longseq_bench.reports.findings import first_named, limit_words, time_of
from longseq_bench.reports.groups import (
    exact_and_sparse,
    grouped,
    is_sparse,
    name_of,
    workload_words,
)
from longseq_bench.table import Row
from longseq_bench.units import format_share, format_tokens

Bounds = tuple[float, float, float]
"""The least, the median and the most that intervals leave possible."""


MOST_FLOOR = 0.9
"""Of a budget that memory limits: what reaches more of the floor wastes nothing worth a word."""


def longest(source: Source) -> Iterator[str]:
    """Of each workload and budget, which takes the longest sequence: exact, and sparse."""
    for group in grouped(source.maxima):
        where = workload_words(group[0], source.machines)
        for what, rows in exact_and_sparse(group).items():
            for ranks, some in _by_ranks(rows).items():
                found = [row for row in some if row["max_tokens"] and confirmed(row)]
                if found:
                    yield _longest(found, f"{what} attention{_on(ranks)}", where)


def confirmed(row: Row) -> bool:
    """Whether a maximum is one of whole passes that left their inputs alone."""
    return not row["fit_only"] and row["keep"] != "nothing"


def _longest(rows: Sequence[Row], what: str, where: str) -> str:
    ordered = sorted(rows, key=lambda row: -int(row["max_tokens"]))
    first = ordered[0]
    alike = [row for row in ordered if _reaches(row, first["max_tokens"])]
    words = first_named(f"{name_of(r)} ({_maximum_words(r)})" for r in alike)
    begin = f"For the longest sequence by {what} ({where}):"
    if len(alike) > 1:
        return f"{begin} {words}; their brackets overlap, so none is named the longest."
    rest = ordered[len(alike) :]
    if not rest:
        return f"{begin} {words}, the only one that was searched."
    times = format_cell(first["max_tokens"] / rest[0]["max_tokens"], "ratio")
    return f"{begin} {words}, {times} the next, {name_of(rest[0])} ({_maximum_words(rest[0])})."


def _reaches(row: Row, tokens: int) -> bool:
    """Whether a bracket leaves it possible that this length fits."""
    failed = row["first_failure"]
    return bool(row["max_tokens"] >= tokens or failed is None or failed > tokens)


def _maximum_words(row: Row) -> str:
    density = row["density_achieved"]
    seen = f", density {format_share(density)}" if density is not None and density < 1 else ""
    return f"{row['max_tokens']:,} tokens{seen}, {limit_words(row)}"


def fastest(source: Source) -> Iterator[str]:
    """Of each workload, which is the fastest over which lengths: exact, and sparse."""
    for group in grouped(source.rows):
        where = workload_words(group[0], source.machines)
        for what, rows in exact_and_sparse(group).items():
            for ranks, some in _by_ranks(rows).items():
                for density, alike in _by_sparsity(some).items():
                    kind = f"{what} attention{density}{_on(ranks)}"
                    yield from _ranges(alike, kind, where)


def _by_ranks(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Which runs on how many ranks is asked for, not chosen: rows of as many are compared."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["world_size"]].append(row)
    return dict(sorted(found.items()))


def _on(ranks: int) -> str:
    return f" on {ranks} ranks" if ranks > 1 else ""


def _by_sparsity(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """How much is skipped is asked for too: rows that were asked to skip as much are compared."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        asked = row["options"].get("sparsity")
        found["" if asked is None else f" of sparsity {float(asked):.6g}"].append(row)
    return found


def _ranges(rows: Sequence[Row], what: str, where: str) -> Iterator[str]:
    """One sentence a run of lengths with the same winners."""
    best = [(tokens, winners) for tokens, winners in _winners(rows) if winners]
    for names, run in groupby(best, key=lambda one: [row["label"] for row in one[1]]):
        lengths = list(run)
        first, (last, winners) = lengths[0][0], lengths[-1]
        span = format_tokens(last)
        span = (
            f"From {format_tokens(first)} to {span} tokens"
            if first != last
            else f"At {span} tokens"
        )
        words = first_named(
            f"{row['label']} ({format_cell(time_of(row), 'seconds')})" for row in winners
        )
        at = f" at {format_tokens(last)}" if first != last else ""
        if len(names) > 1:
            yield f"{span}, the fastest {what} can't be told apart ({where}): {words}{at}."
        else:
            after = _next(rows, last, winners[0])
            yield f"{span}, {names[0]} is the fastest {what} ({where}): {words}{at}{after}."


def _winners(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    """At each length that two or more were timed at: the fastest, and all that can't be told from
    it. Single passes say nothing of their spread, so they take no part."""
    for tokens, timed in sorted(_timed(rows).items()):
        if len(timed) > 1:
            yield tokens, [row for row in timed if row["time_low_s"] <= timed[0]["time_high_s"]]


def _timed(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows by length, the fastest first, of those that were timed more than once."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: float(row["time_s"] or 0)):
        if row["time_s"] and row["samples"] > 1:
            found[row["tokens"]].append(row)
    return found


def _next(rows: Sequence[Row], tokens: int, winner: Row) -> str:
    at = [row for row in rows if row["tokens"] == tokens and row is not winner]
    after = _timed(at)[tokens][0]
    ratio = format_cell(after["time_s"] / winner["time_s"], "ratio")
    return f", {ratio} as fast as the next, {after['label']}"


def ranks_pay(source: Source) -> Iterator[str]:
    """From which length several ranks are faster than one, and which never are: a workload at a
    time."""
    several = [r for r in source.rows if r["world_size"] > 1 and r["speedup_low"] is not None]
    yield from _paying(source, several, "one rank", _speedup)


def sparse_pays(source: Source) -> Iterator[str]:
    """From which length sparse attention is faster than dense on the same inputs."""
    beside = [r for r in source.rows if is_sparse(r) and r["share_low"] is not None]
    yield from _paying(source, beside, "dense attention", _over_dense)


def _paying(
    source: Source, rows: Sequence[Row], against: str, bounds: Callable[[Row], Bounds]
) -> Iterator[str]:
    for group in grouped(rows):
        where = workload_words(group[0], source.machines)
        told: dict[str, list[str]] = defaultdict(list)
        for series in _series(group):
            verdict, words = _pays({row["tokens"]: bounds(row) for row in series}, against)
            told[verdict].append(f"{name_of(series[0])} ({words})")
        for verdict, names in sorted(told.items()):
            yield f"{verdict} ({where}): {first_named(names)}."


def _series(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in length alone, by ascending length."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        found[name_of(row)].append(row)
    return list(found.values())


def _speedup(row: Row) -> Bounds:
    return row["speedup_low"], row["speedup"], row["speedup_high"]


def _over_dense(row: Row) -> Bounds:
    return (
        row["dense_low_s"] / row["time_high_s"],
        row["speed_over_dense"],
        row["dense_high_s"] / row["time_low_s"],
    )


def _pays(told: dict[int, Bounds], against: str) -> tuple[str, str]:
    """A verdict and its figures: faster from the shortest length above which every one that was
    run is, by its interval."""
    gains = [n for n in told if all(told[m][0] > 1 for m in told if m >= n)]
    shown = sorted({min(gains), max(told)} if gains else {max(told)})
    words = ", ".join(
        f"{format_cell(told[n][1], 'ratio')} at {format_tokens(n)} tokens" for n in shown
    )
    if gains:
        since = ", the shortest timed more than once" if min(gains) == min(told) else ""
        return f"Faster than {against} from {format_tokens(min(gains))} tokens{since}", words
    if all(high < 1 for _, _, high in told.values()):
        return f"Slower than {against} at every length timed more than once", words
    return (
        f"Not known to be faster than {against} at the longest length timed more than once",
        words,
    )


def leanest(source: Source) -> Iterator[str]:
    """Of each workload, which maxima leave more than a tenth of the budget to other things than
    the floor, where memory limits them."""
    for group in grouped(source.maxima):
        wasteful = [row for row in group if confirmed(row) and _wastes(row)]
        if wasteful:
            where = workload_words(group[0], source.machines)
            words = first_named(
                f"{name_of(row)} ({format_share(1 - row['fraction_of_floor'])}: "
                f"{row['max_tokens']:,} tokens of {row['floor_tokens']:,})"
                for row in sorted(wasteful, key=lambda row: float(row["fraction_of_floor"]))
            )
            yield f"Leave their budget to other things than the floor ({where}): {words}."


def _wastes(row: Row) -> bool:
    share = row["fraction_of_floor"]
    by_memory = row["limited_by"] == "memory" and row["max_tokens"] and share is not None
    return bool(by_memory and share < MOST_FLOOR)
