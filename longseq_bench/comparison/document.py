"""The report of a comparison, the answer first, and the document that `compare --json` prints."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from longseq_bench.analysis.frames import finite
from longseq_bench.analysis.row import IDENTITY
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.comparison.verdict import (
    CONTROL,
    NOISY,
    Change,
    ComparedRow,
    Comparison,
    count,
    decide,
    find_regressions,
    mark_noisy,
    name_row,
    summarize,
)
from longseq_bench.core.model import Record
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import Cell, Column, Document, Section, Table
from longseq_bench.reports.groups import (
    describe_outcome,
    describe_shared,
    limit_findings,
    table_key,
)

_IDENTITY = [name for name in IDENTITY if name not in ("source", "fingerprint", "host")]
"""Fields that are equal on both sides."""
_ESTIMATE = {"low": "low", "high": "high", "p": "p_value", "adjusted": "adjusted_p"}
_ESTIMATE |= {"seen_from": "detectable", "free": "degrees_of_freedom"}
"""Fields of an estimate by their names in the JSON document."""
_METHOD = (
    "Ratios are B over A, of the geometric means over processes, with a 95 % interval (low, high). "
    "p is corrected for all rows (Holm). Detectable is the smallest change that so many processes "
    "can show."
)


def _detectable(t: Change) -> Cell:
    share = t.estimate.detectable if t.estimate else None
    return ">100 %" if share and share > 1 else share  # the size of more has no meaning


_NAME = ValueColumn("Implementation", "text", attrgetter("a.name"), 10)
_TOKENS = ValueColumn("Tokens", "tokens", attrgetter("a.tokens"), 9)
_WORKLOAD = ValueColumn("Workload", "text", lambda one: _workload(one.a))
_RATIO = ValueColumn("Ratio", "ratio", attrgetter("ratio"), 6)
_VERDICT = ValueColumn("Verdict", "text", attrgetter("verdict"), 10)
_NOTE = ValueColumn("Note", "text", lambda one: one.reason or one.note or None, 1)
_TIMES = (
    _NAME,
    _TOKENS,
    ValueColumn("A", "seconds", lambda t: time_with_interval(t.a), 8),
    ValueColumn("B", "seconds", lambda t: time_with_interval(t.b), 8),
    _RATIO,
    ValueColumn("Low", "ratio", lambda t: t.estimate and t.estimate.low, 5),
    ValueColumn("High", "ratio", lambda t: t.estimate and t.estimate.high, 5),
    ValueColumn("p", "error", lambda t: t.estimate and t.estimate.adjusted_p, 2),
    ValueColumn("Detectable", "share", _detectable, 3),
    ValueColumn("Processes", "text", lambda t: f"{len(t.a_rounds)} and {len(t.b_rounds)}", 1),
    _VERDICT,
    _NOTE,
)
_PEAKS = (
    _NAME,
    _TOKENS,
    ValueColumn("A", "bytes", attrgetter("a.peak_bytes"), 1),
    ValueColumn("B", "bytes", attrgetter("b.peak_bytes"), 2),
    _RATIO,
    _VERDICT,
)
_MAXIMA = (
    _NAME,
    ValueColumn("A", "tokens", attrgetter("a.max_tokens"), 7),
    ValueColumn("A fails at", "tokens", attrgetter("a.first_failure"), 5),
    ValueColumn("A limited by", "text", attrgetter("a.limited_by"), 3),
    ValueColumn("B", "tokens", attrgetter("b.max_tokens"), 8),
    ValueColumn("B fails at", "tokens", attrgetter("b.first_failure"), 5),
    ValueColumn("B limited by", "text", attrgetter("b.limited_by"), 3),
    _RATIO,
    _VERDICT,
    _NOTE,
)
_STATUSES = (
    ValueColumn("Trial", "text", lambda one: name_row(one.a)),
    ValueColumn("A", "text", lambda one: describe_outcome(one.a.status, None, one.a.reason), 2),
    ValueColumn("B", "text", lambda one: describe_outcome(one.b.status, None, one.b.reason), 3),
    _VERDICT,
    _NOTE,
)


def comparison_document(
    result: Comparison, fail_on: float | None = None, is_terminal: bool = False
) -> Document:
    """Return the report, the verdict first; fail_on: the share from which a change is a failure.

    Rows that changed, or were too noisy to tell, come first; the unchanged ones are folded.
    is_terminal: one line for the unchanged rows.
    """
    share = fail_on or result.min_change
    tables, unchanged = _tables(result, share)
    if result.statuses:
        tables.append(build_table("Different status", _STATUSES, result.statuses))
    title = f"{count(sum(len(t.rows) for t in unchanged), 'row')} unchanged"
    worse = find_regressions(result, fail_on) if fail_on else []
    points = [*limit_findings(f"{clause}." for clause in worse), *summarize(result, share)]
    points += [f"{title}."] if is_terminal and unchanged else []
    apart = {"Only in A": result.only_a, "Only in B": result.only_b}
    apart["On different machines"] = result.other_machines
    not_compared = [f"{where}: {name_row(row)}" for where, rows in apart.items() for row in rows]
    columns = Column(""), Column("A"), Column("B")
    differences = [Table("", columns, tuple(result.differences))] if result.differences else []
    sections = [
        Section("Result", points=points, tables=tables),
        Section("Cautions", points=result.caveats),
        Section("Not compared", points=not_compared),
        Section("Differences of machine and software", tables=differences),
        Section(title, tables=unchanged, folded=True),
    ]
    return Document(
        "compare",
        str(decide(result, fail_on)),
        [*map(_describe_side, "AB", result.names, result.records), _METHOD],
        [one for one in sections if one.has_content and not (is_terminal and one.folded)],
        lambda: build_table("times", (_WORKLOAD, *_TIMES), result.times),
    )


def _tables(result: Comparison, share: float) -> tuple[list[Table], list[Table]]:
    """Return the tables of rows that changed or can't be judged, the latter last, and of the rest.

    share: the change that a time must have been able to show to count as unchanged.
    """
    times = mark_noisy(result, share, result.times)
    tables: tuple[list[Table], list[Table]] = [], []
    for name, changes, columns in (
        ("Times", times, _TIMES),
        ("Peak memory", result.peaks, _PEAKS),
        ("Longest lengths", result.maxima, _MAXIMA),
    ):
        ordered = sorted(changes, key=lambda one: one.verdict in (NOISY, "undecided", CONTROL))
        groups = group_by(ordered, lambda one: (one.verdict == "same", table_key(one.a)))
        for (is_same, _), group in groups.items():
            title = f"{name}, {_workload(group[0].a)}"
            tables[is_same].append(build_table(title, columns, group))
    return tables


def _describe_side(letter: str, name: str, records: Sequence[Record]) -> str:
    times = sorted(r.started_at for r in records)
    commits = dict.fromkeys(r.environment.commit or "unknown" for r in records)
    hosts = dict.fromkeys(r.environment.host for r in records)
    return (
        f"{letter}: {name}, {len(records)} records compared, commit {', '.join(commits)}, on "
        f"{', '.join(hosts)}, measured {times[0]} to {times[-1]}."
    )


def _workload(row: ComparedRow) -> str:
    return describe_shared(row, defaultdict(str), frozenset(), row.world_size > 1)


def json_document(result: Comparison, fail_on: float | None) -> dict[str, Any]:
    """Return the comparison as data, in SI units; unknown and infinite values are null.

    fail_on: the smallest share listed in `worse`.
    """
    verdict = decide(result, fail_on)

    def identify(row: ComparedRow) -> dict[str, Any]:
        values = {name: getattr(row, name) for name in _IDENTITY}
        tokens = None if isinstance(row, SearchRow) else row.tokens
        return values | {"tokens": tokens, "label": row.label}

    def describe(one: Change, sides: Mapping[str, str], *names: str) -> dict[str, Any]:
        """Return the trial, fields of both sides (a_NAME, b_NAME), and fields of the change."""
        fields = {f"{s}_{n}": attrgetter(f"{s}.{f}")(one) for s in "ab" for n, f in sides.items()}
        return identify(one.a) | fields | {name: getattr(one, name) for name in names}

    times = {"s": "time_s", "low_s": "time_low_s", "high_s": "time_high_s"}
    own = ("a_rounds", "b_rounds", "ratio", "verdict", "reason", "note", "control")
    limits = ("max_tokens", "first_failure", "limited_by")
    statuses = {"status": "status", "reason": "reason"}
    found: dict[str, Any] = {
        "schema": 1,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "rounds_enough": verdict.rounds,
        "a": result.names[0],
        "b": result.names[1],
        "level": result.level,
        "least": result.min_change,
        "fail_on": fail_on,
        "worse": find_regressions(result, fail_on) if fail_on else None,
        "summary": [*summarize(result, fail_on or result.min_change)],
        "notes": result.caveats,
        "times": [
            describe(t, times, *own)
            | {name: getattr(t.estimate, field, None) for name, field in _ESTIMATE.items()}
            for t in result.times
        ],
        "peaks": [describe(p, {"bytes": "peak_bytes"}, "ratio", "verdict") for p in result.peaks],
        "maxima": [
            describe(m, {}, "ratio", "verdict", "reason")
            | {side: {n: getattr(getattr(m, side), n) for n in limits} for side in "ab"}
            for m in result.maxima
        ],
        "turned": [
            describe(s, statuses, "verdict") | {"budgets": bool(s.note)} for s in result.statuses
        ],
        "failed_alike": result.failed_alike,
        "only_a": [*map(identify, result.only_a)],
        "only_b": [*map(identify, result.only_b)],
        "unlike_machines": [*map(identify, result.other_machines)],
        "differences": [{"name": name, "a": a, "b": b} for name, a, b in result.differences],
    }
    return dict(finite(found))
