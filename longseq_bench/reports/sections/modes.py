"""Capabilities that were run on this machine, reasons of failures, and errors of outputs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import short_names
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.core.masks import CAUSAL, FULL
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Column, Section, Table
from longseq_bench.reports.wording import describe_outcome

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
_EXPLANATION = (
    f"{WORKS} works, {PARTIAL}: some trials failed, {FAILS} none passed, empty: not run. A length "
    "that is too long for memory or time is no failure.",
    "A failure counts against the capability with the lowest share of passed trials.",
)


class Run(NamedTuple):
    """The row of a trial or search; reason: how it failed, "" if it passed or was too long."""

    row: Row
    passed: bool
    reason: str


class Verdict(NamedTuple):
    """The verdict on a capability, and the most frequent reason of its failures."""

    sign: str
    reason: str


def capabilities(source: Source) -> Section:
    """Build the matrix of capabilities that not every run shares, and the reasons of failures."""
    found = judge_implementations(source)
    names = [name for name in CAPABILITIES if any(name in one for one in found.values())]
    reasons = dict.fromkeys(
        verdicts[name].reason
        for verdicts in found.values()
        for name in names
        if name in verdicts and verdicts[name].reason
    )
    letters = {reason: _letter(i) for i, reason in enumerate(reasons)}

    def cell(verdict: Verdict | None) -> str:
        return f"{verdict.sign} {letters.get(verdict.reason, '')}".strip() if verdict else ""

    tables = []
    if found:
        columns = tuple(map(Column, ("Implementation", *names)))
        rows = ((name, *(cell(one.get(column)) for column in names)) for name, one in found.items())
        tables.append(Table("Capabilities that were run", columns, tuple(rows)))
    if letters:
        both = tuple((letter, reason) for reason, letter in letters.items())
        tables.append(Table("Reasons", (Column("Letter"), Column("Reason")), both))
    return Section("Capabilities", _EXPLANATION, tables=tables)


def judge_implementations(source: Source) -> dict[str, dict[str, Verdict]]:
    """Return verdicts by the short name of an implementation, the most capable first."""
    runs = list(_runs(source))
    tried = {name: sum(has(run.row) for run in runs) for name, has in CAPABILITIES.items()}
    differing = [name for name, count in tried.items() if 0 < count < len(runs)]
    columns = differing or [name for name, count in tried.items() if count][:1]
    by_name = group_by(runs, lambda run: run.row.implementation)
    short = short_names(by_name)
    verdicts = {short[name]: dict(_judge(some, columns)) for name, some in by_name.items()}

    def rank(name: str) -> tuple[int, int, int]:
        count = Counter(verdict.sign for verdict in verdicts[name].values())
        return -count[WORKS], count[FAILS], count[PARTIAL]

    return {name: verdicts[name] for name in sorted(verdicts, key=rank)}


def _runs(source: Source) -> Iterator[Run]:
    for row in source.rows:
        # a length that is too long does not mean that results are wrong
        too_long = row.status in ("oom", "timeout", "limit")
        outcome = describe_outcome(row.status, row.phase, row.reason)
        yield Run(row, row.is_ok, "" if too_long or row.is_ok else outcome)
    for search in (row for row in source.maxima if not row.fit_only):
        too_long = search.max_tokens > 0 or search.limited_by in ("memory", "time", "kernel limit")
        words = ": ".join(filter(None, (search.limited_by, search.failure_reason)))
        yield Run(search, search.max_tokens > 0, "" if too_long else words)


def _judge(runs: Sequence[Run], columns: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Yield the verdict on each capability that was run.

    A failure counts against the capability with the lowest share of passed trials: one that
    runs on one rank only fails "Several ranks", not "Train", although it failed to train on two.
    """
    having = {
        name: some for name in columns if (some := [r for r in runs if CAPABILITIES[name](r.row)])
    }
    share = {name: _share_passed(some) for name, some in having.items()}
    # those that all runs share are blamed only without others
    differing = [name for name, some in having.items() if len(some) < len(runs)]

    def blamed(run: Run) -> list[str]:
        names = [name for name in share if CAPABILITIES[name](run.row)]
        names = [name for name in names if name in differing] or names
        lowest = min(share[name] for name in names)
        return [name for name in names if share[name] == lowest]

    for name, some in having.items():
        counted = [run for run in some if run.reason and (not share[name] or name in blamed(run))]
        reasons = Counter(run.reason for run in counted).most_common(1)
        reason = reasons[0][0] if reasons else ""
        if share[name]:
            yield name, Verdict(PARTIAL if reason else WORKS, reason)
        else:
            yield name, Verdict(FAILS, reason or "every trial was too long")


def _share_passed(runs: Sequence[Run]) -> float:
    """Return the share of runs that passed, of those that were not too long."""
    passed = sum(run.passed for run in runs)
    return passed / (passed + sum(bool(run.reason) for run in runs)) if passed else 0.0


def _letter(i: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    high, low = divmod(i, 26)
    return (_letter(high - 1) if high else "") + chr(ord("a") + low)


# ---- errors ------------------------------------------------------------------------------------


def errors(source: Source) -> Section:
    """Build a row per machine, implementation, number of ranks, dtype, mode and limits."""
    explanation = (
        "The largest error of any output against float64, over all lengths and masks; in training "
        "also of gradients. Tokens: the length that has it."
    )
    limits = "memory_budget", "time_budget"
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    same = attrgetter("fingerprint", "device", "label", "world_size", "dtype", "mode", *limits)
    worst = [
        max(rows, key=lambda row: require(row.max_error)) for rows in group_by(known, same).values()
    ]
    words = ValueColumn(
        "Limits", "text", lambda row: source.workload(row, limits) or None, optional=True
    )
    columns = "label", "world_size", "dtype", "mode", words, "tokens", "max_error"
    tables = [
        build_table(source.title(rows[0], ("device", "fingerprint")), columns, rows)
        for rows in group_by(worst, attrgetter("fingerprint", "device")).values()
    ]
    return Section("Numeric error", [explanation], tables=tables)
