"""Charts of rows, as data that every format shows: values with intervals, failures and guides.

A builder takes the rows of one workload and its description, which goes into the title, and
returns None where there is nothing to draw.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.labels import format_option, mask_words
from longseq_bench.analysis.row import R, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point, Shape, format_cell
from longseq_bench.reports.groups import SAME_TABLE, find_varying, group_by_workload, join_words

MAX_CHARTS = 12
"""Maximum number of charts in one section; the tables have all rows."""
MAX_LENGTHS, MAX_BARS = 4, 8
"""Maximum number of lengths whose speeds over dense are drawn, and of bars of longest lengths."""

TOKENS, SPEEDUP, NAMES = Axis("Tokens", "tokens", True), Axis("Speed-up", "ratio"), Axis("", "text")
Builder = Callable[[Sequence[R], str], Chart | None]


def of_each_workload(source: Source, rows: Iterable[R], *builders: Builder[R]) -> list[Chart]:
    """Return the charts of each workload among rows, at most MAX_CHARTS."""
    groups = group_by_workload(rows)[: MAX_CHARTS // len(builders)]
    found = (build(group, source.title(group[0])) for group in groups for build in builders)
    return list(filter(None, found))


# ---- figures against tokens --------------------------------------------------------------------


def time(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the median time against tokens, with its 95 % interval."""
    points = [
        Point(r.name, r.tokens, r.time_s, *((r.time_low_s, r.time_high_s) if r.samples > 1 else ()))
        for r in rows
        if r.time_s
    ]
    return _against_tokens("time", where, Axis("Time", "seconds", True), points, rows)


