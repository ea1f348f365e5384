"""Sentences of a summary, each computed from the rows: they change when the rows change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Spread, format_cell
from longseq_bench.reports.groups import grouped, name_of, workload_words
from longseq_bench.table import Row
from longseq_bench.units import format_bytes, format_seconds, format_share, format_tokens


def findings(source: Source) -> list[str]:
    """What was run, what is fastest and leanest where, how long each got, what was wrong."""
    said = [_what_was_run(source)]
    for group in grouped(source.rows):
        said += _of_group(group, workload_words(group[0], source.machines))
    said += [_of_maximum(row, workload_words(row, source.machines)) for row in source.maxima]
    return said + list(_wrong(source.rows))


def time_of(row: Row) -> Spread | None:
    """The median time of a row with its interval (s); None where it was not timed."""
    if row["time_s"] is None:
        return None
    return Spread(row["time_s"], row["time_low_s"], row["time_high_s"])


def _what_was_run(source: Source) -> str:
    statuses = Counter(record.outcome.status for record in source.records)
    processes = sum(record.processes for record in source.records)
    took = format_seconds(sum(record.wall_s for record in source.records))
    counts = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
    return (
        f"{_count(len(source.records), 'run')} in {_count(processes, 'process', 'processes')} "
        f"took {took}: {counts}."
    )


def _of_group(group: list[Row], where: str) -> Iterator[str]:
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in group:
        if row["status"] == "ok" and row["time_s"] is not None:
            by_length[row["tokens"]].append(row)
    shared = [tokens for tokens, rows in by_length.items() if len(rows) > 1]
    if shared:
        rows, at = by_length[max(shared)], f"At {format_tokens(max(shared))} tokens ({where})"
        yield f"{at}, {_fastest(rows)}"
        if lean := _leanest(rows):
            yield f"{at}, {lean}"
    if longest := _longest_ok(group):
        yield f"The longest lengths swept that were ok ({where}): {longest}."


def _fastest(rows: list[Row]) -> str:
    """No winner is named where the two intervals overlap."""
    first, second = sorted(rows, key=lambda row: float(row["time_s"]))[:2]
    one, two = (f"{name_of(r)} ({format_cell(time_of(r), 'seconds')})" for r in (first, second))
    if first["time_high_s"] >= second["time_low_s"]:
        return f"{one} and {two} can't be told apart: their intervals overlap."
    ratio = format_cell(second["time_s"] / first["time_s"], "ratio")
    return f"{one} is the fastest of {len(rows)}, {ratio} as fast as the next, {two}."


def _leanest(rows: list[Row]) -> str | None:
    known = sorted((r for r in rows if r["peak_bytes"] is not None), key=lambda r: r["peak_bytes"])
    if len(known) < 2 or known[0]["peak_bytes"] == known[1]["peak_bytes"]:
        return None
    one, two = (f"{name_of(r)} ({format_bytes(r['peak_bytes'])})" for r in known[:2])
    return f"{one} has the lowest peak memory of {len(known)}, the next is {two}."


def _longest_ok(group: list[Row]) -> str:
    passed: dict[str, int] = {}
    failed: dict[str, Row] = {}
    for row in sorted(group, key=lambda row: int(row["tokens"])):
        if row["status"] == "ok":
            passed[name_of(row)] = row["tokens"]
    for row in sorted(group, key=lambda row: -int(row["tokens"])):
        if row["status"] != "ok" and row["tokens"] > passed.get(name_of(row), 0):
            failed[name_of(row)] = row
    return "; ".join(
        f"{name} {format_tokens(tokens)}{_then(failed.get(name))}"
        for name, tokens in passed.items()
    )


def _then(failure: Row | None) -> str:
    if failure is None:
        return ""
    return f" ({failure['status']} at {format_tokens(failure['tokens'])})"


def _of_maximum(row: Row, where: str) -> str:
    name = name_of(row)
    if not row["max_tokens"]:
        return f"{name} passed at no length ({where}); {_limit(row)}."
    floor = ""
    if row["fraction_of_floor"] is not None:
        floor = f", {format_share(row['fraction_of_floor'])} of the floor"
    again = row["confirmations"]
    sure = (
        f"confirmed by {_count(again, 'further run')}" if again else "not confirmed by a second run"
    )
    return (
        f"{name} takes {format_tokens(row['max_tokens'])} tokens ({where}){floor}, {sure}; "
        f"{_limit(row)}."
    )


def _limit(row: Row) -> str:
    if row["first_failure"] is None:
        return "no longer length failed, so this is where the search stopped, not a limit"
    phase = f" in {row['failure_phase']}" if row["failure_phase"] else ""
    return f"limited by {row['limited_by']}{phase} at {format_tokens(row['first_failure'])}"


def _wrong(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row["status"] == "wrong":
            yield (
                f"{name_of(row)} gave a wrong output at {format_tokens(row['tokens'])} tokens "
                f"({row['reason'] or 'no reason was recorded'}); no speed is shown for it."
            )


def _count(n: int, one: str, several: str = "") -> str:
    return f"{n:,} {one if n == 1 else several or one + 's'}"
