"""Tables for a terminal, as wide as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.scaling import Complexity, Exponent, Reached
from longseq_bench.analysis.search_row import DensityRow, SearchRow
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.cli.progress import option_value, option_words
from longseq_bench.core.catalogue import Catalogue, Entry
from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.core.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
)
from longseq_bench.reports.groups import (
    describe_workload,
    group_by_workload,
    has_several_ranks,
)
from longseq_bench.reports.render.terminal_text import one_line, plain
from longseq_bench.reports.sections.growth import format_sparsity_down, format_sparsity_up

if TYPE_CHECKING:
    from longseq_bench.doctor import Finding

_COLOURS = {"ok": "green", "oom": "yellow", "timeout": "yellow", "unsupported": "dim"}
_STATES = {
    "ok": "[green]ok[/green]",
    "missing": "[red]missing[/red]",
    "note": "[yellow]note[/yellow]",
}
NONE = "—"
COMPUTED = "†"
GAP, NARROWEST_LABEL, LONGEST_WORD = 2, 20, 32
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
    if baseline:
        found = zip(rows, speeds(rows, baseline), strict=True)
        rows = [replace(row, speed=speed) for row, speed in found]
    machines = dict.fromkeys((row.fingerprint for row in rows), "")
    parts: list[RenderableType] = []
    for group in group_by_workload(rows):
        parts += [f"[bold]{safe(describe_workload(group[0], machines))}[/bold]"]
        parts += [_group_table(group, baseline), ""]
    said = [line for legend in legends(rows) for line in (legend, "")]
    return Group(*parts, *said, *(_failure(r) for r in rows if r.status != "ok"))


def sweep_columns(rows: Sequence[SweepRow], baseline: str | None = None) -> list[Column]:
    """What is told of a group of swept rows, by what there is in it. Its labels come before."""
    if has_several_ranks(rows):
        return _over_ranks(rows, baseline)
    return _with_sparse(baseline) if any(row.is_sparse for row in rows) else _of_lengths(baseline)


def _group_table(group: Sequence[SweepRow], baseline: str | None) -> Fitted:
    return Fitted(group, sweep_columns(group, baseline))


def legends(rows: Sequence[SweepRow]) -> list[str]:
    """What the columns of `sweep_columns` mean, as far as it has to be said."""
    said = [_RANKS_SAID] if has_several_ranks(rows) else []
    if any(row.is_sparse for row in rows):
        computed = any(_of_ideal(row).endswith(COMPUTED) for row in rows)
        said.append(_SPARSE_SAID.format(computed=_COMPUTED_SAID if computed else ""))
    return said


def safe(text: str) -> str:
    """The same as rich markup, to stand inside other markup."""
    return escape(one_line(text))


@dataclass(frozen=True)
class Column:
    """A column and how soon it is left out where the terminal is narrow: 0 never, 1 first.

    cell: rich markup, or a Text, which is taken as it is.
    wraps: the width down to which its cells may take several lines; 0: they stay whole.
    stays: that width of a column that is folded only once those that may have left, and that leaves
    after all others.
    """

    heading: str
    cell: Callable[[Any], str | Text]
    leaves: int = 0
    wraps: int = 0
    justify: Literal["left", "right"] = "right"
    stays: int = 0


@dataclass(frozen=True)
class _Written:
    """A column whose cells are written, and how wide they are."""

    column: Column
    cells: Sequence[Text]

    @property
    def heading(self) -> str:
        """In as many lines as it was given."""
        return "\n".join(map(one_line, self.column.heading.split("\n")))

    @cached_property
    def natural(self) -> int:
        headings = map(len, self.heading.split("\n"))
        return max([*headings, *(cell.cell_len for cell in self.cells)])

    @cached_property
    def least(self) -> int:
        """Of lines that end between words: a figure in a name is not folded either."""
        if not self.column.wraps:
            return self.natural
        words = (len(word) for cell in self.cells for word in cell.plain.split())
        return min(self.natural, max(self.column.wraps, min(LONGEST_WORD, max(words, default=0))))

    @property
    def folded(self) -> int:
        """Of lines that may end inside a long word."""
        return min(self.natural, self.column.wraps or self.column.stays or self.natural)


@dataclass(frozen=True)
class Fitted:
    """Rows under as many columns as the terminal has room for, their labels wrapped.

    heading: of the labels.  hint: where one finds what there was no room for.
    """

    rows: Sequence[Any]
    columns: Sequence[Column]
    hint: str = "see the report"
    heading: str = ""
    label: Callable[[Any], str] = attrgetter("label")

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[Segment | Text]:
        label = Column(self.heading, lambda r: plain(self.label(r)), 0, NARROWEST_LABEL, "left")
        every = [_written(column, self.rows) for column in (label, *self.columns)]
        shown, least = _fitting(every, options.max_width)
        widths = _widths(shown, least, options.max_width)
        headings = [Text(one.heading, "table.header") for one in shown]
        # not rich's own table, which takes ten times as long over thousands of rows
        for cells in chain([headings], zip(*(one.cells for one in shown), strict=True)):
            for line in _lines(cells, shown, widths, console):
                yield from line.render(console, end="\n")
        if out := [one.column.heading or "the chart" for one in every if one not in shown]:
            yield plain(f"no room for {', '.join(out)}: {self.hint}", "dim")


def _lines(
    cells: Sequence[Text], shown: Sequence[_Written], widths: Sequence[int], console: Console
) -> Iterable[Text]:
    """The lines of one row, as many as its longest cell takes."""
    folded = [
        [*cell.wrap(console, width, overflow="fold")]
        if cell.cell_len > width or "\n" in cell.plain
        else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*folded, fillvalue=Text()):
        line, at = Text(), 0
        for part, one, width in zip(parts, shown, widths, strict=True):
            part.rstrip()
            before = width - part.cell_len if one.column.justify == "right" else 0
            if part.plain:
                line.append(" " * (at + before - line.cell_len))
                line.append_text(part)
            at += width + GAP
        yield line


def _written(column: Column, rows: Iterable[Any]) -> _Written:
    cells = (column.cell(row) for row in rows)
    return _Written(
        column, [c if isinstance(c, Text) else Text.from_markup(c, emoji=False) for c in cells]
    )


def _fitting(every: Sequence[_Written], room: int) -> tuple[list[_Written], list[int]]:
    """The columns that there is room for, and how wide each is at least.

    First those leave that may; then words are folded; then, from the right, the others leave; last
    those that stay.
    """

    def fits(widths: Sequence[int]) -> bool:
        return sum(width + GAP for width in widths) - GAP <= room

    shown = list(every)
    while not fits([one.least for one in shown]):
        leaving = [one for one in shown if one.column.leaves]
        if not leaving:
            break
        shown.remove(min(leaving, key=lambda one: one.column.leaves))
    if fits([one.least for one in shown]):
        return shown, [one.least for one in shown]
    while len(shown) > 1 and not fits([one.folded for one in shown]):
        may = [one for one in shown[1:] if not one.column.stays]
        shown.remove((may or shown)[-1])
    return shown, [one.folded for one in shown]


def _widths(shown: Sequence[_Written], least: Sequence[int], room: int) -> list[int]:
    """Of each column: what it takes at least, and its share of what is left."""
    left = max(0, room - sum(width + GAP for width in least) + GAP)
    wanted = [one.natural - width for one, width in zip(shown, least, strict=True)]
    share = min(1.0, left / sum(wanted)) if any(wanted) else 1.0
    return [width + int(more * share) for width, more in zip(least, wanted, strict=True)]


def _of_lengths(baseline: str | None) -> list[Column]:
    """Rows of one rank that see every pair."""
    columns = [
        Column("tokens", lambda r: format_tokens(r.tokens)),
        Column("time", lambda r: time_words(r)[0]),
        Column("±", lambda r: time_words(r)[1], 3),
        Column("peak", lambda r: _shown(r.peak_bytes, format_bytes), 5),
        Column("FLOP/s", _flop_rate, 2),
        Column("error", lambda r: _shown(r.max_error, lambda e: f"{e:.0e}"), 1),
    ]
    return [*columns, *_beside(baseline, 4)]


def _beside(baseline: str | None, leaves: int) -> list[Column]:
    if not baseline:
        return []
    return [Column(f"× {baseline}", lambda r: _shown(r.speed, _times), leaves)]


def _with_sparse(baseline: str | None) -> list[Column]:
    """Rows of one rank of which some skip pairs."""
    columns = _of_lengths(baseline)
    columns[3:3] = [Column("density", _density), Column("of ideal", _of_ideal)]
    return columns


def _over_ranks(rows: Sequence[SweepRow], baseline: str | None) -> list[Column]:
    """Rows of which some ran on several ranks."""
    columns = [
        Column("tokens", lambda r: format_tokens(r.tokens)),
        Column("ranks", lambda r: str(r.world_size)),
        Column("a rank", lambda r: _shown(r.tokens_per_rank, format_tokens), 6),
        Column("time", lambda r: time_words(r)[0]),
        Column("±", lambda r: time_words(r)[1], 5),
        Column("speed-up", lambda r: _shown(r.speedup, _times)),
        Column("efficiency", lambda r: _shown(r.efficiency, format_share), 9),
        Column("exposed", lambda r: _shown(r.exposed_share, format_share)),
        Column("sent", lambda r: _shown(r.bytes_sent, format_bytes), 4),
        Column("peak", lambda r: _shown(r.peak_bytes, format_bytes)),
        Column("least", lambda r: _shown(r.least_peak_bytes, format_bytes), 3),
        Column("max/min", lambda r: _shown(r.imbalance, _times), 7),
        Column("FLOP/s", _flop_rate, 2),
        Column("error", lambda r: _shown(r.max_error, lambda e: f"{e:.0e}"), 1),
    ]
    if any(row.is_sparse for row in rows):
        columns.insert(5, Column("density", _density, 10))
    return [*columns, *_beside(baseline, 8)]


def maxima_table(records: Sequence[Record]) -> RenderableType:
    """A search's results: the bracket, what limited it, how near the floor."""
    rows = search_rows(records)
    sentences = [plain(_sentence(row)) for row in rows]
    return Group(Fitted(rows, maxima_columns(rows)), "", *sentences)


