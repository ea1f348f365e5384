"""Measurements of several runs of one trial, merged over rounds and ranks.

An iteration takes as long as its slowest rank, so an iteration without a sample of every rank has
no time. Sizes are those of the largest rank; the figure of each rank is kept as well. The end
of this file judges whether the machine was steady.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median
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


# ---- whether a row was measured on a steady machine: the one rule for all reports ---------------
# load      other work ran: the load average at the start of a round is more than LOAD_FACTOR times
#           the cores, and times the threads that these trials keep busy themselves.
# CPU time  passes waited for a core: on one rank of a CPU, which only computes, they had less than
#           CPU_SHARE of their time on one. An own function is left out: it may wait on purpose.
# drift     passes became slower or faster: the medians of the first and the second half differ by
#           DRIFT or more, and their 95 % intervals are apart.

LOAD_FACTOR = 2.0
"""Ranks have helper threads (of gloo, of OpenMP). In 557 trials on one and two ranks of an idle
machine (results/xeon2/parallel) they took the load to 1.9 times the cores."""
CPU_SHARE = 0.9
DRIFT = 0.1
MIN_SAMPLES = 12
"""Passes below which no drift is judged: each half needs six for its interval."""
REMEDY = "end other work, let the machine cool down, and run it again with more rounds"

_order = attrgetter("started_at", "trial.round")


def busy_threads(records: Iterable[Record]) -> Mapping[Hashable, int]:
    """Return the threads that the trials of each machine keep busy, by fingerprint: at most.

    Without a number of threads the ranks of a trial share the cores.
    """
    most: dict[Hashable, int] = {}
    for record in records:
        trial, machine = record.trial, record.environment
        own = max(machine.cores, trial.world_size * (trial.threads or 1))
        most[machine.fingerprint] = max(own, most.get(machine.fingerprint, 0))
    return most


def find_instability(records: Sequence[Record], busy: int) -> str | None:
    """Return why the time of a row is not to be trusted, in a few words; None for a steady one.

    records: all rounds of a trial that was ok.  busy: threads that trials keep busy (busy_threads).
    """
    return "; ".join(_reasons(records, busy)) or None


def _reasons(records: Sequence[Record], busy: int) -> Iterator[str]:
    trial = records[0].trial
    if trial.device == "cpu":
        load = max((r.environment.load[0] for r in records if r.environment.load), default=0.0)
        if load > LOAD_FACTOR * busy:
            yield f"load {load:.1f} on {records[0].environment.cores} cores"
        share = _cpu_share(records) if trial.world_size == 1 and trial.source is None else None
        if share is not None and share < CPU_SHARE:
            yield f"CPU time is {share:.0%} of the time"
    in_order = sorted(records, key=_order)
    change = _drift([s for record in in_order for s in per_iteration(record, "time")])
    if abs(change) >= DRIFT:
        yield f"drift {change:+.0%}"


def _cpu_share(records: Sequence[Record]) -> float | None:
    """Return the median share of a pass that it ran on a core; above 1 with several threads."""
    shares = [
        cpu / wall
        for record in records
        for cpu, wall in zip(
            record.outcome.samples("cpu_time"), record.outcome.samples("time"), strict=False
        )
        if wall > 0
    ]
    return median(shares) if shares else None


def _drift(times: Sequence[float]) -> float:
    """Return the change of the median from the first to the second half; 0 within the spread."""
    if len(times) < MIN_SAMPLES:
        return 0.0
    half = len(times) // 2
    first, second = median_interval(times[:half]), median_interval(times[half:])
    apart = first[2] < second[0] or second[2] < first[0]
    return second[1] / first[1] - 1 if apart and first[1] > 0 else 0.0
