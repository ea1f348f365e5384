"""Measurements and facts of a running trial, on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longseq_bench.core.model import Measurement, Outcome


@dataclass
class MeasurementLog:
    """Everything measured so far. It is kept even if the trial fails later.

    own_pass_s: seconds of the pass under the budget on this rank; pass_s: on the slowest rank.
    slowest: seconds of the slowest rank, one for each timed pass.
    exact: if the pass under the budget ran with exact heap accounting, which slows it down.
    compiled: if a rank compiled something in that pass.
    """

    rank: int = 0
    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    own_pass_s: float = 0.0
    pass_s: float = 0.0
    slowest: list[float] = field(default_factory=list)
    exact: bool = False
    compiled: bool = False

    def add(self, name: str, unit: str, *samples: float) -> None:
        """Add samples of this rank."""
        self.measurements.append(Measurement(name=name, unit=unit, samples=samples, rank=self.rank))

    def extend(self, measurements: Iterable[Measurement]) -> None:
        """Add the measurements of a meter as those of this rank."""
        self.measurements += [replace(m, rank=self.rank) for m in measurements]

    def merge(self, other: MeasurementLog) -> None:
        """Add the measurements, the facts and the pass of another log."""
        self.measurements += other.measurements
        self.facts |= other.facts
        self.own_pass_s, self.pass_s = other.own_pass_s, other.pass_s
        self.compiled = other.compiled

    def attach_to(self, outcome: Outcome) -> Outcome:
        """Return the outcome with these measurements and facts added."""
        return outcome.model_copy(
            update={
                "measurements": (*outcome.measurements, *self.measurements),
                "facts": {**self.facts, **outcome.facts},
            }
        )


def samples_of(measurements: Sequence[Measurement], name: str) -> list[float]:
    """Return all samples of the measurements with a name."""
    return [s for m in measurements if m.name == name for s in m.samples]
