"""Rows of searches: for the longest length that fits, and for the least sparsity."""

from collections.abc import Hashable
from dataclasses import dataclass

from longseq_bench.analysis.fields import NONE, declare
from longseq_bench.analysis.row import Row
from longseq_bench.core.model import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Row):
    """Fields that both searches have."""

    limited_by: str | None = declare(
        "Limited by", "text", "What ended the search: memory, time, hang, ...", "search"
    )
    confirmations: int = declare(
        "Confirmations", "count", "Further passes at the result, in fresh processes.", "search"
    )
    runs: int = declare("Runs", "count", "Runs of the search, retries included.", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow(SearchResult):
    """A search for the longest length: a bracket and what limited it.

    Tokens are those of all ranks; the budget, the peak and bytes per token are one rank's.
    """

    max_tokens: int = declare(
        "Max tokens",
        "tokens",
        "Longest length that passed: most runs in time, none failed otherwise; 0: none.",
        "search",
    )
    first_failure: int | None = declare(
        "First failure", "tokens", "Shortest failed length above the longest.", "search"
    )
    failure_phase: Phase | None = declare("Phase", "text", "Where the first failure ended.")
    failure_reason: str | None = declare(
        "Reason", "text", "Why the first failure ended.", json=NONE
    )
    floor_tokens: int | None = declare(
        "Floor", "tokens", "Tokens whose floor fills the budgets of all ranks together."
    )
    fraction_of_floor: float | None = declare(
        "Fraction of floor", "share", "Floor bytes at the longest length over the budget."
    )
    bytes_per_token: float | None = declare(
        "Bytes/token", "bytes", "Peak memory over the tokens of all ranks."
    )
    predicted_tokens: int | None = declare(
        "Predicted", "tokens", "Longest length predicted before the first run.", "search"
    )
    wall_s: float = declare("Wall time", "seconds", "Duration of all runs together.", "search")
    fits_tokens: int | None = declare(
        "Memory alone", "tokens", "Longest length of the same search with loops cut short.",
        default=None,
    )  # fmt: skip
    published_tokens: int | None = declare(
        "Elsewhere", "count", "Longest length that a published source gives.", json=NONE,
        in_frame=False, default=None,
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
    """A search for the least sparsity with which a length fits."""

    tokens: int = declare("Tokens", "tokens", "Sequence length of all ranks together.", "same")
    least_sparsity: float | None = declare(
        "Least sparsity",
        "share",
        "Least sparsity that passed: most runs in time, none failed otherwise.",
        "search",
    )
    too_dense: float | None = declare(
        "Too dense", "share", "Largest sparsity below it that failed.", "search"
    )
    time_s: float | None = declare(
        "Time", "seconds", "Median time of a pass at the least sparsity.", "median",
        measurement="time",
    )  # fmt: skip
