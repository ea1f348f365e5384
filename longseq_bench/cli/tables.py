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
from longseq_bench.reports.growth import dense_words, least_words
from longseq_bench.reports.sparse import is_sparse
from longseq_bench.scaling import Complexity, Exponent, Reached
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
class Column:
    """A column and how soon it is left out where the terminal is narrow: 0 never, 1 first."""

    heading: str
    cell: Callable[[dict[str, Any]], str]
    leaves: int = 0

    def width(self, rows: Iterable[dict[str, Any]]) -> int:
        cells = (Text.from_markup(self.cell(row)).cell_len for row in rows)
        return max(len(self.heading), *cells)


@dataclass(frozen=True)
class Fitted:
    """Rows under as many columns as the terminal has room for, their labels wrapped."""

    rows: Sequence[dict[str, Any]]
    columns: Sequence[Column]
    hint: str = "see the report"

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
            yield f"[dim]no room for {escape(', '.join(out))}: {self.hint}[/dim]"

    def _width(self, shown: Sequence[Column]) -> int:
        return sum(column.width(self.rows) + GAP for column in shown)


def _with_sparse(rows: Sequence[dict[str, Any]], baseline: str | None) -> Fitted:
    """Rows of one rank of which some skip pairs."""
    columns = [
        Column("tokens", lambda r: format_tokens(r["tokens"])),
        Column("time", lambda r: _time(r)[0]),
        Column("±", lambda r: _time(r)[1], 3),
        Column("density", _density),
        Column("of ideal", _of_ideal),
        Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 5),
        Column("FLOP/s", _flop_rate, 2),
        Column("error", lambda r: _shown(r["max_error"], lambda e: f"{e:.0e}"), 1),
    ]
    if baseline:
        columns.append(Column(f"× {baseline}", lambda r: _shown(r["speed"], _times), 4))
    return Fitted(rows, columns)


def _over_ranks(rows: Sequence[dict[str, Any]], baseline: str | None) -> Fitted:
    """Rows of which some ran on several ranks."""
    columns = [
        Column("tokens", lambda r: format_tokens(r["tokens"])),
        Column("ranks", lambda r: str(r["world_size"])),
        Column("a rank", lambda r: _shown(r["tokens_per_rank"], format_tokens), 6),
        Column("time", lambda r: _time(r)[0]),
        Column("±", lambda r: _time(r)[1], 5),
        Column("speed-up", lambda r: _shown(r["speedup"], _times)),
        Column("efficiency", lambda r: _shown(r["efficiency"], format_share), 9),
        Column("exposed", lambda r: _shown(r["exposed_share"], format_share)),
        Column("sent", lambda r: _shown(r["bytes_sent"], format_bytes), 4),
        Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes)),
        Column("least", lambda r: _shown(least_peak(r), format_bytes), 3),
        Column("max/min", lambda r: _shown(r["imbalance"], _times), 7),
        Column("FLOP/s", _flop_rate, 2),
        Column("error", lambda r: _shown(r["max_error"], lambda e: f"{e:.0e}"), 1),
    ]
    if any(map(is_sparse, rows)):
        columns.insert(5, Column("density", _density, 10))
    if baseline:
        heading = f"× {baseline}"
        columns.append(Column(heading, lambda r: _shown(r["speed"], _times), 8))
    return Fitted(rows, columns)


def maxima_table(records: Sequence[Record]) -> RenderableType:
    """A search's results: the bracket, what limited it, how near the floor."""
    rows = maximum_rows(records)
    sentences = [escape(_sentence(row)) for row in rows]
    table = _maxima_over_ranks(rows) if spread_out(rows) else _maxima(rows)
    return Group(table, "", *sentences)


def _maxima_over_ranks(rows: Sequence[dict[str, Any]]) -> Fitted:
    columns = [
        Column("ranks", lambda r: str(r["world_size"])),
        Column("longest", lambda r: f"[bold]{r['max_tokens']:,}[/bold]"),
        Column("a rank", lambda r: _shown(r["tokens_per_rank"], lambda n: f"{n:,}"), 3),
        Column("first failure", lambda r: _shown(r["first_failure"], lambda n: f"{n:,}")),
        Column("limited by", lambda r: str(r["limited_by"])),
        Column("of floor", lambda r: _shown(r["fraction_of_floor"], format_share), 5),
        Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 4),
        Column("max/min", lambda r: _shown(r["imbalance"], _times), 2),
        Column("runs", lambda r: str(r["runs"]), 1),
    ]
    return Fitted(rows, _with_fits(columns, 2, rows))


