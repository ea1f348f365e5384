"""Trials on several ranks: figures of each rank, one rank against several, and stacks of hangs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from longseq_bench.analysis.row import Row, identity, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_with_interval
from longseq_bench.reports.document import MISSING, Section
from longseq_bench.reports.groups import capitalize_first, group_by_workload
from longseq_bench.reports.sections.failures import index_one_rank
from longseq_bench.reports.sections.gains import judge, speedup

MAX_STACK_LINES, MAX_HANGS = 16, 5
"""Maximum number of lines of a rank's stack, and of hung trials whose stacks are shown; the records
have all."""

# ---- figures of each rank ------------------------------------------------------------------------


def rank_column(
    heading: str, name: str, write: Callable[[float], str] = format_bytes
) -> ValueColumn:
    """Return the column of a field with a figure of each rank."""

    def join(row: Row) -> str | None:
        each = getattr(row, name)
        return each and " · ".join(MISSING if one is None else write(one) for one in each)

    return ValueColumn(heading, "text", join)


_PEAKS = rank_column("Peak of each rank", "rank_peaks")
_SWEPT: Columns = (
    "label", "tokens", "world_size", "status", "time_s", "tokens_per_s", "imbalance",
    "work_imbalance",
    rank_column("Time of each rank", "rank_times", format_seconds), _PEAKS,
    rank_column("Bytes sent by each rank", "rank_bytes"),
    rank_column("By formula", "rank_formulas"),
)  # fmt: skip


def each_rank(source: Source) -> Section:
    """Build a row per trial on several ranks, with the figures of each rank in rank order."""
    known = attrgetter("rank_times", "rank_peaks", "rank_bytes", "rank_formulas")
    swept = [row for row in source.rows if row.world_size > 1 and any(known(row))]
    found = [r for r in source.maxima if r.world_size > 1 and r.rank_peaks is not None]
    columns: Columns = ("label", "max_tokens", "world_size", _PEAKS)
    tables = [*source.tables(swept, _SWEPT), *source.tables(found, columns, "at the maximum")]
    drawn = charts.of_each_workload(source, source.rows, charts.speedup_by_ranks)
    words = "Figures of each rank are from the first to the last; bytes are those of one pass."
    return Section("Ranks", [words], tables=tables, charts=drawn)


# ---- bottlenecks: compute or communication -------------------------------------------------------


def bottleneck(source: Source) -> Section:
    """Build a row per trial on several ranks: its bottleneck, and the evidence."""
    columns: Columns = (
        "label", "world_size", "tokens", "time_s", "compute_time_s", "communication_time_s",
        "exposed_share", "exposed_low", "exposed_high",
        ValueColumn("Bottleneck", "text", find_bottleneck),
    )  # fmt: skip
    tables = source.tables(find_timed(source), columns)
    return Section("Bottlenecks", tables=tables)


def find_timed(source: Source) -> list[SweepRow]:
    """Return the trials on several ranks whose communication was timed separately."""
    return [r for r in source.rows if r.world_size > 1 and r.exposed_share is not None]


def find_bottleneck(row: SweepRow) -> str:
    """Name the bottleneck of a row, by the share of its time that communication adds."""
    low, high = row.exposed_low, row.exposed_high
    if low is not None and high is not None and low < 0.5 < high:
        return "either"
    return "communication" if require(row.exposed_share) > 0.5 else "compute"


# ---- one rank against several --------------------------------------------------------------------


def against_one(source: Source) -> Section:
    """Compare one rank with several: times and peaks of sweeps; the longest lengths first."""
    known = sorted(_compared(source), key=lambda row: (-row.tokens, -require(row.speedup)))
    paragraphs = [
        "The same total work on one rank and on several. Ranks of a CPU share its cores.",
        *explain_high_efficiency(known),
    ]
    first = find_compared(source)
    chart = charts.speedups(first, source.workload(first[0])) if first else None
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    columns: Columns = (
        "label", "tokens", "world_size", "speedup",
        ValueColumn("At least", "ratio", attrgetter("speedup_low")),
        ValueColumn("At most", "ratio", attrgetter("speedup_high")),
        ValueColumn("Verdict", "text", lambda row: judge(speedup(row) or 0.0)), "efficiency",
        ValueColumn("Peak on one", "bytes", lambda row: one_rank[row.ranks_key].peak_bytes),
        ValueColumn("Peak of a rank", "bytes", attrgetter("peak_bytes")), "exposed_share",
        ValueColumn("Time on one", "seconds", lambda r: time_with_interval(one_rank[r.ranks_key])),
        "time_s", "bytes_sent",
    )  # fmt: skip
    tables = source.tables(known, columns)
    drawn = [chart] if chart else []
    return Section("One rank against several", paragraphs, tables=tables, charts=drawn)


def _compared(source: Source) -> list[SweepRow]:
    """Return the rows on several ranks whose trial was also timed on one."""
    return [row for row in source.rows if row.speedup and row.world_size > 1]


def find_compared(source: Source) -> list[SweepRow]:
    """Return rows on several ranks of one workload and length, the highest speed-up first."""
    return sorted(most_timed(_compared(source)), key=lambda row: -require(row.speedup))


def most_timed(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Choose the workload with most rows at the longest length that several have; return these."""
    groups = []
    for group in group_by_workload(rows):
        by_length = group_by(group, attrgetter("tokens"))
        shared = [tokens for tokens, some in by_length.items() if len(some) > 1]
        groups.append(by_length[max(shared or by_length)])
    return max(groups, key=len, default=[])


def find_over_ranks(source: Source) -> list[SearchRow]:
    """Return the maxima of the workload that has most of implementations on several ranks."""
    several = []
    for group in group_by_workload(row for row in source.maxima if row.is_full_pass):
        labels = {row.label for row in group if row.world_size > 1}
        several.append([row for row in group if row.label in labels])
    known = (group for group in several if len({row.world_size for row in group}) > 1)
    return max(known, key=len, default=[])


# ---- hangs ---------------------------------------------------------------------------------------


def hangs(source: Source) -> Iterator[Section]:
    """Build a section per hung trial, MAX_HANGS at most, with the stack of each rank."""
    hung = (r for r in source.records if r.outcome.status == "hang" and _stacks(r))
    machine = attrgetter("environment.fingerprint")
    trials = group_by(hung, lambda r: (r.trial.key_without("round", "seed"), machine(r)))
    for record, *_ in list(trials.values())[:MAX_HANGS]:
        trial, outcome = record.trial, record.outcome
        tokens = format_tokens(trial.workload.seq_len)
        phase = f" in {outcome.phase}" if outcome.phase else ""
        workload = source.workload(Row(**identity(record)))
        ended = f"ended{phase}: {outcome.reason or 'no reason recorded'}."
        yield Section(
            f"Hang: {source.label(trial)} at {tokens} tokens on {trial.world_size} ranks",
            [capitalize_first("; ".join(filter(None, (workload, ended))))],
            code=list(_equal_stacks(_stacks(record))),
        )


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
