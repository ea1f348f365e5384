"""Capabilities that were run on this machine, as a matrix of trials that passed."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from longseq_bench.analysis.labels import short_names
from longseq_bench.analysis.row import Row
from longseq_bench.analysis.runs import group_by
from longseq_bench.core.masks import CAUSAL, FULL
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Section, Table

CAPABILITIES: dict[str, Callable[[Row], bool]] = {
    "Forward": lambda row: row.mode == "forward",
    "Train": lambda row: row.mode == "train",
    "Decode": lambda row: row.mode == "decode",
    "Causal": lambda row: row.mask == CAUSAL,
    "Not causal": lambda row: row.mask == FULL,
    "GQA": lambda row: row.kv_heads < row.heads,
    "Batch > 1": lambda row: row.batch > 1,
    "float32": lambda row: row.dtype == "float32",
    "bfloat16": lambda row: row.dtype == "bfloat16",
    "float16": lambda row: row.dtype == "float16",
    "CPU": lambda row: row.device == "cpu",
    "CUDA": lambda row: row.device == "cuda",
    "One rank": lambda row: row.world_size == 1,
    "Several ranks": lambda row: row.world_size > 1,
    "Recomputed": lambda row: row.keep == "inputs",
    "In place": lambda row: row.keep == "nothing",
}
"""Capabilities by name: rows that show whether an implementation has them."""
WORKS, FAILS = "✓", "✗"
_EXPLANATION = (
    f"{WORKS} works, {FAILS} none passed, 2 of 3: some trials failed, empty: not run. A length "
    "that is too long for memory or time is no failure. Failures has the reasons."
)


class Run(NamedTuple):
    """The row of a trial or search; is_too_long: it failed for lack of memory or time."""

    row: Row
    passed: bool
    is_too_long: bool


def capabilities(source: Source) -> Section:
    """Build the matrix of capabilities that not every run shares, the most capable first."""
    runs = list(_runs(source))
    tried = {name: sum(has(run.row) for run in runs) for name, has in CAPABILITIES.items()}
    differing = [name for name, count in tried.items() if 0 < count < len(runs)]
    columns = differing or [name for name, count in tried.items() if count][:1]
    by_name = group_by(runs, lambda run: run.row.implementation)
    short = short_names(by_name)
    rows = [
        (short[name], *(_judge([r for r in some if CAPABILITIES[one](r.row)]) for one in columns))
        for name, some in by_name.items()
    ]
    rows.sort(key=lambda row: (-row.count(WORKS), row.count(FAILS)))
    headings = tuple(map(Column, ("Implementation", *columns)))
    tables = [Table("Capabilities that were run", headings, tuple(rows))] if rows else []
    return Section("Capabilities", [_EXPLANATION], tables=tables)


def requirements(source: Source) -> Iterator[str]:
    """Yield what implementations need to run, from the reasons of those that did not."""
    failed = (r for r in source.records if r.outcome.status == "unsupported" and r.outcome.reason)
    for reason, records in group_by(failed, lambda record: record.outcome.reason).items():
        if "is not installed" not in str(reason):
            names = short_names(record.trial.implementation for record in records)
            yield f"{', '.join(names.values())}: {reason}."


def _runs(source: Source) -> Iterator[Run]:
    for row in source.rows:
        yield Run(row, row.is_ok, row.status in ("oom", "timeout", "limit"))
    for search in (row for row in source.maxima if not row.fit_only):
        too_long = search.limited_by in ("memory", "time", "kernel limit")
        yield Run(search, search.max_tokens > 0, too_long)


def _judge(runs: Sequence[Run]) -> str:
    """Return the verdict on the runs that have a capability; those too long count if all are."""
    counted = [run for run in runs if run.passed or not run.is_too_long] or runs
    passed = sum(run.passed for run in counted)
    if passed == len(counted):
        return WORKS if counted else ""
    return f"{passed} of {len(counted)}" if passed else FAILS
