"""Build the report of a comparison: the answer first, then times, memory, lengths, the rest."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from longseq_bench.analysis.grouping import group_by
from longseq_bench.comparison.model import (
    Comparison,
    LengthComparison,
    MemoryComparison,
    TimeComparison,
)
from longseq_bench.comparison.summary import describe_gate, summarize
from longseq_bench.comparison.wording import (
    ComparedRow,
    format_detectable,
    format_percent,
    is_search,
    name_row,
)
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import (
    Axis,
    Cell,
    Chart,
    Column,
    Document,
    Guide,
    Point,
    Section,
    Table,
)
from longseq_bench.reports.groups import (
    capitalize_first,
    describe_workload,
    has_several_ranks,
    table_key,
)
from longseq_bench.reports.outcome_text import describe_outcome


def comparison_document(result: Comparison, fail_on: float | None = None) -> Document:
    """Return the report; fail_on: the relative change from which regressions are listed."""
    sections = [*_answer(result, fail_on), *_details(result), _commands(result)]
    sides = [_describe_side("A", result.a, 0, result), _describe_side("B", result.b, 1, result)]
    return Document(
        "compare",
        "Two runs compared",
        [*sides, "Ratios are B over A."],
        [section for section in sections if section.has_content],
        lambda: processes_table(result),
    )


def terminal_document(result: Comparison, fail_on: float | None = None) -> Document:
    """Return the report for a terminal, with the answer at the end, above the prompt.

    Charts, commands and unchanged peaks are left out.
    """
    changed = tuple(peak for peak in result.peaks if peak.verdict != "same")
    sections = [*_details(replace(result, peaks=changed)), *_answer(result, fail_on)]
    report = comparison_document(result, fail_on)
    return replace(report, sections=[replace(s, charts=()) for s in sections if s.has_content])


def processes_table(result: Comparison) -> Table:
    """Return the tidy data: one row per process of every trial with times on both sides."""
    fields = (
        "implementation", "label", "tokens", "world_size", "device", "dtype", "mode", "causal",
        "batch", "heads", "kv_heads", "head_dim",
    )  # fmt: skip
    rows = tuple(
        (side, *(getattr(t.row, name) for name in fields), i, seconds)
        for t in result.times
        for side, times in (("A", t.a_rounds), ("B", t.b_rounds))
        for i, seconds in enumerate(times)
    )
    names = ("side", *fields, "process", "median_s")
    return Table("processes", tuple(Column(name) for name in names), rows)


_Compared = TypeVar("_Compared", bound=TimeComparison | MemoryComparison | LengthComparison)

_LABEL = ValueColumn("Implementation", "text", lambda one: one.row.label, 10)
_TOKENS = ValueColumn("Tokens", "tokens", lambda one: one.row.tokens, 9)
_RANKS = ValueColumn("Ranks", "count", lambda one: one.row.world_size, 9)
_TIMES = (
    ValueColumn("A", "seconds", lambda t: t.a_s, 6),
    ValueColumn("B", "seconds", lambda t: t.b_s, 7),
    ValueColumn("Ratio", "ratio", lambda t: t.ratio, 8),
    ValueColumn("Change", "share", lambda t: t.ratio - 1, 4),
    ValueColumn("Low", "ratio", lambda t: t.estimate and t.estimate.low, 5),
    ValueColumn("High", "ratio", lambda t: t.estimate and t.estimate.high, 5),
    ValueColumn("p", "error", lambda t: t.estimate and t.estimate.adjusted_p, 2),
    ValueColumn("Detectable", "share", lambda t: _detectable(t), 3),
    ValueColumn("Processes", "text", lambda t: f"{len(t.a_rounds)} and {len(t.b_rounds)}", 1),
    ValueColumn("Verdict", "text", lambda t: t.verdict, 10),
    ValueColumn("Note", "text", lambda t: "; ".join(filter(None, [t.reason, t.note])) or None, 1),
)
_PEAKS = (
    ValueColumn("A", "bytes", lambda p: p.a_bytes, 1),
    ValueColumn("B", "bytes", lambda p: p.b_bytes, 2),
    ValueColumn("Ratio", "ratio", lambda p: p.ratio, 3),
    ValueColumn("Verdict", "text", lambda p: p.verdict, 10),
)
_MAXIMA = (
    ValueColumn("A", "tokens", lambda m: m.a.max_tokens, 7),
    ValueColumn("A fails at", "tokens", lambda m: m.a.first_failure, 5),
    ValueColumn("A limited by", "text", lambda m: m.a.limited_by, 3),
    ValueColumn("B", "tokens", lambda m: m.b.max_tokens, 8),
    ValueColumn("B fails at", "tokens", lambda m: m.b.first_failure, 5),
    ValueColumn("B limited by", "text", lambda m: m.b.limited_by, 3),
    ValueColumn("Ratio", "ratio", lambda m: m.ratio, 4),
    ValueColumn("Verdict", "text", lambda m: m.verdict, 10),
    ValueColumn("Note", "text", lambda m: m.reason or None, 1),
)


_STATUS_CHANGES = (
    ValueColumn("Trial", "text", lambda one: name_row(one.row)),
    ValueColumn("A", "text", lambda one: describe_outcome(one.a_status, None, one.a_reason), 2),
    ValueColumn("B", "text", lambda one: describe_outcome(one.b_status, None, one.b_reason), 3),
    ValueColumn("Verdict", "text", lambda one: one.verdict, 4),
    ValueColumn("Note", "text", lambda one: "different budgets" if one.budgets else None, 1),
)
_DIFFERENCES = (
    ValueColumn("", "text", lambda one: one.name),
    ValueColumn("A", "text", lambda one: one.a),
    ValueColumn("B", "text", lambda one: one.b),
)


def _detectable(t: TimeComparison) -> Cell:
    if t.estimate is None:
        return None
    share = t.estimate.detectable
    return format_detectable(share) if share > 1 else share


def _answer(result: Comparison, fail_on: float | None) -> Iterator[Section]:
    yield Section("Summary", points=[*summarize(result), *result.caveats])
    if fail_on is not None:
        title = f"Worse by {format_percent(fail_on)} or more"
        yield Section(title, points=describe_gate(result, fail_on))


def _details(result: Comparison) -> Iterator[Section]:
    confidence = format_percent(1 - result.level)
    yield Section(
        "Times",
        [
            "A and B: geometric mean over processes of the median pass on the slowest rank. "
            f"Low and high: the {confidence} interval of the ratio (Student's t on logarithms). "
            "p: corrected for all rows (Holm). Slower and faster: p is at most "
            f"{format_percent(result.level)} and the change at least "
            f"{format_percent(result.min_change)}; same: within noise. Detectable: the "
            "smallest difference that this number of processes can distinguish from noise."
        ],
        tables=_tables(result.times, _TIMES),
        charts=[
            _chart(times, i)
            for i, times in enumerate(_by_workload(result.times), 1) if len(times) > 1
        ],
    )  # fmt: skip
    yield Section(
        "Peak memory",
        [
            "Largest peak over ranks and processes. More: every process of B needs at least 1 % "
            "more than every process of A; less: the reverse."
        ],
        tables=_tables(result.peaks, _PEAKS),
    )
    yield Section(
        "Longest lengths",
        [
            "A and B: the longest length that passed; fails at: the shortest failed length above "
            "it. Same: the brackets overlap."
        ],
        tables=_tables(result.maxima, _MAXIMA),
    )
    yield Section("Different status", tables=_table(result.status_changes, _STATUS_CHANGES))
    unmatched = [
        f"Only in {name}: {_name_with_kind(row)}"
        for name, rows in (("A", result.only_a), ("B", result.only_b))
        for row in rows
    ]
    yield Section("Only in A or only in B", points=unmatched)
    yield Section(
        "In both, on different machines",
        [f"Not compared, because the machines differ{result.machine_differences}:"],
        points=[_name_with_kind(row) for row in result.other_machines],
    )
    title = "Differences of machine and software"
    yield Section(title, tables=_table(result.differences, _DIFFERENCES))


def _commands(result: Comparison) -> Section:
    lines = [
        f"# {name}: {command}".replace("\n", " ")
        for name, records in zip("AB", result.records, strict=True)
        for command in dict.fromkeys(r.command for r in records if r.command)
    ]
    return Section("How they were measured", code=lines)


def _describe_side(letter: str, name: str, index: int, result: Comparison) -> str:
    records = result.records[index]
    first, last = min(r.started_at for r in records), max(r.started_at for r in records)
    commits = dict.fromkeys(r.environment.commit or "unknown" for r in records)
    hosts = dict.fromkeys(r.environment.host for r in records)
    return (
        f"{letter}: {name}, {len(records)} records compared, commit {', '.join(commits)}, on "
        f"{', '.join(hosts)}, measured {first}" + (f" to {last}." if last != first else ".")
    )


def _by_workload(items: Sequence[_Compared]) -> list[list[_Compared]]:
    return list(group_by(items, lambda one: table_key(one.row)).values())


def _table(items: Sequence[Any], columns: Sequence[ValueColumn]) -> list[Table]:
    return [build_table("", columns, items)] if items else []


def _tables(items: Sequence[_Compared], fields: Sequence[ValueColumn]) -> list[Table]:
    """Return one table per workload; columns without any value are left out."""
    tables = []
    for group in _by_workload(items):
        rows = [one.row for one in group]
        tokens = [] if is_search(rows[0]) else [_TOKENS]
        ranks = [_RANKS] if has_several_ranks(rows) else []
        title = capitalize_first(describe_workload(rows[0], defaultdict(str)))
        tables.append(build_table(title, [_LABEL, *tokens, *ranks, *fields], group))
    return tables


def _chart(times: Sequence[TimeComparison], number: int) -> Chart:
    points = []
    for t in times:
        low, high = (t.estimate.low, t.estimate.high) if t.estimate else (None, None)
        points.append(Point(t.row.name, t.row.tokens, t.ratio, low, high, t.verdict))
    lengths = [p.x for p in points]
    same = tuple(Point("the same", x, 1.0) for x in (min(lengths), max(lengths)))
    decided = sum(p.words in ("slower", "faster") for p in points)
    return Chart(
        f"ratios {number}",
        f"B over A: {describe_workload(times[0].row, defaultdict(str))}",
        f"Times of B divided by those of A, with intervals: {len(points)} trials, of which "
        f"{decided} are slower or faster.",
        Axis("tokens", "tokens", log=True),
        Axis("time, B over A", "ratio"),
        tuple(points),
        guides=(Guide("the same", same, "no change"),),
        shape="dots",
    )


def _name_with_kind(row: ComparedRow) -> str:
    return f"{name_row(row)}{', a search' if is_search(row) else ''}"
