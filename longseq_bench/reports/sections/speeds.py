"""Time, memory and speed relative to a baseline, per length; statuses on many ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import SWEEP, SWEEP_RANKS, Source
from longseq_bench.reports.columns import Columns, ValueColumn, build_table
from longseq_bench.reports.document import Column, Section, Table, format_ratio
from longseq_bench.reports.groups import capitalize_first, group_by_workload, split_by_sparsity


def relative(source: Source) -> Section:
    """Build a table per workload at the longest length that most rows ran, fastest first."""
    base = baseline_of(source)
    tables: list[Table] = []
    points: list[str] = []
    for group in group_by_workload(source.rows if any(r.time_s for r in source.rows) else []):
        tokens = shared_length(group)
        at = [row for row in group if row.tokens == tokens]
        named = {row.label for row in at if base in (row.label, row.implementation)}
        # an implementation with several labels does not identify one of them
        label = base if base in named else named.pop() if len(named) == 1 else None
        found = speeds(at, label) if label else [None] * len(at)
        speed = {id(row): one for row, one in zip(at, found, strict=True)}
        at.sort(key=lambda row: -(speed[id(row)] or 0.0))
        where = ", ".join(filter(None, (source.workload(at[0]), f"{format_tokens(tokens)} tokens")))
        columns = _columns(speed, _reference_peak(at, label))
        tables.append(build_table(capitalize_first(where), columns, at, keep_empty=True))
        points += _describe(at, speed, base, where)
    explanation = (
        "At the longest length at which most rows were ok. Relative speed: time of "
        f"{base} (on the same number of ranks, else on the fewest) divided by the row's time. "
        "Relative memory: peak of a rank divided by that of the baseline on the fewest ranks. "
        "Pairs seen: share of the pairs of dense attention, if less."
    )
    builders = section_charts.time, section_charts.memory, section_charts.roofline
    return Section(
        "Time, memory, relative speed",
        [explanation, *section_charts.limit_note(source.rows, 3)],
        points,
        tables,
        charts=section_charts.charts(source, source.rows, *builders) if tables else (),
        missing=("timed trial", SWEEP),
    )


def baseline_of(source: Source) -> str:
    """Return the requested baseline, else sdpa or dense, else the label with most timed rows."""
    labels = Counter(row.label for row in source.rows if row.time_s is not None)
    preferred = [name for name in ("sdpa", "dense") if name in labels]
    most_frequent = [label for label, _ in labels.most_common(1)]
    return source.baseline_label or next(iter([*preferred, *most_frequent]), "")


def shared_length(group: Sequence[SweepRow]) -> int:
    """Return the longest of the lengths at which most rows were ok."""
    ok = Counter(row.tokens for row in group if row.status == "ok")
    return max((row.tokens for row in group), key=lambda tokens: (ok[tokens], tokens))


def _reference_peak(at: Sequence[SweepRow], label: str | None) -> int | None:
    """Return the peak of the baseline on the fewest ranks."""
    same = [r for r in at if r.label == label and r.status == "ok" and r.peak_bytes]
    found = min(same, key=attrgetter("world_size"), default=None)
    return found.peak_bytes if found else None


def _columns(speed: dict[int, float | None], reference: int | None) -> Columns:
    def peak(row: SweepRow) -> int | None:
        return row.peak_bytes if row.status == "ok" else None

    def memory(row: SweepRow) -> float | None:
        known = peak(row)
        return known / reference if known and reference else None

    return (
        "label", "world_size", "status",
        ValueColumn("Pairs seen", "share", lambda r: r.token_density if r.is_sparse else None),
        "time_s", ValueColumn("Peak memory", "bytes", peak),
        ValueColumn("Relative speed", "ratio", lambda row: speed[id(row)]),
        ValueColumn("Relative memory", "ratio", memory), "max_error",
    )  # fmt: skip


def _describe(
    ordered: Sequence[SweepRow], speed: dict[int, float | None], base: str, where: str
) -> Iterator[str]:
    """Name the fastest and slowest exact and sparse row; `ordered` starts with the fastest."""
    timed = (row for row in ordered if speed[id(row)] is not None)
    for kind, rows in split_by_sparsity(timed).items():
        if len(rows) > 1:
            first, last = (
                f"{row.name} {format_ratio(speed[id(row)] or 0.0)}" for row in (rows[0], rows[-1])
            )
            yield (
                f"Speed relative to {base} ({where}), {len(rows)} {kind} rows: fastest {first}, "
                f"slowest {last}."
            )


def on_ranks(source: Source) -> Section:
    """Build a table of the trials that were ok: a row per label, a column per number of ranks."""
    worlds = sorted({row.world_size for row in source.rows})
    explanation = "Number of trials that were ok, by number of ranks; see Failures for the reasons."
    together = group_by(source.rows, attrgetter("fingerprint", "device", "mode")).values()
    tables = [_worlds(source, rows, worlds) for rows in together] if worlds != [1] else []
    missing = "trial on several ranks", SWEEP_RANKS
    return Section("What works on many ranks", [explanation], tables=tables, missing=missing)


def _worlds(source: Source, rows: Sequence[SweepRow], worlds: Sequence[int]) -> Table:
    ranks = (Column(f"On {n} rank{'s' if n > 1 else ''}") for n in worlds)
    return Table(
        source.title(rows[0], ("mode", "device", "fingerprint")),
        (Column("Implementation"), *ranks),
        tuple(
            (label, *(_statuses([r.status for r in some if r.world_size == n]) for n in worlds))
            for label, some in group_by(rows, attrgetter("label")).items()
        ),
    )


def _statuses(found: Sequence[str]) -> str | None:
    if not found:
        return None
    bad = sorted({status for status in found if status != "ok"})
    return f"{found.count('ok')} of {len(found)}" + (f" ({', '.join(bad)})" if bad else "")
