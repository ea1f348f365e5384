"""The two contracts of a report: a kind says what it tells, a format says how it is written.

kind     Source -> Document; @KINDS.register("summary")
format   Document -> Files;  @FORMATS.register("md"), the name being the main file's suffix

Neither sees a device. Other packages add theirs through the entry-point groups
`longseq_bench.report_kinds` and `longseq_bench.report_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

from longseq_bench.analysis.rows import Row, add_labels, maximum_rows, set_apart, speeds, sweep_rows
from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.core.registry import Registry
from longseq_bench.reports.document import Document
from longseq_bench.reports.published_results import Elsewhere

Files = dict[str, str]
"""Text by file name, below the folder of the report; the main file first."""


@dataclass(frozen=True)
class Source:
    """What a report is made from: records, and the tables computed from them.

    baseline: whose speed is 1; None for no comparison.  notes: sentences from reading the records.
    place: the results as the user named them, for commands that the report tells.
    configs: text of sweeps' configs, by where they were kept.
    """

    records: Sequence[Record]
    baseline: str | None = None
    notes: Sequence[str] = field(default=())
    elsewhere: Elsewhere | None = None
    place: str = "RESULTS"
    configs: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """Measured rows with `speed`; labels are shared with `maxima`.

        Raises UserError where the baseline is not among them.
        """
        rows = self._tables[0]
        known = speeds(rows, self.baseline) if rows and self.baseline else repeat(None, len(rows))
        for row, speed in zip(rows, known, strict=True):
            row["speed"] = speed
        return rows

    @cached_property
    def maxima(self) -> list[Row]:
        """One row a search for the longest length."""
        rows, beside = self._tables[1], self.elsewhere
        for row in rows:
            row["elsewhere"] = beside.tokens(row) if beside else None
        return rows

    @property
    def elsewhere_said(self) -> str:
        """Where the figures beside the maxima come from."""
        return self.elsewhere.source if self.elsewhere else ""

    @cached_property
    def environments(self) -> dict[str, Environment]:
        """The last environment seen of each fingerprint, in order of first appearance."""
        return {r.environment.fingerprint: r.environment for r in self.records}

    @cached_property
    def machines(self) -> dict[str, str]:
        """A short name of each fingerprint: "" if there is only one, else "A (host)"."""
        if len(self.environments) == 1:
            return dict.fromkeys(self.environments, "")
        return {
            fingerprint: f"{_letter(i)} ({environment.host})"
            for i, (fingerprint, environment) in enumerate(self.environments.items())
        }

    def label(self, trial: Trial) -> str:
        """What this report calls the trial's implementation and options."""
        settings = (trial.fit_only, trial.keep, trial.allocator)
        known = (trial.implementation, repr(trial.options), *settings)
        if known not in self._said:
            how = _how(trial.implementation, trial.options)
            row = dict(zip(("fit_only", "keep", "allocator"), settings, strict=True))
            apart = set_apart({**row, "options": trial.options})
            self._said[known] = self._labels.get(how, trial.implementation) + apart
        return self._said[known]

    @cached_property
    def _tables(self) -> tuple[list[Row], list[Row]]:
        rows, maxima = sweep_rows(self.records), maximum_rows(self.records)
        add_labels([*rows, *maxima])
        return rows, maxima

    @cached_property
    def _said(self) -> dict[tuple[Any, ...], str]:
        """Labels of trials asked for so far: every record is asked for its own several times."""
        return {}

    @cached_property
    def _labels(self) -> dict[str, str]:
        both = [*self._tables[0], *self._tables[1]]
        return {
            _how(row["implementation"], row["options"]): row["label"].removesuffix(set_apart(row))
            for row in both
        }


KINDS: Registry[Callable[[Source], Document]] = Registry(
    "report kind", "longseq_bench.reports", "longseq_bench.report_kinds"
)
FORMATS: Registry[Callable[[Document], Files]] = Registry(
    "report format", "longseq_bench.reports.render", "longseq_bench.report_formats"
)


def _how(implementation: str, options: dict[str, Any]) -> str:
    return repr((implementation, sorted(options.items(), key=lambda item: item[0])))


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"M{i + 1}"
