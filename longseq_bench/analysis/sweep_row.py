"""A row of a sweep: one measured trial, its rounds and ranks merged."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from longseq_bench.analysis.row import SAME_WORKLOAD, Row, declare, largest, same
from longseq_bench.core.model import Phase, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow(Row):
    """One measured trial. Bounds (low, high) are 95 % intervals; None for a single sample."""

    tokens: int = same(
        "Tokens", "tokens", "Sequence length of all ranks; in decode with the new tokens."
    )
    status: Status = declare("Status", "text", "How the trial ended.", "worst")
    reason: str | None = declare("Reason", "text", "Reason of a failure.", "worst")
    phase: Phase | None = declare("Phase", "text", "Phase in which it failed.", "worst")
    time_s: float | None = declare(
        "Time", "seconds", "Median of a pass on the slowest rank; in decode of a step.", "median"
    )
    time_low_s: float | None = declare("Time, low", "seconds", "Lower bound of the time.")
    time_high_s: float | None = declare("Time, high", "seconds", "Upper bound of the time.")
    samples: int = declare("Samples", "count", "Number of timed passes.")
    unstable: str | None = declare(
        "Unstable", "text", "Why the time is not to be trusted: load, CPU time or drift."
    )
    plan_time_s: float | None = declare(
        "Preparation time", "seconds", "Time to prepare layouts; not part of Time.", "median"
    )
    tokens_per_s: float | None = declare(
        "Tokens/s", "count", "Tokens of all ranks per second; in decode new tokens."
    )
    flops: float | None = largest(
        "FLOPs", "count", "FLOPs of the computed pairs and of a module's projections."
    )
    max_error: float | None = largest(
        "Max error", "error", "Largest error of any output against float64."
    )
    density_asked: float | None = largest(
        "Requested density", "share", "Density requested by the options."
    )
    compute_time_s: float | None = declare(
        "Compute only", "seconds", "Time of a pass with communication switched off.", "median"
    )
    communication_time_s: float | None = declare(
        "Communication only", "seconds", "Time of a pass with computation switched off.", "median"
    )
    exposed_share: float | None = declare(
        "Exposed", "share", "Time that communication adds: 1 - compute time / time."
    )
    bytes_sent: int | None = largest(
        "Bytes sent per rank", "bytes", "Bytes counted in a pass; largest of any rank."
    )
    bytes_formula: int | None = largest("By formula", "bytes", "Bytes sent in a pass by formula.")
    wire_error: float | None = largest(
        "Wire error", "error", "Change of the output caused by compressed transfers."
    )
    quantisation_error: float | None = largest(
        "Quantisation error", "error", "Error against the cache before quantisation."
    )
    rank_times: Sequence[float | None] | None = declare(
        "Time of each rank", "seconds", "Median time of each rank.", "each rank"
    )
    speedup: float | None = declare("Speed-up", "ratio", "Time on one rank / the row's time.")
    efficiency: float | None = declare("Efficiency", "share", "Speed-up / number of ranks.")
    effective_flops: float | None = declare("Effective FLOP/s", "flop_rate", "FLOPs / Time.")
    matmul_rate: float | None = largest(
        "Matrix product rate", "flop_rate", "Highest measured FLOP/s, of all ranks."
    )
    share_of_peak: float | None = declare(
        "Share of peak", "share", "Effective FLOP/s divided by the rate of matrix products."
    )
    bytes_to_read: int | None = largest(
        "Cache to read", "bytes", "Keys and values of a step of decoding, of all ranks."
    )
    copy_bandwidth: float | None = largest(
        "Copy bandwidth", "byte_rate", "Highest of copies in memory, of all ranks."
    )
    share_of_bandwidth: float | None = declare(
        "Share of bandwidth", "share", "Cache to read / Time / Copy bandwidth."
    )
    token_density: float | None = declare(
        "Density of pairs", "share", "Computed query-key pairs / those of dense attention."
    )
    mask_density: float = declare(
        "Visible pairs", "share", "Share of all query-key pairs that the mask shows.", default=1.0
    )
    work_imbalance: float | None = declare(
        "Work imbalance", "ratio", "Visible pairs of the busiest rank / mean; none for one rank."
    )
    uncovered: float | None = largest(
        "Uncovered", "share", "Share of the (token, head) pairs without any key."
    )
    dense_time_s: float | None = declare(
        "Dense time", "seconds", "Time of exact attention by Dense kernel on the same inputs."
    )
    dense_low_s: float | None = declare("Dense time, low", "seconds", "Its lower bound.")
    dense_high_s: float | None = declare("Dense time, high", "seconds", "Its upper bound.")
    dense_source: str | None = declare(
        "Source of dense time", "text", "measured, or computed from the named part."
    )
    dense_kernel: str | None = declare(
        "Dense kernel", "text", "Kernel of the dense time; sdpa: torch's own choice."
    )
    speed_over_dense: float | None = declare("Speed over dense", "ratio", "Dense time / Time.")
    share_of_ideal: float | None = declare(
        "Share of ideal", "share", "Dense time × density / Time; 100 %: skipped work is free."
    )
    share_low: float | None = declare("Share of ideal, low", "share", "Its lower bound.")
    share_high: float | None = declare("Share of ideal, high", "share", "Its upper bound.")
    dense_flops: float | None = largest(
        "Dense FLOPs", "count", "FLOPs of dense attention in the same module."
    )
    dense_peak_bytes: int | None = declare(
        "Standard attention memory", "bytes", "Its peak with a full score matrix, on one device."
    )
    dense_memory_source: str | None = declare(
        "Source of standard memory", "text", "measured or computed."
    )
    memory_reduction: float | None = declare(
        "Memory reduction", "ratio", "Standard attention memory / peak; one rank only."
    )
    zero_rows: float | None = largest("Zero rows", "share", "Share of output rows that are zero.")
    bytes_unlike: Sequence[tuple[int, int, int]] | None = declare(
        "Miscounted", "list", "Ranks that differ: rank, bytes counted, by formula."
    )
    speedup_low: float | None = declare("Speed-up, low", "ratio", "Its lower bound.")
    speedup_high: float | None = declare("Speed-up, high", "ratio", "Its upper bound.")
    speed: float | None = declare("Speed", "ratio", "Time of the baseline / Time.", in_frame=False)

    @property
    def is_ok(self) -> bool:
        """True if every round of the trial ran and passed the check."""
        return self.status == "ok"

    @property
    def workload_key(self) -> Hashable:
        """Equal for rows of one workload and length on one machine."""
        return _same_length(self)


_same_length = attrgetter("tokens", *SAME_WORKLOAD)