def maxima_columns(rows: Sequence[SearchRow]) -> Sequence[Column]:
    """What is told of searches for the longest length. Their labels come before."""
    return _maxima_over_ranks(rows) if has_several_ranks(rows) else _maxima(rows)


def _maxima_over_ranks(rows: Sequence[SearchRow]) -> Sequence[Column]:
    columns = [
        Column("ranks", lambda r: str(r.world_size)),
        Column("longest", lambda r: f"[bold]{r.max_tokens:,}[/bold]"),
        Column("a rank", lambda r: _shown(r.tokens_per_rank, lambda n: f"{n:,}"), 3),
        Column("first failure", lambda r: _shown(r.first_failure, lambda n: f"{n:,}")),
        Column("limited by", lambda r: str(r.limited_by)),
        Column("of floor", lambda r: _shown(r.fraction_of_floor, format_share), 5),
        Column("peak", lambda r: _shown(r.peak_bytes, format_bytes), 4),
        Column("max/min", lambda r: _shown(r.imbalance, _times), 2),
        Column("runs", lambda r: str(r.runs), 1),
    ]
    return _with_fits(columns, 2, rows)


def _maxima(rows: Sequence[SearchRow]) -> Sequence[Column]:
    columns = [
        Column("longest", lambda r: f"[bold]{r.max_tokens:,}[/bold]"),
        Column("first failure", lambda r: _shown(r.first_failure, lambda n: f"{n:,}"), 6),
        Column("limited by", lambda r: str(r.limited_by)),
        Column("of floor", lambda r: _shown(r.fraction_of_floor, format_share), 5),
        Column("peak", lambda r: _shown(r.peak_bytes, format_bytes), 3),
        Column("runs", lambda r: str(r.runs), 1),
    ]
    return _with_fits(columns, 1, rows)


