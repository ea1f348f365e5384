"""Modes that were run on this machine: their status and the error of their output."""

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.runs import SEVERITY
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import SWEEP_RANKS, Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import group_by_workload, in_brackets
from longseq_bench.reports.wording import join_names

_MODES = (
    Column("Implementation"), Column("Ranks", "count"), Column("Dtype"), Column("Mode"),
    Column("Works"), Column("Masks"), Column("Largest error", "error"), Column("Longest", "tokens"),
    Column("Trials", "count"), Column("What failed"),
)  # fmt: skip
_GAINS: Columns = (
    "label", "tokens", "world_size", "time_s", "speedup",
    ValueColumn("At least", "ratio", attrgetter("speedup_low")),
    ValueColumn("At most", "ratio", attrgetter("speedup_high")), "efficiency", "bytes_sent",
)  # fmt: skip
BY_LENGTH = ("oom", "timeout", "limit")
"""Statuses of a trial that is too long; they don't mean that its results are wrong."""

_EXPLANATION = (
    "Works: all trials passed the check against float64 (in training also of gradients), except "
    "those that were too long (out of memory, timeout, kernel limit); partly: some failed "
    "otherwise. Largest error: of any output, over all lengths and masks."
)
_mode_of = attrgetter("label", "world_size", "dtype", "mode")


def modes(source: Source) -> Section:
    """Build a row per machine, implementation, number of ranks, dtype and mode."""
    tables: list[Table] = []
    points: list[str] = []
    for rows in group_by(source.rows, attrgetter("fingerprint", "device")).values():
        title = source.title(rows[0], ("device", "fingerprint"))
        cells = tuple(_cells(some) for some in group_by(rows, _mode_of).values())
        tables.append(Table(title, _MODES, cells))
        points += _works(rows, in_brackets(title))
    missing = "sweep", SWEEP_RANKS, "longseq list"
    return Section("Modes run here", [_EXPLANATION], points, tables, missing=missing)


def _cells(rows: Sequence[SweepRow]) -> tuple[Cell, ...]:
    passed = [row for row in rows if row.status == "ok"]
    errors = [row.max_error for row in passed if row.max_error is not None]
    masks = dict.fromkeys("causal" if row.causal else "not causal" for row in passed)
    return (
        *_mode_of(rows[0]), _verdict(rows), ", ".join(masks) or None, max(errors, default=None),
        max((row.tokens for row in passed), default=None), len(rows), _failed(rows),
    )  # fmt: skip


def _verdict(rows: Sequence[SweepRow]) -> str:
    passed = sum(row.status == "ok" for row in rows)
    ended = sum(row.status in BY_LENGTH for row in rows)
    return "no" if not passed else "yes" if passed + ended == len(rows) else "partly"


def _failed(rows: Sequence[SweepRow]) -> str | None:
    """Return statuses with their counts, worst first, and the reason if all had the same."""
    bad = [row for row in rows if row.status != "ok"]
    counts = Counter(row.status for row in bad)
    words = ", ".join(f"{counts[s]} {s}" for s in SEVERITY if counts[s])
    reasons = {row.reason for row in bad if row.reason}
    return f"{words}: {reasons.pop()}" if len(reasons) == 1 else words or None


def _works(rows: Sequence[SweepRow], where: str) -> Iterator[str]:
    series = group_by(rows, attrgetter("label", "world_size")).values()
    verdicts = group_by(series, _verdict)
    verbs = {"yes": "work", "partly": "work in part", "no": "do not work"}
    for verdict, verb in verbs.items():
        if some := verdicts.get(verdict):
            names = join_names(rows[0].name for rows in some)
            yield f"{len(some)} of {len(series)} {verb}{where}: {names}."


def gains(source: Source) -> Section:
    """Build the section on speed-up and efficiency by length, and when several ranks are faster."""
    known = [row for row in source.rows if row.world_size > 1 and row.speedup is not None]
    in_order = attrgetter("label", "tokens")
    groups = [sorted(group, key=in_order) for group in group_by_workload(known)]
    explanation = (
        "Compared with the same trial on one rank. At least, at most: the bounds that the "
        "intervals of both times allow."
    )
    return Section(
        "Speed-up and efficiency by length",
        [explanation, *section_charts.limit_note(known)],
        tables=[table for group in groups for table in source.tables(group, _GAINS)],
        charts=section_charts.charts(source, known, section_charts.speedup_by_length),
        missing=("trial timed on one rank and on several", SWEEP_RANKS),
    )
