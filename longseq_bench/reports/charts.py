"""Charts of rows: values with intervals, failures and guides, as data that every format shows.

A builder takes the rows of one workload and its description, which goes into the title, and
returns None where there is nothing to draw.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.labels import format_option
from longseq_bench.analysis.row import R, Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import floor_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import (
    COMPUTED,
    MAX_FINDING_WORDS,
    Axis,
    Chart,
    Guide,
    Mark,
    Point,
    Shape,
    format_cell,
)
from longseq_bench.reports.groups import common_length, group_by_workload

MAX_CHARTS = 12
"""Maximum number of charts in one section; the tables have all rows."""
MAX_FACETS, MAX_CELL_ROWS, MAX_RANKED = 4, 40, 16
"""Maximum number of facets of a chart, of rows of a heat map, and of speed-ups without a title that
says that they are the highest."""
FEW = 6
"""Lines in colour on a first screen; the others are grey."""

TOKENS, SPEEDUP, NAMES = Axis("Tokens", "tokens", True), Axis("Speed-up", "ratio"), Axis("", "text")
ONE_RANK = "as fast as one rank"
Builder = Callable[[Sequence[R], str], Chart | None]


def of_each_workload(source: Source, rows: Iterable[R], *builders: Builder[R]) -> list[Chart]:
    """Return the charts of each workload among rows, at most MAX_CHARTS."""
    groups = group_by_workload(rows)[: MAX_CHARTS // len(builders)]
    found = (build(group, source.title(group[0])) for group in groups for build in builders)
    return list(filter(None, found))


def limit_note(rows: Iterable[Row], builders: int = 1) -> list[str]:
    """Return a sentence if there are more workloads than `of_each_workload` draws."""
    groups, drawn = len(group_by_workload(rows)), MAX_CHARTS // builders
    note = f"Charts are of the first {drawn} of {groups} workloads; the tables have all."
    return [note] if groups > drawn else []


# ---- figures against tokens --------------------------------------------------------------------


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
    lengths = {p.x for p in points}
    if len(lengths) < 2:
        lengths |= {m.x for m in _failed(rows)}
    on_one = all(r.world_size == 1 for r in rows)
    floor = guide_line("floor", lengths if on_one else (), lambda x: x * _floor_bytes(rows[0]))
    axis = Axis("Peak memory", "bytes", True)
    return _against_tokens("memory", where, axis, points, rows, floor)


def speedup_by_length(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against tokens."""
    points = [_speedup(r, r.name, r.tokens) for r in rows if r.speedup and r.world_size > 1]
    level = guide_line(ONE_RANK, (p.x for p in points), lambda _: 1.0, ONE_RANK)
    return _against_tokens("speed-up", where, SPEEDUP, points, rows, level)


def ratios(name: str, where: str, points: Sequence[Point]) -> Chart:
    """Chart times of a comparison, B over A; `words` of a point are its verdict."""
    decided = sum(p.words in ("slower", "faster") for p in points)
    ends = min(p.x for p in points), max(p.x for p in points)
    level = Guide("the same", tuple(Point("the same", x, 1.0) for x in ends), "no change")
    return Chart(
        name,
        f"B over A: {where}",
        f"Times of B divided by those of A, with intervals: {len(points)} trials, {decided} of "
        "them slower or faster.",
        replace(TOKENS, name="tokens"),
        Axis("time, B over A", "ratio"),
        tuple(points),
        guides=(level,),
        shape="dots",
    )


# ---- sparsity, and work per byte ---------------------------------------------------------------


def share_of_ideal(source: Source, rows: Iterable[SweepRow]) -> list[Chart]:
    """Chart the share of ideal against sparsity, per workload and length, longest first."""
    by_length = sorted(group_by(rows, attrgetter("tokens")).items(), reverse=True)
    found = [chart for _, some in by_length for chart in of_each_workload(source, some, _share)]
    return found[:MAX_CHARTS]


