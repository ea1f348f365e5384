"""Failed runs, and figures that are missing although the run was ok, each with its reason."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from longseq_bench.analysis.row import R
from longseq_bench.analysis.runs import REMEDY, are_finite, group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_ratio
from longseq_bench.reports.wording import UNCONFIRMED, name_status, shorten_reason

_NUMBER = re.compile(r"[\d.,]+")
_FAILED = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Ranks", "count"),
    Column("Asked for"), Column("Status"), Column("Phase"), Column("Reason"),
)  # fmt: skip
_MISSING = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Not measured"), Column("Reason"),
)  # fmt: skip


def failures(source: Source) -> Section:
    """Build the section on failed runs and figures that ok rows lack, with equal rows counted."""
    tables = [
        _warnings(source),
        _counted("Runs that were not ok", _FAILED, _failed(source), source),
        _counted("Figures that are missing from ok rows", _MISSING, _missing(source), source),
    ]
    return Section(
        "Failures",
        points=_count_by_status(source.records),
        tables=[table for table in tables if table.rows],
    )


def _count_by_status(records: Sequence[Record]) -> list[str]:
    """Return the number of runs by status, then that of searches; nothing if all were ok."""
    failed = [record for record in records if record.outcome.status != "ok"]
    by_status = Counter(record.outcome.status for record in failed).most_common()
    counts = ", ".join(f"{count:,} {name_status(status)}" for status, count in by_status)
    steps = sum(record.purpose != "measure" for record in failed)
    found = [f"{len(failed):,} of {len(records):,} runs were not ok: {counts}."] if failed else []
    return found + [f"Steps of searches, which end with a failure: {steps:,} of them."] * (
        steps > 0
    )


def _warnings(source: Source) -> Table:
    """List rows whose allocator retried, with bytes that differ from the formula, or unstable."""
    columns = Column("Implementation"), Column("Tokens", "tokens"), Column("Warning")
    found = [
        (row, f"CUDA's allocator freed its cache and retried; times: {row.alloc_retries:,.0f}")
        for row in thrashes(source)
    ]
    for row in source.rows:
        for rank, counted, stated in row.bytes_unlike or ():
            words = f"rank {rank} sent {counted:,} B in a pass; the formula gives {stated:,} B"
            found.append((row, words))
        if row.unstable:
            found.append((row, f"unstable: {row.unstable}; {REMEDY}"))
    rows: list[tuple[Cell, ...]] = [
        (*filter(None, [source.machines[row.fingerprint]]), row.name, row.tokens, words)
        for row, words in found
    ]
    return Table("Figures to distrust", (*source.machine_column, *columns), tuple(rows))


def _counted(
    title: str, columns: Sequence[Column], found: Iterable[tuple[Record, tuple[Cell, ...]]],
    source: Source,
) -> Table:  # fmt: skip
    """Count equal rows; the machine is a column where there are several."""
    rows = Counter((*source.machine_cell(record), *cells) for record, cells in found)
    shown = (*source.machine_column, *columns, Column("Runs", "count"))
    return Table(title, shown, tuple((*row, count) for row, count in rows.items()))


def _failed(source: Source) -> Iterator[tuple[Record, tuple[Cell, ...]]]:
    """Yield the failed records, one of every kind of reason first.

    Those that can't run here ("unsupported") are after what failed.
    """
    failed = [record for record in source.records if record.outcome.status != "ok"]
    kinds = [
        (record.outcome.status, _NUMBER.sub("", shorten_reason(record.outcome) or ""))
        for record in failed
    ]
    first = {kind: at for at, kind in reversed([*enumerate(kinds)])}

    def order(at: int) -> tuple[bool, bool]:
        return first[kinds[at]] != at, kinds[at][0] == "unsupported"

    for record in map(failed.__getitem__, sorted(range(len(failed)), key=order)):
        trial, outcome = record.trial, record.outcome
        yield record, (
            source.label(trial), trial.workload.seq_len, trial.world_size, record.purpose,
            outcome.status, outcome.phase, shorten_reason(outcome) or "none was recorded",
        )  # fmt: skip


def _missing(source: Source) -> Iterator[tuple[Record, tuple[Cell, ...]]]:
    for record in source.records:
        trial, outcome = record.trial, record.outcome
        if outcome.status != "ok" or record.purpose != "measure":
            continue
        measured: defaultdict[str, list[float]] = defaultdict(list)
        for one in outcome.measurements:
            measured[one.name] += one.samples
        for name in _expected(record, measured.get("density_achieved", ())):
            samples = measured.get(name, ())
            if not are_finite(samples):
                some = any(map(math.isfinite, samples))
                reason = f"{'some of ' * some}its samples are not finite"
            elif samples:
                continue
            else:
                reason = str(_explain_missing(record, name))
            yield record, (source.label(trial), trial.workload.seq_len, name, reason)


def _expected(record: Record, densities: Sequence[float]) -> Iterator[str]:
    """Yield the measurements that an ok trial should have."""
    yield from ("time", "peak", "flops", "max_error")
    if record.trial.world_size > 1:
        yield from ("compute_time", "bytes_sent")
    if min(densities, default=1.0) < 1:
        yield "dense_time"


def _explain_missing(record: Record, name: str) -> object:
    """Return the reason why a measurement is missing."""
    facts = record.outcome.facts
    if name in _TIMED and not record.trial.repeats:
        return "none was requested (repeats 0)"
    return {
        "peak": facts.get("heap") or "the memory meter gave no peak",
        "flops": "the implementation stated no FLOPs",
        "max_error": "the output's error was not recorded",
        "bytes_sent": "no bytes were counted",
        "time": "no timed pass was recorded",
        "compute_time": "no pass without communication was recorded",
        "dense_time": facts.get("dense", "no dense pass was recorded"),
    }[name]


_TIMED = ("time", "compute_time", "dense_time")


# ---- what to distrust on a first screen, and searches in words -----------------------------------


def problems(source: Source) -> Iterator[str]:
    """Yield sentences on wrong outputs, thrashing, miscounted bytes and unstable times."""
    wrong = [
        f"{source.label(r.trial)} at {format_tokens(r.trial.workload.seq_len)} tokens"
        for r in source.records
        if r.outcome.status == "wrong"
    ]
    thrashing = [f"{row.name} at {format_tokens(row.tokens)} tokens" for row in thrashes(source)]
    miscounted = [
        f"{row.name} at {format_tokens(row.tokens)} tokens" for row in source.rows
        if row.bytes_unlike
    ]  # fmt: skip
    unstable = [
        f"{row.name} at {format_tokens(row.tokens)} tokens" for row in source.rows if row.unstable
    ]
    found = (
        ("Wrong output, no speed is shown", wrong),
        ("CUDA's allocator freed its cache and retried (thrashing)", thrashing),
        ("Bytes sent differ from their formula", miscounted),
        ("Unstable times, run these again on an idle machine", unstable),
    )
    for words, names in found:
        if names:
            yield f"{words}: {_first(dict.fromkeys(names))}; see Failures."


def thrashes(source: Source) -> list[SweepRow | SearchRow]:
    """Return the rows in which CUDA's allocator freed its cache and retried."""
    rows: list[SweepRow | SearchRow] = [*source.rows, *source.maxima]
    return [row for row in rows if row.alloc_retries]


