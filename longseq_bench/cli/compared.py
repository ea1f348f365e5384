"""What `compare` prints: a table a question, then sentences; the same as data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType

from longseq_bench.analysis.rows import Row
from longseq_bench.cli.tables import NONE, Column, Fitted, safe
from longseq_bench.comparison.compare import Comparison, Timed, called, percent, regressions
from longseq_bench.comparison.document import bracket_words, gate_said, verdict_words
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports.groups import grouped, spread_out, workload_words

SCHEMA = 1
HINT = "--json has it"
FOLDED = 9
"""Of a verdict, the longest word."""
_SAID = (
    "[dim]A, B: geometric mean over processes of their median pass · interval: of the ratio B "
    "over A, {sure} taken alone · seen from: the least difference that could have been told from "
    "noise · slower, faster: the chance of any false one here is at most {level}[/dim]"
)
_COLOURS = {
    "slower": "red", "more": "red", "shorter": "red", "broken": "red", "faster": "green",
    "less": "green", "longer": "green", "mended": "green", "undecided": "yellow",
}  # fmt: skip
_IDENTITY = (
    "implementation", "options", "label", "tokens", "device", "world_size", "dtype", "mode",
    "causal", "batch", "heads", "kv_heads", "head_dim", "threads", "memory_budget", "time_budget",
    "fit_only", "keep", "allocator",
)  # fmt: skip


def comparison_tables(found: Comparison, fail_on: float | None) -> RenderableType:
    """Times by workload, memory and maxima that are not the same, and what it comes to."""
    parts: list[RenderableType] = [f"A: {safe(found.a)}", f"B: {safe(found.b)}", ""]
    for rows in _by_workload(found.timed):
        parts += [_heading(rows), _times(rows), ""]
    if found.timed:
        parts += [_SAID.format(sure=percent(1 - found.level), level=percent(found.level)), ""]
    if peaks := [p for p in found.peaks if p.verdict != "same"]:
        parts += ["[bold]peak memory[/bold]", _peaks([{**p.what, "found": p} for p in peaks]), ""]
    for rows in _by_workload(found.maxima):
        parts += [f"[bold]longest, {safe(_words(rows))}[/bold]", _longest(rows), ""]
    parts += [safe(line) for line in _lines(found, fail_on)]
    return Group(*parts)


def comparison_json(found: Comparison, fail_on: float | None) -> dict[str, Any]:
    """The same as data, SI units; what is not known, or not finite, is null."""
    document = {
        "schema": SCHEMA,
        "a": found.a,
        "b": found.b,
        "level": found.level,
        "least": found.least,
        "fail_on": fail_on,
        "worse": None if fail_on is None else regressions(found, fail_on),
        "summary": found.said,
        "notes": list(found.notes),
        "times": [_timed(t) for t in found.timed],
        **{
            name: [{**_identity(one.what), **_but_what(one)} for one in rows]
            for name, rows in (
                ("peaks", found.peaks), ("maxima", found.maxima), ("turned", found.turned)
            )
        },
        "failed_alike": found.failed_alike,
        "only_a": [_identity(what) for what in found.only_a],
        "only_b": [_identity(what) for what in found.only_b],
        "unlike_machines": [_identity(what) for what in found.unlike],
        "differences": [asdict(one) for one in found.differences],
    }  # fmt: skip
    finite: dict[str, Any] = _finite(document)
    return finite


def _timed(t: Timed) -> dict[str, Any]:
    names = ("ratio", "low", "high", "p", "adjusted", "seen_from", "free")
    tested = {name: getattr(t.shift, name, None) for name in names}
    rest = {k: v for k, v in _but_what(t).items() if k != "shift"}
    return {**_identity(t.what), **tested, **rest}


def _but_what(one: Any) -> dict[str, Any]:
    return {k: v for k, v in asdict(one).items() if k != "what"}


def _identity(what: Row) -> dict[str, Any]:
    return {name: what.get(name) for name in _IDENTITY}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: Comparison, fail_on: float | None) -> Iterator[str]:
    for t in found.turned:
        yield f"{called(t.what)}: {t.a_status} in A, {_ended(t.b_status, t.b_reason)} in B"
    if found.turned:
        yield ""
    yield from found.said
    yield from found.notes
    if found.differences:
        said = "; ".join(f"{one.name} {one.a} and {one.b}" for one in found.differences)
        yield f"What differs: {said}."
    if fail_on is not None:
        yield ""
        yield f"--fail-on {percent(fail_on)}: " + " ".join(gate_said(found, fail_on))


def _ended(status: str, reason: str | None) -> str:
    return f"{status} ({reason})" if reason else status


def _by_workload(items: Sequence[Any]) -> list[list[Row]]:
    return grouped([{**one.what, "found": one} for one in items])


def _heading(rows: Sequence[Row]) -> str:
    return f"[bold]{safe(_words(rows))}[/bold]"


def _words(rows: Sequence[Row]) -> str:
    return workload_words(rows[0], defaultdict(str))


def _times(rows: Sequence[Row]) -> Fitted:
    columns = [
        Column("tokens", lambda r: format_tokens(r["tokens"])),
        *_ranks(rows),
        Column("A", lambda r: format_seconds(r["found"].a_s), 3),
        Column("B", lambda r: format_seconds(r["found"].b_s), 4),
        Column("ratio", lambda r: f"{r['found'].ratio:.3f}", 5),
        Column("interval", _interval, 2),
        Column("seen from", _seen, 1),
        Column("verdict", lambda r: _verdict(r["found"]), stays=FOLDED),
    ]
    return Fitted(rows, columns, HINT)


def _interval(row: Row) -> str:
    shift = row["found"].shift
    return f"{shift.low:.3f} to {shift.high:.3f}" if shift else NONE


def _seen(row: Row) -> str:
    shift = row["found"].shift
    return percent(shift.seen_from) if shift else NONE


def _peaks(rows: Sequence[Row]) -> Fitted:
    return Fitted(rows, [
        Column("tokens", lambda r: format_tokens(r["tokens"])),
        *_ranks(rows),
        Column("A", lambda r: format_bytes(r["found"].a_bytes), 1),
        Column("B", lambda r: format_bytes(r["found"].b_bytes), 2),
        Column("ratio", lambda r: f"{r['found'].ratio:.3f}", 3),
        Column("verdict", lambda r: _verdict(r["found"]), stays=FOLDED),
    ], HINT)  # fmt: skip


def _longest(rows: Sequence[Row]) -> Fitted:
    return Fitted(rows, [
        *_ranks(rows),
        Column("A", lambda r: bracket_words(r["found"].a)),
        Column("limited by", lambda r: r["found"].a.limited_by, 1),
        Column("B", lambda r: bracket_words(r["found"].b)),
        Column("limited by", lambda r: r["found"].b.limited_by, 2),
        Column("verdict", lambda r: _verdict(r["found"]), stays=FOLDED),
    ], HINT)  # fmt: skip


def _ranks(rows: Sequence[Row]) -> list[Column]:
    return [Column("ranks", lambda r: str(r["world_size"]))] if spread_out(rows) else []


def _verdict(found: Any) -> str:
    words = verdict_words(found)
    colour = _COLOURS.get(found.verdict)
    return f"[{colour}]{words}[/{colour}]" if colour else words
