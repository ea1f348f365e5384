"""The report of a comparison: what is worse, then times, memory, maxima, and what else differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from longseq_bench.analysis.rows import Row
from longseq_bench.comparison.compare import (
    Bracket,
    Comparison,
    Maxima,
    Peaks,
    Timed,
    called,
    percent,
    regressions,
    unseen,
)
from longseq_bench.reports.document import (
    Axis,
    Cell,
    Chart,
    Column,
    Document,
    Guide,
    Point,
    Section,
    Table,
)
from longseq_bench.reports.groups import capital, grouped, name_of, spread_out, workload_words


def comparison(found: Comparison, fail_on: float | None = None) -> Document:
    """A comparison as a document. fail_on: the share from which on what is worse is listed."""
    return Document(
        "compare",
        "Two runs compared",
        [_side("A", found.a, 0, found), _side("B", found.b, 1, found), "Ratios are B over A."],
        [section for section in _sections(found, fail_on) if section.holds or section.paragraphs],
        lambda: rounds_table(found),
    )


def gate_said(found: Comparison, fail_on: float) -> list[str]:
    """What became worse by this share at least, in sentences; also where nothing did, and for how
    many trials that says little."""
    worse = [f"{said}." for said in regressions(found, fail_on)]
    said = worse or [f"Nothing was found to be worse by {percent(fail_on)}."]
    if found.only_a:
        gone = len(found.only_a)
        said.append(f"{gone} of A's {'is' if gone == 1 else 'are'} not in B, and not looked at.")
    if blind := unseen(found, fail_on):
        said.append(
            f"In {blind} of {len(found.timed)} timed trials {percent(fail_on)} could not have been "
            "told from noise; more rounds would."
        )
    return said


def verdict_words(found: Timed | Peaks | Maxima) -> str:
    """The verdict; of a time "same" is said with what it means."""
    within = isinstance(found, Timed) and found.verdict == "same"
    return "same within noise" if within else found.verdict


def rounds_table(found: Comparison) -> Table:
    """The tidy data: a row a process of every trial that has times on both sides."""
    names = (
        "side", "implementation", "label", "tokens", "world_size", "device", "dtype", "mode",
        "causal", "batch", "heads", "kv_heads", "head_dim", "process", "median_s",
    )  # fmt: skip
    rows = []
    for t in found.timed:
        for side, times in (("A", t.a_rounds), ("B", t.b_rounds)):
            known = [t.what[name] for name in names[1:-2]]
            rows += [(side, *known, i, seconds) for i, seconds in enumerate(times)]
    return Table("processes", tuple(Column(name) for name in names), tuple(rows))


def _side(letter: str, name: str, which: int, found: Comparison) -> str:
    records = found.records[which]
    first, last = min(r.started_at for r in records), max(r.started_at for r in records)
    commits = dict.fromkeys(r.environment.commit or "unknown" for r in records)
    hosts = dict.fromkeys(r.environment.host for r in records)
    return (
        f"{letter}: {name}, {len(records)} records compared, commit {', '.join(commits)}, on "
        f"{', '.join(hosts)}, measured {first}" + (f" to {last}." if last != first else ".")
    )


def _sections(found: Comparison, fail_on: float | None) -> Iterator[Section]:
    yield Section("Summary", points=[*found.said, *found.notes])
    if fail_on is not None:
        yield Section(f"Worse by {percent(fail_on)} or more", points=gate_said(found, fail_on))
    yield _times(found)
    yield _memory(found)
    yield _longest(found)
    yield _turned(found)
    yield _only(found)
    yield _unlike(found)
    yield _differing(found)
    yield _commands(found)


def _times(found: Comparison) -> Section:
    if not found.timed:
        return Section("Times")
    sure = percent(1 - found.level)
    said = [
        "A time is a process's median pass, of the slowest rank, and over processes their "
        "geometric mean. Low and high: between what the ratio lies with "
        f"{sure} certainty, taken alone, by Student's t in logarithms over processes. p: of such a "
        f"difference by noise alone, for all rows together (Holm). Slower and faster: p is at most "
        f"{percent(found.level)} and the ratio is off by {percent(found.least)} at least. Seen "
        "from: the least difference that could have been told from noise."
    ]
    groups = _by_workload(found.timed)
    return Section(
        "Times", said, tables=[_times_table(rows) for rows in groups],
        charts=[_chart(rows, i) for i, rows in enumerate(groups, 1) if _drawn(rows)],
    )  # fmt: skip


def _by_workload(items: Sequence[Any]) -> list[list[Row]]:
    """Rows of one workload together, each with what was found of it."""
    return grouped([{**one.what, "found": one} for one in items])


def _times_table(rows: Sequence[Row]) -> Table:
    columns = [
        *_names(rows), Column("A", "seconds"), Column("B", "seconds"), Column("Ratio", "ratio"),
        Column("Change", "share"),
        Column("Low", "ratio"), Column("High", "ratio"), Column("p", "error"),
        Column("Seen from", "share"), Column("Processes"), Column("Verdict"), Column("Note"),
    ]  # fmt: skip
    return Table(_title(rows), tuple(columns), tuple(_times_cells(row, rows) for row in rows))


def _times_cells(row: Row, rows: Sequence[Row]) -> tuple[Cell, ...]:
    t: Timed = row["found"]
    s = t.shift
    tested: tuple[Cell, ...] = (None,) * 4
    if s is not None:
        tested = (s.low, s.high, s.adjusted, s.seen_from)
    note = "; ".join(filter(None, [t.reason, t.note]))
    processes = f"{len(t.a_rounds)} and {len(t.b_rounds)}"
    return (
        *_named(row, rows), t.a_s, t.b_s, t.ratio, t.ratio - 1, *tested, processes,
        verdict_words(t), note or None,
    )  # fmt: skip


def _drawn(rows: Sequence[Row]) -> bool:
    return len(rows) > 1


def _chart(rows: Sequence[Row], number: int) -> Chart:
    """Ratios with their intervals over lengths."""
    points = []
    for row in rows:
        t: Timed = row["found"]
        low, high = (t.shift.low, t.shift.high) if t.shift else (None, None)
        words = verdict_words(t)
        points.append(Point(name_of(row), row["tokens"], t.ratio, low, high, words))
    ends_x = sorted({p.x for p in points})
    even = tuple(Point("the same", x, 1.0) for x in (ends_x[0], ends_x[-1]))
    same = Guide("the same", even, "no change")
    apart = [p for p in points if p.words in ("slower", "faster")]
    said = f"Times of B over those of A with their intervals: {len(points)} trials, of which "
    said += f"{len(apart)} are slower or faster."
    return Chart(
        f"ratios {number}", f"B over A: {workload_words(rows[0], defaultdict(str))}", said,
        Axis("tokens", "tokens", log=True), Axis("time, B over A", "ratio"), tuple(points),
        guides=(same,), shape="dots",
    )  # fmt: skip


def _memory(found: Comparison) -> Section:
    said = [
        "Peaks are the largest over ranks and processes. More and less: all processes of one side "
        "lie beyond all of the other, by 1 % at least."
    ]
    tables = []
    for rows in _by_workload(found.peaks):
        columns = (
            *_names(rows), Column("A", "bytes"), Column("B", "bytes"), Column("Ratio", "ratio"),
            Column("Verdict"),
        )  # fmt: skip
        cells = tuple(
            (*_named(r, rows), r["found"].a_bytes, r["found"].b_bytes, r["found"].ratio,
             r["found"].verdict)
            for r in rows
        )  # fmt: skip
        tables.append(Table(_title(rows), columns, cells))
    return Section("Peak memory", said if tables else (), tables=tables)


def _longest(found: Comparison) -> Section:
    said = [
        "From the longest length that passed to the shortest above it that failed. Where these "
        "brackets overlap it is the same."
    ]
    tables = []
    for rows in _by_workload(found.maxima):
        columns = (
            *_names(rows), Column("A"), Column("limited by"), Column("B"), Column("limited by"),
            Column("Ratio", "ratio"), Column("Verdict"), Column("Note"),
        )  # fmt: skip
        cells = []
        for row in rows:
            m = row["found"]
            cells.append((
                *_named(row, rows), bracket_words(m.a), m.a.limited_by, bracket_words(m.b),
                m.b.limited_by, m.ratio, m.verdict, m.reason or None,
            ))  # fmt: skip
        tables.append(Table(_title(rows), columns, tuple(cells)))
    return Section("Longest lengths", said if tables else (), tables=tables)


def bracket_words(one: Bracket) -> str:
    """ "3,874 to 3,938"; "from 3,874" where nothing failed above it."""
    if one.first_failure is None:
        return f"from {one.max_tokens:,}"
    return f"{one.max_tokens:,} to {one.first_failure:,}"


def _turned(found: Comparison) -> Section:
    rows = tuple(
        (called(t.what), t.a_status, t.a_reason, t.b_status, t.b_reason, t.verdict,
         "under unlike budgets" if t.budgets else None)
        for t in found.turned
    )  # fmt: skip
    names = ("Trial", "A", "Reason", "B", "Reason", "Verdict", "Note")
    table = Table("", tuple(Column(name) for name in names), rows)
    return Section("Ended otherwise", tables=[table] if rows else [])


def _only(found: Comparison) -> Section:
    points = [
        f"Only in {name}: {_one(what)}"
        for name, side in (("A", found.only_a), ("B", found.only_b))
        for what in side
    ]
    return Section("In one of them only", points=points)


def _unlike(found: Comparison) -> Section:
    said = [f"Not compared, as the machines are not the same{found.machines}:"]
    return Section(
        "In both, on unlike machines", said if found.unlike else (),
        points=[_one(what) for what in found.unlike],
    )  # fmt: skip


def _one(what: Row) -> str:
    return f"{called(what)}{'' if 'tokens' in what else ', a search'}"


def _differing(found: Comparison) -> Section:
    rows = tuple((one.name, one.a, one.b) for one in found.differences)
    table = Table("", (Column("What"), Column("A"), Column("B")), rows)
    return Section("What differs of machine and software", tables=[table] if rows else [])


def _commands(found: Comparison) -> Section:
    code = [
        f"# {name}: {command}"
        for name, records in zip("AB", found.records, strict=True)
        for command in dict.fromkeys(r.command for r in records if r.command)
    ]
    return Section("How they were measured", code=[line.replace("\n", " ") for line in code])


def _title(rows: Sequence[Row]) -> str:
    words = workload_words(rows[0], defaultdict(str))
    return capital(words)


def _names(rows: Sequence[Row]) -> tuple[Column, ...]:
    """What a row is called: a search has no length, and one rank is not told."""
    lengths = [Column("Tokens", "tokens")] if "tokens" in rows[0] else []
    ranks = [Column("Ranks", "count")] if spread_out(rows) else []
    return (Column("Implementation"), *lengths, *ranks)


def _named(row: Row, rows: Sequence[Row]) -> tuple[Cell, ...]:
    lengths = [row["tokens"]] if "tokens" in row else []
    ranks = [row["world_size"]] if spread_out(rows) else []
    return (row["label"], *lengths, *ranks)