def memory(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the peak of a rank against tokens."""
    points = [
        Point(r.name, r.tokens, r.peak_bytes) for r in rows if r.peak_bytes and r.status == "ok"
    ]
    return _against_tokens("memory", where, Axis("Peak memory", "bytes", True), points, rows)


def _against_tokens(
    name: str,
    where: str,
    y: Axis,
    points: Sequence[Point],
    rows: Sequence[SweepRow],
) -> Chart | None:
    """Chart a quantity against tokens, with a cross per failed trial; bars for a single length."""
    failures = [Mark(r.name, r.tokens, _describe_failure(r)) for r in rows if _is_failed(r)]
    lengths = {int(p.x) for p in points} | {int(m.x) for m in failures}
    if len(lengths) > 1:
        return build_chart(name, where, TOKENS, y, points, failures)
    at = _at(where, lengths.pop()) if lengths else where
    return build_chart(name, at, NAMES, replace(y, log=False), points, failures, shape="bars")


# ---- sparsity ----------------------------------------------------------------------------------


def speed_over_dense(source: Source, rows: Iterable[SweepRow]) -> list[Chart]:
    """Chart the speed over dense against the requested density, a chart per length.

    Only lengths with several densities are drawn.
    """
    # the sparsity of a plug-in may be a word
    rows = [r for r in rows if type(r.options.get("sparsity")) in (int, float)]
    by_length = sorted(group_by(rows, attrgetter("tokens")).items(), reverse=True)
    found = [c for _, some in by_length for c in of_each_workload(source, some, _speed_over_dense)]
    return found[:MAX_LENGTHS]


def _speed_over_dense(rows: Sequence[SweepRow], where: str) -> Chart | None:
    known = [r for r in rows if r.speed_over_dense]
    points = [Point(*_place(r), require(r.speed_over_dense)) for r in known]
    if len({p.x for p in points}) < 2:
        return None
    computed = any(r.dense_source != "measured" for r in known)
    where = join_words(_at(where, rows[0].tokens), "dense time computed" if computed else "")
    failures = [Mark(*_place(r), _describe_failure(r)) for r in rows if _is_failed(r)]
    x, y = Axis("Requested density", "share", True), Axis("Speed over dense", "ratio", True)
    return build_chart("speed-over-dense", where, x, y, points, failures)


def _place(row: SweepRow) -> tuple[str, float]:
    """Return the name of a row without its sparsity, and the density that it leaves."""
    sparsity = row.options["sparsity"]
    name = row.name.replace(f" {format_option('sparsity', sparsity)}", "", 1)
    return name, round(1 - float(str(sparsity)), 9)


# ---- several ranks -----------------------------------------------------------------------------


def speedups(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-ups of one length as sorted bars, with a tick at 1."""
    words = "as fast as one rank"
    points = [_speedup(r, r.name, 0) for r in rows]
    ones = Guide(words, tuple(Point(p.series, 0, 1.0) for p in points), words)
    where = _at(where, rows[0].tokens)
    return build_chart("speed-up", where, NAMES, SPEEDUP, points, (), ones, "bars")


# ---- longest lengths ---------------------------------------------------------------------------

MAX_TOKENS = Axis("Max tokens", "tokens")
_LIMIT = ("fingerprint", "device", "mode", "memory_budget", "time_budget", "fit_only")


def by_limit(source: Source) -> list[Chart]:
    """Chart longest lengths as sorted bars, with the theoretical maximum as a tick.

    A chart has the searches of one machine, mode and limits, at most MAX_BARS of them; those with
    the longest lengths come first.
    """
    groups = group_by(source.maxima, attrgetter(*_LIMIT, "is_full_pass")).values()
    known = [sorted(rows, key=lambda r: -r.max_tokens) for rows in groups]
    known.sort(key=lambda rows: (not rows[0].is_full_pass, -rows[0].max_tokens))
    found = (_maxima(source, rows) for rows in known[:MAX_CHARTS])
    return list(filter(None, found))


def _maxima(source: Source, rows: Sequence[SearchRow]) -> Chart | None:
    """Chart longest lengths; the title has what they share, and a bar what differs."""
    varying = find_varying(rows)
    named = {_name_bar(row, varying): row for row in rows}
    passed = {name: row for name, row in [*named.items()][:MAX_BARS] if row.max_tokens}
    points = [
        Point(name, 0, row.max_tokens, words=f"limited by {row.limited_by}")
        for name, row in passed.items()
    ]
    failures = [
        Mark(name, 0, f"no length passed, limited by {row.limited_by}")
        for name, row in named.items()
        if _passed_none(row)
    ]
    floors = [Point(name, 0, row.floor_tokens) for name, row in passed.items() if row.floor_tokens]
    words = "the length whose q, k, v and output alone fill the memory budget, computed"
    guide = Guide("theoretical maximum", tuple(floors), words)
    kind = "" if rows[0].is_full_pass else " in place (outputs overwrite inputs)"
    if rows[0].fit_only:
        kind = " that fit in memory (fit only: not checked or timed)"
    title = f"Longest lengths{kind}"
    if len(named) > MAX_BARS:
        title += f", the longest {MAX_BARS}"
    where = source.workload(rows[0], frozenset(SAME_TABLE) - varying)
    return build_chart(
        "maxima", where, NAMES, MAX_TOKENS, points, failures[:MAX_BARS], guide, "bars", title
    )


def _name_bar(row: SearchRow, varying: Iterable[str]) -> str:
    """Return the name of a row, with the fields of its workload that differ here."""
    words = {"mask": mask_words(row.mask), "dtype": row.dtype}
    fields = [field for field in SAME_TABLE if field in varying]
    others = (words.get(f, f"{f.replace('_', ' ')} {getattr(row, f)}") for f in fields)
    return join_words(row.name, *others)


def over_ranks(rows: Sequence[SearchRow], where: str) -> Chart | None:
    """Chart longest lengths against ranks, of implementations that were searched on several.

    The guide is the longest on one rank times the ranks.
    """
    several = {row.label for row in rows if row.world_size > 1}
    rows = [row for row in rows if row.label in several]
    points = [Point(r.label, r.world_size, r.max_tokens) for r in rows if r.max_tokens]
    failures = [Mark(r.label, r.world_size, "no length passed") for r in rows if _passed_none(r)]
    worlds = {p.x for p in points} | {m.x for m in failures}
    if len(worlds) < 2:
        return None
    alone = max((p.y for p in points if p.x == 1), default=0.0)
    ends = (min(worlds), max(worlds)) if alone else ()
    guide = Guide("ideal: one rank × ranks", tuple(Point("", x, x * alone) for x in ends))
    x, y = Axis("Ranks", "count", log=True), replace(MAX_TOKENS, log=True)
    name, title = "maxima-over-ranks", "Longest lengths against ranks"
    return build_chart(name, where, x, y, points, failures, guide, title=title)


# ---- parts of charts ---------------------------------------------------------------------------


def build_chart(
    name: str,
    where: str,
    x: Axis,
    y: Axis,
    points: Sequence[Point],
    failures: Sequence[Mark] = (),
    guide: Guide | None = None,
    shape: Shape = "lines",
    title: str = "",
) -> Chart | None:
    """Build a chart; None without points.  title: its start, if not the names of the axes."""
    if not points:
        return None
    title = title or y.name + (f" against {x.name.lower()}" if x.name else "")
    title += f": {where[0].lower()}{where[1:]}" if where else ""
    words = _describe(y, points) + (f"; {len(failures)} failed" if failures else "")
    guides = (guide,) if guide and guide.points else ()
    return Chart(name, title, f"{words}.", x, y, tuple(points), tuple(failures), guides, shape)


def _describe(y: Axis, points: Sequence[Point]) -> str:
    """Describe the points for readers who can't see them."""
    lowest, highest = min(points, key=lambda p: p.y), max(points, key=lambda p: p.y)
    ends = dict.fromkeys(format_cell(p.y, y.kind) for p in (lowest, highest))
    names = len({p.series for p in points})
    words = f"{y.name} of {names} series, from {' to '.join(ends)}"
    if len(points) == 1:
        words = f"{y.name}: {next(iter(ends))}"
    return f"{words} ({highest.series})"


def _speedup(row: SweepRow, name: str, x: float) -> Point:
    return Point(name, x, require(row.speedup), row.speedup_low, row.speedup_high)


def _is_failed(row: SweepRow) -> bool:
    """Return True for a failed row; of what is unsupported, no length is tried."""
    return row.status not in ("ok", "unsupported")


def _passed_none(row: SearchRow) -> bool:
    return not row.max_tokens and row.limited_by != "unsupported"


def _describe_failure(row: SweepRow) -> str:
    where = f" in {row.phase}" if row.phase else ""
    return f"{row.status}{where} at {row.tokens:,} tokens"


def _at(where: str, tokens: int) -> str:
    return join_words(where, f"{format_tokens(tokens)} tokens")
