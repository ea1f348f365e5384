"""Time, memory and speed relative to a baseline, per length; statuses on many ranks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import (
    capitalize_first,
    group_by_workload,
    split_by_sparsity,
)
from longseq_bench.reports.sections.findings import limit_sentences
from longseq_bench.reports.sections.multi_rank import SWEEP_RANKS

_SPEEDS = (
    Column("Implementation"), Column("Ranks", "count"), Column("Status"),
    Column("Pairs seen", "share"), Column("Time", "seconds"), Column("Peak memory", "bytes"),
    Column("Relative speed", "ratio"), Column("Relative memory", "ratio"),
    Column("Max error", "error"),
)  # fmt: skip


def relative(source: Source) -> Section:
    """Build a table per workload at the longest length that most rows ran, fastest first."""
    if not any(row.time_s for row in source.rows):
        return missing_section(
            "Time, memory, relative speed", "timed trial", "longseq sweep configs/quickstart.yaml"
        )
    base = baseline_of(source)
    tables: list[Table] = []
    points: list[str] = []
    for group in group_by_workload(source.rows):
        tokens = shared_length(group)
        at = [row for row in group if row.tokens == tokens]
        meant = _meant(at, base)
        reference, relative_speeds = _reference(at, meant), _relative(at, meant)
        pairs = list(zip(at, relative_speeds, strict=True))
        pairs.sort(key=lambda pair: -float(pair[1] or 0))
        where = f"{source.workload(at[0])}, {format_tokens(tokens)} tokens"
        told = tuple(_cells(row, reference, speed) for row, speed in pairs)
        tables.append(Table(capitalize_first(where), _SPEEDS, told))
        points += _said(pairs, base, where)
    said = (
        f"Relative speed is the time of {base} over the row's, on as many ranks where it ran so, "
        "else on the fewest; relative memory is the row's peak of a rank over that of the baseline "
        "on the fewest. Both only of outputs that passed the check. Pairs seen: the share of the "
        "pairs that dense attention sees, where it is less. The length is the longest of those "
        "that most implementations were ok at."
    )
    pictures = section_charts.charts(
        source, source.rows, section_charts.time, section_charts.memory, section_charts.roofline
    )
    return Section(
        "Time, memory, relative speed",
        [said, *section_charts.cut(source.rows, 3)],
        limit_sentences(points),
        tables,
        charts=pictures,
    )


def baseline_of(source: Source) -> str:
    """Return the chosen baseline; else standard attention, else the label with most rows."""
    labels: dict[str, int] = defaultdict(int)
    for row in source.rows:
        labels[row.label] += row.time_s is not None
    usual = next((name for name in ("sdpa", "dense") if labels.get(name)), None)
    return source.baseline or usual or max(labels, key=lambda label: labels[label])


def shared_length(group: Sequence[SweepRow]) -> int:
    """Return the longest of the lengths at which most rows were ok."""
    ok: dict[int, int] = defaultdict(int)
    for row in group:
        ok[row.tokens] += row.status == "ok"
    return max(ok, key=lambda tokens: (ok[tokens], tokens))


def _meant(at: Sequence[SweepRow], base: str) -> str | None:
    """Return the one label that the baseline names at a length; None for none or several."""
    labels = {row.label for row in at if base in (row.label, row.implementation)}
    return base if base in labels else labels.pop() if len(labels) == 1 else None


def _relative(at: Sequence[SweepRow], meant: str | None) -> list[float | None]:
    return speeds(at, meant) if meant else [None] * len(at)


def _reference(at: Sequence[SweepRow], meant: str | None) -> int | None:
    same = [r for r in at if r.label == meant and r.status == "ok" and r.peak_bytes]
    found = min(same, key=lambda r: int(r.world_size), default=None)
    return require(found.peak_bytes) if found else None


def _cells(row: SweepRow, reference: int | None, speed: float | None) -> tuple[Cell, ...]:
    peak = row.peak_bytes if row.status == "ok" else None
    return (
        row.label, row.world_size, row.status,
        row.token_density if row.is_sparse else None, time_with_interval(row), peak, speed,
        peak / reference if peak and reference else None, row.max_error,
    )  # fmt: skip


def _said(pairs: Sequence[tuple[SweepRow, float | None]], base: str, where: str) -> Iterator[str]:
    """Name the fastest and slowest of exact and of sparse attention; rows are by falling speed."""
    known = {id(row): speed for row, speed in pairs if speed is not None}
    timed = (row for row, _ in pairs if id(row) in known)
    for what, rows in split_by_sparsity(timed).items():
        if len(rows) > 1:
            first, last = (
                f"{row.name} runs at {format_cell(known[id(row)], 'ratio')} its speed"
                for row in (rows[0], rows[-1])
            )
            yield f"Against {base} ({where}), of {len(rows)} {what}: {first}, {last}."


def on_ranks(source: Source) -> Section:
    """Build a table of the trials that were ok: a row per label, a column per number of ranks."""
    worlds = sorted({row.world_size for row in source.rows})
    if not worlds or worlds == [1]:
        return missing_section("What works on many ranks", "trial on several ranks", SWEEP_RANKS)
    said = "How many of the trials on so many ranks were ok; Failures has the reasons."
    together: dict[tuple[str, ...], list[SweepRow]] = defaultdict(list)
    for row in source.rows:
        together[row.fingerprint, row.device, row.mode].append(row)
    tables = [_worlds(source, rows, worlds) for rows in together.values()]
    return Section("What works on many ranks", [said], tables=tables)


def _worlds(source: Source, rows: Sequence[SweepRow], worlds: Sequence[int]) -> Table:
    counts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        counts[row.label][row.world_size].append(row.status)
    machine = source.machines[rows[0].fingerprint]
    title = f"{rows[0].mode}, {rows[0].device}" + (f", machine {machine}" if machine else "")
    ranks = (Column(f"On {n} rank{'s' if n > 1 else ''}") for n in worlds)
    return Table(
        capitalize_first(title),
        (Column("Implementation"), *ranks),
        tuple((label, *(_statuses(by.get(n)) for n in worlds)) for label, by in counts.items()),
    )


def _statuses(found: Sequence[str] | None) -> str | None:
    if not found:
        return None
    bad = sorted({status for status in found if status != "ok"})
    return f"{found.count('ok')} of {len(found)}" + (f" ({', '.join(bad)})" if bad else "")
