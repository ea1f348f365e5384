"""Tables for a terminal, as wide as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from longseq_bench.catalogue import Catalogue, Entry
from longseq_bench.cli.watch import option_value, option_words
from longseq_bench.doctor import Finding
from longseq_bench.model import Environment, Record, Trial
from longseq_bench.table import maximum_rows, speeds, sweep_rows
from longseq_bench.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
)

_COLOURS = {"ok": "green", "oom": "yellow", "timeout": "yellow", "unsupported": "dim"}
_STATES = {
    "ok": "[green]ok[/green]",
    "missing": "[red]missing[/red]",
    "note": "[yellow]note[/yellow]",
}
NONE = "—"


def rows_table(records: Sequence[Record], baseline: str | None) -> RenderableType:
    """A sweep's rows: time with its spread, memory, rate, error, speed beside the baseline."""
    rows = sweep_rows(records)
    faster = speeds(rows, baseline) if baseline else [None] * len(rows)
    table = Table("", "tokens", "status", "time", "peak", "rate", "max error", box=None)
    if baseline:
        table.add_column(f"× {escape(baseline)}")
    for column in table.columns[1:]:
        column.justify = "right"
    table.columns[0].overflow = "fold"
    for row, speed in zip(rows, faster, strict=True):
        cells = [
            escape(_what(row)), format_tokens(row["tokens"]), _status(row["status"]),
            _spread(row), _shown(row["peak_bytes"], format_bytes), _flop_rate(row),
            _shown(row["max_error"], lambda e: f"{e:.1e}"),
        ]  # fmt: skip
        table.add_row(*cells, *([_shown(speed, lambda s: f"{s:.2f}")] if baseline else []))
    failed = [r for r in rows if r["status"] != "ok"]
    return Group(table, *(f"[yellow]{escape(_failure(r))}[/yellow]" for r in failed))


def maxima_table(records: Sequence[Record]) -> RenderableType:
    """A search's results: the bracket, what limited it, how near the floor."""
    table = Table(
        "", "longest", "first failure", "limited by", "of floor", "peak", "runs", box=None
    )
    for column in table.columns[1:]:
        column.justify = "right"
    lines = []
    for row in maximum_rows(records):
        limited = row["limited_by"] + (
            f" in {row['failure_phase']}" if row["failure_phase"] else ""
        )
        table.add_row(
            escape(row["label"]), f"[bold]{row['max_tokens']:,}[/bold]",
            _shown(row["first_failure"], lambda n: f"{n:,}"), limited,
            _shown(row["fraction_of_floor"], format_share),
            _shown(row["peak_bytes"], format_bytes), str(row["runs"]),
        )  # fmt: skip
        lines.append(escape(_sentence(row)))
    return Group(table, "", *lines)


def _sentence(row: dict[str, Any]) -> str:
    name, budget = row["label"], format_bytes(row["memory_budget"])
    if not row["max_tokens"]:
        return f"{name}: no length passed ({row['failure_reason']})"
    times = f", {format_seconds(row['time_budget'])} a pass" if row["time_budget"] else ""
    again = f"confirmed {row['confirmations']}×" if row["confirmations"] else "not confirmed"
    limit = (
        f"limited by: {row['limited_by']}"
        if row["first_failure"]
        else "nothing failed up to the ceiling"
    )
    what = f"{row['max_tokens']:,} tokens ({row['dtype']}, {row['mode']})"
    return f"{name}: {what} under {budget}{times}; {limit}; {again}"


def trials_table(trials: Sequence[Trial], rounds: int) -> RenderableType:
    """What a sweep would run."""
    table = Table("", "options", "tokens", "dtype", "mode", "causal", "device", "budget", box=None)
    for trial in trials:
        w = trial.workload
        table.add_row(
            trial.implementation, escape(option_words(trial)), format_tokens(w.seq_len), w.dtype,
            w.mode, "yes" if w.causal else "no", trial.device,
            _shown(trial.memory_budget, format_bytes),
        )  # fmt: skip
    return Group(table, f"{len(trials)} trials × {rounds} rounds; nothing was run")


def catalogue_table(catalogue: Catalogue) -> RenderableType:
    """Implementations with their options, and why one can't run."""
    table = Table("implementation", "what it is, and its options", box=None, padding=(0, 2, 1, 0))
    for name, entry in catalogue.implementations.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", "\n".join(_entry_lines(entry, catalogue)))
    return table


def _entry_lines(entry: Entry, catalogue: Catalogue) -> list[str]:
    lines = [escape(entry.summary)]
    for spec in entry.options:
        choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
        given = f"[cyan]{spec.name}[/cyan]={escape(option_value(spec.default))}"
        lines.append(f"  {given}  {escape(spec.help + choices)}")
    for device, reason in entry.unavailable.items():
        if not catalogue.devices[device].unavailable:
            lines.append(f"  [yellow]not on {device}: {escape(reason)}[/yellow]")
    return lines


def findings_table(machine: Environment, findings: Sequence[Finding]) -> RenderableType:
    """What doctor found."""
    table = Table("", "", "found", "what to do", box=None)
    for finding in findings:
        table.add_row(
            _STATES[finding.state], finding.name, escape(finding.found), escape(finding.remedy)
        )
    return Group(f"[bold]{escape(machine.host)}[/bold]: {escape(machine.cpu)}, {machine.os}", table)


def _what(row: dict[str, Any]) -> str:
    words = [row["label"], row["dtype"]]
    words += ["train"] if row["mode"] == "train" else []
    words += ["causal"] if row["causal"] else []
    return " ".join(words)


def _status(status: str) -> str:
    colour = _COLOURS.get(status, "red")
    return f"[{colour}]{status}[/{colour}]"


def _spread(row: dict[str, Any]) -> str:
    if row["time_s"] is None:
        return NONE
    off = max(row["time_high_s"] - row["time_s"], row["time_s"] - row["time_low_s"])
    return f"{format_seconds(row['time_s'])} ±{off / row['time_s']:.0%}"


def _flop_rate(row: dict[str, Any]) -> str:
    if not row["time_s"] or row["flops"] is None:
        return NONE
    return format_rate(row["flops"] / row["time_s"], "FLOP/s")


def _failure(row: dict[str, Any]) -> str:
    where = f" in {row['phase']}" if row["phase"] else ""
    return (
        f"{_what(row)} at {format_tokens(row['tokens'])}: {row['status']}{where}: {row['reason']}"
    )


def _shown(value: Any, write: Any) -> str:
    return NONE if value is None else str(write(value))
