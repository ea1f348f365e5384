"""Trials on several ranks: the figures of each rank, and the stacks of those that hung."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from longseq_bench.analysis.row import Row
from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import MISSING, Section
from longseq_bench.reports.fields import TableField, rows_table
from longseq_bench.reports.groups import (
    capitalize_first,
    group_by_workload,
    has_several_ranks,
)
from longseq_bench.reports.sections.findings import MOST_SAID

BETWEEN = " · "
MOST_LINES = 16
"""Maximum number of lines of a rank's stack; the record has all lines."""

_SWEPT = (
    "label", "tokens", "world_size", "status",
    TableField("rank_times", kind="text", value=lambda r: _joined(r.rank_times, format_seconds)),
    TableField("rank_peaks", kind="text", value=lambda r: format_rank_bytes(r.rank_peaks)),
    TableField("rank_bytes", kind="text", value=lambda r: format_rank_bytes(r.rank_bytes)),
    TableField(
        "rank_formulas", "By formula", "text", lambda r: format_rank_bytes(r.rank_formulas)
    ),
)  # fmt: skip
_FOUND = (
    "label", "max_tokens", "world_size",
    TableField("rank_peaks", kind="text", value=lambda r: format_rank_bytes(r.rank_peaks)),
)  # fmt: skip


def each_rank(source: Source) -> Section:
    """Build a row per trial on several ranks, with the figures of each rank in rank order."""
    known = ("rank_times", "rank_peaks", "rank_bytes", "rank_formulas")
    several = [row for row in source.rows if row.world_size > 1]
    swept = [row for row in several if any(getattr(row, name) is not None for name in known)]
    found = [r for r in source.maxima if r.world_size > 1 and r.rank_peaks is not None]
    tables = [rows_table(group, source, _SWEPT) for group in group_by_workload(swept)]
    tables += [rows_table(g, source, _FOUND, "at the maximum: ") for g in group_by_workload(found)]
    said = [
        "From the first rank to the last. Time is the rank's median, peak its largest; sent is "
        "what it was counted to send in one pass, beside what it should send by formula."
    ]
    pictures = section_charts.charts(source, source.rows, section_charts.speedup)
    return Section("Ranks", said + section_charts.cut(source.rows), tables=tables, charts=pictures)


def hangs(source: Source) -> Iterator[Section]:
    """Build a section per hung trial with the stack of each rank; the first MOST_SAID trials."""
    hung = list(_hung(source))
    for record, stacks in hung[:MOST_SAID]:
        said = [f"{_where(source, record)}: {record.outcome.reason or 'no reason recorded'}."]
        yield Section(_title(source, record), said, code=list(_standing(stacks)))
    if more := len(hung[MOST_SAID:]):
        said = [f"{more:,} more trials hung; the records have where their ranks stood."]
        yield Section("Further hangs", points=said)


def _hung(source: Source) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    """Return the first record of each hung trial that has stacks."""
    seen = set()
    for record in source.records:
        stacks = record.outcome.facts.get("stacks")
        if record.outcome.status != "hang" or not isinstance(stacks, Mapping) or not stacks:
            continue
        trial = record.trial.key_without("round", "seed"), record.environment.fingerprint
        if trial not in seen:
            seen.add(trial)
            yield record, stacks


def format_rank_bytes(each: Sequence[float | None] | None) -> str | None:
    """Format the values of all ranks, in rank order."""
    return _joined(each, format_bytes)


def _joined(each: Sequence[float | None] | None, write: Callable[[float], str]) -> str | None:
    if each is None:
        return None
    return BETWEEN.join(MISSING if one is None else write(one) for one in each)


def _title(source: Source, record: Record) -> str:
    trial = record.trial
    tokens = format_tokens(trial.workload.seq_len)
    return f"Hang: {source.label(trial)} at {tokens} tokens on {trial.world_size} ranks"


def _where(source: Source, record: Record) -> str:
    phase = f" in {record.outcome.phase}" if record.outcome.phase else ""
    words = source.workload(Row.from_record(record))
    return f"{capitalize_first(words)}; ended{phase}"


def _standing(stacks: Mapping[str, Any]) -> Iterator[str]:
    """Group ranks with equal stacks, with the first lines of each."""
    places: dict[tuple[str, ...], list[str]] = {}
    for rank, stack in sorted(stacks.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        lines = stack.splitlines() if isinstance(stack, str) else map(str, stack)
        places.setdefault(tuple(line.rstrip() for line in lines), []).append(str(rank))
    for stack, ranks in places.items():
        yield f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}:"
        yield from (f"  {line}" for line in stack[:MOST_LINES])
        if len(stack) > MOST_LINES:
            yield f"  … {len(stack) - MOST_LINES} more in the record"


def explain_rank_columns(rows: Sequence[SweepRow]) -> list[str]:
    """Explain the columns of rows on several ranks; nothing without such rows."""
    if not has_several_ranks(rows):
        return []
    return [
        "With several ranks: tokens and tokens/s are those of all ranks, tokens a rank the most "
        "that one holds. Compute and communication only are passes with the other half switched "
        "off; exposed is the share of the time that communication adds to computing alone. "
        "Speed-up is the time of the same trial on one rank, where that was run, over the row's; "
        "efficiency is that over the ranks. Sent a rank is counted, peak memory is a rank's, both "
        "of the rank with most; imbalance is the largest peak over the least.",
        *explain_high_efficiency(rows),
    ]
