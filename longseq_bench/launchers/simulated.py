"""No process at all: outcomes by formula, for tests of plans and searches, and for dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longseq_bench.catalogue import Catalogue, DeviceInfo
from longseq_bench.cost import attention_flops, floor_bytes
from longseq_bench.launchers.base import Launched, Launcher, OnPhase
from longseq_bench.model import Measurement, Outcome, Trial

Formula = Callable[[Trial], float]
FLOPS_PER_S = 1e11


class Simulated(Launcher):
    """Says what a machine would that follows the formulas; it measures nothing.

    peak: bytes of a trial.  seconds: of one pass.  dies: an outcome that comes before either.
    """

    def __init__(
        self,
        peak: Formula = lambda t: 1.05 * floor_bytes(t.workload),
        seconds: Formula = lambda t: attention_flops(t.workload) / FLOPS_PER_S,
        dies: Callable[[Trial], Outcome | None] = lambda t: None,
    ) -> None:
        self._peak, self._seconds, self._dies = peak, seconds, dies
        self.ran: list[Trial] = []

    def catalogue(self) -> Catalogue:
        return Catalogue(implementations={}, devices={"cpu": DeviceInfo(name="simulated")})

    def check(self, trials: Sequence[Trial]) -> None:
        """A formula takes any options."""

    def run(self, trial: Trial, on_phase: OnPhase) -> Launched:
        self.ran.append(trial)
        on_phase("forward", "")
        return Launched(self._dies(trial) or self._outcome(trial))

    def _outcome(self, trial: Trial) -> Outcome:
        peak, seconds = self._peak(trial), self._seconds(trial)
        facts = {"launcher": "simulated"}
        if trial.memory_budget and peak > trial.memory_budget:
            return Outcome(status="oom", reason="simulated", phase="forward", facts=facts)
        if trial.time_budget and seconds > trial.time_budget:
            return Outcome(status="timeout", reason="simulated", phase="forward", facts=facts)
        measured = [("peak", "B", peak), ("pass_time", "s", seconds)]
        if trial.repeats:
            measured.append(("time", "s", seconds))
        return Outcome(
            status="ok",
            measurements=tuple(Measurement(name=n, unit=u, samples=(x,)) for n, u, x in measured),
            facts=facts,
        )
