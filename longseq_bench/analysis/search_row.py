"""Rows of searches: for the longest length that fits, and for the minimum sparsity."""

from collections.abc import Hashable
from dataclasses import dataclass

from longseq_bench.analysis.fields import NO_JSON, declare
from longseq_bench.analysis.row import Row
from longseq_bench.core.model import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Row):
    """Fields that both searches have."""

    limited_by: str | None = declare(
        "Limited by", "text", "What ended the search: memory, time, hang, ...", "search"
    )
    confirmations: int = declare(
        "Confirmations", "count", "Further passes of the result, in fresh processes.", "search"
    )
    runs: int = declare("Runs", "count", "Runs of the search, retries included.", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow(SearchResult):
    """A search for the longest length: a bracket and its limit.

    Tokens are those of all ranks. Budget and peak are those of one rank.
    """

    max_tokens: int = declare(
        "Max tokens",
        "tokens",
        "Longest length that passed: most of its runs met the time limit, and none failed for "
        "another reason; 0: none.",
        "search",
    )
    first_failure: int | None = declare(
        "First failure", "tokens", "Shortest failed length above Max tokens.", "search"
    )
    failure_phase: Phase | None = declare("Phase", "text", "Phase of the first failure.")
    failure_reason: str | None = declare(
        "Reason", "text", "Reason of the first failure.", json=NO_JSON
    )
    floor_tokens: int | None = declare(
        "Floor", "tokens", "Length whose floor fills the memory budgets of all ranks."
    )
    fraction_of_floor: float | None = declare(
        "Fraction of floor",
        "share",
        "Bytes that any exact attention needs at Max tokens, divided by the budgets of all ranks.",
    )
    bytes_per_token: float | None = declare(
        "Bytes/token", "bytes", "Peak memory divided by the tokens of all ranks."
    )
    predicted_tokens: int | None = declare(
        "Predicted", "tokens", "Longest length predicted before the first run.", "search"
    )
    wall_s: float = declare("Wall time", "seconds", "Duration of all runs together.", "search")
    fits_tokens: int | None = declare(
        "Fits in memory", "tokens", "Longest length of the same search with --fit-only.",
        default=None,
    )  # fmt: skip

    @property
    def tokens(self) -> int:
        """The longest length, under the field name that rows of sweeps use."""
        return self.max_tokens

    @property
    def time_key(self) -> Hashable:
        """Equal for searches that differ only in time budget and fit_only."""
        same = (self.implementation, self.memory_budget, self.keep, self.allocator)
        return same, self.world_size, self.workload_key, self.options_key


@dataclass(frozen=True, slots=True, kw_only=True)
class DensityRow(SearchResult):
    """A search for the minimum sparsity with which a length fits."""

    tokens: int = declare("Tokens", "tokens", "Sequence length of all ranks together.", "same")
    least_sparsity: float | None = declare(
        "Minimum sparsity",
        "share",
        "Lowest sparsity that passed: most of its runs met the time limit, and none failed for "
        "another reason.",
        "search",
    )
    too_dense: float | None = declare(
        "Highest failed sparsity", "share", "Highest sparsity below it that failed.", "search"
    )
    time_s: float | None = declare(
        "Time", "seconds", "Median time of a pass at the minimum sparsity.", "median",
        measurement="time",
    )  # fmt: skip