def _first(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first}, and {len(others):,} more" if others else first


def index_one_rank(maxima: Iterable[R]) -> Mapping[Hashable, R]:
    """Index the maxima on one rank by search, to compare those on several ranks with them."""
    by_search = group_by((row for row in maxima if row.world_size == 1), lambda row: row.ranks_key)
    return {key: rows[0] for key, rows in by_search.items()}


def describe_search(row: SearchRow, one_rank: Mapping[Hashable, SearchRow], where: str = "") -> str:
    """Return the answer of a search as a sentence.

    one_rank: from `index_one_rank`.  where: its workload in brackets, if not stated nearby.
    """
    name = row.name
    if not row.max_tokens:
        return f"{name}: no length passed{where}; {describe_limit(row)}."
    if row.fit_only:
        tokens = format_tokens(row.max_tokens)
        return f"{name}: {tokens} tokens fit in memory{where}; not checked or timed."
    floor = gain = ""
    if row.fraction_of_floor is not None:
        floor = f", {format_share(row.fraction_of_floor)} of the floor"
    one = one_rank.get(row.ranks_key) if row.world_size > 1 else None
    if one is not None and one.max_tokens:
        gain = f", {format_ratio(row.max_tokens / one.max_tokens)} one rank's"
    confirmed = UNCONFIRMED
    if row.confirmations:
        confirmed = f"confirmed by {_count(row.confirmations, 'further run')}"
    return (
        f"{name} takes {format_tokens(row.max_tokens)} tokens{where}{floor}{gain}, {confirmed}; "
        f"{describe_limit(row)}."
    )


def describe_limit(row: SearchRow) -> str:
    """Describe the cause that ended a search, and its length."""
    if row.first_failure is None:
        return "no longer length failed: this is where the search stopped, not a limit"
    adds = row.failure_phase and row.failure_phase != row.limited_by
    phase = f" in {row.failure_phase}" if adds else ""
    return f"limited by {row.limited_by}{phase} at {format_tokens(row.first_failure)}"


def _count(n: int, one: str) -> str:
    return f"{n:,} {one}{'s' * (n != 1)}"
