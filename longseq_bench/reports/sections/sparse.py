"""Sparse attention: the skipped share of the pairs, and the time saved by it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section, format_cell
from longseq_bench.reports.fields import TableField, computed, rows_table
from longseq_bench.reports.groups import (
    group_by_workload,
    has_several_ranks,
)
from longseq_bench.reports.sections.findings import join_names, limit_sentences

_COLUMNS = (
    computed("Implementation", "text", attrgetter("name")), "tokens", "status", "density_asked",
    "density_achieved", "token_density", "uncovered", "plan_time_s", "time_s", "effective_flops",
    "dense_time_s", "dense_source", "speed_over_dense",
    computed("Share of ideal", "text", lambda row: _share_words(row)), "peak_bytes",
    "memory_reduction",
    TableField(
        "dense_memory_source",
        value=lambda row: None if row.memory_reduction is None else row.dense_memory_source,
    ),
)  # fmt: skip
_SAID = (
    "Density is the share of the visible blocks (of the query-key pairs, where a pattern has no "
    "blocks) that is kept; of pairs, a pair seen twice counts twice. Plan time is of the pass "
    "under the memory budget, and in no other time but where a pattern is chosen by its inputs. "
    "Dense time is that of torch's dense attention on the same inputs, its passes in turn with the "
    "sparse ones; where a whole pass would take too long it is computed from some of its rows. "
    "Share of ideal is dense time times the density of work (of pairs, and a module's projections) "
    "over the time, with what the intervals of both leave possible: 100 % where what is skipped "
    "costs nothing. Memory reduction is the peak of standard attention, with its whole "
    "score matrix, over the row's: measured where the implementation dense was run on the same "
    "workload, else computed by formula."
)
_ONE_RANK = (
    "Dense time and memory reduction are of one rank: over several, each holds only a part of the "
    "inputs."
)


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, after a sentence on the best one."""
    rows = [row for row in source.rows if row.is_sparse]
    if not rows:
        return Section("Sparse attention")
    groups = group_by_workload(rows)
    said = [_SAID, *[_ONE_RANK] * has_several_ranks(rows)]
    points = limit_sentences(
        sentence for group in groups for sentence in _best(group, source.workload(group[0]))
    )
    tables = [rows_table(group, source, _COLUMNS) for group in groups]
    pictures = section_charts.shares(source, rows)
    return Section("Sparse attention", said, points, tables, charts=pictures)


def _share_words(row: SweepRow) -> str | None:
    """Return the share of ideal, with its bounds if they are known."""
    if row.share_of_ideal is None:
        return None
    share = format_share(row.share_of_ideal)
    if row.share_low is None:
        return share
    return f"{share} ({format_share(row.share_low)} to {format_share(require(row.share_high))})"


def _best(group: Sequence[SweepRow], where: str) -> Iterator[str]:
    """Name the highest share of ideal, at the longest length where several rows have one."""
    by_length: dict[int, list[SweepRow]] = defaultdict(list)
    for row in group:
        if row.share_of_ideal is not None:
            by_length[row.tokens].append(row)
    if not by_length:
        return
    shared = [tokens for tokens, rows in by_length.items() if len(rows) > 1]
    tokens = max(shared or by_length)
    rows = sorted(by_length[tokens], key=lambda row: -require(row.share_of_ideal))
    at = f"At {format_tokens(tokens)} tokens ({where})"
    words = {id(row): f"{row.name} ({_words(row)})" for row in rows}
    least = rows[0].share_low
    alike = [r for r in rows if least is not None and _most(r) >= least]
    if len(rows) == 1:
        yield f"{at}, {words[id(rows[0])]} alone has a share of ideal."
    elif least is None:
        one, two = (words[id(row)] for row in rows[:2])
        yield (
            f"{at}, {one} has the highest share of ideal of {len(rows)}, the next is {two}; the "
            f"first comes from a single pass, so how far off it may be is not known."
        )
    elif len(alike) > 1:
        names = join_names(words[id(row)] for row in alike)
        yield f"{at}, these reach the highest share of ideal and can't be told apart: {names}."
    else:
        one, two = (words[id(row)] for row in rows[:2])
        yield f"{at}, {one} reaches the highest share of ideal of {len(rows)}, the next is {two}."


def _most(row: SweepRow) -> float:
    """Return the highest share that a row's intervals allow; infinite if they are not known."""
    return float("inf") if row.share_high is None else float(row.share_high)


def _words(row: SweepRow) -> str:
    """Describe a share with its speed and density, and the source of the dense time."""
    faster = format_cell(row.speed_over_dense, "ratio")
    density = format_share(require(row.token_density))
    known = "" if row.dense_source == "measured" else f", dense time {row.dense_source}"
    return (
        f"{format_share(require(row.share_of_ideal))}: {faster} as fast as dense at a density of "
        f"{density}{known}"
    )
