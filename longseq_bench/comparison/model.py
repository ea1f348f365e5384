"""The result of a comparison, in SI units, and words for its parts; a ratio is B over A."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longseq_bench.analysis.labels import mask_words, mode_words
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.significance import RatioEstimate
from longseq_bench.core.masks import FULL
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_tokens

ComparedRow = SweepRow | SearchRow
"""A trial or a search."""


@dataclass(frozen=True)
class Change:
    """The time, the peak memory, the longest length or the status of a trial on both sides.

    a, b: the merged runs of each side, SweepRow or SearchRow; a has the label.
    verdict: of a time "slower", "faster", "same", "undecided"; of a peak "more", "less", "same"; of
    a length "longer", "shorter", "same", "undecided"; of a status "broken", "mended", "otherwise".
    ratio: infinite if no length passed with A.  reason: why it is undecided.
    note: budgets of the two sides that differ and matter, as text.
    a_rounds, b_rounds: of a time, the median pass of each process on the slowest rank (s); ratio
    is that of their geometric means.  estimate: None if it is undecided.
    """

    a: Any
    b: Any
    verdict: str
    ratio: float = math.nan
    reason: str = ""
    note: str = ""
    a_rounds: tuple[float, ...] = ()
    b_rounds: tuple[float, ...] = ()
    estimate: RatioEstimate | None = None


@dataclass(frozen=True)
class Comparison:
    """Two sets of results, compared.

    names: of A and B.  level: family-wise error rate of all `slower` and `faster`.
    min_change: the smallest relative difference in time that is reported.
    failed_alike: trials that ended with the same status, not ok, on both sides.
    other_machines: trials of both sides that ran on different machines and are not compared.
    machine_differences: those of the latter, in brackets.
    differences: of machine and software: name, values of A, values of B.
    records: those compared, of A and of B.
    """

    names: tuple[str, str]
    level: float
    min_change: float
    times: Sequence[Change]
    peaks: Sequence[Change]
    maxima: Sequence[Change]
    statuses: Sequence[Change]
    failed_alike: int
    only_a: Sequence[ComparedRow]
    only_b: Sequence[ComparedRow]
    other_machines: Sequence[ComparedRow]
    machine_differences: str
    differences: Sequence[tuple[str, str, str]]
    caveats: Sequence[str]
    records: tuple[Sequence[Record], Sequence[Record]]


def name_row(row: ComparedRow) -> str:
    """Return the name of a trial or a search: "ring chunk 1k ×2 at 4k (train)"."""
    tokens = f" at {format_tokens(row.tokens)}" if isinstance(row, SweepRow) else ""
    workload = [
        mode_words(row.mode, row.new_tokens) if row.mode != "forward" else "",
        row.dtype if row.dtype != "float32" else "",
        mask_words(row.mask) if row.mask != FULL else "",
    ]
    words = ", ".join(filter(None, workload))
    return f"{row.name}{tokens}{f' ({words})' if words else ''}"


def format_percent(share: float) -> str:
    """Format a relative difference as a percentage with two digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.2g} %"


def count(n: int, one: str, several: str = "") -> str:
    """Return a number with the singular or the plural, which has an s if it is not given."""
    return f"{n} {one if n == 1 else several or f'{one}s'}"
