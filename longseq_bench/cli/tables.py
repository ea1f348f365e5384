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
from longseq_bench.reports.groups import grouped, workload_words
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
    """A sweep's rows, a table a workload: time with its spread, memory, rate, error, speed."""
    rows = sweep_rows(records)
    faster = speeds(rows, baseline) if baseline else [None] * len(rows)
    for row, speed in zip(rows, faster, strict=True):
        row["speed"] = speed
    machines = dict.fromkeys((row["fingerprint"] for row in rows), "")
    parts: list[RenderableType] = []
    for group in grouped(rows):
        parts += [f"[bold]{escape(workload_words(group[0], machines))}[/bold]"]
        parts += [_lengths_table(group, baseline), ""]
    return Group(*parts, *(_failure(r) for r in rows if r["status"] != "ok"))


def _lengths_table(rows: Sequence[dict[str, Any]], baseline: str | None) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for heading in ("tokens", "time", "±", "peak", "FLOP/s", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    if baseline:
        table.add_column(f"× {escape(baseline)}", justify="right", no_wrap=True)
    for row in rows:
        time, spread = _time(row)
        cells = [
            escape(row["label"]), format_tokens(row["tokens"]), time, spread,
            _shown(row["peak_bytes"], format_bytes), _flop_rate(row),
            _shown(row["max_error"], lambda e: f"{e:.0e}"),
        ]  # fmt: skip
        if baseline:
            cells.append(_shown(row["speed"], lambda s: f"{s:.2f}"))
        table.add_row(*cells)
    return table


def maxima_table(records: Sequence[Record]) -> RenderableType:
    """A search's results: the bracket, what limited it, how near the floor."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for heading in ("longest", "first failure", "limited by", "of floor", "peak", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = []
    for row in maximum_rows(records):
        table.add_row(
            escape(row["label"]), f"[bold]{row['max_tokens']:,}[/bold]",
            _shown(row["first_failure"], lambda n: f"{n:,}"), row["limited_by"],
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


def _time(row: dict[str, Any]) -> tuple[str, str]:
    """The median and its spread; what became of it where there is none."""
    if row["time_s"] is None:
        colour = _COLOURS.get(row["status"], "red")
        return f"[{colour}]{row['status']}[/{colour}]", NONE
    off = max(row["time_high_s"] - row["time_s"], row["time_s"] - row["time_low_s"])
    spread = f"{off / row['time_s']:.0%}" if row["samples"] > 1 else NONE
    return format_seconds(row["time_s"]), spread


def _flop_rate(row: dict[str, Any]) -> str:
    if not row["time_s"] or row["flops"] is None:
        return NONE
    return format_rate(row["flops"] / row["time_s"], "")


def _failure(row: dict[str, Any]) -> str:
    where = f" in {row['phase']}" if row["phase"] else ""
    what = f"{row['label']} at {format_tokens(row['tokens'])}"
    said = f"{what}: {row['status']}{where}: {row['reason']}"
    return f"[yellow]{escape(said)}[/yellow]"


def _shown(value: Any, write: Any) -> str:
    return NONE if value is None else str(write(value))
