"""The figures of a report, computed a second time: plain Python on records.

No figure here comes from the package's analysis or reports: medians, intervals and floors
are written out again, so that an error in one of the two shows where they differ. Labels are the
package's; `tests/analysis/test_short_labels.py` tests them.

Book       everything of one set of records
Swept      one measured trial, its rounds together
Search     one search for the longest length
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import median
from typing import Any

from longseq_bench.analysis.labels import find_short_labels
from longseq_bench.core.model import Record, Workload

WORST_FIRST = (
    "wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok",
)  # fmt: skip
LIMITS = {
    "oom": "memory", "timeout": "time", "hang": "hang", "limit": "kernel limit",
    "wrong": "numerics", "crashed": "crash", "error": "error", "unsupported": "unsupported",
}  # fmt: skip
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics: each end leaves out the largest k with
    P(heads <= k) <= 1/40 for one throw of a fair coin per sample."""
    ordered, n = sorted(samples), len(samples)
    rare = [
        k for k in range(n // 2) if 40 * sum(math.comb(n, i) for i in range(k + 1)) <= 2**n
    ]  # fmt: skip
    k = max(rare, default=0)
    return ordered[k], ordered[n - 1 - k]


def floor_a_token(w: Workload) -> int:
    """q and the output of each query head, k and v of each key head; in training also their
    gradients and a float32 per head."""
    element = ELEMENT[w.dtype]
    tensors = (w.heads + w.heads + w.kv_heads + w.kv_heads) * w.head_dim * element
    return w.batch * (tensors + (tensors + 4 * w.heads if w.mode == "train" else 0))


def dense_flops(w: Workload) -> int:
    """Two matrix products, in training five more, of two FLOPs per pair and element."""
    n = w.seq_len
    pairs = n * (n + 1) // 2 if w.causal else n * n
    return 2 * (7 if w.mode == "train" else 2) * pairs * w.head_dim * w.heads * w.batch


def score_bytes(w: Workload) -> int:
    """Peak of standard attention: two score matrices and the floor; in training three score
    matrices, three tensors as large as q and three as large as k."""
    n, element = w.seq_len, ELEMENT[w.dtype]
    matrix, mask = w.batch * w.heads * n * n * element, n * n if w.causal else 0
    if w.mode == "train":
        tensors = 3 * w.batch * (w.heads + w.kv_heads) * n * w.head_dim * element
        return tensors + 3 * matrix + mask
    return floor_a_token(w) * n + 2 * matrix + mask


def largest(records: Iterable[Record], name: str) -> float | None:
    """The largest sample of all ranks; NaN if one is NaN."""
    found = [s for r in records for s in r.outcome.samples(name)]
    return math.nan if any(s != s for s in found) else max(found, default=None)


def rounded(value: float | None) -> int | None:
    """A rounded size; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value)


def on_rank(record: Record, name: str, rank: int) -> list[float]:
    known = record.outcome.measurements
    return [s for m in known if (m.name, m.rank) == (name, rank) for s in m.samples]


def iterations(records: Iterable[Record], name: str) -> list[float]:
    """The slowest rank of each pass that every rank finished; empty if one is not finite."""
    found: list[float] = []
    for record in records:
        ranks = [on_rank(record, name, rank) for rank in range(record.trial.world_size)]
        found += [max(each) for each in zip(*ranks, strict=False)]
    return found if all(math.isfinite(s) for s in found) else []


def each_rank(
    records: Sequence[Record], name: str, of: Callable[[list[float]], float]
) -> list[float | None] | None:
    """A value per rank; None if no rank has one."""
    ranks = range(records[0].trial.world_size) if records else ()
    samples = [[s for r in records for s in on_rank(r, name, rank)] for rank in ranks]
    return [of(some) if some else None for some in samples] if any(samples) else None


def over(one: float | None, other: float | None) -> float | None:
    """A ratio; None if either is missing or the denominator is 0."""
    return None if one is None or not other else one / other


class Trials:
    label: str
    alone: Any = None
    """The same trial on one rank, if it ran."""

    def __init__(self, records: Sequence[Record]) -> None:
        worst = min(records, key=lambda r: WORST_FIRST.index(r.outcome.status))
        self.records, self.outcome, self.trial = records, worst.outcome, worst.trial
        self.at = records
        self.workload, self.ranks = worst.trial.workload, worst.trial.world_size
        self.implementation, self.options = worst.trial.implementation, worst.trial.options
        self.fingerprint = worst.environment.fingerprint

    def largest(self, name: str) -> float | None:
        """The largest sample of a measurement over ranks and rounds; of a search at its maximum."""
        return largest(self.at, name)

    @property
    def name(self) -> str:
        """The label, with the number of ranks if there are several."""
        return f"{self.label} ×{self.ranks}" if self.ranks > 1 else self.label

    @property
    def workload_key(self) -> tuple[Any, ...]:
        """Equal for the same workload on the same machine, at any length."""
        shape = tuple(sorted(self.workload.model_dump(exclude={"seq_len"}).items()))
        return self.fingerprint, self.trial.device, self.trial.threads, shape

    @property
    def group(self) -> tuple[Any, ...]:
        """Equal for rows of one table."""
        t = self.trial
        return (*self.workload_key, t.memory_budget, t.time_budget, t.fit_only)

    @property
    def but_ranks(self) -> tuple[Any, ...]:
        """Equal for trials that differ only in length and ranks."""
        t = self.trial
        return (*self.group, t.keep, t.allocator, self.implementation, str(self.options))


class Swept(Trials):
    """One measured trial; its rounds are merged. A trial that failed in one round has no time."""

    standard: tuple[int, str]
    speed: float | None = None

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(records)
        self.tokens, self.status = self.workload.seq_len, self.outcome.status
        self.ok = self.status == "ok"
        timed = records if self.ok else []
        self.times, self.computing = (iterations(timed, n) for n in ("time", "compute_time"))
        self.communicating = iterations(timed, "communication_time")
        self.planning = iterations(records, "plan_time")
        self.time, self.ends = middle(self.times), ends(self.times)
        self.peak = rounded(largest(records, "peak"))
        self.rank_peaks = each_rank(records, "peak", max)
        self.rank_times = each_rank(timed, "time", median)
        self.imbalance = uneven(self.rank_peaks)

    @property
    def sparse(self) -> bool:
        """Whether the pattern skips pairs of dense attention."""
        kept = self.largest("density_achieved")
        return kept is not None and kept < 1

    @property
    def pairs_seen(self) -> float | None:
        """The share of the pairs of dense attention, by FLOPs without a module's projections."""
        flops, dense = self.largest("flops"), dense_flops(self.workload)
        if flops is None or self.largest("density_achieved") is None:
            return None
        return (flops - ((self.largest("dense_flops") or dense) - dense)) / dense

    @property
    def exposed(self) -> float | None:
        """The share of the time that communication adds."""
        compute = middle(self.computing)
        return max(0.0, 1 - compute / self.time) if self.time and compute is not None else None

    @property
    def exposed_ends(self) -> tuple[Any, Any]:
        """The lowest and the highest exposed share that the intervals allow."""
        if self.ends is None or len(self.computing) < 2:
            return None, None
        low, high = interval(self.computing)
        return max(0.0, 1 - high / self.ends[0]), max(0.0, 1 - low / self.ends[1])

    @property
    def speedup(self) -> float | None:
        """The time on one rank divided by the time."""
        return over(self.alone.time, self.time) if self.alone and self.time else None

    @property
    def speedup_ends(self) -> tuple[float | None, float | None]:
        """The lowest and the highest speed-up that the intervals allow."""
        if not (self.speedup and self.ends and self.alone.ends):
            return None, None
        return self.alone.ends[0] / self.ends[1], self.alone.ends[1] / self.ends[0]

    @cached_property
    def dense(self) -> tuple[str, float, tuple[float, float] | None] | None:
        """The source of the dense time, its median, and its interval."""
        found: dict[str, list[float]] = defaultdict(list)
        for record in self.records if self.ok else []:
            if times := iterations([record], "dense_time"):
                found[str(record.outcome.facts.get("dense", "not recorded"))] += times
        if not found:
            return None
        source = "measured" if "measured" in found else next(iter(found))
        return source, median(found[source]), ends(found[source])

    @property
    def ideal(self) -> tuple[float, float | None, float | None] | None:
        """Dense time times the share of work divided by the time, with its interval."""
        dense = self.largest("dense_flops") or dense_flops(self.workload)
        work = over(self.largest("flops"), dense)
        if self.dense is None or work is None or not self.time:
            return None
        _, dense, interval_of_dense = self.dense
        share = dense * work / self.time
        if interval_of_dense is None or self.ends is None:
            return share, None, None
        low, high = interval_of_dense
        return share, low * work / self.ends[1], high * work / self.ends[0]

    @property
    def saving(self) -> float | None:
        """The peak of standard attention divided by the peak, on one rank."""
        return over(self.standard[0], self.peak) if self.ok and self.ranks == 1 else None


def pass_seconds(record: Record) -> float | None:
    """The median of timed passes; of a search's one pass, if its heap was the usual one."""
    timed = [m.samples for m in record.outcome.measurements if m.name == "time"]
    if timed:
        return median([max(of_ranks) for of_ranks in zip(*timed, strict=True)])
    bound = [m for m in record.outcome.measurements if m.name == "peak_bound"]
    return largest([record], "pass_time") if bound or record.trial.device == "cuda" else None


class Search(Trials):
    """One search for the longest length: the bracket of its steps."""

    memory_alone: int | None = None

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(records)
        lengths = {r.trial.workload.seq_len for r in records}
        bad = {r.trial.workload.seq_len for r in records if r.outcome.status != "ok"}
        self.tokens = max(lengths - bad, default=0)
        self.failed = min((n for n in lengths if n > self.tokens), default=None)
        failures = [r.outcome for r in records if r.trial.workload.seq_len == self.failed]
        worst = min(failures, key=lambda o: WORST_FIRST.index(o.status), default=None)
        self.at = [r for r in records if r.trial.workload.seq_len == self.tokens]
        every = [t for r in self.at if (t := pass_seconds(r)) is not None]
        self.time = median(every) if every else None
        end = "ceiling" if len(self.at) > 1 else "unfinished"
        confirmed = [r.predicted_tokens or 0 for r in self.at if r.purpose == "confirm"]
        is_open = self.failed is None or self.failed > 1.16 * max(confirmed, default=0)
        by_time = self.trial.time_budget and is_open and max(confirmed, default=0) > self.tokens
        self.limited_by = "time" if by_time else LIMITS[worst.status] if worst else end
        self.phase = worst.phase if worst else None
        self.peak = rounded(largest(self.at, "peak"))
        self.rank_peaks = each_rank(self.at, "peak", max)
        self.imbalance = uneven(self.rank_peaks)
        self.runs = sum(max(1, r.processes // self.ranks) for r in records)
        self.confirmations = max(len(self.at) - 1, 0)
        predicted = [r.predicted_tokens for r in records if r.purpose != "confirm"]
        self.predicted = next((n for n in predicted if n is not None), None)
        own = self.trial.memory_budget
        budget, a_token = own and own * self.ranks, floor_a_token(self.workload)
        self.floor_tokens = budget and budget // a_token
        self.of_floor = budget and self.tokens * a_token / budget

    @property
    def expected(self) -> int | None:
        """The maximum on one rank times the ranks, if memory limited both."""
        if self.alone is None or {self.alone.limited_by, self.limited_by} != {"memory"}:
            return None
        return self.alone.tokens * self.ranks or None


class Book:
    """All figures of a set of records: `swept`, `searches`."""

    def __init__(self, records: Sequence[Record], baseline: str | None = None) -> None:
        def chosen(*purposes: str) -> list[Record]:
            return [r for r in records if r.purpose in purposes]

        self.swept = [Swept(some) for some in together(chosen("measure"), "round", "seed")]
        steps = ("round", "seed", "repeats", "time_cap")
        found = together(chosen("probe", "edge", "confirm"), *steps, length=False)
        self.searches = [Search(some) for some in found]
        set_labels([*self.swept, *self.searches])
        self._relate()
        if baseline:
            for row in self.swept:
                row.speed = self._against(row, baseline)

    def _relate(self) -> None:
        alone = [r for r in self.swept if r.ranks == 1 and r.time is not None]
        standard = [r for r in self.swept if is_standard(r)]
        for row in self.swept:
            same = (r for r in alone if r.tokens == row.tokens and r.but_ranks == row.but_ranks)
            row.alone = next(same, None)
            peaks = [
                r.peak
                for r in standard
                if r.tokens == row.tokens and r.workload_key == row.workload_key
            ]
            computed = (score_bytes(row.workload), "computed")
            row.standard = (peaks[0] or 0, "measured") if peaks else computed
        for one in self.searches:
            ranks = (s for s in self.searches if s.ranks == 1 and s.but_ranks == one.but_ranks)
            one.alone = next(ranks, None)
            lean = [s.tokens for s in self.searches if holds_memory(s) and but_time(s, one)]
            one.memory_alone = lean[-1] if lean and not one.trial.fit_only else None

    def _against(self, row: Swept, base: str) -> float | None:
        times: dict[int, float] = {}
        labels = {r.label for r in self.swept}
        for other in self.swept:
            named = other.label == base if base in labels else other.implementation == base
            same = (other.tokens, other.workload_key) == (row.tokens, row.workload_key)
            if named and other.time is not None and same:
                times.setdefault(other.ranks, other.time)
        return times.get(row.ranks, times[min(times)]) / row.time if row.time and times else None


def holds_memory(one: Search) -> bool:
    """Whether a fit-only search found a bracket."""
    return bool(one.trial.fit_only and one.tokens and one.failed)


def but_time(one: Search, other: Search) -> bool:
    """Whether two searches differ only in time budget and fit_only."""
    keys = [
        (s.workload_key, s.ranks, s.trial.memory_budget, s.trial.keep, s.trial.allocator,
         s.implementation, str(s.options))
        for s in (one, other)
    ]  # fmt: skip
    return keys[0] == keys[1]


def is_standard(row: Swept) -> bool:
    """Whether a row is a full pass of standard attention on one rank."""
    ran = row.status in ("ok", "timeout") and row.peak is not None and row.ranks == 1
    return ran and row.implementation == "dense" and row.trial.keep == "all"


def together(records: Iterable[Record], *but: str, length: bool = True) -> list[list[Record]]:
    """Records grouped by environment and by all fields except some, in file order."""
    found: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        trial = record.trial.model_dump(exclude=set(but))
        if not length:
            del trial["workload"]["seq_len"]
        trial["options"] = dict(sorted(trial["options"].items()))
        found[str(trial), record.environment.fingerprint].append(record)
    return list(found.values())


def by(same: Callable[[Any], Any], items: Iterable[Any]) -> list[list[Any]]:
    """Items grouped by a key, in order of first appearance."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[same(item)].append(item)
    return list(found.values())


def set_labels(trials: Sequence[Trials]) -> None:
    settings = [one.trial.replace(options=one.options) for one in trials]
    for one, label in zip(trials, find_short_labels(settings), strict=True):
        one.label = label


def middle(samples: Sequence[float]) -> float | None:
    return median(samples) if samples else None


def ends(samples: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the median; a single sample has none."""
    return interval(samples) if len(samples) > 1 else None


def uneven(peaks: Sequence[float | None] | None) -> float | None:
    """The largest value of several ranks divided by the smallest."""
    known = [peak for peak in peaks or () if peak]
    if len(known) < 2 or len(known) < len(peaks or ()):
        return None
    return max(known) / min(known)