def _with_fits(columns: list[Column], at: int, rows: Sequence[SearchRow]) -> Sequence[Column]:
    """With how far memory alone goes, where that was asked."""
    alone = Column("memory alone", lambda r: _shown(r.fits_tokens, lambda n: f"{n:,}"), 4)
    return [*columns[:at], alone, *columns[at:]] if any(r.fits_tokens for r in rows) else columns


def _sentence(row: SearchRow) -> str:
    name, budget = row.name, format_bytes(require(row.memory_budget))
    if row.world_size > 1:
        budget += " a rank"
    if not row.max_tokens:
        return f"{name}: no length passed ({row.failure_reason})"
    times = f", {format_seconds(row.time_budget)} a pass" if row.time_budget else ""
    if row.fit_only:
        return f"{name}: memory holds {row.max_tokens:,} tokens under {budget}; nothing computed"
    again = f"confirmed {row.confirmations}×" if row.confirmations else "not confirmed"
    limit = (
        f"limited by: {row.limited_by}" if row.first_failure else "nothing failed up to the ceiling"
    )
    what = f"{row.max_tokens:,} tokens ({row.dtype}, {row.mode})"
    return f"{name}: {what} under {budget}{times}; {limit}; {again}"


def scaling_tables(maxima: Sequence[Reached], times: Sequence[Complexity]) -> RenderableType:
    """Theory, expectation and measurement over ranks; exponents in tokens and ranks."""
    longest = Fitted(maxima, [
        Column("ranks", lambda r: str(r.world_size)),
        Column("theory", lambda r: _shown(r.theory, lambda n: f"{n:,}"), 2),
        Column("expected", lambda r: _shown(r.expected, lambda n: f"{n:,}")),
        Column("found", lambda r: f"[bold]{r['one'].actual:,}[/bold]"),
        Column("of expected", lambda r: _of_expected(r), 1),
        Column("limited by", lambda r: _shown(r.limited_by, str), 3),
    ])  # fmt: skip
    fitted = Fitted(times, [
        Column("of", lambda r: r.quantity),
        Column("tokens ^", lambda r: _shown(r.tokens, _exponent)),
        Column("by formula", lambda r: _shown(r.formula_tokens, lambda x: f"{x:.2f}"), 2),
        Column("ranks ^", lambda r: _shown(r.ranks, _exponent)),
        Column("by formula", lambda r: _shown(r.formula_ranks, lambda x: f"{x:.2f}"), 3),
        Column("points", lambda r: str(r.points), 4),
    ])  # fmt: skip
    said = (
        "[dim]theory: the floor of all ranks' budgets · expected: one rank's times the ranks, "
        "where memory limits both · exponents with their 95 % interval · by formula: FLOPs over "
        "the ranks, and the floor[/dim]"
    )
    parts: list[RenderableType] = [longest, ""] if maxima else []
    parts += [fitted, ""] if times else []
    return Group(*parts, said)


