"""A row of a sweep: one measured trial, its rounds and ranks merged."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from longseq_bench.analysis.row import NO_JSON, SAME_WORKLOAD, Row, declare
from longseq_bench.core.model import Phase, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow(Row):
    """One measured trial. Bounds (low, high) are 95 % intervals; None for a single sample."""

    tokens: int = declare(
        "Tokens", "tokens",
        "Sequence length of all ranks together; in decode the cached tokens, new ones included.",
        "same",
    )  # fmt: skip
    status: Status = declare("Status", "text", "How the trial ended.", "worst")
    reason: str | None = declare("Reason", "text", "Reason of a failure.", "worst")
    phase: Phase | None = declare("Phase", "text", "Phase in which it failed.", "worst")
    time_s: float | None = declare(
        "Time", "seconds",
        "Median time of a pass on the slowest rank; in decode of one step.", "median",
        measurement="time",
    )  # fmt: skip
    time_low_s: float | None = declare("Time, low", "seconds", "Lower bound of the time.")
    time_high_s: float | None = declare("Time, high", "seconds", "Upper bound of the time.")
    samples: int = declare("Samples", "count", "Number of timed passes.")
    unstable: str | None = declare(
        "Unstable", "text",
        "Why the time is not to be trusted: load by other work, CPU time short of the time, drift "
        "from the first to the second half of the passes; none for a steady row.",
        default=None,
    )  # fmt: skip
    cpu_time_s: float | None = declare(
        "CPU time", "seconds", "Median processor time of a pass; largest of any rank.", "median",
        measurement="cpu_time",
    )  # fmt: skip
    plan_time_s: float | None = declare(
        "Preparation time", "seconds", "Time to prepare layouts; not part of Time.", "median",
        measurement="plan_time",
    )  # fmt: skip
    tokens_per_s: float | None = declare(
        "Tokens/s", "count", "Tokens of all ranks per second; in decode new tokens."
    )
    flops: float | None = declare(
        "FLOPs", "count", "FLOPs of the computed pairs and of a module's projections.", "largest"
    )
    max_error: float | None = declare(
        "Max error", "error", "Largest error of any output against float64.", "largest"
    )
    error_of_allowed: float | None = declare(
        "Error of allowed", "share", "Largest error of any result divided by what it may be.",
        "largest",
    )  # fmt: skip
    bias: float | None = declare(
        "Bias", "error", "Largest distance from 1 of the slope of results on float64.", "largest"
    )
    checked_rows: float | None = declare(
        "Rows checked", "count", "Output rows of each head that were compared with float64.",
        "largest",
    )  # fmt: skip
    checked_passes: float | None = declare(
        "Passes checked", "count", "Timed passes with the results of the checked one.", "largest"
    )
    density_asked: float | None = declare(
        "Requested density", "share", "Density requested by the options.", "largest"
    )
    compute_time_s: float | None = declare(
        "Compute only", "seconds", "Time of a pass with communication switched off.", "median",
        measurement="compute_time",
    )  # fmt: skip
    communication_time_s: float | None = declare(
        "Communication only", "seconds", "Time of a pass with computation switched off.", "median",
        measurement="communication_time",
    )  # fmt: skip
    exposed_share: float | None = declare(
        "Exposed", "share",
        "Share of the time that communication adds to computation: 1 - compute time / time.",
    )  # fmt: skip
    bytes_sent: int | None = declare(
        "Bytes sent per rank", "bytes", "Bytes counted in a pass; largest of any rank.", "largest"
    )
    bytes_formula: int | None = declare(
        "By formula", "bytes", "Bytes sent in a pass by formula; largest of any rank.",
        "largest",
    )  # fmt: skip
    wire_error: float | None = declare(
        "Wire error", "error", "Change of the output caused by compressed transfers.", "largest"
    )
    rank_times: Sequence[float | None] | None = declare(
        "Time of each rank", "seconds", "Median time of each rank.", "each rank",
        measurement="time",
    )  # fmt: skip
    speedup: float | None = declare(
        "Speed-up", "ratio", "Time on one rank divided by the row's time.", default=None
    )
    efficiency: float | None = declare(
        "Efficiency", "share", "Speed-up divided by the number of ranks.", default=None
    )
    effective_flops: float | None = declare("Effective FLOP/s", "flop_rate", "FLOPs / Time.")
    matmul_rate: float | None = declare(
        "Matrix product rate", "flop_rate",
        "Highest measured FLOP/s of matrix products of this dtype, of all ranks together.",
        "largest",
    )  # fmt: skip
    share_of_peak: float | None = declare(
        "Share of peak", "share", "Effective FLOP/s divided by the rate of matrix products."
    )
    bytes_to_read: int | None = declare(
        "Cache to read", "bytes",
        "Bytes of the keys and values that a step of decoding sees, of all ranks together.",
        "largest",
    )  # fmt: skip
    copy_bandwidth: float | None = declare(
        "Copy bandwidth", "byte_rate",
        "Highest measured bandwidth of copies in memory, bytes read and written, of all ranks "
        "together; measured in decode.",
        "largest",
    )  # fmt: skip
    share_of_bandwidth: float | None = declare(
        "Share of bandwidth", "share",
        "Cache to read / Time, divided by the bandwidth of copies in the same run.",
    )  # fmt: skip
    sparsity_asked: float | None = declare("Requested sparsity", "share", "1 - Requested density.")
    token_density: float | None = declare(
        "Density of pairs", "share",
        "Computed share of the query-key pairs of dense attention; a pair computed twice counts "
        "twice.",
    )  # fmt: skip
    mask_density: float = declare(
        "Visible pairs", "share", "Share of all query-key pairs that the mask shows.", default=1.0
    )
    work_imbalance: float | None = declare(
        "Work imbalance", "ratio",
        "Work of the busiest rank (visible pairs, by formula) divided by the mean; none with one "
        "rank, and for code of others.", default=None,
    )  # fmt: skip
    uncovered: float | None = declare(
        "Uncovered", "share", "Share of the (token, head) pairs without any key.", "largest"
    )
    dense_time_s: float | None = declare(
        "Dense time",
        "seconds",
        "Time of exact attention by Dense kernel on the same inputs (not of `dense`).",
    )
    dense_low_s: float | None = declare(
        "Dense time, low", "seconds", "Lower bound of the dense time."
    )
    dense_high_s: float | None = declare(
        "Dense time, high", "seconds", "Upper bound of the dense time."
    )
    dense_source: str | None = declare(
        "Source of dense time", "text", "measured, or computed from the named part."
    )
    dense_kernel: str | None = declare(
        "Dense kernel", "text", "Kernel that computed the dense time; sdpa: torch's own choice."
    )
    speed_over_dense: float | None = declare(
        "Speed over dense",
        "ratio",
        "Dense time divided by the row's time.",
    )
    share_of_ideal: float | None = declare(
        "Share of ideal", "share",
        "Dense time × density of the work / time; 100 %: skipped work costs nothing.",
    )  # fmt: skip
    share_low: float | None = declare(
        "Share of ideal, low", "share", "Lower bound of the share of ideal."
    )
    share_high: float | None = declare(
        "Share of ideal, high", "share", "Upper bound of the share of ideal."
    )
    dense_flops: float | None = declare(
        "Dense FLOPs", "count", "FLOPs of dense attention in the same module.", "largest"
    )
    dense_peak_bytes: int | None = declare(
        "Standard attention memory", "bytes",
        "Peak memory of standard attention, with its full score matrix, on one device.",
    )  # fmt: skip
    dense_memory_source: str | None = declare(
        "Source of standard memory", "text", "measured or computed.", default=None
    )
    memory_reduction: float | None = declare(
        "Memory reduction", "ratio",
        "Standard attention memory divided by the row's peak; one rank only.", default=None,
    )  # fmt: skip
    zero_rows: float | None = declare(
        "Zero rows", "share", "Share of output rows that are zero.", "largest", json=NO_JSON
    )
    rank_bytes: Sequence[int | None] | None = declare(
        "Bytes sent by each rank", "bytes", "Bytes counted in a pass, of each rank.", "each rank",
        measurement="bytes_sent", json=NO_JSON,
    )  # fmt: skip
    rank_formulas: Sequence[int | None] | None = declare(
        "By formula, each rank", "bytes", "Bytes that each rank sends by formula.", "each rank",
        measurement="bytes_formula", json=NO_JSON,
    )  # fmt: skip
    bytes_unlike: Sequence[tuple[int, int, int]] | None = declare(
        "Miscounted", "list", "(rank, bytes counted, bytes by formula) where the two differ.",
        json=NO_JSON,
    )  # fmt: skip
    exposed_low: float | None = declare(
        "Exposed, low", "share", "Lower bound of the exposed share.", json=NO_JSON
    )
    exposed_high: float | None = declare(
        "Exposed, high", "share", "Upper bound of the exposed share.", json=NO_JSON
    )
    speedup_low: float | None = declare(
        "Speed-up, low", "ratio", "Lower bound of the speed-up.", json=NO_JSON, default=None
    )
    speedup_high: float | None = declare(
        "Speed-up, high", "ratio", "Upper bound of the speed-up.", json=NO_JSON, default=None
    )
    speed: float | None = declare(
        "Speed", "ratio", "Time of the baseline divided by the row's time.", json=NO_JSON,
        in_frame=False, default=None,
    )  # fmt: skip

    @property
    def is_ok(self) -> bool:
        """True if every round of the trial ran and passed the check."""
        return self.status == "ok"

    @property
    def workload_key(self) -> Hashable:
        """Equal for rows of one workload and length on one machine."""
        return _same_length(self)


_same_length = attrgetter("tokens", *SAME_WORKLOAD)
