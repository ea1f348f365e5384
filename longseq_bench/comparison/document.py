"""Build the report of a comparison: the answer first, then times, memory, lengths, the rest."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from longseq_bench.analysis.runs import group_by
from longseq_bench.comparison.model import (
    Comparison,
    LengthComparison,
    MemoryComparison,
    TimeComparison,
)
from longseq_bench.comparison.summary import could_show, describe_gate, summarize
from longseq_bench.comparison.verdict import decide
from longseq_bench.comparison.wording import (
    ComparedRow,
    count,
    format_detectable,
    format_percent,
    is_search,
    join_words,
    name_row,
)
from longseq_bench.reports.charts import ratios
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import (
    Cell,
    Chart,
    Column,
    Document,
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

UNCHANGED = "unchanged"
"""End of the title of the section of unchanged rows."""


def comparison_document(result: Comparison, fail_on: float | None = None) -> Document:
    """Return the report, the verdict first; fail_on: the share from which a change is a failure.

    Rows that changed, or were too noisy to tell, come first; the unchanged ones are folded.
    """
    changed, unchanged = _split(result, fail_on or result.min_change)
    sections = [
        _answer(result, changed, fail_on),
        *_details(result),
        _unchanged(result, unchanged),
        _method(result),
        _commands(result),
    ]
    sides = [_describe_side("A", result.a, 0, result), _describe_side("B", result.b, 1, result)]
    shared = [f"{workload}." for workload in [_shared_workload(result)] if workload]
    return Document(
        "compare",
        decide(result, fail_on).line,
        [*sides, *shared, "Ratios are B over A."],
        [section for section in sections if section.has_content],
        lambda: processes_table(result),
    )


def terminal_document(result: Comparison, fail_on: float | None = None) -> Document:
    """Return the report for a terminal: without charts, and one line for the unchanged rows."""
    report = comparison_document(result, fail_on).without_charts()
    answer, *others = [section for section in report.sections if not section.folded]
    lines = [s.title for s in report.sections if s.folded and s.title.endswith(UNCHANGED)]
    answer = replace(answer, points=[*answer.points, *(f"{line}." for line in lines)])
    return replace(report, sections=[answer, *others])


def processes_table(result: Comparison) -> Table:
    """Return the tidy data: one row per process of every trial with times on both sides."""
    fields = (
        "tokens", "world_size", "device", "dtype", "mode", "new_tokens", "causal", "mask", "batch",
        "heads", "kv_heads", "head_dim", "v_head_dim", "model",
    )  # fmt: skip
    rows = tuple(
        (side, t.row.implementation, result.program_label(t.row), *values, i, seconds)
        for t in result.times
        for values in [[getattr(t.row, name) for name in fields]]
        for side, times in (("A", t.a_rounds), ("B", t.b_rounds))
        for i, seconds in enumerate(times)
    )
    names = ("side", "implementation", "label", *fields, "process", "median_s")
    return Table("processes", tuple(Column(name) for name in names), rows)


_Compared = TypeVar("_Compared", bound=TimeComparison | MemoryComparison | LengthComparison)

_LABEL = ValueColumn("Implementation", "text", lambda one: one.row.label, 10)
_TOKENS = ValueColumn("Tokens", "tokens", lambda one: one.row.tokens, 9)
_RANKS = ValueColumn("Ranks", "count", lambda one: one.row.world_size, 9)
_TIMES = (
    ValueColumn("A", "seconds", lambda t: time_with_interval(t.a), 8),
    ValueColumn("B", "seconds", lambda t: time_with_interval(t.b), 8),
    ValueColumn("Ratio", "ratio", lambda t: t.ratio, 7),
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


def _split(result: Comparison, share: float) -> tuple[Comparison, Comparison]:
    """Return the rows that changed or can't be judged, the latter last, and the unchanged rows.

    share: the change that a time must have been able to show to count as unchanged.
    """
    times = [
        t if t.verdict != "same" or could_show(t, share, result.min_change)
        else replace(t, verdict="too noisy") for t in result.times
    ]  # fmt: skip

    def part(is_same: bool) -> Comparison:
        def choose(items: Iterable[_Compared]) -> tuple[_Compared, ...]:
            kept = [one for one in items if (one.verdict == "same") == is_same]
            return tuple(sorted(kept, key=lambda one: one.verdict in ("too noisy", "undecided")))

        return replace(
            result, times=choose(times), peaks=choose(result.peaks), maxima=choose(result.maxima)
        )

    return part(False), part(True)


def _answer(result: Comparison, changed: Comparison, fail_on: float | None) -> Section:
    gate = [] if fail_on is None else describe_gate(result, fail_on)
    charts = [
        _chart(times, i) for i, times in enumerate(_by_workload(result.times), 1) if len(times) > 1
    ]
    return Section(
        "Result",
        points=[*gate, *summarize(result)],
        tables=[
            *_figure_tables(result, changed),
            *_table("Different status", result.status_changes, _STATUS_CHANGES),
        ],
        charts=charts,
    )


def _figure_tables(result: Comparison, rows: Comparison) -> list[Table]:
    """Return the tables of times, peaks and lengths of some rows of a comparison."""
    shared = bool(_shared_workload(result))
    return [
        *_tables("Times", rows.times, _TIMES, shared),
        *_tables("Peak memory", rows.peaks, _PEAKS, shared),
        *_tables("Longest lengths", rows.maxima, _MAXIMA, shared),
    ]


def _details(result: Comparison) -> Iterator[Section]:
    yield Section("Cautions", points=result.caveats)
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
    yield Section(title, tables=_table("", result.differences, _DIFFERENCES))


def _unchanged(result: Comparison, rows: Comparison) -> Section:
    number = len(rows.times) + len(rows.peaks) + len(rows.maxima)
    counts = [
        count(len(found), *names)
        for found, names in (
            (rows.times, ("time", "times")),
            (rows.peaks, ("peak", "peaks")),
            (rows.maxima, ("longest length", "longest lengths")),
        )
        if found
    ]
    title = f"{count(number, 'row', 'rows')} ({join_words(counts)}) {UNCHANGED}"
    return Section(title, tables=_figure_tables(result, rows), folded=True)


def _method(result: Comparison) -> Section:
    level, confidence = format_percent(result.level), format_percent(1 - result.level)
    return Section(
        "How to read the tables",
        points=[
            "Times, A and B: median over the passes of all processes, on the slowest rank, with "
            "its interval, as in the report of the same records.",
            "Ratio: of the geometric means over processes of the median pass, so it may differ "
            f"from B divided by A. Low and high: its {confidence} interval (Student's t on "
            "logarithms). p: corrected for all rows (Holm).",
            f"Slower and faster: p is at most {level} and the change at least "
            f"{format_percent(result.min_change)}. Same: within noise. Detectable: the smallest "
            "difference that this number of processes can distinguish from noise. Too noisy: "
            "the same within noise, but the noise hides the change that was asked for.",
            "Peak memory: the largest over ranks and processes. More: every process of B needs at "
            "least 1 % and 64 KiB more than every process of A; less: the reverse.",
            "Longest lengths: the longest length that passed; fails at: the shortest failed "
            "length above it. Same: the brackets overlap.",
        ],
        folded=True,
    )


def _commands(result: Comparison) -> Section:
    lines = [
        f"# {name}: {command}".replace("\n", " ")
        for name, records in zip("AB", result.records, strict=True)
        for command in dict.fromkeys(r.command for r in records if r.command)
    ]
    return Section("How they were measured", code=lines, folded=True)


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


def _shared_workload(result: Comparison) -> str:
    """Return the workload in words if all rows have the same; else ""."""
    figures = (result.times, result.peaks, result.maxima)
    words = {_workload(one.row) for figure in figures for one in figure}
    return words.pop() if len(words) == 1 else ""


def _workload(row: ComparedRow) -> str:
    return capitalize_first(describe_workload(row, defaultdict(str)))


def _table(title: str, items: Sequence[Any], columns: Sequence[ValueColumn]) -> list[Table]:
    return [build_table(title, columns, items)] if items else []


def _tables(
    name: str, items: Sequence[_Compared], fields: Sequence[ValueColumn], shared: bool
) -> list[Table]:
    """Return one table per workload; columns without any value are left out.

    shared: all rows of the comparison have one workload, which is not repeated.
    """
    tables = []
    for group in _by_workload(items):
        rows = [one.row for one in group]
        tokens = [] if is_search(rows[0]) else [_TOKENS]
        ranks = [_RANKS] if has_several_ranks(rows) else []
        title = name if shared else f"{name}. {_workload(rows[0])}"
        tables.append(build_table(title, [_LABEL, *tokens, *ranks, *fields], group))
    return tables


def _chart(times: Sequence[TimeComparison], number: int) -> Chart:
    points = []
    for t in times:
        low, high = (t.estimate.low, t.estimate.high) if t.estimate else (None, None)
        points.append(Point(t.row.name, t.row.tokens, t.ratio, low, high, t.verdict))
    workload = describe_workload(times[0].row, defaultdict(str))
    return ratios(f"ratios {number}", workload, points)


def _name_with_kind(row: ComparedRow) -> str:
    return f"{name_row(row)}{', a search' if is_search(row) else ''}"