def _of_expected(one: Reached) -> str:
    return format_share(one.actual / one.expected) if one.expected else NONE


def sparsities_table(rows: Sequence[DensityRow]) -> RenderableType:
    """The least sparsity with which a length fits."""
    several = [Column("ranks", lambda r: str(r.world_size))] if has_several_ranks(rows) else []
    return Fitted(rows, [
        *several,
        Column("tokens", lambda r: format_tokens(r.tokens)),
        Column("passed", lambda r: f"[bold]{format_sparsity_up(r.least_sparsity) or NONE}[/bold]"),
        Column("failed", lambda r: _shown(format_sparsity_down(r.too_dense), str)),
        Column("limited by", lambda r: _shown(r.limited_by, str)),
        Column("time", lambda r: _shown(r.time_s, format_seconds), 2),
        Column("peak", lambda r: _shown(r.peak_bytes, format_bytes), 3),
        Column("runs", lambda r: str(r.runs), 1),
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


def time_words(row: SweepRow) -> tuple[str, str]:
    """The median and its spread; what became of it where there is none."""
    if row.time_s is None:
        colour = _COLOURS.get(row.status, "red")
        return f"[{colour}]{row.status}[/{colour}]", NONE
    off = max(require(row.time_high_s) - row.time_s, row.time_s - require(row.time_low_s))
    spread = f"{off / row.time_s:.0%}" if row.samples > 1 and row.time_s else NONE
    return format_seconds(row.time_s), spread


def _flop_rate(row: SweepRow) -> str:
    return _shown(row.effective_flops, lambda rate: format_rate(rate, ""))


def _density(row: SweepRow) -> str:
    return _shown(row.token_density, format_share)


def _of_ideal(row: SweepRow) -> str:
    """The share of ideal, marked where no whole dense pass was run."""
    mark = "" if row.dense_source == "measured" else COMPUTED
    return _shown(row.share_of_ideal, lambda share: format_share(share) + mark)


def _failure(row: SweepRow) -> Text:
    where = f" in {row.phase}" if row.phase else ""
    what = f"{row.name} at {format_tokens(row.tokens)}"
    said = f"{what}: {row.status}{where}: {row.reason}"
    return plain(said, "yellow")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def _shown(value: Any, write: Any) -> str:
    return NONE if value is None else str(write(value))
