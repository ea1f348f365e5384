"""Charts of rows: values with intervals, failures and guides.

Each function takes the rows of one workload and returns a chart, or None without points.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from longseq_bench.analysis.row import R, Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import floor_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Axis, Chart, Guide, Kind, Mark, Point, format_cell
from longseq_bench.reports.groups import capitalize_first, group_by_workload

MOST_CHARTS = 12
"""Maximum number of charts in one section; the tables have all rows."""

TOKENS = Axis("Tokens", "tokens", log=True)
Maker = Callable[[Sequence[R], str], Chart | None]


def charts(source: Source, rows: Iterable[R], *makers: Maker[R]) -> list[Chart]:
    """Return the charts of each workload among rows, at most MOST_CHARTS."""
    made = []
    for group in group_by_workload(rows)[: MOST_CHARTS // len(makers)]:
        where = source.workload(group[0])
        found = (make(group, capitalize_first(where)) for make in makers)
        made += [chart for chart in found if chart is not None]
    return made


def cut(rows: Iterable[Row], makers: int = 1) -> list[str]:
    """Return a sentence if there are more workloads than `charts` draws."""
    groups, drawn = len(group_by_workload(rows)), MOST_CHARTS // makers
    if groups <= drawn:
        return []
    return [f"Charts are of the first {drawn} of {groups} workloads; the tables have all."]


def time(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the median time against tokens, with its 95 % interval."""
    points = [
        Point(r.name, r.tokens, r.time_s, *_ends(r, "time_low_s", "time_high_s"))
        for r in rows
        if r.time_s
    ]  # fmt: skip
    return _lines("time", where, "Time", "seconds", points, rows)


