"""The contracts of a report: sections make the content of a kind, a format writes it.

kind     Source -> Document; @KINDS.register("summary")
section  Source -> Section;  kinds.py lists those of each kind
format   Document -> Files;  @FORMATS.register("md"), the name is the main file's suffix

None of them uses a device. Other packages add kinds and formats through the entry-point groups
`longseq_bench.report_kinds` and `longseq_bench.report_formats`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import ascii_uppercase

from longseq_bench.analysis.labels import (
    Labels,
    find_baseline_label,
    index_short_labels,
    settings_key,
    speeds,
)
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.searches import SearchRow, search_rows
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows_with_records
from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.core.registry import Registry
from longseq_bench.reports.columns import Columns, build_table, make_columns
from longseq_bench.reports.document import MAX_CHARTS, MAX_TABLES, Cell, Chart, Document, Table
from longseq_bench.reports.groups import (
    SAME_TABLE,
    capitalize_first,
    describe_shared,
    describe_workload,
    find_varying,
    group_by_workload,
    in_brackets,
    join_words,
)

Files = dict[str, str | bytes]
"""Text or bytes by file name, below the folder of the report; the main file first."""


@dataclass(frozen=True)
class Source:
    """The input of a report: records, and the tables computed from them.

    baseline: label or implementation whose speed is 1, as in find_baseline_label; None for no
    comparison.
    notes: sentences from reading the records.  configs: text of the sweeps' configs by path.
    """

    records: Sequence[Record]
    baseline: str | None = None
    notes: Sequence[str] = ()
    configs: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[SweepRow]:
        """Measured rows with `speed`; labels are shared with `maxima`.

        Raises UserError where the baseline is not among them.
        """
        rows = self._measured
        if not self.baseline_label:
            return rows
        found = zip(rows, speeds(rows, self.baseline_label), strict=True)
        return [replace(row, speed=speed) for row, speed in found]

    @cached_property
    def baseline_label(self) -> str | None:
        """The label of the baseline; None for no comparison. Errors as in find_baseline_label."""
        rows = self._measured
        if not rows or not self.baseline:
            return None
        return find_baseline_label(rows, (row.label for row in rows), self.baseline)

    @cached_property
    def maxima(self) -> list[SearchRow]:
        """Rows of searches for the longest length, one row per search."""
        return search_rows(self.records, self._labels)

    @cached_property
    def environments(self) -> dict[str, Environment]:
        """The last environment with each fingerprint, in order of first appearance."""
        return {r.environment.fingerprint: r.environment for r in self.records}

    @cached_property
    def machines(self) -> dict[str, str]:
        """A short name for each fingerprint: "" if there is only one, else "A (host)"."""
        if len(self.environments) == 1:
            return dict.fromkeys(self.environments, "")
        letters = [*ascii_uppercase, *(f"M{i + 1}" for i in range(26, len(self.environments)))]
        named = zip(letters, self.environments.values(), strict=False)
        return {machine.fingerprint: f"{letter} ({machine.host})" for letter, machine in named}

    @cached_property
    def context(self) -> str:
        """A sentence on what is equal in all rows: workload, budgets, check; "" without rows."""
        row = next(iter([*self._measured, *self.maxima]), None)
        if row is None:
            return ""
        words = describe_shared(row, self.machines, self._varying, self.is_parallel)
        words += "; all outputs checked against float64" if self.is_all_checked else ""
        return f"{capitalize_first(words)}."

    @cached_property
    def errors(self) -> list[float | None]:
        """The largest error against float64 of each run that was ok; None if it has none."""
        ok = (record.outcome for record in self.records if record.outcome.status == "ok")
        return [outcome.largest("max_error") for outcome in ok]

    @cached_property
    def is_parallel(self) -> bool:
        """True if any trial has several ranks."""
        return any(record.trial.world_size > 1 for record in self.records)

    @property
    def is_all_checked(self) -> bool:
        """True if every run that was ok has the error of its output against float64."""
        return bool(self.errors) and None not in self.errors

    def workload(self, row: Row, fields: Iterable[str] = SAME_TABLE) -> str:
        """Describe how the workload of a row differs from others in this report; "" if it doesn't.

        fields: the fields of SAME_TABLE that may be described.
        """
        named = self._varying.intersection(fields)
        return describe_workload(row, self.machines, named, self.is_parallel)

    def where(self, row: Row) -> str:
        """Return the workload in brackets for a sentence: " (float32, 30 s limit)", or ""."""
        return in_brackets(self.workload(row))

    def title(self, row: Row) -> str:
        """Return the workload of a row as a title, "Float32, 30 s limit", or ""."""
        fit_only = "fit only" if row.fit_only and "fit_only" in self._varying else ""
        return capitalize_first(join_words(self.workload(row), fit_only))

    def tables(
        self, rows: Iterable[Row], columns: Columns, keep_empty: bool = False
    ) -> list[Table]:
        """Return a table of rows per workload; its title is the workload.

        At most MAX_TABLES and one more, which a section does not show.
        """
        return [
            build_table(self.title(group[0]), columns, group, keep_empty)
            for group in group_by_workload(rows)[: MAX_TABLES + 1]
        ]

    def charts(
        self, rows: Iterable[R], *builders: Callable[[Sequence[R], str], Chart | None]
    ) -> list[Chart]:
        """Return the charts of each workload among rows, at most MAX_CHARTS.

        builders: from the rows of a workload and its description; None if nothing is to be drawn.
        """
        groups = group_by_workload(rows)[: MAX_CHARTS // len(builders)]
        found = (build(group, self.title(group[0])) for group in groups for build in builders)
        return list(filter(None, found))

    def label(self, trial: Trial) -> str:
        """Return the label of the trial's implementation and options in this report."""
        return self._labels[settings_key(trial)]

    def table(self, title: str, headings: str, rows: Iterable[tuple[Cell, ...]]) -> Table:
        """Return a table of rows that begin with a fingerprint: the machine, if there are several.

        headings: as in make_columns.
        """
        first = 0 if len(self.environments) > 1 else 1
        columns = make_columns(f"Machine, {headings}")[first:]
        named = ((self.machines[str(key)], *cells) for key, *cells in rows)
        return Table(title, columns, tuple(row[first:] for row in named))

    @cached_property
    def _measured(self) -> list[SweepRow]:
        return [row for row, _ in self.pairs]

    @cached_property
    def pairs(self) -> list[tuple[SweepRow, list[Record]]]:
        """Measured rows without `speed`, each with its records."""
        return sweep_rows_with_records(self.records, self._labels)

    @property
    def unstable(self) -> dict[int, str]:
        """The reason of each unstable row by the id of its record; steady rows are left out."""
        return {id(r): row.unstable for row, runs in self.pairs if row.unstable for r in runs}

    @cached_property
    def _labels(self) -> Labels:
        """The labels of all trials: of sweeps, then of searches, in which order #1, #2 count."""
        in_order = sorted(self.records, key=lambda record: record.purpose != "measure")
        return index_short_labels([record.trial for record in in_order])

    @cached_property
    def _varying(self) -> frozenset[str]:
        return find_varying([*self._measured, *self.maxima])


KINDS: Registry[Callable[[Source], Document]] = Registry(
    "report kind", "longseq_bench.reports", "longseq_bench.report_kinds"
)
FORMATS: Registry[Callable[[Document], Files]] = Registry(
    "report format", "longseq_bench.reports.render", "longseq_bench.report_formats"
)
