"""Charts of rows: values with intervals, failures and guides.

Each function takes the rows of one workload and returns a chart, or None without points.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.short_labels import format_option
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import floor_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point, format_cell
from longseq_bench.reports.groups import group_by_workload

MAX_CHARTS = 12
"""Maximum number of charts in one section; the tables have all rows."""

TOKENS, SPEEDUP, NAMES = Axis("Tokens", "tokens", True), Axis("Speed-up", "ratio"), Axis("", "text")
ChartBuilder = Callable[[Sequence[R], str], Chart | None]


def charts(source: Source, rows: Iterable[R], *builders: ChartBuilder[R]) -> list[Chart]:
    """Return the charts of each workload among rows, at most MAX_CHARTS."""
    groups = group_by_workload(rows)[: MAX_CHARTS // len(builders)]
    found = (build(group, source.title(group[0])) for group in groups for build in builders)
    return list(filter(None, found))


def limit_note(rows: Iterable[Row], builders: int = 1) -> list[str]:
    """Return a sentence if there are more workloads than `charts` draws."""
    groups, max_groups = len(group_by_workload(rows)), MAX_CHARTS // builders
    if groups <= max_groups:
        return []
    return [f"Charts are of the first {max_groups} of {groups} workloads; the tables have all."]


# ---- sweeps ------------------------------------------------------------------------------------


def time(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the median time against tokens, with its 95 % interval."""
    points = [Point(r.name, r.tokens, r.time_s, *_interval(r)) for r in rows if r.time_s]
    return _against_tokens("time", where, Axis("Time", "seconds", True), points, rows)