def _maxima(rows: Sequence[dict[str, Any]]) -> Fitted:
    columns = [
        Column("longest", lambda r: f"[bold]{r['max_tokens']:,}[/bold]"),
        Column("first failure", lambda r: _shown(r["first_failure"], lambda n: f"{n:,}"), 6),
        Column("limited by", lambda r: str(r["limited_by"])),
        Column("of floor", lambda r: _shown(r["fraction_of_floor"], format_share), 5),
        Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 3),
        Column("runs", lambda r: str(r["runs"]), 1),
    ]
    return Fitted(rows, _with_fits(columns, 1, rows))


def _with_fits(columns: list[Column], at: int, rows: Sequence[dict[str, Any]]) -> Sequence[Column]:
    """With how far memory alone goes, where that was asked."""
    alone = Column("memory alone", lambda r: _shown(r["fits_tokens"], lambda n: f"{n:,}"), 4)
    return [*columns[:at], alone, *columns[at:]] if any(r["fits_tokens"] for r in rows) else columns


def _sentence(row: dict[str, Any]) -> str:
    name, budget = name_of(row), format_bytes(row["memory_budget"])
    if row["world_size"] > 1:
        budget += " a rank"
    if not row["max_tokens"]:
        return f"{name}: no length passed ({row['failure_reason']})"
    times = f", {format_seconds(row['time_budget'])} a pass" if row["time_budget"] else ""
    if row["fit_only"]:
        return f"{name}: memory holds {row['max_tokens']:,} tokens under {budget}; nothing computed"
    again = f"confirmed {row['confirmations']}×" if row["confirmations"] else "not confirmed"
    limit = (
        f"limited by: {row['limited_by']}"
        if row["first_failure"]
        else "nothing failed up to the ceiling"
    )
    what = f"{row['max_tokens']:,} tokens ({row['dtype']}, {row['mode']})"
    return f"{name}: {what} under {budget}{times}; {limit}; {again}"


def scaling_tables(maxima: Sequence[Reached], times: Sequence[Complexity]) -> RenderableType:
    """Theory, expectation and measurement over ranks; exponents in tokens and ranks."""
    reached = [{"label": one.label, "one": one} for one in maxima]
    longest = Fitted(reached, [
        Column("ranks", lambda r: str(r["one"].world_size)),
        Column("theory", lambda r: _shown(r["one"].theory, lambda n: f"{n:,}"), 2),
        Column("expected", lambda r: _shown(r["one"].expected, lambda n: f"{n:,}")),
        Column("found", lambda r: f"[bold]{r['one'].actual:,}[/bold]"),
        Column("of expected", lambda r: _of_expected(r["one"]), 1),
        Column("limited by", lambda r: _shown(r["one"].limited_by, str), 3),
    ])  # fmt: skip
    fits = [{"label": one.label, "one": one} for one in times]
    fitted = Fitted(fits, [
        Column("of", lambda r: r["one"].quantity),
        Column("tokens ^", lambda r: _shown(r["one"].tokens, _exponent)),
        Column("by formula", lambda r: _shown(r["one"].formula_tokens, lambda x: f"{x:.2f}"), 2),
        Column("ranks ^", lambda r: _shown(r["one"].ranks, _exponent)),
        Column("by formula", lambda r: _shown(r["one"].formula_ranks, lambda x: f"{x:.2f}"), 3),
        Column("points", lambda r: str(r["one"].points), 4),
    ])  # fmt: skip
    said = (
        "[dim]theory: the floor of all ranks' budgets · expected: one rank's times the ranks, "
        "where memory limits both · exponents with their 95 % interval · by formula: FLOPs over "
        "the ranks, and the floor[/dim]"
    )
    parts: list[RenderableType] = [longest, ""] if reached else []
    parts += [fitted, ""] if fits else []
    return Group(*parts, said)


def _of_expected(one: Reached) -> str:
    return format_share(one.actual / one.expected) if one.expected else NONE


def sparsities_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The least sparsity with which a length fits."""
    several = [Column("ranks", lambda r: str(r["world_size"]))] if spread_out(rows) else []
    return Fitted(rows, [
        *several,
        Column("tokens", lambda r: format_tokens(r["tokens"])),
        Column("passed", lambda r: f"[bold]{_shown(least_words(r['least_sparsity']), str)}[/bold]"),
        Column("failed", lambda r: _shown(dense_words(r["too_dense"]), str)),
        Column("limited by", lambda r: _shown(r["limited_by"], str)),
        Column("time", lambda r: _shown(r["time_s"], format_seconds), 2),
        Column("peak", lambda r: _shown(r["peak_bytes"], format_bytes), 3),
        Column("runs", lambda r: str(r["runs"]), 1),
    ])  # fmt: skip


def _exponent(one: Exponent) -> str:
    if one.low is None or one.high is None:
        return f"{one.value:.2f}"
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


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
