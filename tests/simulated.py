"""A launcher without processes: outcomes by formula, for tests of strategies and searches."""

from collections.abc import Callable, Sequence

from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue, DeviceInfo
from longseq_bench.core.cost import attention_flops, floor_bytes
from longseq_bench.core.model import DryRunEstimate, Measurement, Outcome, Trial
from longseq_bench.launchers.base import DRY_RUN_LIMIT_S, Launcher, LaunchResult, OnPhase

Formula = Callable[[Trial], float]
FLOPS_PER_S = 1e11


class SimulatedLauncher(Launcher):
    """A launcher that computes every outcome from formulas. It measures nothing.

    By default memory and work are divided evenly among the ranks, and communication takes no time.

    Args:
        peak: peak memory of a rank in bytes.
        seconds: time of one pass.
        dies: returns an outcome that replaces the computed one, or None.
        dry_run_factor: ratio of the predicted to the computed peak.
    """

    has_quick_runs = False
    """Runs without timed passes have a bound of the peak, as those of a worker often have."""

    def __init__(
        self,
        peak: Formula = lambda t: 1.05 * floor_bytes(t.workload) / t.world_size,
        seconds: Formula = lambda t: attention_flops(t.workload) / FLOPS_PER_S / t.world_size,
        dies: Callable[[Trial], Outcome | None] = lambda t: None,
        dry_run_factor: Formula = lambda t: 1.0,
    ) -> None:
        self._dry_run_factor = dry_run_factor
        self._peak, self._seconds, self._dies = peak, seconds, dies
        self.ran: list[Trial] = []

    @override
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        return Catalogue(implementations={}, devices={"cpu": DeviceInfo(name="simulated")})

    def check(self, trials: Sequence[Trial]) -> None:
        """Accept every trial."""

    def dry_run(
        self,
        trials: Sequence[Trial],
        limit: float = DRY_RUN_LIMIT_S,
        capability: tuple[int, int] | None = None,
    ) -> list[DryRunEstimate]:
        """Predict by the formulas, times `dry_run_factor`."""
        return [
            DryRunEstimate(
                peak_bytes=int(self._dry_run_factor(t) * self._peak(t)),
                flops=attention_flops(t.workload) / t.world_size,
                floor_bytes=floor_bytes(t.workload),
            )
            for t in trials
        ]

    @override
    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        self.ran.append(trial)
        on_phase("forward", "")
        return LaunchResult(self._dies(trial) or self._outcome(trial))

    def _outcome(self, trial: Trial) -> Outcome:
        peak, seconds = self._peak(trial), self._seconds(trial)
        tokens, ranks = trial.workload.seq_len, trial.world_size
        facts = {"launcher": "simulated"}
        if tokens < ranks:
            reason = f"{tokens} tokens are too few for {ranks} ranks"
            return Outcome(status="unsupported", reason=reason, phase="start", facts=facts)
        if trial.memory_budget and peak > trial.memory_budget:
            return Outcome(status="oom", reason="simulated", phase="forward", facts=facts)
        if trial.time_budget and seconds > trial.time_budget:
            return Outcome(status="timeout", reason="simulated", phase="forward", facts=facts)
        peak_name = "peak_bound" if self.has_quick_runs and not trial.repeats else "peak"
        measured = [(peak_name, "B", peak), ("pass_time", "s", seconds)]
        if trial.repeats:
            measured.append(("time", "s", seconds))
        measurements = tuple(
            Measurement(name=name, unit=unit, samples=(value,), rank=rank)
            for rank in range(ranks)
            for name, unit, value in (
                *measured, ("own_tokens", "1", tokens // ranks + (rank < tokens % ranks)),
            )
        )  # fmt: skip
        return Outcome(status="ok", measurements=measurements, facts=facts)