def throughput(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the tokens per second of all ranks against tokens."""
    points = []
    for r in rows:
        if r.tokens_per_s and r.time_s:
            low, high = _interval(r)
            tokens = r.tokens_per_s * r.time_s
            rates = (tokens / high, tokens / low) if low and high else (None, None)
            points.append(Point(r.name, r.tokens, r.tokens_per_s, *rates))
    return _against_tokens("throughput", where, Axis("Tokens/s", "count", True), points, rows)


def memory(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the peak of a rank against tokens; with the floor if all rows ran on one rank."""
    points = [
        Point(r.name, r.tokens, r.peak_bytes) for r in rows if r.peak_bytes and r.status == "ok"
    ]
    guides = []
    if points and all(r.world_size == 1 for r in rows):
        measured = {p.x for p in points}
        lengths = measured if len(measured) > 1 else measured | {m.x for m in _failed(rows)}
        guides = [Guide("floor", _line(lengths, lambda x: x * _floor_bytes(rows[0])))]
    return _against_tokens(
        "memory", where, Axis("Peak memory", "bytes", True), points, rows, guides
    )


def share_of_ideal(source: Source, rows: Iterable[SweepRow]) -> list[Chart]:
    """Chart the share of ideal against sparsity, per workload and length, longest first."""
    by_length = sorted(group_by(rows, attrgetter("tokens")).items(), reverse=True)
    return [chart for _, some in by_length for chart in charts(source, some, _share)][:MAX_CHARTS]


def _share(rows: Sequence[SweepRow], where: str) -> Chart | None:
    points = [
        Point(
            _without_sparsity(r),
            1 - require(r.token_density), r.share_of_ideal, r.share_low, r.share_high,
            "" if r.dense_source == "measured" else f"dense time {r.dense_source}",
        )
        for r in sorted(rows, key=lambda r: -float(r.token_density or 0))
        if r.share_of_ideal and r.token_density is not None and r.token_density < 1
    ]  # fmt: skip
    if not points:
        return None
    ideal = Guide("skipped work costs nothing", _line([p.x for p in points], lambda x: 1.0))
    axes = Axis("Sparsity (of pairs)", "share"), Axis("Share of ideal", "share")
    at = _join(where, f"{format_tokens(rows[0].tokens)} tokens")
    return _chart("share-of-ideal", at, *axes, points, guides=[ideal])


def roofline(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart FLOP/s against FLOPs per floor byte; the highest measured rate is the roof."""
    points = [
        Point(
            r.label, r.flops / (_floor_bytes(r) * r.tokens), r.effective_flops,
            words=f"{format_tokens(r.tokens)} tokens",
        )
        for r in rows
        if r.effective_flops and r.flops and r.world_size == 1
    ]  # fmt: skip
    if len({p.x for p in points}) < 2:
        return None
    best = max(points, key=lambda p: p.y)
    level = _line([p.x for p in points], lambda x: best.y)
    roof = Guide(f"highest here: {best.series}", level, "the highest rate measured here")
    axes = Axis("FLOPs a byte of the floor", "count", True), Axis("FLOP/s", "flop_rate", True)
    return _chart("roofline", where, *axes, points, guides=[roof], shape="dots")


# ---- longest lengths ---------------------------------------------------------------------------

_IN_NAME = ("dtype", "causal", "batch", "heads", "kv_heads", "head_dim", "threads")
_MAXIMA_GROUP = ("fingerprint", "device", "mode", "memory_budget", "time_budget")
_MAXIMA_KINDS = {
    "maxima": ("Max tokens", ""),
    "maxima-over-inputs": ("Max tokens", "Longest lengths in place (outputs overwrite inputs)"),
    "maxima-fits": (
        "Tokens that fit",
        "Longest lengths that fit in memory (fit only: not checked or timed)",
    ),
}
"""Kinds of maxima, confirmed ones first: name of the axis, and start of the title if it differs.
A chart has maxima of one kind only."""


def _maxima_kind(row: SearchRow) -> str:
    if row.fit_only:
        return "maxima-fits"
    return "maxima" if row.is_full_pass else "maxima-over-inputs"


def _order_by_kind(source: Source) -> list[SearchRow]:
    return sorted(source.maxima, key=lambda row: list(_MAXIMA_KINDS).index(_maxima_kind(row)))


def maxima(source: Source) -> list[Chart]:
    """Chart longest lengths as bars, with the tokens whose floor fills the budget.

    One chart per kind, machine, device, mode and budgets; the names of bars have other differences.
    """
    same = attrgetter(*_MAXIMA_GROUP)
    groups = group_by(_order_by_kind(source), lambda row: (_maxima_kind(row), same(row)))
    found = (_maxima(source, rows) for rows in groups.values())
    return list(filter(None, found))[:MAX_CHARTS]


def _maxima(source: Source, rows: Sequence[SearchRow]) -> Chart | None:
    differing = [name for name in _IN_NAME if len({getattr(row, name) for row in rows}) > 1]

    def name(row: SearchRow) -> str:
        return ", ".join([row.name, *(_describe(row, field) for field in differing)])

    points = [
        Point(name(r), 0, r.max_tokens, words=f"limited by {r.limited_by}")
        for r in rows
        if r.max_tokens
    ]
    failures = [
        Mark(name(r), 0, f"no length passed, limited by {r.limited_by}") for r in _failed_all(rows)
    ]
    floors = tuple(Point(name(r), 0, r.floor_tokens) for r in rows if r.floor_tokens)
    axis, title = _MAXIMA_KINDS[_maxima_kind(rows[0])]
    return _chart(
        _maxima_kind(rows[0]), source.workload(rows[0], _MAXIMA_GROUP), NAMES,
        Axis(axis, "tokens"), points, failures, [Guide("floor", floors)] if floors else [], "bars",
        title,
    )  # fmt: skip


def _describe(row: Row, name: str) -> str:
    value = getattr(row, name)
    if name == "causal":
        return "causal" if value else "not causal"
    return str(value) if name == "dtype" else f"{name} {value}"


def _failed_all(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return supported searches in which no length passed."""
    return [r for r in rows if not r.max_tokens and r.limited_by != "unsupported"]


# ---- parts of charts ---------------------------------------------------------------------------


def _against_tokens(
    name: str, where: str, y: Axis, points: Sequence[Point], rows: Sequence[SweepRow],
    guides: Sequence[Guide] = (),
) -> Chart | None:  # fmt: skip
    """Chart a quantity against tokens, with a cross per failed trial; bars for a single length."""
    failures = tuple(_failed(rows))
    lengths = {int(p.x) for p in points} | {int(m.x) for m in failures}
    if len(lengths) > 1:
        return _chart(name, where, TOKENS, y, points, failures, guides)
    at = _join(where, f"{format_tokens(lengths.pop())} tokens") if lengths else where
    return _chart(name, at, NAMES, replace(y, log=False), points, failures, shape="bars")


def _chart(
    name: str, where: str, x: Axis, y: Axis, points: Sequence[Point],
    failures: Sequence[Mark] = (), guides: Sequence[Guide] = (), shape: str = "lines",
    title: str = "",
) -> Chart | None:  # fmt: skip
    """Build a chart; None without points.  title: its start, if not the names of the axes."""
    if not points:
        return None
    # keep the capitals of a name like FLOPs
    along = x.name if x.name[1:2].isupper() else x.name.lower()
    across = f" against {along}" if along else ""
    title = title or y.name + across
    title += f": {where[0].lower()}{where[1:]}" if where else ""
    words = _values(y, points)
    if n := len(failures):
        searches = f"search{'es' if n > 1 else ''} without a length that passed"
        trials = f"trial{'s' if n > 1 else ''} failed"
        words += f"; {n} {searches if name.startswith('maxima') else trials}"
    kept = tuple(points), tuple(failures), tuple(guides)
    return Chart(name, title, f"{words}.", x, y, *kept, shape)  # type: ignore[arg-type]


def _values(y: Axis, points: Sequence[Point]) -> str:
    """Describe the points, for readers who can't see the chart."""
    series = len({p.series for p in points})
    lowest, highest = min(points, key=lambda p: p.y), max(points, key=lambda p: p.y)
    if len(points) == 1:
        return f"{y.name} of {highest.series}: {format_cell(highest.y, y.kind)}"
    return (
        f"{y.name} of {series} series, from {format_cell(lowest.y, y.kind)} ({lowest.series}) "
        f"to {format_cell(highest.y, y.kind)} ({highest.series})"
    )


def _failed(rows: Sequence[SweepRow]) -> Iterator[Mark]:
    for r in rows:
        if r.status not in ("ok", "unsupported"):  # unsupported: no length is tried
            where = f" in {r.phase}" if r.phase else ""
            yield Mark(r.name, r.tokens, f"{r.status}{where} at {r.tokens:,} tokens")


def _without_sparsity(row: SweepRow) -> str:
    """Return the name of a row without its sparsity, so that sparsities are one series."""
    sparsity = row.options.get("sparsity")
    return (
        row.name.replace(f" {format_option('sparsity', sparsity)}", "", 1) if sparsity else row.name
    )


def _join(*words: str) -> str:
    return ", ".join(filter(None, words))


def _interval(row: SweepRow) -> tuple[float | None, float | None]:
    """Return the interval of the time; (None, None) for a single sample."""
    return (row.time_low_s, row.time_high_s) if row.samples > 1 else (None, None)


def _line(xs: Iterable[float], height: Callable[[float], float]) -> tuple[Point, ...]:
    """Return the ends of a line over all x."""
    values = list(xs)
    return tuple(Point("", float(x), height(x)) for x in (min(values), max(values)))


def _floor_bytes(row: SweepRow) -> int:
    """Return the bytes per token that any exact attention needs."""
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "mode")
    return floor_bytes_per_token(Workload(seq_len=1, **{n: getattr(row, n) for n in names}))
