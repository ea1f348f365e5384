"""Modes that were run on this machine: their status and the error of their output."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter

from longseq_bench.analysis.runs import SEVERITY
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import section_charts
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.fields import TableField, rows_table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.findings import join_names, limit_sentences
from longseq_bench.reports.sections.multi_rank import SWEEP_RANKS

_MODES = (
    Column("Implementation"), Column("Ranks", "count"), Column("Dtype"), Column("Mode"),
    Column("Works"), Column("Masks"), Column("Largest error", "error"), Column("Longest", "tokens"),
    Column("Trials", "count"), Column("What failed"),
)  # fmt: skip
_GAINS = (
    "label", "tokens", "world_size", "time_s", "speedup", TableField("speedup_low", "At least"),
    TableField("speedup_high", "At most"), "efficiency",
    TableField("bytes_sent", "Bytes sent a rank"),
)  # fmt: skip
BY_LENGTH = ("oom", "timeout", "limit")
"""Statuses of a trial that is too long; they don't mean that its results are wrong."""

_SAID = (
    "Works: trials were ok, so their output (in training their gradients too) passed the check "
    "against a float64 reference, but for those that their length ended (out of memory or time, a "
    "kernel's limit); partly: some ended otherwise. The error is the largest of any of its "
    "outputs, over lengths and masks. What the records have no trial of is not in this table."
)


def modes(source: Source) -> Section:
    """Build a row per machine, implementation, number of ranks, dtype and mode."""
    by_device: dict[tuple[str, str], list[SweepRow]] = defaultdict(list)
    for row in source.rows:
        by_device[row.fingerprint, row.device].append(row)
    if not by_device:
        return missing_section("Modes run here", "sweep", SWEEP_RANKS, "longseq list")
    tables, points = [], []
    for (fingerprint, device), rows in by_device.items():
        machine = source.machines[fingerprint]
        title = f"On {device}" + (f", machine {machine}" if machine else "")
        modes_of = tuple(_mode(some) for some in _by_mode(rows))
        tables.append(Table(title, _MODES, modes_of))
        points += _works(rows, title)
    return Section("Modes run here", [_SAID], limit_sentences(points), tables)


def _by_mode(rows: Sequence[SweepRow]) -> list[list[SweepRow]]:
    return _split(rows, "label", "world_size", "dtype", "mode")


def _split(rows: Sequence[SweepRow], *names: str) -> list[list[SweepRow]]:
    found: dict[tuple[str, ...], list[SweepRow]] = defaultdict(list)
    for row in rows:
        found[tuple(getattr(row, name) for name in names)].append(row)
    return list(found.values())


def _mode(rows: Sequence[SweepRow]) -> tuple[Cell, ...]:
    passed = [row for row in rows if row.status == "ok"]
    errors = [row.max_error for row in passed if row.max_error is not None]
    return (
        rows[0].label, rows[0].world_size, rows[0].dtype, rows[0].mode, _verdict(rows),
        _masks(passed), max(errors, default=None),
        max((row.tokens for row in passed), default=None), len(rows), _failed(rows),
    )  # fmt: skip


def _verdict(rows: Sequence[SweepRow]) -> str:
    passed = sum(row.status == "ok" for row in rows)
    ended = sum(row.status in BY_LENGTH for row in rows)
    return "no" if not passed else "yes" if passed + ended == len(rows) else "partly"


def _masks(rows: Sequence[SweepRow]) -> str | None:
    words = {True: "causal", False: "not causal"}
    return ", ".join(dict.fromkeys(words[row.causal] for row in rows)) or None


def _failed(rows: Sequence[SweepRow]) -> str | None:
    """Return statuses with their counts, worst first, and the reason if all had the same."""
    bad = [row for row in rows if row.status != "ok"]
    counts = Counter(row.status for row in bad)
    words = [f"{counts[s]} {s}" for s in SEVERITY if counts[s]]
    reasons = {row.reason for row in bad if row.reason}
    said = f": {reasons.pop()}" if len(reasons) == 1 else ""
    return ", ".join(words) + said if words else None


def _works(rows: Sequence[SweepRow], where: str) -> list[str]:
    verdicts: dict[str, list[str]] = defaultdict(list)
    for some in _split(rows, "label", "world_size"):
        verdicts[_verdict(some)].append(some[0].name)
    begins = {"yes": "work", "partly": "work in part", "no": "do not work"}
    return [
        f"{where} {begin}, {len(verdicts[verdict])} of {sum(map(len, verdicts.values()))}: "
        f"{join_names(verdicts[verdict])}."
        for verdict, begin in begins.items()
        if verdicts[verdict]
    ]


def gains(source: Source) -> Section:
    """Build the section on speed-up and efficiency by length, and when several ranks are faster."""
    known = [row for row in source.rows if row.world_size > 1 and row.speedup is not None]
    if not known:
        return missing_section(
            "Speed-up and efficiency by length", "trial timed on one rank and on several",
            SWEEP_RANKS,
        )  # fmt: skip
    tables = [
        rows_table(sorted(group, key=attrgetter("label", "tokens")), source, _GAINS)
        for group in group_by_workload(known)
    ]
    said = (
        "Against the same trial on one rank; at least and at most are what the intervals of both "
        "times leave possible."
    )
    pictures = section_charts.charts(source, known, section_charts.pays)
    title = "Speed-up and efficiency by length"
    return Section(title, [said, *section_charts.cut(known)], tables=tables, charts=pictures)
