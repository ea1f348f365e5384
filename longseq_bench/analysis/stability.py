"""Judge whether a row was measured on a steady machine. This is the one rule for all reports.

load      other work ran: the load average at the start of a round is more than LOAD_FACTOR times
          the cores, and times the threads that these trials keep busy themselves.
CPU time  passes waited for a core: on one rank of a CPU, which only computes, they had less than
          CPU_SHARE of their time on one. An own function is left out: it may wait on purpose.
drift     passes became slower or faster: the medians of the first and the second half differ by
          DRIFT or more, and their 95 % intervals are apart.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.core.model import Record
from longseq_bench.core.stats import median_interval

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
