"""Charts of searches: longest lengths as bars under each limit, and against ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

from longseq_bench.analysis.labels import MAX_LABEL, mask_words
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.charts import (
    MAX_CHARTS,
    MAX_FACETS,
    NAMES,
    build_chart,
    guide_line,
    join_words,
    of_each_workload,
)
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point
from longseq_bench.reports.groups import SAME_TABLE, find_varying, group_by_workload

MAX_BARS = 8
"""Maximum number of bars of a facet."""
_LIMIT = ("fingerprint", "device", "mode", "memory_budget", "time_budget", "fit_only")
_MAXIMA_KINDS = {
    "maxima": ("Max tokens", "Longest lengths"),
    "maxima-over-inputs": ("Max tokens", "Longest lengths in place (outputs overwrite inputs)"),
    "maxima-fits": (
        "Tokens that fit",
        "Longest lengths that fit in memory (fit only: not checked or timed)",
    ),
}
"""Kinds of maxima, confirmed ones first: name of the axis, and start of the title.
A chart has maxima of one kind only."""
_FLOOR = "the length whose q, k, v and output alone fill the memory budget, computed"


def _by_kind(rows: Iterable[SearchRow]) -> Iterator[tuple[str, list[SearchRow]]]:
    """Yield the maxima of each kind."""

    def kind(row: SearchRow) -> str:
        if row.fit_only:
            return "maxima-fits"
        return "maxima" if row.is_full_pass else "maxima-over-inputs"

    found = group_by(rows, kind)
    yield from ((kind, found[kind]) for kind in _MAXIMA_KINDS if kind in found)


def by_limit(source: Source) -> list[Chart]:
    """Chart longest lengths as sorted bars, with the theoretical maximum as a tick.

    A facet has the searches of one machine, mode and limits, at most MAX_BARS of them; those with
    the longest lengths come first, MAX_FACETS in a chart.
    """
    found: list[Chart] = []
    for kind, rows in _by_kind(source.maxima):
        groups = [group for group in _split_by_limit(rows) if any(r.max_tokens for r in group)]
        groups.sort(key=lambda group: -max(r.max_tokens for r in group))
        for i in range(0, len(groups), MAX_FACETS):
            found += filter(None, [_maxima(kind, source, groups[i : i + MAX_FACETS])])
    return found[:MAX_CHARTS]


def _split_by_limit(rows: Sequence[SearchRow]) -> Iterator[list[SearchRow]]:
    """Yield the rows of each limit; of each workload where names of bars would be too long."""
    for group in group_by(rows, attrgetter(*_LIMIT)).values():
        names = map(_name_bars(group), group)
        yield from [group] if max(map(len, names)) <= MAX_LABEL else group_by_workload(group)


def _name_bars(rows: Sequence[SearchRow]) -> Callable[[SearchRow], str]:
    """Return a function that names a row, with the fields of its workload that differ here."""
    varying = find_varying(rows)

    def describe(row: Row, field: str) -> str:
        value = getattr(row, field)
        if field == "mask":
            return mask_words(value)
        return str(value) if field == "dtype" else f"{field.replace('_', ' ')} {value}"

    differing = [field for field in SAME_TABLE if field in varying]
    return lambda row: join_words(row.name, *(describe(row, field) for field in differing))


def _maxima(kind: str, source: Source, groups: Sequence[Sequence[SearchRow]]) -> Chart | None:
    """Chart groups of rows as facets; the title has what they share."""
    shared = frozenset(SAME_TABLE) - find_varying([row for rows in groups for row in rows])
    points, failures, floors = list[Point](), list[Mark](), list[Point]()
    for rows in groups:
        name, order = _name_bars(rows), sorted(rows, key=lambda row: -row.max_tokens)
        own = frozenset(SAME_TABLE) - find_varying(rows) - shared
        facet = source.workload(rows[0], own)
        drawn = [row for row in order if row.max_tokens][:MAX_BARS]
        points += [_longest(name(row), row, facet) for row in drawn]
        floors += [_floor(name(row), row, facet) for row in drawn if row.floor_tokens]
        failures += [
            Mark(name(row), 0, f"no length passed, limited by {row.limited_by}", facet)
            for row in _failed_all(rows)[:MAX_BARS]
        ]
    axis, title = _MAXIMA_KINDS[kind]
    if any(sum(row.max_tokens > 0 for row in rows) > MAX_BARS for rows in groups):
        title += f", the longest {MAX_BARS} of each limit"
    where, y = source.workload(groups[0][0], shared), Axis(axis, "tokens")
    guide = Guide("theoretical maximum", tuple(floors), _FLOOR)
    return build_chart(kind, where, NAMES, y, points, failures, guide, "bars", title)


def longest_bars(named: Mapping[str, SearchRow]) -> Chart | None:
    """Chart longest lengths as bars, for a first screen.

    named: rows by the names of their bars, which state what differs among them.
    """
    found = {name: row for name, row in named.items() if row.max_tokens}
    points = [_longest(name, row) for name, row in found.items()]
    floors = tuple(_floor(name, row) for name, row in found.items() if row.floor_tokens)
    guide, y = Guide("theoretical maximum", floors, _FLOOR), Axis("Max tokens", "tokens")
    return build_chart("maxima", "", NAMES, y, points, guide=guide, shape="bars")


def _longest(name: str, row: SearchRow, facet: str = "") -> Point:
    return Point(name, 0, row.max_tokens, words=f"limited by {row.limited_by}", facet=facet)


def _floor(name: str, row: SearchRow, facet: str = "") -> Point:
    return Point(name, 0, require(row.floor_tokens), facet=facet)


def _failed_all(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return supported searches in which no length passed."""
    return [r for r in rows if not r.max_tokens and r.limited_by != "unsupported"]


def ran_on_several(maxima: Sequence[SearchRow]) -> list[SearchRow]:
    """Return the maxima of implementations that were searched on several ranks."""
    several = {row.label for row in maxima if row.world_size > 1}
    return [row for row in maxima if row.label in several]


def over_ranks(source: Source, maxima: Iterable[SearchRow] | None = None) -> list[Chart]:
    """Chart longest lengths against ranks, one chart per workload and kind of maximum.

    The guide is the longest on one rank times the ranks; without one rank, the floor.

    maxima: those of the source if None.
    """
    found = []
    for kind, rows in _by_kind(source.maxima if maxima is None else maxima):
        found += of_each_workload(source, rows, partial(_over_ranks, kind))
    return found[:MAX_CHARTS]


def _over_ranks(kind: str, maxima: Sequence[SearchRow], where: str) -> Chart | None:
    rows = ran_on_several(maxima)
    points = [Point(r.label, r.world_size, r.max_tokens) for r in rows if r.max_tokens]
    failures = [Mark(r.label, r.world_size, "no length passed") for r in _failed_all(rows)]
    worlds = {p.x for p in points} | {m.x for m in failures}
    if len(worlds) < 2:
        return None
    floors = sorted({(r.world_size, r.floor_tokens) for r in rows if r.floor_tokens})
    alone = max((p.y for p in points if p.x == 1), default=0.0)
    guide = guide_line("ideal: one rank × ranks", worlds, lambda ranks: ranks * alone)
    if not alone:
        line = tuple(Point("", float(ranks), float(tokens)) for ranks, tokens in floors)
        guide = Guide("theoretical maximum", line)
    name, title = _MAXIMA_KINDS[kind]
    x, y = Axis("Ranks", "count", log=True), Axis(name, "tokens", log=True)
    title = f"{title} against ranks"
    return build_chart(f"{kind}-over-ranks", where, x, y, points, failures, guide, title=title)
