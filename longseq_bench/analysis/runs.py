"""Measurements of several runs of one trial, merged over rounds and ranks.

An iteration takes as long as its slowest rank, so an iteration without a sample of every rank has
no time. Sizes are those of the largest rank; the figure of each rank is kept as well. The end
of this file judges whether the machine was steady.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import TypeVar

from longseq_bench.core.model import Record, Status
from longseq_bench.core.stats import median_interval

SEVERITY: tuple[Status, ...] = (
    *("wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok"),
)
"""Worst first: runs of one trial that end differently are reported by the worst status."""

Samples = Sequence[float]
ByRank = Mapping[int, Samples]
"""Samples of one quantity in one run, by rank."""

Interval = tuple[float, float, float] | tuple[None, None, None]
"""Lower bound, median and upper bound; None without samples."""


class Runs:
    """Runs of one trial, in the order of their start.

    measured: names of what any run measured.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=attrgetter("started_at", "trial.round"))
        self._by_run: dict[str, list[dict[int, Samples]]] = {}
        for i, record in enumerate(self.records):
            for one in record.outcome.measurements:
                of_rank = self._by_run.setdefault(one.name, [{} for _ in self.records])[i]
                of_rank[one.rank] = (*of_rank.get(one.rank, ()), *one.samples)
        self.measured = self._by_run.keys()
        self._world_size = self.records[0].trial.world_size if self.records else 1

    def by_run(self, name: str) -> Sequence[ByRank]:
        """Return the samples of each run."""
        return self._by_run.get(name) or [{}] * len(self.records)

    def iterations(self, name: str) -> Samples:
        """Return one sample per iteration, of the slowest rank."""
        runs = (slowest(ranks, self._world_size) for ranks in self.by_run(name))
        return list(chain.from_iterable(runs))

    def interval(self, name: str) -> Interval:
        """Return the 95 % interval of the median over iterations."""
        samples = self.iterations(name)
        return median_interval(samples) if samples else (None, None, None)

    def median(self, name: str) -> float | None:
        """Return the median over iterations."""
        return self.interval(name)[1]

    def largest(self, name: str) -> float | None:
        """Return the largest sample."""
        runs = self.by_run(name)
        return max((s for ranks in runs for some in ranks.values() for s in some), default=None)

    def largest_size(self, name: str) -> int | None:
        """Return the largest sample as a whole number; None where it is not finite."""
        return _to_int(self.largest(name))

    def each_rank(self, name: str, merge: Callable[[Samples], float]) -> list[float | None] | None:
        """Return a figure per rank in their order; None for a rank without samples.

        The list itself is None where no rank has any sample.
        """
        if name not in self.measured:
            return None
        runs = self.by_run(name)
        ranks = [[s for run in runs for s in run.get(i, ())] for i in range(self._world_size)]
        return [merge(samples) if samples else None for samples in ranks] if any(ranks) else None

    def each_rank_size(self, name: str) -> list[int | None] | None:
        """Return the largest sample of each rank as a whole number."""
        sizes = self.each_rank(name, max)
        return None if sizes is None else [_to_int(size) for size in sizes]


def per_iteration(record: Record, name: str) -> Samples:
    """Return one sample per iteration of one run, in the measurement's own unit."""
    return Runs([record]).iterations(name)


def pass_seconds(record: Record) -> float | None:
    """Return the seconds of a pass on its slowest rank; None where only a slower pass was timed.

    The median of timed passes, else the pass of a search that ran with the usual heap: exact
    accounting of memory is slower.
    """
    if times := per_iteration(record, "time"):
        return median(times)
    usual_heap = record.trial.device == "cuda" or record.outcome.samples("peak_bound")
    return record.outcome.largest("pass_time") if usual_heap else None


def slowest(ranks: ByRank, world_size: int) -> Samples:
    """Return the largest sample over ranks of each iteration that every rank finished."""
    if not ranks or len(ranks) < world_size:
        return ()
    return list(map(max, zip(*ranks.values(), strict=False)))


def find_check_limits(records: Iterable[Record]) -> str | None:
    """Return what the check of these runs left out, and a coarser dtype by which it judged."""
    limits: list[str] = []
    for facts in (record.outcome.facts for record in records):
        if isinstance(skipped := facts.get("every_row_skipped"), dict):
            is_some = facts.get("every_row_checked")
            limits.append(f"without {' and '.join(skipped)}" if is_some else "not every row")
        limits += [f"judged as {facts['judged_as']}"] if "judged_as" in facts else []
    return "; ".join(dict.fromkeys(limits)) or None


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
    return all(map(math.isfinite, samples))


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
# throttled the GPU was slowed down during some of the passes (worker/throttling.py).
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


def busy_threads(records: Iterable[Record]) -> Mapping[Hashable, int]:
    """Return the threads that the trials of each machine keep busy, by fingerprint: at most.

    Without a number of threads the ranks of a trial share the cores.
    """
    most: dict[Hashable, int] = {}
    for record in records:
        trial, machine = record.trial, record.environment
        own = max(machine.cores, trial.world_size * (trial.threads or 1)) * (machine.workers or 1)
        most[machine.fingerprint] = max(own, most.get(machine.fingerprint, 0))
    return most


def find_instability(runs: Runs, busy: int) -> str | None:
    """Return why the time of a row is not to be trusted, in a few words; None for a steady one.

    runs: all rounds of a trial that was ok.  busy: threads that trials keep busy (busy_threads).
    """
    reasons, records, times = [], runs.records, runs.iterations("time")
    trial = records[0].trial
    if trial.device == "cpu":
        load = max((r.environment.load[0] for r in records if r.environment.load), default=0.0)
        if load > LOAD_FACTOR * busy:
            reasons.append(f"load {load:.1f} on {records[0].environment.cores} cores")
        pairs = zip(runs.iterations("cpu_time"), times, strict=False)
        shares = [cpu / wall for cpu, wall in pairs if wall > 0]
        is_alone = trial.world_size == 1 and trial.source is None
        if is_alone and shares and (share := median(shares)) < CPU_SHARE:
            reasons.append(f"CPU time is {share:.0%} of the time")
    facts = (r.outcome.facts for r in records)
    reasons += dict.fromkeys(str(of["throttled"]) for of in facts if "throttled" in of)
    if abs(change := _drift(times)) >= DRIFT:
        reasons.append(f"drift {change:+.0%}")
    return "; ".join(reasons) or None


def _drift(times: Sequence[float]) -> float:
    """Return the change of the median from the first to the second half; 0 within the spread."""
    if len(times) < MIN_SAMPLES:
        return 0.0
    half = len(times) // 2
    first, second = median_interval(times[:half]), median_interval(times[half:])
    apart = first[2] < second[0] or second[2] < first[0]
    return second[1] / first[1] - 1 if apart and first[1] > 0 else 0.0
