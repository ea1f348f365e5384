"""Capabilities that were run on this machine, reasons of failures, and errors of outputs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import MAX_LABEL, short_names
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.core.masks import CAUSAL, FULL
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Column, Section, Table
from longseq_bench.reports.outcome_text import describe_outcome

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
WORKS, PARTIAL, FAILS = "✓", "partial", "✗"
BY_LENGTH = ("oom", "timeout", "limit")
"""Statuses of a trial that is too long; they don't mean that its results are wrong."""
TITLE, ERRORS = "Capabilities", "Numeric error"
_LEGEND = (
    f"{WORKS} works, {PARTIAL}: some trials failed, {FAILS} none passed, empty: not run. A length "
    "that is too long for memory or time is no failure."
)


class Run(NamedTuple):
    """The row of a trial or search; reason: how it failed, "" if it passed or was too long."""

    row: Row
    passed: bool
    reason: str


@dataclass(frozen=True)
class Matrix:
    """Capabilities by implementation, the most capable first.

    columns: names of capabilities.  rows: name and cells of each implementation: "✓", "partial a",
    "✗ b", or "" if it was not run.  reasons: by letter.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reasons: dict[str, str]


def build_matrix(source: Source) -> Matrix:
    """Return the capabilities of all implementations, those that not every run shares."""
    runs = list(_runs(source))
    tried = {name: sum(has(run.row) for run in runs) for name, has in CAPABILITIES.items()}
    columns = tuple(name for name, count in tried.items() if 0 < count < len(runs))
    columns = columns or tuple(name for name, count in tried.items() if count)[:1]
    letters: dict[str, str] = {}
    rows = []
    by_name = group_by(runs, lambda run: run.row.implementation)
    short = short_names(by_name)
    verdicts = {name: dict(_judge(some, columns)) for name, some in by_name.items()}

    def rank(name: str) -> tuple[int, int, int]:
        count = Counter(verdict for verdict, _ in verdicts[name].values())
        return -count[WORKS], count[FAILS], count[PARTIAL]

    for name in sorted(verdicts, key=rank):
        cells = [shorten_name(short[name])]
        for column in columns:
            verdict, reason = verdicts[name].get(column, ("", ""))
            letter = letters.setdefault(reason, _letter(len(letters))) if reason else ""
            cells.append(f"{verdict} {letter}".strip())
        rows.append(tuple(cells))
    return Matrix(columns, tuple(rows), {letter: reason for reason, letter in letters.items()})


def shorten_name(name: str) -> str:
    """Return the name of an implementation with at most MAX_LABEL characters."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def _runs(source: Source) -> Iterator[Run]:
    for row in source.rows:
        too_long = row.status in BY_LENGTH
        outcome = describe_outcome(row.status, row.phase, row.reason)
        yield Run(row, row.is_ok, "" if too_long or row.is_ok else outcome)
    for search in (row for row in source.maxima if not row.fit_only):
        too_long = search.max_tokens > 0 or search.limited_by in ("memory", "time", "kernel limit")
        words = ": ".join(filter(None, (search.limited_by, search.failure_reason)))
        yield Run(search, search.max_tokens > 0, "" if too_long else words)


def _judge(runs: Sequence[Run], columns: Iterable[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield verdict and reason of each capability that was run.

    A failure counts against the capability with the lowest share of passed trials: one that
    runs on one rank only fails "Several ranks", not "Train", although it failed to train on two.
    """
    having = {
        name: some for name in columns if (some := [r for r in runs if CAPABILITIES[name](r.row)])
    }
    share = {name: _share_passed(some) for name, some in having.items()}
    differing = {name for name, some in having.items() if len(some) < len(runs)}
    for name, some in having.items():
        if share[name]:
            some = [r for r in some if name in _blamed(r, share, differing)]
        failed = Counter(r.reason for r in some if r.reason).most_common(1)
        reason = failed[0][0] if failed else ""
        if share[name]:
            yield name, (PARTIAL if failed else WORKS, reason)
        else:
            yield name, (FAILS, reason or "every trial was too long")


def _blamed(run: Run, share: dict[str, float], differing: set[str]) -> list[str]:
    """Return the capabilities of a run that have the lowest share of passed trials.

    differing: capabilities that not all runs share; the others are blamed only without these.
    """
    names = [name for name in share if CAPABILITIES[name](run.row)]
    names = [name for name in names if name in differing] or names
    lowest = min(share[name] for name in names)
    return [name for name in names if share[name] == lowest]


def _share_passed(runs: Sequence[Run]) -> float:
    """Return the share of runs that passed, of those that were not too long."""
    passed = sum(run.passed for run in runs)
    return passed / (passed + sum(bool(run.reason) for run in runs)) if passed else 0.0


def _letter(i: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    high, low = divmod(i, 26)
    return (_letter(high - 1) if high else "") + chr(ord("a") + low)


def capabilities(source: Source) -> Section:
    """Build the matrix and the reasons of its failures."""
    matrix = build_matrix(source)
    if not matrix.rows:
        return Section(TITLE)
    columns = tuple(map(Column, ("Implementation", *matrix.columns)))
    tables = [Table("Capabilities that were run", columns, matrix.rows)]
    if matrix.reasons:
        reasons = tuple(matrix.reasons.items())
        tables.append(Table("Reasons", (Column("Letter"), Column("Reason")), reasons))
    blame = "A failure counts against the capability with the lowest share of passed trials."
    return Section(TITLE, [_LEGEND, blame], tables=tables)


# ---- errors ------------------------------------------------------------------------------------

_LIMITS = "memory_budget", "time_budget"
_EXPLANATION = (
    "The largest error of any output against float64, over all lengths and masks; in training also "
    "of gradients. Tokens: the length that has it."
)
_same_kind = attrgetter("fingerprint", "device", "label", "world_size", "dtype", "mode", *_LIMITS)


def errors(source: Source) -> Section:
    """Build a row per machine, implementation, number of ranks, dtype, mode and limits."""
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    groups = group_by(known, _same_kind).values()
    worst = [max(rows, key=lambda row: require(row.max_error)) for rows in groups]
    limits = ValueColumn(
        "Limits", "text", lambda row: source.workload(row, _LIMITS) or None, optional=True
    )
    columns = "label", "world_size", "dtype", "mode", limits, "tokens", "max_error"
    tables = [
        build_table(source.title(rows[0], ("device", "fingerprint")), columns, rows)
        for rows in group_by(worst, attrgetter("fingerprint", "device")).values()
    ]
    return Section(ERRORS, [_EXPLANATION], tables=tables)
