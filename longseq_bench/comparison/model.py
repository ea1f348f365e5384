"""The result of a comparison: one class per question, in SI units; a ratio is B over A."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from longseq_bench.analysis.labels import Labels, find_labels, settings_key
from longseq_bench.analysis.runs import SEVERITY
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.significance import RatioEstimate
from longseq_bench.comparison.wording import ComparedRow
from longseq_bench.core.model import Record, Status


@dataclass(frozen=True)
class TimeComparison:
    """A trial with times on both sides.

    a, b: the processes of each side merged as in the report of the same records.
    a_rounds, b_rounds: per process, its median pass on the slowest rank (s).
    ratio: the geometric mean of b_rounds over that of a_rounds.
    estimate: interval and test of the ratio; None where the verdict is "undecided", with a reason.
    verdict: "too noisy" is for display: the same within noise, but a change could hide in it.
    note: differing budgets of the two sides.
    """

    row: SweepRow
    a: SweepRow
    b: SweepRow
    a_rounds: tuple[float, ...]
    b_rounds: tuple[float, ...]
    ratio: float
    estimate: RatioEstimate | None
    verdict: Literal["slower", "faster", "same", "undecided", "too noisy"]
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class MemoryComparison:
    """The peak memory of a trial in bytes: the largest over ranks and rounds.

    verdict: "more" or "less" only if all rounds of one side exceed all of the other, by 1 % and
    by 64 KiB.
    """

    row: SweepRow
    a_bytes: int
    b_bytes: int
    ratio: float
    verdict: Literal["more", "less", "same"]


@dataclass(frozen=True)
class Bracket:
    """The longest length that passed, the shortest failed length above it, and the limit."""

    max_tokens: int
    first_failure: int | None
    limited_by: str

    @property
    def end(self) -> float:
        """The shortest length that fails; infinite if none failed."""
        return math.inf if self.first_failure is None else self.first_failure


@dataclass(frozen=True)
class LengthComparison:
    """A search for the longest length on both sides; ratio: None if no length passed with A."""

    row: SearchRow
    a: Bracket
    b: Bracket
    ratio: float | None
    verdict: Literal["longer", "shorter", "same", "undecided"]
    reason: str = ""


@dataclass(frozen=True)
class StatusChange:
    """A trial that ended with another status.

    budgets: it failed for lack of memory or time, and the budgets of the two sides differ.
    """

    row: SweepRow
    a_status: Status
    b_status: Status
    a_reason: str | None
    b_reason: str | None
    verdict: Literal["broken", "mended", "otherwise"]
    budgets: bool = False


@dataclass(frozen=True)
class Difference:
    """A property of machine or software with different values, as text."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """Two sets of results, compared.

    a, b: the names of the sides.  level: family-wise error rate of all `slower` and `faster`.
    min_change: the smallest relative difference in time that is reported.
    failed_alike: trials that ended with the same status, not ok, on both sides.
    other_machines: trials of both sides that ran on different machines and are not compared.
    records: those compared, of A and of B.
    """

    a: str
    b: str
    level: float
    min_change: float
    times: tuple[TimeComparison, ...]
    peaks: tuple[MemoryComparison, ...]
    maxima: tuple[LengthComparison, ...]
    status_changes: tuple[StatusChange, ...]
    failed_alike: int
    only_a: tuple[ComparedRow, ...]
    only_b: tuple[ComparedRow, ...]
    other_machines: tuple[ComparedRow, ...]
    machine_differences: str
    differences: tuple[Difference, ...]
    caveats: tuple[str, ...]
    records: tuple[tuple[Record, ...], tuple[Record, ...]]

    def program_label(self, row: ComparedRow) -> str:
        """Return the label of a row for programs ("ring chunk=1024"); its own is for people."""
        return self._program_labels[settings_key(row)]

    @cached_property
    def _program_labels(self) -> Labels:
        trials = [record.trial for side in self.records for record in side]
        return find_labels([*trials, *self.only_a, *self.only_b, *self.other_machines])


def status_of(runs: Iterable[Record]) -> Status:
    """Return the worst status of the runs of one trial."""
    return worst_run(runs).outcome.status


def is_valid_time(seconds: float) -> bool:
    """Return True for a finite time above zero."""
    return 0 < seconds < math.inf


def worst_run(runs: Iterable[Record]) -> Record:
    """Return the run with the worst status."""
    return min(runs, key=lambda record: SEVERITY.index(record.outcome.status))
