"""Tables for a terminal, as wide as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from longseq_bench.catalogue import Catalogue, Entry
from longseq_bench.cli.watch import option_value, option_words
from longseq_bench.doctor import Finding
from longseq_bench.model import Environment, Record, Trial
from longseq_bench.reports.groups import grouped, least_peak, name_of, spread_out, workload_words
from longseq_bench.reports.sparse import is_sparse
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
COMPUTED = "†"
GAP, NARROWEST_LABEL = 2, 20
_RANKS_SAID = (
    "[dim]a rank: the most tokens that one rank holds · peak, sent: of the rank with most · "
    "exposed: share of the time that communication adds to computing · speed-up: over one rank, "
    "efficiency: that over the ranks · max/min: largest peak over the least[/dim]"
)

_SPARSE_SAID = (
    "[dim]density: share of the query-key pairs that is kept · of ideal: dense time × density over "
    "time, 100 % where what is skipped costs nothing{computed}[/dim]"
)
_COMPUTED_SAID = f" · {COMPUTED}: dense time computed from some of its rows"


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
        parts += [_group_table(group, baseline), ""]
    said = [_RANKS_SAID, ""] if spread_out(rows) else []
    said += _said_of_sparse(rows)
    return Group(*parts, *said, *(_failure(r) for r in rows if r["status"] != "ok"))


def _group_table(group: Sequence[dict[str, Any]], baseline: str | None) -> RenderableType:
    if spread_out(group):
        return _over_ranks(group, baseline)
    return (_with_sparse if any(map(is_sparse, group)) else _lengths_table)(group, baseline)


def _said_of_sparse(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not any(map(is_sparse, rows)):
        return []
    computed = any(_of_ideal(row).endswith(COMPUTED) for row in rows)
    return [_SPARSE_SAID.format(computed=_COMPUTED_SAID if computed else ""), ""]


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


@dataclass(frozen=True)
class _Column:
    """A column and how soon it is left out where the terminal is narrow: 0 never, 1 first."""

    heading: str
    cell: Callable[[dict[str, Any]], str]
    leaves: int = 0

    def width(self, rows: Iterable[dict[str, Any]]) -> int:
        cells = (Text.from_markup(self.cell(row)).cell_len for row in rows)
        return max(len(self.heading), *cells)


@dataclass(frozen=True)
class _Fitted:
    """Rows under as many columns as the terminal has room for, their labels wrapped."""

    rows: Sequence[dict[str, Any]]
    columns: Sequence[_Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Table | str]:
        shown = list(self.columns)
        label = max(len(row["label"]) for row in self.rows)
        while (room := options.max_width - self._width(shown)) < min(label, NARROWEST_LABEL):
            leaving = [column for column in shown if column.leaves]
            if not leaving:
                break
            shown.remove(min(leaving, key=lambda column: column.leaves))
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("", max_width=max(room, 1), overflow="fold")
        for column in shown:
            table.add_column(escape(column.heading), justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(escape(row["label"]), *(column.cell(row) for column in shown))
        yield table
        if out := [c.heading for c in self.columns if c not in shown]:
            yield f"[dim]no room for {escape(', '.join(out))}: see the report[/dim]"

    def _width(self, shown: Sequence[_Column]) -> int:
        return sum(column.width(self.rows) + GAP for column in shown)


def _with_sparse(rows: Sequence[dict[str, Any]], baseline: str | None) -> _Fitted:
    """Rows of one rank of which some skip pairs."""
    columns = [
        _Column("tokens", lambda r: format_tokens(r["tokens"])),
        _Column("time", lambda r: _time(r)[0]),
        _Column("±", lambda r: _time(r)[1], 3),
        _Column("density", _density),
        _Column("of ideal", _of_ideal),
        _Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 5),
        _Column("FLOP/s", _flop_rate, 2),
        _Column("error", lambda r: _shown(r["max_error"], lambda e: f"{e:.0e}"), 1),
    ]
    if baseline:
        columns.append(_Column(f"× {baseline}", lambda r: _shown(r["speed"], _times), 4))
    return _Fitted(rows, columns)


def _over_ranks(rows: Sequence[dict[str, Any]], baseline: str | None) -> _Fitted:
    """Rows of which some ran on several ranks."""
    columns = [
        _Column("tokens", lambda r: format_tokens(r["tokens"])),
        _Column("ranks", lambda r: str(r["world_size"])),
        _Column("a rank", lambda r: _shown(r["tokens_per_rank"], format_tokens), 6),
        _Column("time", lambda r: _time(r)[0]),
        _Column("±", lambda r: _time(r)[1], 5),
        _Column("speed-up", lambda r: _shown(r["speedup"], _times)),
        _Column("efficiency", lambda r: _shown(r["efficiency"], format_share), 9),
        _Column("exposed", lambda r: _shown(r["exposed_share"], format_share)),
        _Column("sent", lambda r: _shown(r["bytes_sent"], format_bytes), 4),
        _Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes)),
        _Column("least", lambda r: _shown(least_peak(r), format_bytes), 3),
        _Column("max/min", lambda r: _shown(r["imbalance"], _times), 7),
        _Column("FLOP/s", _flop_rate, 2),
        _Column("error", lambda r: _shown(r["max_error"], lambda e: f"{e:.0e}"), 1),
    ]
    if any(map(is_sparse, rows)):
        columns.insert(5, _Column("density", _density, 10))
    if baseline:
        heading = f"× {baseline}"
        columns.append(_Column(heading, lambda r: _shown(r["speed"], _times), 8))
    return _Fitted(rows, columns)


def maxima_table(records: Sequence[Record]) -> RenderableType:
    """A search's results: the bracket, what limited it, how near the floor."""
    rows = maximum_rows(records)
    sentences = [escape(_sentence(row)) for row in rows]
    table = _maxima_over_ranks(rows) if spread_out(rows) else _maxima(rows)
    return Group(table, "", *sentences)


