"""Measurements of several runs of one trial, merged over rounds and ranks.

An iteration takes as long as its slowest rank, so an iteration without a sample of every rank has
no time. Sizes are those of the largest rank; the figure of each rank is kept as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from longseq_bench.core.model import Measurement, Record, Status

SEVERITY: tuple[Status, ...] = (
    "wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok",
)  # fmt: skip
"""Worst first: runs of one trial that end differently are reported by the worst status."""

ByRank = Mapping[int, Sequence[float]]
"""Samples of one quantity in one run, by rank."""


@dataclass(frozen=True)
class Runs:
    """Runs of one trial, and the samples of each measurement by rank: a mapping for each run."""

    records: Sequence[Record]
    measured: Mapping[str, Sequence[ByRank]]
    _iterations: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Runs:
        """Index the measurements of some records."""
        measured: dict[str, list[dict[int, Sequence[float]]]] = {}
        for i, record in enumerate(records):
            for one in record.outcome.measurements:
                if one.name not in measured:
                    measured[one.name] = [{} for _ in records]
                _add(measured[one.name][i], one)
        return cls(records, measured)

    def iterations(self, name: str) -> list[float]:
        """Return one sample per iteration, of the slowest rank; none if any is not finite."""
        found = self._iterations.get(name)
        if found is None:
            each = zip(self.records, self.measured.get(name, ()), strict=False)
            found = [sample for record, ranks in each for sample in slowest(record, ranks)]
            self._iterations[name] = found = found if _are_finite(found) else []
        return found

    def median(self, name: str) -> float | None:
        """Return the median over iterations."""
        samples = self.iterations(name)
        return median(samples) if samples else None

    def largest(self, name: str) -> float | None:
        """Return the largest sample; NaN if any sample is NaN, which max() may hide."""
        runs = self.measured.get(name, ())
        known = [one for ranks in runs for samples in ranks.values() for one in samples]
        if not _are_finite(known) and any(map(math.isnan, known)):
            return math.nan
        return max(known, default=None)

    def largest_size(self, name: str) -> int | None:
        """Return the largest sample as a whole number; None where it is not finite."""
        return _to_int(self.largest(name))

    def each_rank(
        self, name: str, merge: Callable[[list[float]], float]
    ) -> list[float | None] | None:
        """Return a figure per rank in their order; None for a rank without samples.

        The list itself is None where no rank has any sample.
        """
        of_ranks: dict[int, list[float]] = defaultdict(list)
        for ranks in self.measured.get(name, ()):
            for rank, samples in ranks.items():
                of_ranks[rank] += samples
        if not any(of_ranks.values()):
            return None
        every = map(of_ranks.get, range(self.records[0].trial.world_size))
        return [merge(samples) if samples else None for samples in every]

    def each_rank_size(self, name: str) -> list[int | None] | None:
        """Return the largest sample of each rank as a whole number."""
        sizes = self.each_rank(name, max)
        return None if sizes is None else [_to_int(size) for size in sizes]

    def byte_counts(self) -> list[tuple[int, int, int]]:
        """Return (rank, bytes counted, bytes by formula) of each round and rank with both."""
        found = []
        names = "bytes_sent", "bytes_formula"
        for counted, stated in zip(*(self.measured.get(name, ()) for name in names), strict=False):
            for rank in sorted(counted.keys() & stated.keys()):
                for one, other in zip(counted[rank], stated[rank], strict=False):
                    if math.isfinite(one) and math.isfinite(other):
                        found.append((rank, round(one), round(other)))
        return found


def per_iteration(record: Record, name: str) -> list[float]:
    """Return one sample per iteration: the largest over ranks, in the measurement's own unit.

    Iterations that not every rank of the trial finished are left out.
    """
    ranks: dict[int, Sequence[float]] = {}
    for one in record.outcome.measurements:
        if one.name == name:
            _add(ranks, one)
    return list(slowest(record, ranks))


def slowest(record: Record, ranks: ByRank) -> Sequence[float]:
    """Return the largest sample over ranks of each iteration that every rank finished."""
    if not ranks or len(ranks) < record.trial.world_size:
        return ()
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    return [max(samples) for samples in zip(*ranks.values(), strict=False)]


def _add(ranks: dict[int, Sequence[float]], one: Measurement) -> None:
    known = ranks.get(one.rank)
    ranks[one.rank] = one.samples if known is None else (*known, *one.samples)


def imbalance(peaks: Sequence[float | None]) -> float | None:
    """Return the largest peak divided by the smallest; None with one rank or if one is unknown."""
    known = [peak for peak in peaks if peak]
    return max(known) / min(known) if len(known) == len(peaks) > 1 else None


def _are_finite(samples: Sequence[float]) -> bool:
    # a finite sum has finite terms; a sum of finite terms may overflow
    return math.isfinite(sum(samples)) or all(map(math.isfinite, samples))


def _to_int(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)
