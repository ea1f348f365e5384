"""Measurements of several runs of one trial, merged over rounds and ranks.

An iteration takes as long as its slowest rank, so an iteration without a sample of every rank has
no time. Sizes are those of the largest rank; the figure of each rank is kept as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from longseq_bench.core.model import Measurement, Record, Status
from longseq_bench.core.stats import median_interval

SEVERITY: tuple[Status, ...] = (
    "wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok",
)  # fmt: skip
"""Worst first: runs of one trial that end differently are reported by the worst status."""

Samples = Sequence[float]
ByRank = Mapping[int, Samples]
"""Samples of one quantity in one run, by rank."""

Interval = tuple[float, float, float] | tuple[None, None, None]
"""Lower bound, median and upper bound; None without samples."""


class Runs:
    """Runs of one trial.

    measured: of each name, the measurements in order, with the index of their run.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.measured: defaultdict[str, list[tuple[int, Measurement]]] = defaultdict(list)
        for i, record in enumerate(records):
            for one in record.outcome.measurements:
                self.measured[one.name].append((i, one))
        self._world_size = records[0].trial.world_size if records else 1
        self._intervals: dict[str, Interval] = {}

    def by_run(self, name: str) -> list[ByRank]:
        """Return the samples of each run."""
        runs: list[dict[int, Samples]] = [{} for _ in self.records]
        for i, one in self.measured.get(name, ()):
            _add(runs[i], one)
        return [*runs]

    def iterations(self, name: str) -> list[float]:
        """Return one sample per iteration, of the slowest rank; none if any is not finite."""
        found = [
            sample for ranks in self.by_run(name) for sample in slowest(ranks, self._world_size)
        ]
        return found if are_finite(found) else []

    def interval(self, name: str) -> Interval:
        """Return the 95 % interval of the median over iterations."""
        if name not in self._intervals:
            samples = self.iterations(name)
            self._intervals[name] = median_interval(samples) if samples else (None, None, None)
        return self._intervals[name]

    def median(self, name: str) -> float | None:
        """Return the median over iterations."""
        return self.interval(name)[1]

    def largest(self, name: str) -> float | None:
        """Return the largest sample; NaN if any sample is NaN, which max() may hide."""
        known = [sample for _, one in self.measured.get(name, ()) for sample in one.samples]
        if any(map(math.isnan, known)):
            return math.nan
        return max(known, default=None)

    def largest_size(self, name: str) -> int | None:
        """Return the largest sample as a whole number; None where it is not finite."""
        return _to_int(self.largest(name))

    def each_rank(self, name: str, merge: Callable[[Samples], float]) -> list[float | None] | None:
        """Return a figure per rank in their order; None for a rank without samples.

        The list itself is None where no rank has any sample.
        """
        of_ranks: dict[int, Samples] = {}
        for _, one in self.measured.get(name, ()):
            _add(of_ranks, one)
        if not any(of_ranks.values()):
            return None
        every = map(of_ranks.get, range(self._world_size))
        return [merge(samples) if samples else None for samples in every]

    def each_rank_size(self, name: str) -> list[int | None] | None:
        """Return the largest sample of each rank as a whole number."""
        sizes = self.each_rank(name, max)
        return None if sizes is None else [_to_int(size) for size in sizes]


def per_iteration(record: Record, name: str) -> list[float]:
    """Return one sample per iteration: the largest over ranks, in the measurement's own unit.

    Iterations that not every rank of the trial finished are left out.
    """
    ranks: dict[int, Samples] = {}
    for one in record.outcome.measurements:
        if one.name == name:
            _add(ranks, one)
    return list(slowest(ranks, record.trial.world_size))


def slowest(ranks: ByRank, world_size: int) -> Samples:
    """Return the largest sample over ranks of each iteration that every rank finished."""
    if not ranks or len(ranks) < world_size:
        return ()
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    return list(map(max, *ranks.values()))


def _add(ranks: dict[int, Samples], one: Measurement) -> None:
    known = ranks.get(one.rank)
    ranks[one.rank] = [*known, *one.samples] if known else one.samples


def imbalance(peaks: Sequence[float | None]) -> float | None:
    """Return the largest peak divided by the smallest; None with one rank or if one is unknown."""
    known = [peak for peak in peaks if peak]
    return max(known) / min(known) if len(known) == len(peaks) > 1 else None


def largest_over_mean(shares: Sequence[float | None]) -> float | None:
    """Return the largest share over their mean; None with one rank or if one is unknown."""
    known = [share for share in shares if share]
    return max(known) * len(known) / sum(known) if len(known) == len(shares) > 1 else None


def are_finite(samples: Samples) -> bool:
    """Return whether every sample is finite."""
    # a finite sum has finite terms; a sum of finite terms may overflow
    return math.isfinite(sum(samples)) or all(map(math.isfinite, samples))


def _to_int(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, both in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
