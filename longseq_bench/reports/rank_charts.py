"""Charts of several ranks: speed-ups, memory of a rank, longest lengths; and of errors."""

from collections.abc import Iterable, Sequence

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point
from longseq_bench.reports.groups import common_length
from longseq_bench.reports.section_charts import (
    _MAXIMA_KINDS,
    MAX_CHARTS,
    NAMES,
    SPEEDUP,
    _against_tokens,
    _chart,
    _failed_all,
    _join,
    _line,
    _maxima_kind,
    _order_by_kind,
    charts,
)

RANKS = Axis("Ranks", "count", log=True)
MAX_BARS = 16
"""Maximum number of bars of the first chart; the tables have all rows."""
ONE_RANK = "as fast as one rank"


def speedups(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-ups of one length as sorted bars, with a tick at 1."""
    ordered = sorted(rows, key=lambda r: -require(r.speedup))
    points = [Point(r.name, 0, require(r.speedup), r.speedup_low, r.speedup_high) for r in ordered]
    ones = tuple(Point(p.series, 0, 1.0) for p in points)
    at = _join(where, f"{format_tokens(ordered[0].tokens)} tokens")
    guides = [Guide(ONE_RANK, ones, ONE_RANK)]
    title = "" if len(rows) <= MAX_BARS else f"The {MAX_BARS} highest of {len(rows)} speed-ups"
    return _chart("speed-up", at, NAMES, SPEEDUP, points, guides=guides, shape="bars", title=title)


def speedup_by_length(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against tokens."""
    points = [
        Point(r.name, r.tokens, r.speedup, r.speedup_low, r.speedup_high)
        for r in rows
        if r.speedup and r.world_size > 1
    ]
    level = _line([p.x for p in points], lambda x: 1.0) if points else ()
    guides = [Guide(ONE_RANK, level, ONE_RANK)] if points else []
    return _against_tokens("speed-up", where, SPEEDUP, points, rows, guides)


def speedup_by_ranks(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against ranks, with the ideal, at the most common length.

    None for two numbers of ranks: the table says as much as a line of two points.
    """
    several = {r.ranks_key for r in rows if r.world_size > 1 and r.speedup}
    some = common_length([r for r in rows if r.ranks_key in several])
    points = [
        Point(r.label, r.world_size, r.speedup, r.speedup_low, r.speedup_high)
        for r in some
        if r.speedup
    ]
    if len({p.x for p in points}) < 3:
        return None
    ideal = Guide("ideal", _line([p.x for p in points], float))
    at, ranks = _join(where, f"{format_tokens(some[0].tokens)} tokens"), Axis("Ranks", "count")
    return _chart("speed-up", at, ranks, SPEEDUP, points, guides=[ideal])


def rank_peaks(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the largest peak of a rank as bars, at the most common length of several ranks.

    rows: on one rank and on several; a tick is the peak of the same trial on one rank.
    """
    known = [r for r in rows if r.peak_bytes and r.status == "ok"]
    several = common_length([r for r in known if r.world_size > 1])
    if not several:
        return None
    alone = {r.ranks_key: r for r in known if r.world_size == 1}
    points = [Point(r.name, 0, require(r.peak_bytes)) for r in several]
    ones = [
        Point(r.name, 0, require(alone[r.ranks_key].peak_bytes))
        for r in several
        if r.ranks_key in alone
    ]
    at = _join(where, f"{format_tokens(several[0].tokens)} tokens")
    guides = [Guide("on one rank", tuple(ones), "the same trial on one rank")] if ones else []
    axis = Axis("Peak memory of a rank", "bytes")
    return _chart("rank-memory", at, NAMES, axis, points, guides=guides, shape="bars")


def ran_on_several(maxima: Sequence[SearchRow]) -> list[SearchRow]:
    """Return the maxima of implementations that were searched on several ranks."""
    several = {row.label for row in maxima if row.world_size > 1}
    return [row for row in maxima if row.label in several]


def over_ranks(source: Source, maxima: Iterable[SearchRow] | None = None) -> list[Chart]:
    """Chart longest lengths against ranks, one chart per workload and kind of maximum.

    The guide is the longest on one rank times the ranks; without one rank, the floor.

    maxima: those of the source if None.
    """
    rows = _order_by_kind(source) if maxima is None else maxima
    by_kind = group_by(rows, _maxima_kind).values()
    return [chart for some in by_kind for chart in charts(source, some, _over_ranks)][:MAX_CHARTS]


def _over_ranks(maxima: Sequence[SearchRow], where: str) -> Chart | None:
    rows = ran_on_several(maxima)
    points = [Point(r.label, r.world_size, r.max_tokens) for r in rows if r.max_tokens]
    failures = [Mark(r.label, r.world_size, "no length passed") for r in _failed_all(rows)]
    worlds = {p.x for p in points} | {m.x for m in failures}
    if len(worlds) < 2:
        return None
    floors = sorted({(r.world_size, r.floor_tokens) for r in rows if r.floor_tokens})
    alone = max((p.y for p in points if p.x == 1), default=0.0)
    if alone:
        guides = [Guide("ideal: one rank × ranks", _line(worlds, lambda ranks: ranks * alone))]
    elif floors:
        line = tuple(Point("", float(ranks), float(tokens)) for ranks, tokens in floors)
        guides = [Guide("theoretical maximum", line)]
    else:
        guides = []
    kind = _maxima_kind(rows[0])
    axis, title = _MAXIMA_KINDS[kind]
    return _chart(
        f"{kind}-over-ranks", where, RANKS, Axis(axis, "tokens", log=True), points, failures,
        guides, title=title and f"{title} against ranks",
    )  # fmt: skip


def errors(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the error of the worst variant of each implementation; None for a single value.

    A variant that sends bfloat16 has a larger error than others, so a line has its label.
    """
    known = [r for r in rows if r.is_ok and r.max_error is not None]
    points = []
    for some in group_by(known, lambda r: r.implementation).values():
        label = max(some, key=lambda r: require(r.max_error)).label
        by_length = group_by((r for r in some if r.label == label), lambda r: r.tokens)
        points += [
            Point(label, tokens, max(require(r.max_error) for r in same))
            for tokens, same in by_length.items()
        ]
    axis = Axis("Largest error", "error", True)
    return _against_tokens("error", where, axis, points, known) if len(points) > 1 else None