def _maxima_over_ranks(rows: Sequence[dict[str, Any]]) -> _Fitted:
    columns = [
        _Column("ranks", lambda r: str(r["world_size"])),
        _Column("longest", lambda r: f"[bold]{r['max_tokens']:,}[/bold]"),
        _Column("a rank", lambda r: _shown(r["tokens_per_rank"], lambda n: f"{n:,}"), 3),
        _Column("first failure", lambda r: _shown(r["first_failure"], lambda n: f"{n:,}")),
        _Column("limited by", lambda r: str(r["limited_by"])),
        _Column("of floor", lambda r: _shown(r["fraction_of_floor"], format_share), 5),
        _Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 4),
        _Column("max/min", lambda r: _shown(r["imbalance"], _times), 2),
        _Column("runs", lambda r: str(r["runs"]), 1),
    ]
    return _Fitted(rows, columns)


def _maxima(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for heading in ("longest", "first failure", "limited by", "of floor", "peak", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["label"]), f"[bold]{row['max_tokens']:,}[/bold]",
            _shown(row["first_failure"], lambda n: f"{n:,}"), row["limited_by"],
            _shown(row["fraction_of_floor"], format_share),
            _shown(row["peak_bytes"], format_bytes), str(row["runs"]),
        )  # fmt: skip
    return table


def _sentence(row: dict[str, Any]) -> str:
    name, budget = name_of(row), format_bytes(row["memory_budget"])
    if row["world_size"] > 1:
        budget += " a rank"
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
    several = any(trial.world_size > 1 for trial in trials)
    ranks = ["ranks"] if several else []
    table = Table(
        "", "options", "tokens", *ranks, "dtype", "mode", "causal", "device", "budget", box=None
    )
    for trial in trials:
        w = trial.workload
        ranks = [str(trial.world_size)] if several else []
        table.add_row(
            trial.implementation, escape(option_words(trial)), format_tokens(w.seq_len), *ranks,
            w.dtype, w.mode, "yes" if w.causal else "no", trial.device,
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
    return _shown(row["effective_flops"], lambda rate: format_rate(rate, ""))


def _density(row: dict[str, Any]) -> str:
    return _shown(row["token_density"], format_share)


def _of_ideal(row: dict[str, Any]) -> str:
    """The share of ideal, marked where no whole dense pass was run."""
    mark = "" if row["dense_source"] == "measured" else COMPUTED
    return _shown(row["share_of_ideal"], lambda share: format_share(share) + mark)


def _failure(row: dict[str, Any]) -> str:
    where = f" in {row['phase']}" if row["phase"] else ""
    what = f"{name_of(row)} at {format_tokens(row['tokens'])}"
    said = f"{what}: {row['status']}{where}: {row['reason']}"
    return f"[yellow]{escape(said)}[/yellow]"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def _shown(value: Any, write: Any) -> str:
    return NONE if value is None else str(write(value))