def _share(rows: Sequence[SweepRow], where: str) -> Chart | None:
    points = []
    for r in sorted(rows, key=lambda r: -float(r.token_density or 0)):
        if r.share_of_ideal and r.token_density is not None and r.token_density < 1:
            words = "" if r.dense_source == "measured" else f"dense time {r.dense_source}"
            share = r.share_of_ideal, r.share_low, r.share_high
            points.append(Point(_without_sparsity(r), 1 - r.token_density, *share, words))
    ideal = guide_line("skipped work costs nothing", (p.x for p in points), lambda _: 1.0)
    x, y = Axis("Sparsity (of pairs)", "share"), Axis("Share of ideal", "share")
    return build_chart("share-of-ideal", _at(where, rows[0].tokens), x, y, points, guide=ideal)


def roofline(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart FLOP/s against FLOPs per floor byte; the highest measured rate is the roof."""
    points = []
    for r in rows:
        if r.effective_flops and r.flops and r.world_size == 1:
            place = r.flops / (_floor_bytes(r) * r.tokens), r.effective_flops
            points.append(Point(r.label, *place, words=f"{format_tokens(r.tokens)} tokens"))
    if len({p.x for p in points}) < 2:
        return None
    best = max(points, key=lambda p: p.y)
    words = f"the highest rate measured here, {best.series}"
    roof = guide_line("highest here", (p.x for p in points), lambda _: best.y, words)
    x, y = Axis("FLOPs a byte of the floor", "count", True), Axis("FLOP/s", "flop_rate", True)
    return build_chart("roofline", where, x, y, points, guide=roof, shape="dots")


def speed_over_dense(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Map the speed over dense: a row per pattern, a column per sparsity, a facet per length.

    The longest lengths are drawn, at most MAX_FACETS. None with fewer than two sparsities.
    """
    # the sparsity of a plug-in may be a word
    rows = [r for r in rows if type(r.options.get("sparsity")) in (int, float)]
    known = [r for r in rows if r.speed_over_dense]
    if len({r.options["sparsity"] for r in known}) < 2:
        return None
    names = {_without_sparsity(r) for r in known}
    facets = max(1, min(MAX_FACETS, MAX_CELL_ROWS // len(names)))
    lengths = sorted({r.tokens for r in known})[-facets:]
    drawn = sorted((r for r in known if r.tokens in lengths), key=attrgetter("tokens"))
    sources = group_by(drawn, attrgetter("tokens"))

    def place(row: SweepRow) -> tuple[str, float]:
        return _without_sparsity(row), float(str(row.options["sparsity"]))

    def facet(tokens: int) -> str:
        computed = [r.dense_source != "measured" for r in sources[tokens]]
        words = "dense time computed" if all(computed) else "some dense times computed"
        return join_words(f"{format_tokens(tokens)} tokens", words if any(computed) else "")

    points = [Point(*place(r), require(r.speed_over_dense), facet=facet(r.tokens)) for r in drawn]
    failures = [
        Mark(*place(r), _describe_failure(r), facet(r.tokens))
        for r in rows
        if r.tokens in lengths and r.status not in ("ok", "unsupported")
        if _without_sparsity(r) in names
    ]
    x, y = Axis("Requested sparsity", "share"), Axis("Speed over dense", "ratio")
    title = "Speed over dense attention"
    return build_chart("speed-over-dense", where, x, y, points, failures, shape="heat", title=title)


# ---- several ranks -----------------------------------------------------------------------------


def speedups(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-ups of one length as sorted bars, with a tick at 1."""
    points = [_speedup(r, r.name, 0) for r in sorted(rows, key=lambda r: -require(r.speedup))]
    ones = Guide(ONE_RANK, tuple(Point(p.series, 0, 1.0) for p in points), ONE_RANK)
    title = f"The {MAX_RANKED} highest of {len(rows)} speed-ups" if len(rows) > MAX_RANKED else ""
    where = _at(where, rows[0].tokens)
    return build_chart("speed-up", where, NAMES, SPEEDUP, points, (), ones, "bars", title)


def speedup_by_ranks(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-up over one rank against ranks, with the ideal, at the most common length.

    None for two numbers of ranks: the table says as much as a line of two points.
    """
    several = {r.ranks_key for r in rows if r.world_size > 1 and r.speedup}
    some = common_length([r for r in rows if r.ranks_key in several])
    points = [_speedup(r, r.label, r.world_size) for r in some if r.speedup]
    if len({p.x for p in points}) < 3:
        return None
    ideal, x = guide_line("ideal", (p.x for p in points), float), Axis("Ranks", "count")
    return build_chart("speed-up", _at(where, some[0].tokens), x, SPEEDUP, points, guide=ideal)


def rank_peaks(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the largest peak of a rank as bars, at the most common length of several ranks.

    rows: on one rank and on several; a tick is the peak of the same trial on one rank.
    """
    known = [r for r in rows if r.peak_bytes and r.status == "ok"]
    several = common_length([r for r in known if r.world_size > 1])
    if not several:
        return None
    alone = {r.ranks_key: require(r.peak_bytes) for r in known if r.world_size == 1}
    points = [Point(r.name, 0, require(r.peak_bytes)) for r in several]
    ones = tuple(Point(r.name, 0, alone[r.ranks_key]) for r in several if r.ranks_key in alone)
    guide = Guide("on one rank", ones, "the same trial on one rank")
    where, y = _at(where, several[0].tokens), Axis("Peak memory of a rank", "bytes")
    return build_chart("rank-memory", where, NAMES, y, points, (), guide, "bars")


# ---- parts of charts ---------------------------------------------------------------------------


def _against_tokens(
    name: str,
    where: str,
    y: Axis,
    points: Sequence[Point],
    rows: Sequence[SweepRow],
    guide: Guide | None = None,
) -> Chart | None:
    """Chart a quantity against tokens, with a cross per failed trial; bars for a single length."""
    failures = tuple(_failed(rows))
    lengths = {int(p.x) for p in points} | {int(m.x) for m in failures}
    if len(lengths) > 1:
        return build_chart(name, where, TOKENS, y, points, failures, guide)
    at = _at(where, lengths.pop()) if lengths else where
    return build_chart(name, at, NAMES, replace(y, log=False), points, failures, shape="bars")


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
    # keep the capitals of a name like FLOPs
    along = x.name if x.name[1:2].isupper() else x.name.lower()
    title = title or y.name + (f" against {along}" if along else "")
    title += f": {where[0].lower()}{where[1:]}" if where else ""
    words = _describe(y, points) + (f"; {len(failures)} failed" if failures else "")
    guides = (guide,) if guide and guide.points else ()
    return Chart(name, title, f"{words}.", x, y, tuple(points), tuple(failures), guides, shape)


def _describe(y: Axis, points: Sequence[Point]) -> str:
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


def _speedup(row: SweepRow, name: str, x: float) -> Point:
    return Point(name, x, require(row.speedup), row.speedup_low, row.speedup_high)


def _failed(rows: Sequence[SweepRow]) -> Iterator[Mark]:
    for row in rows:
        if row.status not in ("ok", "unsupported"):  # unsupported: no length is tried
            yield Mark(row.name, row.tokens, _describe_failure(row))


def _describe_failure(row: SweepRow) -> str:
    where = f" in {row.phase}" if row.phase else ""
    return f"{row.status}{where} at {row.tokens:,} tokens"


def _without_sparsity(row: SweepRow) -> str:
    """Return the name of a row without its sparsity, so that sparsities are one series."""
    sparsity = row.options.get("sparsity")
    return (
        row.name.replace(f" {format_option('sparsity', sparsity)}", "", 1) if sparsity else row.name
    )


def join_words(*words: str) -> str:
    """Join the words that are not empty by commas."""
    return ", ".join(filter(None, words))


def _at(where: str, tokens: int) -> str:
    return join_words(where, f"{format_tokens(tokens)} tokens")


def _interval(row: SweepRow) -> tuple[float | None, float | None]:
    """Return the interval of the time; (None, None) for a single sample."""
    return (row.time_low_s, row.time_high_s) if row.samples > 1 else (None, None)


def guide_line(
    name: str, xs: Iterable[float], height: Callable[[float], float], description: str = COMPUTED
) -> Guide:
    """Return a guide over all x, from its height at each; it has no points without any x."""
    found = sorted(xs)
    ends = [*found[:1], *found[-1:]]
    return Guide(name, tuple(Point("", float(x), height(x)) for x in ends), description)


def _floor_bytes(row: SweepRow) -> int:
    """Return the bytes per token that any exact attention needs."""
    names = "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "mode", "new_tokens"
    tokens = max(1, row.new_tokens)
    return floor_bytes_per_token(Workload(seq_len=tokens, **{n: getattr(row, n) for n in names}))