def throughput(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the tokens per second of all ranks against tokens."""
    points = [Point(r.name, r.tokens, r.tokens_per_s, *_rates(r)) for r in rows if r.tokens_per_s]
    return _lines("throughput", where, "Tokens/s", "count", points, rows)


def memory(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the peak of a rank against tokens, with the floor where all ran on one rank."""
    points = [
        Point(r.name, r.tokens, r.peak_bytes) for r in rows if r.peak_bytes and r.status == "ok"
    ]
    guides = []
    if points and all(r.world_size == 1 for r in rows):
        a_token = floor_bytes_per_token(_workload(rows[0]))
        ends = _span(points, rows)
        guides = [Guide("floor", tuple(Point("floor", x, x * a_token) for x in ends))]
    return _lines("memory", where, "Peak memory", "bytes", points, rows, guides)


def speedup(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against ranks, with the ideal."""
    several = {r.label for r in rows if r.world_size > 1 and r.speedup}
    points = [
        Point(
            f"{r.label}, {format_tokens(r.tokens)} tokens", r.world_size, r.speedup,
            r.speedup_low, r.speedup_high,
        )
        for r in rows
        if r.speedup and r.label in several
    ]  # fmt: skip
    if len({p.x for p in points}) < 2:
        return None
    most = max(p.x for p in points)
    ideal = Guide("ideal", tuple(Point("ideal", float(n), float(n)) for n in (1, most)))
    return _chart(
        "speed-up", where, Axis("Ranks", "count"), Axis("Speed-up", "ratio"), points, guides=[ideal]
    )


def pays(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against tokens."""
    points = [
        Point(r.name, r.tokens, r.speedup, r.speedup_low, r.speedup_high)
        for r in rows
        if r.speedup and r.world_size > 1
    ]
    level = tuple(Point("", p.x, 1.0) for p in _ends_of(points))
    even = [Guide("as fast as one rank", level, "as fast as one rank")]
    return _lines("speed-up", where, "Speed-up", "ratio", points, rows, even, log=False)


def shares(source: Source, rows: Iterable[SweepRow]) -> list[Chart]:
    """Chart the share of ideal against sparsity, per workload and length, longest first."""
    by_length: dict[int, list[SweepRow]] = defaultdict(list)
    for row in rows:
        by_length[row.tokens].append(row)
    made = [charts(source, by_length[n], _share) for n in sorted(by_length, reverse=True)]
    return [chart for some in made for chart in some][:MOST_CHARTS]


def _share(rows: Sequence[SweepRow], where: str) -> Chart | None:
    where = f"{where}, {format_tokens(rows[0].tokens)} tokens"
    points = [
        Point(
            _but_sparsity(r), 1 - r.token_density,
            r.share_of_ideal, r.share_low, r.share_high,
            "" if r.dense_source == "measured" else f"dense time {r.dense_source}",
        )
        for r in sorted(rows, key=lambda r: -float(r.token_density or 0))
        if r.share_of_ideal and r.token_density is not None and r.token_density < 1
    ]  # fmt: skip
    if not points:
        return None
    ends = (min(p.x for p in points), max(p.x for p in points))
    ideal = [Guide("what is skipped costs nothing", tuple(Point("", x, 1.0) for x in ends))]
    sparsity, ideal_share = Axis("Sparsity (of pairs)", "share"), Axis("Share of ideal", "share")
    return _chart("share-of-ideal", where, sparsity, ideal_share, points, guides=ideal)


_APART = ("dtype", "causal", "batch", "heads", "kv_heads", "head_dim", "time_budget", "threads")


_TOKENS_AS = {
    "maxima": ("Max tokens", ""),
    "maxima-over-inputs": ("Max tokens", "Longest lengths with results written over inputs"),
    "maxima-fits": (
        "Tokens that fit",
        "Longest lengths that fit, memory alone, nothing checked or timed",
    ),
}
"""Sorts of maxima, confirmed ones first: name of the axis, and start of the title if it differs.
A chart has maxima of one sort only."""


def _sort(row: SearchRow) -> str:
    if row.fit_only:
        return "maxima-fits"
    return "maxima" if row.is_full_pass else "maxima-over-inputs"


def maxima(source: Source) -> list[Chart]:
    """Chart longest lengths as bars, with the tokens whose floor fills the budget.

    A chart per sort, machine, device, mode and budget; other differences are named at the bar.
    """
    together: dict[tuple[object, ...], list[SearchRow]] = defaultdict(list)
    names = ("fingerprint", "device", "mode", "memory_budget")
    for sort in _TOKENS_AS:
        for row in source.maxima:
            if _sort(row) == sort:
                together[(sort, *(getattr(row, name) for name in names))].append(row)
    made = [_maxima(source, rows) for rows in together.values()]
    return [chart for chart in made if chart is not None][:MOST_CHARTS]


def _maxima(source: Source, rows: Sequence[SearchRow]) -> Chart | None:
    apart = [name for name in _APART if len({getattr(row, name) for row in rows}) > 1]
    named = {id(row): ", ".join([row.name, *(_told(row, n) for n in apart)]) for row in rows}
    points = [
        Point(named[id(r)], 0, r.max_tokens, words=f"limited by {r.limited_by}")
        for r in rows
        if r.max_tokens
    ]
    failures = [
        Mark(named[id(r)], 0, f"no length passed, limited by {r.limited_by}")
        for r in _reached_none(rows)
    ]
    floors = tuple(Point(named[id(r)], 0, r.floor_tokens) for r in rows if r.floor_tokens)
    row, machine = rows[0], source.machines[rows[0].fingerprint]
    budget = f", {format_bytes(row.memory_budget)} budget a rank" if row.memory_budget else ""
    where = f"{row.mode}, {row.device}{budget}" + (f", machine {machine}" if machine else "")
    sort = _sort(row)
    axis, title = _TOKENS_AS[sort]
    return _chart(
        sort, where, Axis("", "text"), Axis(axis, "tokens"), points, failures,
        [Guide("floor", floors)] if floors else [], "bars", title, _searches(failures),
    )  # fmt: skip


def _told(row: Row, name: str) -> str:
    value = getattr(row, name)
    if name == "causal":
        return "causal" if value else "not causal"
    if name == "time_budget":
        return f"{format_seconds(value)} a pass" if value else "no time limit"
    return str(value) if name == "dtype" else f"{name} {value}"


def _reached_none(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return supported searches in which no length passed."""
    return [r for r in rows if not r.max_tokens and r.limited_by != "unsupported"]


def _searches(failures: Sequence[Mark]) -> str:
    n = len(failures)
    return f"{n} search{'es' if n > 1 else ''} passed at no length" if n else ""


def over_ranks(source: Source) -> list[Chart]:
    """Chart longest lengths against ranks, one chart per sort."""
    by_sort = ([row for row in source.maxima if _sort(row) == sort] for sort in _TOKENS_AS)
    made = [charts(source, rows, _over_ranks) for rows in by_sort]
    return [chart for some in made for chart in some][:MOST_CHARTS]


def _over_ranks(rows: Sequence[SearchRow], where: str) -> Chart | None:
    points = [Point(r.label, r.world_size, r.max_tokens) for r in rows if r.max_tokens]
    failures = [Mark(r.label, r.world_size, "no length passed") for r in _reached_none(rows)]
    if len({p.x for p in points} | {m.x for m in failures}) < 2:
        return None
    floors = sorted({(r.world_size, r.floor_tokens) for r in rows if r.floor_tokens})
    theory = Guide("theory: the floor", tuple(Point("", float(x), float(y)) for x, y in floors))
    sort = _sort(rows[0])
    axis, title = _TOKENS_AS[sort]
    return _chart(
        f"{sort}-over-ranks", where, Axis("Ranks", "count", log=True),
        Axis(axis, "tokens", log=True), points, failures, [theory] if floors else [],
        title=title and f"{title} against ranks", failed=_searches(failures),
    )  # fmt: skip


def each_peak(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the peak of each rank as bars, at the longest length that most rows ran."""
    several = [r for r in rows if r.world_size > 1 and r.rank_peaks and r.status == "ok"]
    if not several:
        return None
    lengths = [r.tokens for r in several]
    tokens = max(sorted(set(lengths)), key=lambda n: (lengths.count(n), n))
    points = [
        Point(f"{r.label}, rank {rank} of {r.world_size}", 0, peak)
        for r in several
        if r.tokens == tokens
        for rank, peak in enumerate(r.rank_peaks or ())
        if peak is not None
    ]
    at = f"{where}, {format_tokens(tokens)} tokens"
    axes = Axis("", "text"), Axis("Peak memory", "bytes")
    return _chart("rank-memory", at, *axes, points, shape="bars")


def roofline(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart FLOP/s against FLOPs per floor byte; the highest measured rate is the roof."""
    points = []
    for r in rows:
        if r.effective_flops and r.flops and r.world_size == 1:
            floor = floor_bytes_per_token(_workload(r)) * r.tokens
            at = f"{format_tokens(r.tokens)} tokens"
            points.append(Point(r.label, r.flops / floor, r.effective_flops, words=at))
    if len({p.x for p in points}) < 2:
        return None
    best = max(points, key=lambda p: p.y)
    level = tuple(Point("", p.x, best.y) for p in _ends_of(points))
    roof = Guide(f"highest here: {best.series}", level, "the highest rate measured here")
    axes = Axis("FLOPs a byte of the floor", "count", True), Axis("FLOP/s", "flop_rate", True)
    return _chart("roofline", where, *axes, points, guides=[roof], shape="dots")  # fmt: skip


def _lines(
    name: str, where: str, what: str, kind: Kind, points: Sequence[Point], rows: Sequence[SweepRow],
    guides: Sequence[Guide] = (), log: bool = True,
) -> Chart | None:  # fmt: skip
    """Chart a quantity against tokens, with a cross per failed trial; bars for a single length."""
    failures = tuple(_failed(rows))
    lengths = {int(p.x) for p in points} | {int(m.x) for m in failures}
    if len(lengths) == 1:
        at = f"{where}, {format_tokens(lengths.pop())} tokens"
        return _chart(name, at, Axis("", "text"), Axis(what, kind), points, failures, shape="bars")
    return _chart(name, where, TOKENS, Axis(what, kind, log), points, failures, guides)


def _chart(
    name: str, where: str, x: Axis, y: Axis, points: Sequence[Point],
    failures: Sequence[Mark] = (), guides: Sequence[Guide] = (), shape: str = "lines",
    title: str = "", failed: str = "",
) -> Chart | None:  # fmt: skip
    """Make a chart; None without points.

    title: its start, if not the names of the axes.  failed: number of failures in words, if they
    are not trials.
    """
    if not points:
        return None
    # keep the capitals of a name like FLOPs
    along = x.name if x.name[1:2].isupper() else x.name.lower()
    across = f" against {along}" if along else ""
    title = f"{title or y.name + across}: {where[0].lower() + where[1:]}"
    if failures and not failed:
        failed = f"{len(failures)} trial{'s' if len(failures) > 1 else ''} failed"
    said = _said(y, points) + (f"; {failed}." if failed else ".")
    kept = tuple(points), tuple(failures), tuple(guides)
    return Chart(name, title, said, x, y, *kept, shape)  # type: ignore[arg-type]


def _said(y: Axis, points: Sequence[Point]) -> str:
    """Describe the points in a sentence, without full stop, for readers who can't see the chart."""
    series = len({p.series for p in points})
    least, most = min(points, key=lambda p: p.y), max(points, key=lambda p: p.y)
    if len(points) == 1:
        return f"{y.name} of {most.series}: {format_cell(most.y, y.kind)}"
    return (
        f"{y.name} of {series} series, from {format_cell(least.y, y.kind)} ({least.series}) to "
        f"{format_cell(most.y, y.kind)} ({most.series})"
    )


def _failed(rows: Sequence[SweepRow]) -> Iterator[Mark]:
    for r in rows:
        if r.status not in ("ok", "unsupported"):  # unsupported: no length is tried
            where = f" in {r.phase}" if r.phase else ""
            yield Mark(r.name, r.tokens, f"{r.status}{where} at {r.tokens:,} tokens")


def _ends(row: SweepRow, low: str, high: str) -> tuple[float | None, float | None]:
    """Return an interval; (None, None) for a single sample."""
    return (getattr(row, low), getattr(row, high)) if row.samples > 1 else (None, None)


def _rates(row: SweepRow) -> tuple[float | None, float | None]:
    low, high = _ends(row, "time_low_s", "time_high_s")
    done = require(row.tokens_per_s) * require(row.time_s)
    return (done / high, done / low) if low and high else (None, None)


def _span(points: Sequence[Point], rows: Sequence[SweepRow]) -> list[float]:
    """Return the smallest and largest x of points; if they have only one x, failures count too."""
    found = {p.x for p in points}
    if len(found) == 1:
        found |= {m.x for m in _failed(rows)}
    return [min(found), max(found)]


def _ends_of(points: Sequence[Point]) -> list[Point]:
    ordered = sorted(points, key=lambda p: p.x)
    return [ordered[0], ordered[-1]] if ordered else []


def _but_sparsity(row: Row) -> str:
    return " ".join(part for part in row.name.split(" ") if not part.startswith("sparsity="))


def _workload(row: SweepRow) -> Workload:
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "mode")
    return Workload(seq_len=1, **{name: getattr(row, name) for name in names})
