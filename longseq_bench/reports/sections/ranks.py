"""Trials on several ranks: the figures of each rank, and the stacks of those that hung."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from longseq_bench.analysis.row import Row
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import MISSING, Section
from longseq_bench.reports.groups import capitalize_first, has_several_ranks

MAX_STACK_LINES = 16
"""Maximum number of lines of a rank's stack; the record has all lines."""

MAX_RANKS = 1024
"""Maximum number of ranks whose figures are in a cell; the CSV has a line for each."""

MAX_HANGS = 5
"""Maximum number of hung trials whose stacks are shown."""


def rank_column(
    heading: str, name: str, write: Callable[[float], str] = format_bytes
) -> ValueColumn:
    """Return the column of a field with a figure of each rank."""

    def join(row: Row) -> str | None:
        each = getattr(row, name)
        if each is None:
            return None
        first = [MISSING if one is None else write(one) for one in each[:MAX_RANKS]]
        more = len(each) - len(first)
        return " · ".join(first) + (f" · … {more:,} more ranks in the CSV" if more else "")

    return ValueColumn(heading, "text", join)


_PEAKS = rank_column("Peak of each rank", "rank_peaks")
_SWEPT: Columns = (
    "label", "tokens", "world_size", "status", "time_s", "tokens_per_s", "imbalance",
    "work_imbalance",
    rank_column("Time of each rank", "rank_times", format_seconds), _PEAKS,
    rank_column("Bytes sent by each rank", "rank_bytes"),
    rank_column("By formula", "rank_formulas"),
)  # fmt: skip
_FOUND: Columns = ("label", "max_tokens", "world_size", _PEAKS)
_EXPLANATION = (
    "Of each rank, from the first to the last: median time, largest peak, bytes counted in one "
    "pass and by formula. Imbalance: largest peak divided by the smallest; of work: visible pairs "
    "of the busiest rank, by formula, divided by the mean."
)


def each_rank(source: Source) -> Section:
    """Build a row per trial on several ranks, with the figures of each rank in rank order."""
    known = ("rank_times", "rank_peaks", "rank_bytes", "rank_formulas")
    several = [row for row in source.rows if row.world_size > 1]
    swept = [row for row in several if any(getattr(row, name) is not None for name in known)]
    found = [r for r in source.maxima if r.world_size > 1 and r.rank_peaks is not None]
    builders = charts.rank_peaks, charts.speedup_by_ranks
    return Section(
        "Ranks",
        [_EXPLANATION, *charts.limit_note(source.rows, len(builders))],
        tables=[
            *source.tables(swept, _SWEPT),
            *source.tables(found, _FOUND, "at the maximum"),
        ],
        charts=charts.of_each_workload(source, source.rows, *builders),
    )


def hangs(source: Source) -> Iterator[Section]:
    """Build a section per hung trial, MAX_HANGS at most, with the stack of each rank."""
    hung = (r for r in source.records if r.outcome.status == "hang" and _stacks(r))
    machine = attrgetter("environment.fingerprint")
    trials = group_by(hung, lambda r: (r.trial.key_without("round", "seed"), machine(r)))
    first = [records[0] for records in trials.values()]
    for record in first[:MAX_HANGS]:
        trial, outcome = record.trial, record.outcome
        tokens = format_tokens(trial.workload.seq_len)
        phase = f" in {outcome.phase}" if outcome.phase else ""
        workload = source.workload(Row.from_record(record))
        ended = f"ended{phase}: {outcome.reason or 'no reason recorded'}."
        yield Section(
            f"Hang: {source.label(trial)} at {tokens} tokens on {trial.world_size} ranks",
            [capitalize_first("; ".join(filter(None, (workload, ended))))],
            code=list(_equal_stacks(_stacks(record))),
        )
    if more := len(first[MAX_HANGS:]):
        explanation = [f"{more:,} more trials hung; the records have the stacks of their ranks."]
        yield Section("Further hangs", points=explanation)


def _stacks(record: Record) -> Mapping[str, Any]:
    stacks = record.outcome.facts.get("stacks")
    return stacks if isinstance(stacks, Mapping) else {}


def _equal_stacks(stacks: Mapping[str, Any]) -> Iterator[str]:
    """Group ranks with equal stacks, with the first lines of each."""

    def lines(rank: str) -> tuple[str, ...]:
        stack = stacks[rank]
        each = map(str, stack) if isinstance(stack, (list, tuple)) else str(stack).splitlines()
        return tuple(line.rstrip() for line in each)

    in_order = sorted(stacks, key=lambda rank: (len(str(rank)), str(rank)))
    for stack, ranks in group_by(in_order, lines).items():
        yield f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"
        yield from (f"  {line}" for line in stack[:MAX_STACK_LINES])
        if len(stack) > MAX_STACK_LINES:
            yield f"  … {len(stack) - MAX_STACK_LINES} more in the record"


def explain_rank_columns(rows: Sequence[SweepRow]) -> list[str]:
    """Explain the columns of rows on several ranks; nothing without such rows."""
    if not has_several_ranks(rows):
        return []
    return [
        "With several ranks, Tokens and Tokens/s are those of all ranks. Tokens per rank, Bytes "
        "sent per rank (counted) and Peak memory are the largest of any rank.",
        "Compute only, Communication only: passes with the other part switched off. Exposed: share "
        "of the time that communication adds to computation.",
        "Speed-up: time of the same trial on one rank divided by the row's time. Efficiency: "
        "speed-up divided by ranks.",
        *explain_high_efficiency(rows),
    ]
