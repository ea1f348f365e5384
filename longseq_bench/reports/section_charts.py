"""Charts of rows: values with intervals, failures and guides.

Each function takes the rows of one workload and returns a chart, or None without points.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.labels import MAX_LABEL, format_option, mask_words
from longseq_bench.analysis.row import R, Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import floor_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import (
    MAX_FINDING_WORDS,
    Axis,
    Chart,
    Guide,
    Mark,
    Point,
    format_cell,
)
from longseq_bench.reports.groups import SAME_TABLE, find_varying, group_by_workload

MAX_CHARTS = 12
"""Maximum number of charts in one section; the tables have all rows."""

FEW = 6
"""Lines in colour on a first screen; the others are grey."""

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


def time_of_best(rows: Sequence[SweepRow], best: Sequence[SweepRow]) -> Chart | None:
    """Chart the times of the rows named as the best, at most FEW in colour, for a first screen.

    rows: of one workload or shape, which is stated nearby.
    """
    names = {row.name for row in best}
    chart = time([row for row in rows if row.name in names], "")
    return chart and replace(chart, colours=FEW)


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
    roof = Guide("highest here", level, f"the highest rate measured here, {best.series}")
    axes = Axis("FLOPs a byte of the floor", "count", True), Axis("FLOP/s", "flop_rate", True)
    return _chart("roofline", where, *axes, points, guides=[roof], shape="dots")


# ---- sparsity ----------------------------------------------------------------------------------


def speed_over_dense(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Map the speed over dense: a row per pattern, a column per sparsity, a facet per length.

    The longest lengths are drawn, at most MAX_FACETS. None with fewer than two sparsities.
    """
    known = [r for r in rows if r.speed_over_dense and _has_sparsity(r)]
    if len({r.options["sparsity"] for r in known}) < 2:
        return None
    names = {_without_sparsity(r) for r in known}
    facets = max(1, min(MAX_FACETS, MAX_CELL_ROWS // len(names)))
    lengths = sorted({r.tokens for r in known})[-facets:]
    drawn = [r for r in known if r.tokens in lengths]
    drawn.sort(key=attrgetter("tokens"))
    sources = group_by(drawn, attrgetter("tokens"))

    def facet(tokens: int) -> str:
        computed = [r.dense_source != "measured" for r in sources.get(tokens, ())]
        if not any(computed):
            return f"{format_tokens(tokens)} tokens"
        words = "dense time computed" if all(computed) else "some dense times computed"
        return f"{format_tokens(tokens)} tokens, {words}"

    points = [
        Point(
            _without_sparsity(r), _sparsity(r), require(r.speed_over_dense), facet=facet(r.tokens)
        )
        for r in drawn
    ]
    failures = [
        Mark(_without_sparsity(r), _sparsity(r), _describe_failure(r), facet(r.tokens))
        for r in rows
        if r.tokens in lengths and _has_sparsity(r) and r.status not in ("ok", "unsupported")
        if _without_sparsity(r) in names
    ]
    axes = Axis("Requested sparsity", "share"), Axis("Speed over dense", "ratio")
    return _chart(
        "speed-over-dense", where, *axes, points, failures, shape="heat",
        title="Speed over dense attention",
    )  # fmt: skip


def _has_sparsity(row: SweepRow) -> bool:
    """Return True if the option is a number; that of a plug-in may be a word."""
    return type(row.options.get("sparsity")) in (int, float)


def _sparsity(row: SweepRow) -> float:
    return float(str(row.options["sparsity"]))


# ---- longest lengths ---------------------------------------------------------------------------

MAX_FACETS, MAX_BARS, MAX_CELL_ROWS = 4, 8, 40
"""Maximum number of facets of a chart, of bars of a facet, and of rows of a heat map."""
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


def _maxima_kind(row: SearchRow) -> str:
    if row.fit_only:
        return "maxima-fits"
    return "maxima" if row.is_full_pass else "maxima-over-inputs"


def _order_by_kind(source: Source) -> list[SearchRow]:
    return sorted(source.maxima, key=lambda row: list(_MAXIMA_KINDS).index(_maxima_kind(row)))


def maxima(source: Source) -> list[Chart]:
    """Chart longest lengths as sorted bars, with the theoretical maximum as a tick.

    A facet has the searches of one machine, mode and limits, at most MAX_BARS of them; those with
    the longest lengths come first, MAX_FACETS in a chart.
    """
    found: list[Chart] = []
    for rows in group_by(_order_by_kind(source), _maxima_kind).values():
        groups = [group for group in _split_by_limit(rows) if any(r.max_tokens for r in group)]
        groups.sort(key=lambda group: -max(r.max_tokens for r in group))
        for i in range(0, len(groups), MAX_FACETS):
            found += filter(None, [_maxima(source, groups[i : i + MAX_FACETS])])
    return found[:MAX_CHARTS]


def _split_by_limit(rows: Sequence[SearchRow]) -> Iterator[list[SearchRow]]:
    """Yield the rows of each limit; of each workload where names of bars would be too long."""
    for group in group_by(rows, attrgetter(*_LIMIT)).values():
        names = map(_name_bars(group), group)
        yield from [group] if max(map(len, names)) <= MAX_LABEL else group_by_workload(group)


def _name_bars(rows: Sequence[SearchRow]) -> Callable[[SearchRow], str]:
    """Return a function that names a row, with the fields of its workload that differ here."""
    shared = _shared(rows)
    differing = [name for name in SAME_TABLE if name not in shared]
    return lambda row: _join(row.name, *(_describe(row, field) for field in differing))


def _shared(rows: Iterable[Row]) -> frozenset[str]:
    """Return the fields of SAME_TABLE that are equal in all rows."""
    return frozenset(SAME_TABLE) - find_varying(rows)


def _maxima(source: Source, groups: Sequence[Sequence[SearchRow]]) -> Chart | None:
    """Chart groups of rows as facets; the title has what they share."""
    title_fields = _shared(row for rows in groups for row in rows)
    where = source.workload(groups[0][0], title_fields)
    points, failures, floors = [], [], []
    for rows in groups:
        name, order = _name_bars(rows), sorted(rows, key=lambda row: -row.max_tokens)
        facet = source.workload(rows[0], _shared(rows) - title_fields)
        drawn = [r for r in order if r.max_tokens][:MAX_BARS]
        points += [
            Point(name(r), 0, r.max_tokens, words=f"limited by {r.limited_by}", facet=facet)
            for r in drawn
        ]
        floors += [Point(name(r), 0, r.floor_tokens, facet=facet) for r in drawn if r.floor_tokens]
        failures += [
            Mark(name(r), 0, f"no length passed, limited by {r.limited_by}", facet)
            for r in _failed_all(rows)[:MAX_BARS]
        ]
    kind = _maxima_kind(groups[0][0])
    axis, title = _MAXIMA_KINDS[kind]
    if any(sum(r.max_tokens > 0 for r in rows) > MAX_BARS for rows in groups):
        title += f", the longest {MAX_BARS} of each limit"
    guides = [Guide("theoretical maximum", tuple(floors), _FLOOR)] if floors else []
    return _chart(kind, where, NAMES, Axis(axis, "tokens"), points, failures, guides, "bars", title)


def longest_bars(named: Mapping[str, SearchRow]) -> Chart | None:
    """Chart longest lengths as bars, for a first screen.

    named: rows by the names of their bars, which state what differs among them.
    """
    found = {name: row for name, row in named.items() if row.max_tokens}
    points = [
        Point(name, 0, row.max_tokens, words=f"limited by {row.limited_by}")
        for name, row in found.items()
    ]
    floors = tuple(Point(name, 0, r.floor_tokens) for name, r in found.items() if r.floor_tokens)
    guides = [Guide("theoretical maximum", floors, _FLOOR)] if floors else []
    axis = Axis("Max tokens", "tokens")
    return _chart("maxima", "", NAMES, axis, points, guides=guides, shape="bars")


def _describe(row: Row, name: str) -> str:
    value = getattr(row, name)
    if name == "mask":
        return mask_words(value)
    return str(value) if name == "dtype" else f"{name.replace('_', ' ')} {value}"


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
    title = title or y.name + (f" against {along}" if along else "")
    title += f": {where[0].lower()}{where[1:]}" if where else ""
    words = _values(y, points) + (f"; {len(failures)} failed" if failures else "")
    kept = tuple(points), tuple(failures), tuple(guides)
    return Chart(name, title, f"{words}.", x, y, *kept, shape)  # type: ignore[arg-type]


def _values(y: Axis, points: Sequence[Point]) -> str:
    """Describe the points in at most MAX_FINDING_WORDS - 2 words, for readers who can't see them.

    The name of the highest is left out if it has too many words.
    """
    lowest, highest = min(points, key=lambda p: p.y), max(points, key=lambda p: p.y)
    ends = dict.fromkeys(format_cell(p.y, y.kind) for p in (lowest, highest))
    names = len({p.series for p in points})
    words = f"{y.name} of {names} series, from {' to '.join(ends)}"
    if len(points) == 1:
        words = f"{y.name}: {next(iter(ends))}"
    named = f"{words} ({highest.series})"
    return named if len(named.split()) <= MAX_FINDING_WORDS - 2 else words


def _failed(rows: Sequence[SweepRow]) -> Iterator[Mark]:
    for r in rows:
        if r.status not in ("ok", "unsupported"):  # unsupported: no length is tried
            yield Mark(r.name, r.tokens, _describe_failure(r))


def _describe_failure(row: SweepRow) -> str:
    where = f" in {row.phase}" if row.phase else ""
    return f"{row.status}{where} at {row.tokens:,} tokens"


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
    names = "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "mode", "new_tokens"
    tokens = max(1, row.new_tokens)
    return floor_bytes_per_token(Workload(seq_len=tokens, **{n: getattr(row, n) for n in names}))
