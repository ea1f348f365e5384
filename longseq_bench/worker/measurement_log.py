"""What a trial has seen of itself so far, on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longseq_bench.core.model import Measurement, Outcome


@dataclass
class MeasurementLog:
    """Measurements and facts gathered so far, kept whatever happens next.

    pass_s: seconds of the pass under the budget, of the slowest rank.
    slowest: of each timed pass, the slowest rank's seconds.
    exact: whether the pass under the budget had its peak taken exactly, which slows it down.
    """

    rank: int = 0
    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    own_pass_s: float = 0.0
    pass_s: float = 0.0
    slowest: list[float] = field(default_factory=list)
    exact: bool = False

    def add(self, name: str, unit: str, *samples: float) -> None:
        """Samples of this rank."""
        made = Measurement(name=name, unit=unit, samples=tuple(samples), rank=self.rank)
        self.measurements.append(made)

    def extend(self, measurements: Iterable[Measurement]) -> None:
        """What a meter saw on this rank."""
        self.measurements += [replace(m, rank=self.rank) for m in measurements]

    def merge(self, later: MeasurementLog) -> None:
        """Add what was noted apart."""
        self.measurements += later.measurements
        self.facts |= later.facts
        self.own_pass_s, self.pass_s = later.own_pass_s, later.pass_s

    def attach_to(self, outcome: Outcome) -> Outcome:
        """The outcome with all of it."""
        return outcome.model_copy(
            update={
                "measurements": (*outcome.measurements, *self.measurements),
                "facts": {**self.facts, **outcome.facts},
            }
        )


def samples_of(measurements: Sequence[Measurement], name: str) -> list[float]:
    """All samples of that name."""
    return [s for m in measurements if m.name == name for s in m.samples]
