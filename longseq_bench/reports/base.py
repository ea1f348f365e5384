"""The contracts of a report: sections make the content of a kind, a format writes it.

kind     Source -> Document; @KINDS.register("summary")
section  Source -> Section;  @SECTIONS.register("summary.name"), at the end of the kind `summary`
format   Document -> Files;  @FORMATS.register("md"), the name is the main file's suffix

None of them uses a device. Other packages add their own through the entry-point groups
`longseq_bench.report_kinds`, `longseq_bench.report_sections` and `longseq_bench.report_formats`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import ascii_uppercase

from longseq_bench.analysis.labels import Settings, find_labels, set_labels, settings_suffix, speeds
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.core.registry import Registry
from longseq_bench.reports.columns import Columns, row_table
from longseq_bench.reports.document import Column, Document, Section, Table
from longseq_bench.reports.groups import capitalize_first, describe_workload, group_by_workload
from longseq_bench.reports.published_results import PublishedResults

Files = dict[str, str]
"""Text by file name, below the folder of the report; the main file first."""


@dataclass(frozen=True)
class Source:
    """The input of a report: records, and the tables computed from them.

    baseline: label or implementation whose speed is 1; None for no comparison.
    notes: sentences from reading the records.  published: maxima of another source.
    configs: text of the sweeps' configs by path.
    """

    records: Sequence[Record]
    baseline: str | None = None
    notes: Sequence[str] = ()
    published: PublishedResults | None = None
    configs: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[SweepRow]:
        """Measured rows with `speed`; labels are shared with `maxima`.

        Raises UserError where the baseline is not among them.
        """
        rows = self._tables[0]
        if not rows or not self.baseline:
            return rows
        found = zip(rows, speeds(rows, self.baseline), strict=True)
        return [replace(row, speed=speed) for row, speed in found]

    @cached_property
    def maxima(self) -> list[SearchRow]:
        """Rows of searches for the longest length, one row per search."""
        rows = self._tables[1]
        if self.published is None:
            return rows
        return [replace(row, published_tokens=self.published.tokens(row)) for row in rows]

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

    def workload(self, row: Row) -> str:
        """Describe the workload of a row, with the machine where there are several."""
        return describe_workload(row, self.machines)

    def title(self, row: Row) -> str:
        """Return the workload of a row as a title."""
        return capitalize_first(self.workload(row))

    def workloads(self, rows: Iterable[R]) -> list[tuple[str, list[R]]]:
        """Return the rows of each workload, with its description."""
        return [(self.workload(group[0]), group) for group in group_by_workload(rows)]

    def tables(
        self, rows: Iterable[Row], columns: Columns, prefix: str = "", keep_empty: bool = True
    ) -> list[Table]:
        """Return a table of rows per workload, as `row_table` does."""
        groups = group_by_workload(rows)
        return [row_table(group, columns, self.machines, keep_empty, prefix) for group in groups]

    def label(self, trial: Trial) -> str:
        """Return the label of the trial's implementation and options in this report."""
        return self._labels.get(_key(trial), trial.implementation) + settings_suffix(trial)

    @property
    def machine_column(self) -> list[Column]:
        """The column for `machine_cell`: none if there is only one machine."""
        return [Column("Machine")] * (len(self.environments) > 1)

    def machine_cell(self, record: Record) -> list[str]:
        """Return the name of a record's machine as a cell; none if there is only one."""
        return [self.machines[record.environment.fingerprint]] * len(self.machine_column)

    def machine_suffix(self, fingerprint: str) -> str:
        """Return ", machine A (host)"; "" if there is only one."""
        machine = self.machines[fingerprint]
        return f", machine {machine}" if machine else ""

    @cached_property
    def _tables(self) -> tuple[list[SweepRow], list[SearchRow]]:
        rows, maxima = sweep_rows(self.records), search_rows(self.records)
        labels = iter(find_labels([*rows, *maxima]))
        return set_labels(rows, labels), set_labels(maxima, labels)

    @cached_property
    def _labels(self) -> dict[Hashable, str]:
        return {
            _key(row): row.label.removesuffix(settings_suffix(row))
            for rows in self._tables
            for row in rows
        }


SEARCH = "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99"
SWEEP = "longseq sweep configs/quickstart.yaml"
SWEEP_RANKS = "longseq sweep configs/parallel.yaml"
SCALING = "longseq scaling --impl ring --impl ulysses --world-sizes 1,2"
"""Commands that produce the rows of a section; they need only files of the checkout."""

KINDS: Registry[Callable[[Source], Document]] = Registry(
    "report kind", "longseq_bench.reports", "longseq_bench.report_kinds"
)
SECTIONS: Registry[Callable[[Source], Section]] = Registry(
    "report section", "longseq_bench.reports.sections", "longseq_bench.report_sections"
)
FORMATS: Registry[Callable[[Document], Files]] = Registry(
    "report format", "longseq_bench.reports.render", "longseq_bench.report_formats"
)


def _key(settings: Settings) -> Hashable:
    return settings.implementation, repr(sorted(settings.options.items()))
