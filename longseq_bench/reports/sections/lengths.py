"""Swept lengths, one row per trial, and longest lengths, one row per search, per workload."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from longseq_bench.analysis.labels import mask_words
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, field_column
from longseq_bench.reports.document import (
    MAX_CHARTS,
    Axis,
    Chart,
    Guide,
    Mark,
    Point,
    Section,
    build_chart,
)
from longseq_bench.reports.groups import (
    SAME_TABLE,
    at_length,
    find_varying,
    join_words,
    split_names,
)


def _of_standard(name: str) -> ValueColumn:
    """Return a column about standard attention, empty in rows that are not compared with it."""
    return replace(
        field_column(SweepRow, name),
        value=lambda row: None if row.memory_reduction is None else getattr(row, name),
    )


_LENGTHS: Columns = (
    *split_names(
        "label tokens world_size tokens_per_rank status time_s samples unstable check_limits "
        "compute_time_s communication_time_s exposed_share speedup efficiency bytes_sent "
        "peak_bytes imbalance tokens_per_s effective_flops max_error share_of_bandwidth "
        "copy_bandwidth memory_reduction"
    ),
    *(_of_standard(name) for name in ("dense_peak_bytes", "dense_memory_source")),
    *split_names("wire_error quantisation_error density_asked density_achieved"),
    ValueColumn("Uncovered", "share", lambda row: row.uncovered or None),
    ValueColumn("Zero rows", "share", lambda row: row.zero_rows or None),
    "speed",
)


def lengths(source: Source) -> Section:
    """Build a table and charts of all measured rows, per workload."""
    explanation = ["A dash: not measured."]
    if source.baseline_label:
        explanation.append(f"Speed: time of {source.baseline_label} divided by the row's time.")
    return Section(
        "Lengths swept",
        explanation,
        tables=source.tables(source.rows, _LENGTHS),
        charts=source.charts(source.rows, chart_time, chart_memory),
    )


def chart_time(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the median time against tokens, with its 95 % interval."""
    points = [
        Point(r.name, r.tokens, r.time_s, *((r.time_low_s, r.time_high_s) if r.samples > 1 else ()))
        for r in rows
        if r.time_s
    ]
    return _against_tokens("time", where, Axis("Time", "seconds", True), points, rows)


def chart_memory(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the peak of a rank against tokens."""
    points = [
        Point(r.name, r.tokens, r.peak_bytes) for r in rows if r.peak_bytes and r.status == "ok"
    ]
    return _against_tokens("memory", where, Axis("Peak memory", "bytes", True), points, rows)


def _against_tokens(
    name: str, where: str, y: Axis, points: Sequence[Point], rows: Sequence[SweepRow]
) -> Chart | None:
    """Chart a quantity against tokens, with a cross per failed trial; bars for a single length."""
    failures = mark_failures(rows, attrgetter("name", "tokens"))
    lengths = {int(p.x) for p in points} | {int(m.x) for m in failures}
    if len(lengths) > 1:
        return build_chart(name, where, Axis("Tokens", "tokens", True), y, points, failures)
    at = at_length(where, lengths.pop()) if lengths else where
    return build_chart(name, at, None, replace(y, log=False), points, failures)


def mark_failures(
    rows: Iterable[SweepRow], place: Callable[[SweepRow], tuple[str, float]]
) -> list[Mark]:
    """Return a mark at the place of each failed row; of what is unsupported, no length is tried."""
    return [
        Mark(*place(r), f"{r.status}{f' in {r.phase}' if r.phase else ''} at {r.tokens:,} tokens")
        for r in rows
        if r.status not in ("ok", "unsupported")
    ]


# ---- longest lengths -----------------------------------------------------------------------------

_MAXIMA: Columns = split_names(
    "label world_size max_tokens pass_time_s density_achieved fits_tokens fit_predicted_tokens "
    "fit_time_s tokens_per_rank first_failure limited_by failure_phase check_limits floor_tokens "
    "fraction_of_floor peak_bytes imbalance bytes_per_token predicted_tokens runs confirmations"
)


def maxima(source: Source) -> Section:
    """Build a table of all searches per workload, the longest first, and bar charts."""
    rows = sorted(source.maxima, key=lambda row: (not row.is_full_pass, -row.max_tokens))
    explanations = {
        "Fit only, and Fits in memory: loops were shortened, under the same memory budget. "
        "Outputs and times were not checked.": any(row.fit_only for row in rows),
        "Recomputed: only q, k and v are kept between forward and backward.": any(
            row.keep == "inputs" for row in rows
        ),
        "In place: outputs overwrite inputs; the floor counts both.": any(
            row.keep == "nothing" for row in rows
        ),
        "Offloaded: q, k, v and the output are in the host's memory, so the device's budget "
        "and the floor do not limit their length.": any(row.offloads for row in rows),
    }
    return Section(
        "Longest lengths",
        [words for words, is_needed in explanations.items() if is_needed],
        tables=source.tables(rows, _MAXIMA),
        charts=_by_limit(source),
    )


MAX_TOKENS, MAX_BARS = Axis("Max tokens", "tokens"), 8
_LIMIT = ("fingerprint", "device", "mode", "memory_budget", "time_budget", "fit_only")


def _by_limit(source: Source) -> list[Chart]:
    """Chart longest lengths as sorted bars, with the floor as a tick.

    A chart has the searches of one machine, mode and limits, at most MAX_BARS of them; those with
    the longest lengths come first.
    """
    groups = group_by(source.maxima, attrgetter(*_LIMIT, "is_full_pass")).values()
    known = [sorted(rows, key=lambda r: -r.max_tokens) for rows in groups]
    known.sort(key=lambda rows: (not rows[0].is_full_pass, -rows[0].max_tokens))
    found = (_chart_maxima(source, rows) for rows in known[:MAX_CHARTS])
    return list(filter(None, found))


def _chart_maxima(source: Source, rows: Sequence[SearchRow]) -> Chart | None:
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
        if passed_none(row)
    ]
    floors = [Point(name, 0, row.floor_tokens) for name, row in passed.items() if row.floor_tokens]
    words = "the length whose q, k, v and output alone fill the memory budget, computed"
    guide = Guide("floor", tuple(floors), words)
    kind = "" if rows[0].is_full_pass else " in place (outputs overwrite inputs)"
    if rows[0].fit_only:
        kind = " that fit in memory (fit only: not checked or timed)"
    title = f"Longest lengths{kind}"
    if len(named) > MAX_BARS:
        title += f", the longest {MAX_BARS}"
    where = source.workload(rows[0], frozenset(SAME_TABLE) - varying)
    failed = failures[:MAX_BARS]
    return build_chart("maxima", where, None, MAX_TOKENS, points, failed, guide, title)


def _name_bar(row: SearchRow, varying: Iterable[str]) -> str:
    """Return the name of a row, with the fields of its workload that differ here."""
    words = {"mask": mask_words(row.mask), "dtype": row.dtype}
    fields = [field for field in SAME_TABLE if field in varying]
    others = (words.get(f, f"{f.replace('_', ' ')} {getattr(row, f)}") for f in fields)
    return join_words(row.name, *others)


def passed_none(row: SearchRow) -> bool:
    """Return True for a search without a length that passed, if any was tried."""
    return not row.max_tokens and row.limited_by != "unsupported"
