"""The figures of a report, computed a second time: plain Python on records.

Nothing here comes from table.py, scaling.py or reports: medians, intervals, floors, fits and labels
are written out again, so that an error in one of the two shows where they differ.

Book       everything of one set of records: `swept`, `searches`, `sparsities`, with their labels
Swept      one measured trial, its rounds together
Search     one search for the longest length
Sparsity   one search for the least sparsity
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from statistics import median
from typing import Any

from longseq_bench.core.model import Record, Trial, Workload
from longseq_bench.core.units import format_bytes, format_seconds

WORST_FIRST = (
    "wrong", "crashed", "error", "hang", "limit", "oom", "timeout", "unsupported", "ok",
)  # fmt: skip
LIMITS = {
    "oom": "memory", "timeout": "time", "hang": "hang", "limit": "kernel limit",
    "wrong": "numerics", "crashed": "crash", "error": "error", "unsupported": "unsupported",
}  # fmt: skip
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Of the median, by order statistics: as many left out at each end as a fair coin, thrown as
    often as there are samples, shows heads or fewer at most once in forty."""
    ordered, n = sorted(samples), len(samples)
    rare = [
        k for k in range(n // 2) if 40 * sum(math.comb(n, i) for i in range(k + 1)) <= 2**n
    ]  # fmt: skip
    k = max(rare, default=0)
    return ordered[k], ordered[n - 1 - k]


def floor_a_token(w: Workload) -> int:
    """q and out of each query head, k and v of each key head; in training the gradients of all four
    and a float32 a head."""
    element = ELEMENT[w.dtype]
    tensors = (w.heads + w.heads + w.kv_heads + w.kv_heads) * w.head_dim * element
    return w.batch * (tensors + (tensors + 4 * w.heads if w.mode == "train" else 0))


def dense_flops(w: Workload) -> int:
    """Two products of matrices, in training five more, of two FLOPs a pair and element."""
    n = w.seq_len
    pairs = n * (n + 1) // 2 if w.causal else n * n
    return 2 * (7 if w.mode == "train" else 2) * pairs * w.head_dim * w.heads * w.batch


def score_bytes(w: Workload) -> int:
    """What standard attention holds at its fullest: two score matrices beside the floor; in
    training three, beside three tensors as large as q and three as large as k."""
    n, element = w.seq_len, ELEMENT[w.dtype]
    matrix, mask = w.batch * w.heads * n * n * element, n * n if w.causal else 0
    if w.mode == "train":
        tensors = 3 * w.batch * (w.heads + w.kv_heads) * n * w.head_dim * element
        return tensors + 3 * matrix + mask
    return floor_a_token(w) * n + 2 * matrix + mask


@cache
def student(free: int) -> float:
    """The 97.5 % point of Student's t: to three digits after the point up to 20 degrees of freedom,
    beyond by 1.96 + 2.4 over them."""
    if free > 20:
        return 1.96 + 2.4 / free
    whole = math.gamma((free + 1) / 2) / (math.sqrt(free * math.pi) * math.gamma(free / 2))

    def below(t: float) -> float:
        steps = 2000
        heights = [(1 + (t * i / steps) ** 2 / free) ** (-(free + 1) / 2) for i in range(steps + 1)]
        return 0.5 + whole * t / steps * (sum(heights) - (heights[0] + heights[-1]) / 2)

    low, high = 1.9, 13.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if below(middle) > 0.975 else (middle, high)
    return round((low + high) / 2, 3)


Exponent = tuple[float, float | None, float | None]


def exponents(columns: Sequence[Sequence[float]], y: Sequence[float]) -> list[Exponent] | None:
    """Least squares with a free constant in one or two columns, by the normal equations, each with
    the ends of its 95 % interval; None where the columns go together."""
    n, k = len(y), len(columns)
    xs = [[x - sum(column) / n for x in column] for column in columns]
    ys = [value - sum(y) / n for value in y]
    products = [[math.fsum(a * b for a, b in zip(p, q, strict=True)) for q in xs] for p in xs]
    with_y = [math.fsum(a * b for a, b in zip(p, ys, strict=True)) for p in xs]
    if k == 1:
        inverse = [[1 / products[0][0]]]
    else:
        (a, b), (_, d) = products
        det = a * d - b * b
        if det <= 1e-12 * max(a * d, 1e-300):
            return None
        inverse = [[d / det, -b / det], [-b / det, a / det]]
    slopes = [sum(i * v for i, v in zip(line, with_y, strict=True)) for line in inverse]
    fitted = [sum(s * x[i] for s, x in zip(slopes, xs, strict=True)) for i in range(n)]
    left = sum((v - f) ** 2 for v, f in zip(ys, fitted, strict=True))
    free = n - k - 1
    if free < 1:
        return [(s, None, None) for s in slopes]
    spread = [student(free) * math.sqrt(left / free * inverse[i][i]) for i in range(k)]
    return [(s, s - w, s + w) for s, w in zip(slopes, spread, strict=True)]


def largest(records: Iterable[Record], name: str) -> float | None:
    """Of all samples of all ranks; not a number where one is not."""
    found = [s for r in records for s in r.outcome.samples(name)]
    return math.nan if any(s != s for s in found) else max(found, default=None)


def whole(value: float | None) -> int | None:
    """Rounded; None for what is no size."""
    return None if value is None or not math.isfinite(value) else round(value)


def on_rank(record: Record, name: str, rank: int) -> list[float]:
    """The samples of one rank."""
    known = record.outcome.measurements
    return [s for m in known if (m.name, m.rank) == (name, rank) for s in m.samples]


def iterations(records: Iterable[Record], name: str) -> list[float]:
    """The slowest rank of each pass that every rank finished; none where one is no number."""
    found: list[float] = []
    for record in records:
        ranks = [on_rank(record, name, rank) for rank in range(record.trial.world_size)]
        found += [max(each) for each in zip(*ranks, strict=False)]
    return found if all(math.isfinite(s) for s in found) else []


def each_rank(
    records: Sequence[Record], name: str, of: Callable[[list[float]], float]
) -> list[float | None] | None:
    """A figure a rank; None where no rank has one."""
    ranks = range(records[0].trial.world_size) if records else ()
    samples = [[s for r in records for s in on_rank(r, name, rank)] for rank in ranks]
    return [of(some) if some else None for some in samples] if any(samples) else None


def over(one: float | None, other: float | None) -> float | None:
    """A ratio; None where either is missing or the lower is 0."""
    return None if one is None or not other else one / other


class Figure:
    """What was run where: `where` it stands in a report, and as what. `label` is set by Book."""

    label: str
    where: str

    def __init__(self, record: Record) -> None:
        """Of one of its records; the others differ in what it is not named by."""
        self.trial: Trial = record.trial
        self.workload = record.trial.workload
        self.environment = record.environment
        self.implementation, self.options = record.trial.implementation, record.trial.options
        self.ranks = record.trial.world_size

    @property
    def name(self) -> str:
        """The label, with the ranks where there are several."""
        return f"{self.label} on {self.ranks} ranks" if self.ranks > 1 else self.label

    @cached_property
    def plain_workload(self) -> tuple[Any, ...]:
        """Machine, device and workload but its length."""
        w = self.workload
        shape = (w.batch, w.heads, w.kv_heads, w.head_dim)
        return (self.environment.fingerprint, self.trial.device, w.mode, w.dtype, w.causal, *shape)

    @cached_property
    def group(self) -> tuple[Any, ...]:
        """Equal for what may stand in one table."""
        t = self.trial
        return (*self.plain_workload, t.memory_budget, t.time_budget, t.threads, t.fit_only)

    @cached_property
    def but_ranks(self) -> tuple[Any, ...]:
        """Equal for what differs in its ranks alone."""
        t = self.trial
        settings = (t.keep, t.allocator, t.implementation, options_text(t.options))
        return (*self.group, *settings)

    @property
    def whole(self) -> bool:
        """Not cut short, and its inputs left alone."""
        return not self.trial.fit_only and self.trial.keep != "nothing"


def options_text(options: dict[str, Any]) -> str:
    """Equal for equal options."""
    return json.dumps({k: options[k] for k in sorted(options)})


class Swept(Figure):
    """One measured trial; its rounds are merged, and what is not ok in one has no time."""

    speedup: float | None = None
    speedup_ends: tuple[float, float] | None = None
    standard: tuple[int, str]

    def __init__(self, records: Sequence[Record]) -> None:
        """Of the records of its rounds."""
        worst = min(records, key=lambda r: WORST_FIRST.index(r.outcome.status))
        super().__init__(worst)
        self.records, self.outcome = records, worst.outcome
        self.largest: dict[str, float | None] = {}
        self.status, self.tokens = worst.outcome.status, self.workload.seq_len
        self.ok = self.status == "ok"
        timed = records if self.ok else []
        self.times, self.computing = (iterations(timed, n) for n in ("time", "compute_time"))
        self.time = median(self.times) if self.times else None
        self.ends = interval(self.times) if len(self.times) > 1 else None
        self.compute = median(self.computing) if self.computing else None
        talking = iterations(timed, "communication_time")
        self.communication = median(talking) if talking else None
        planning = iterations(records, "plan_time")
        self.plan = median(planning) if planning else None
        self.rank_times = each_rank(timed, "time", median)
        self.peak = whole(largest(records, "peak"))
        self.rank_peaks = each_rank(records, "peak", max)
        self.imbalance, self.least_peak = uneven(self.rank_peaks)

    def most(self, name: str) -> float | None:
        """The largest sample of a measurement over ranks and rounds."""
        if name not in self.largest:
            self.largest[name] = largest(self.records, name)
        return self.largest[name]

    @cached_property
    def exposed(self) -> tuple[float, float | None, float | None] | None:
        """The share of the time that communication adds, and between what it lies."""
        if self.time is None or self.compute is None:
            return None
        share = max(0.0, 1 - self.compute / self.time)
        if self.ends is None or len(self.computing) < 2:
            return share, None, None
        low, high = interval(self.computing)
        return share, max(0.0, 1 - high / self.ends[0]), max(0.0, 1 - low / self.ends[1])

    @cached_property
    def tokens_a_second(self) -> float | None:
        """Of all ranks and the whole batch."""
        return over(self.workload.batch * self.tokens, self.time)

    @property
    def floor(self) -> int:
        """Bytes that no exact attention can do without."""
        return floor_a_token(self.workload) * self.tokens

    @cached_property
    def sparse(self) -> bool:
        """Whether anything that dense attention sees is skipped."""
        kept = self.most("density_achieved")
        return kept is not None and kept < 1

    @cached_property
    def pairs_seen(self) -> float | None:
        """The share of dense attention's pairs, by FLOPs; a module's projections see none."""
        flops, dense = self.most("flops"), dense_flops(self.workload)
        if flops is None or self.most("density_achieved") is None:
            return None
        return (flops - ((self.most("dense_flops") or dense) - dense)) / dense

    @cached_property
    def dense(self) -> tuple[str, float, tuple[float, float] | None] | None:
        """Where dense attention's time comes from, its median, and its ends where it has any."""
        found: dict[str, list[float]] = defaultdict(list)
        for record in self.records if self.ok else []:
            times = iterations([record], "dense_time")
            if times:
                found[str(record.outcome.facts.get("dense", "not recorded"))] += times
        if not found:
            return None
        source = "measured" if "measured" in found else next(iter(found))
        times = found[source]
        return source, median(times), interval(times) if len(times) > 1 else None

    @cached_property
    def ideal(self) -> tuple[float, float | None, float | None] | None:
        """Dense time times the density of work over the time, and between what that lies."""
        work = over(self.most("flops"), self.most("dense_flops") or dense_flops(self.workload))
        if self.dense is None or work is None or not self.time:
            return None
        _, middle, ends = self.dense
        if ends is None or self.ends is None:
            return middle * work / self.time, None, None
        low, high = ends[0] * work / self.ends[1], ends[1] * work / self.ends[0]
        return middle * work / self.time, low, high

    @property
    def saving(self) -> float | None:
        """How many times less than standard attention it takes, on one rank."""
        return over(self.standard[0], self.peak) if self.ok and self.ranks == 1 else None

    @property
    def over_dense(self) -> tuple[float, float, float] | None:
        """Dense time over the time: the least, the median and the most possible."""
        if self.dense is None or self.dense[2] is None or self.ends is None or not self.time:
            return None
        (low, high), middle = self.dense[2], self.dense[1]
        return low / self.ends[1], middle / self.time, high / self.ends[0]


def uneven(peaks: Sequence[float | None] | None) -> tuple[float | None, float | None]:
    """The largest over the least of several ranks, and the least."""
    known = [peak for peak in peaks or () if peak]
    if len(known) < 2 or len(known) < len(peaks or ()):
        return None, None
    return max(known) / min(known), min(known)


class Search(Figure):
    """One search for the longest length: the bracket that its steps came to."""

    memory_alone: int | None = None

    def __init__(self, records: Sequence[Record]) -> None:
        """Of its steps."""
        super().__init__(records[0])
        self.records = records
        lengths = {r.trial.workload.seq_len for r in records}
        bad = {r.trial.workload.seq_len for r in records if r.outcome.status != "ok"}
        self.tokens = max(lengths - bad, default=0)
        self.failed = min((n for n in lengths if n > self.tokens), default=None)
        failures = [r.outcome for r in records if r.trial.workload.seq_len == self.failed]
        worst = min(failures, key=lambda o: WORST_FIRST.index(o.status), default=None)
        self.limited_by = LIMITS[worst.status] if worst else "ceiling"
        self.phase = worst.phase if worst else None
        self.at = [r for r in records if r.trial.workload.seq_len == self.tokens]
        self.peak = whole(largest(self.at, "peak"))
        self.rank_peaks = each_rank(self.at, "peak", max)
        self.imbalance, self.least_peak = uneven(self.rank_peaks)
        self.runs = sum(max(1, r.processes // self.ranks) for r in records)
        self.confirmations = max(len(self.at) - 1, 0)
        asked = [r.predicted_tokens for r in records if r.purpose != "confirm"]
        self.predicted = next((n for n in asked if n is not None), None)

    @property
    def budget(self) -> int | None:
        """That of all ranks together."""
        own = self.trial.memory_budget
        return own and own * self.ranks

    @property
    def floor_tokens(self) -> int | None:
        """The most whose floor fits in the budgets of all ranks."""
        return self.budget and self.budget // floor_a_token(self.workload)

    @property
    def of_floor(self) -> float | None:
        """The floor at the maximum over the budget."""
        return self.budget and self.tokens * floor_a_token(self.workload) / self.budget

    @property
    def sparse(self) -> bool:
        """Whether its maximum skipped anything."""
        kept = largest(self.at, "density_achieved")
        return kept is not None and kept < 1


class Sparsity(Figure):
    """One search for the least sparsity with which a length fits."""

    def __init__(self, records: Sequence[Record]) -> None:
        """Of its steps."""
        super().__init__(records[0])
        self.options = {k: v for k, v in records[0].trial.options.items() if k != "sparsity"}
        self.records, self.tokens = records, self.workload.seq_len
        runs = [(float(str(r.trial.options["sparsity"])), r) for r in records]
        bad = {sparsity for sparsity, r in runs if r.outcome.status != "ok"}
        self.least = min({sparsity for sparsity, _ in runs} - bad, default=None)
        denser = [s for s in bad if self.least is None or s < self.least]
        self.too_dense = max(denser, default=None)
        at = [r for sparsity, r in runs if sparsity == self.least]
        failed = [r.outcome.status for sparsity, r in runs if sparsity == self.too_dense]
        failed = [status for status in failed if status != "ok"]
        self.limited_by = LIMITS[failed[-1]] if failed else None
        times = iterations(at, "time")
        self.time = median(times) if times else None
        self.peak = whole(largest(at, "peak"))
        self.confirmations = max(len(at) - 1, 0)


def together(records: Iterable[Record], same: Callable[[Record], Any]) -> list[list[Record]]:
    """Records that are the same, in order of first appearance."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(same(record), []).append(record)
    return list(found.values())


def a_row(record: Record) -> Any:
    """Equal for the rounds of one trial on one machine."""
    trial = record.trial.model_dump_json(exclude={"round", "seed", "options"})
    return trial, options_text(record.trial.options), record.environment.fingerprint


def a_search(record: Record) -> Any:
    """Equal for the steps of one search."""
    steps = {"round", "seed", "repeats", "time_cap", "options", "workload"}
    trial = record.trial.model_dump_json(exclude=steps)
    shape = record.trial.workload.model_dump_json(exclude={"seq_len"})
    options = options_text(record.trial.options)
    return trial, shape, options, record.environment.fingerprint


def a_sparsity(record: Record) -> Any:
    """Equal for the steps of one search for the least sparsity."""
    trial = record.trial.model_dump_json(exclude={"round", "repeats", "options"})
    rest = {k: v for k, v in record.trial.options.items() if k != "sparsity"}
    return trial, options_text(rest), record.environment.fingerprint


class Book:
    """All figures of a set of records, named as a report names them."""

    def __init__(
        self,
        records: Sequence[Record],
        baseline: str | None = None,
        elsewhere: Any = None,
        notes: Sequence[str] = (),
    ) -> None:
        """baseline, elsewhere, notes: as for the report."""
        self.records, self.notes = records, notes
        self.baseline, self.elsewhere = baseline, elsewhere
        purposes = {"measure": a_row, "density": a_sparsity}
        kinds = {kind: [r for r in records if r.purpose == kind] for kind in purposes}
        steps = [r for r in records if r.purpose in ("probe", "edge", "confirm")]
        self.swept = [Swept(some) for some in together(kinds["measure"], a_row)]
        self.searches = [Search(some) for some in together(steps, a_search)]
        self.sparsities = [Sparsity(some) for some in together(kinds["density"], a_sparsity)]
        seen = {r.environment.fingerprint: r.environment for r in records}
        self.environments = seen
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        several = len(seen) > 1
        self.machines = {
            print_: f"{letters[i]} ({e.host})" if several else ""
            for i, (print_, e) in enumerate(seen.items())
        }
        self.option_values: dict[tuple[str, str], set[str]] = {}
        self._name()
        self._scale()
        self._set_standard()
        self._fit()

    def _name(self) -> None:
        both: list[Figure] = [*self.swept, *self.searches]
        self.option_values = option_values(both)
        for one in both:
            one.label = labelled(one.implementation, one.options, self.option_values)
            one.label += settings_text(one.trial)
        own: list[Figure] = [*self.sparsities]
        for one in own:
            one.label = labelled(one.implementation, one.options, option_values(own))
            one.label += settings_text(one.trial)
        for one in [*both, *own]:
            one.where = self.words(one.trial, one.environment.fingerprint)

    def words(self, trial: Trial, fingerprint: str) -> str:
        """A workload, what it ran on and under."""
        w = trial.workload
        keys = f" ({w.kv_heads} for k, v)" if w.kv_heads != w.heads else ""
        said = f"{w.mode}, {w.dtype}, {'causal' if w.causal else 'not causal'}, batch {w.batch}, "
        said += f"{w.heads} heads of {w.head_dim}{keys}, {trial.device}"
        if trial.threads:
            said += f", {trial.threads} thread{'' if trial.threads == 1 else 's'} a rank"
        if trial.memory_budget:
            said += f", {format_bytes(trial.memory_budget)} budget a rank"
        if trial.time_budget:
            said += f", {format_seconds(trial.time_budget)} a pass at most"
        machine = self.machines[fingerprint]
        return said + (f", machine {machine}" if machine else "")

    def label_of(self, trial: Trial) -> str:
        """What a single run is called."""
        if (trial.implementation, options_text(trial.options)) not in self.known:
            return trial.implementation + settings_text(trial)
        named = labelled(trial.implementation, trial.options, self.option_values)
        return named + settings_text(trial)

    @cached_property
    def known(self) -> set[tuple[str, str]]:
        """Every implementation with its options that has a row or a maximum."""
        return {(f.implementation, options_text(f.options)) for f in [*self.swept, *self.searches]}

    def _scale(self) -> None:
        for row in self.swept:
            alone = self.alone(row)
            if alone is None or not row.time:
                continue
            row.speedup = alone.time / row.time
            if row.ends and alone.ends:
                row.speedup_ends = alone.ends[0] / row.ends[1], alone.ends[1] / row.ends[0]

    def alone(self, row: Swept) -> Swept | None:
        """The same on one rank, timed."""
        same = (r for r in self.swept if r.ranks == 1 and r.time is not None)
        return next((r for r in same if same_but_ranks(r, row)), None)

    def alone_of(self, search: Search) -> Search | None:
        """The same search on one rank."""
        same = (s for s in self.searches if s.ranks == 1 and s.but_ranks == search.but_ranks)
        return next(same, None)

    def _set_standard(self) -> None:
        dense = [r for r in self.swept if r.implementation == "dense"]
        for row in self.swept:
            row.standard = next(
                ((r.peak, "measured") for r in dense if is_standard(r, row)),
                (score_bytes(row.workload), "computed"),
            )

    def _fit(self) -> None:
        """The maximum of passes cut short, beside one of whole passes, whatever their time."""
        for search in self.searches:
            same = [
                s.tokens
                for s in self.searches
                if s.trial.fit_only and s.tokens and s.failed and but_time(s) == but_time(search)
            ]
            search.memory_alone = same[-1] if same and not search.trial.fit_only else None

    def groups(self, figures: Iterable[Any]) -> list[list[Any]]:
        """Figures that stand in one table, in order of first appearance."""
        return list(together(figures, lambda figure: figure.group))

    def speeds(self, rows: Sequence[Swept], base: str) -> dict[int, float]:
        """By row: the baseline's time over its own, on as many ranks, else on the fewest."""
        found = {}
        labels = {row.label for row in rows}
        for row in rows:
            times: dict[int, float] = {}
            for other in rows:
                named = other.label == base if base in labels else other.implementation == base
                if named and other.time is not None and same_workload(other, row):
                    times.setdefault(other.ranks, other.time)
            if row.time and times:
                found[id(row)] = times.get(row.ranks, times[min(times)]) / row.time
        return found

    def statuses(self) -> str:
        """How many runs ended how, the most frequent first."""
        counts = Counter(r.outcome.status for r in self.records)
        return ", ".join(f"{n:,} {status}" for status, n in counts.most_common())


def same_workload(one: Swept, other: Swept) -> bool:
    """Of one length and thread count too, whatever the budget."""
    return (
        one.tokens == other.tokens
        and one.trial.threads == other.trial.threads
        and one.plain_workload == other.plain_workload
    )


def same_but_ranks(one: Swept, other: Swept) -> bool:
    """The same trial at the same length, on other ranks perhaps."""
    return one.tokens == other.tokens and one.but_ranks == other.but_ranks


def is_standard(one: Swept, row: Swept) -> bool:
    """Whether one of dense was run whole on the workload of a row."""
    ran = one.status in ("ok", "timeout") and one.peak is not None and one.ranks == 1
    untouched = one.trial.keep == "all" and not one.trial.fit_only
    return ran and untouched and same_workload(one, row)


def but_time(search: Search) -> tuple[Any, ...]:
    """Equal for searches that differ in the time of a pass, or in being cut short."""
    t = search.trial
    settings = (t.keep, t.allocator, t.memory_budget, t.threads, t.world_size)
    return (*search.plain_workload, *settings, t.implementation, options_text(t.options))


def option_values(figures: Iterable[Figure]) -> dict[tuple[str, str], set[str]]:
    """Every value of each option of each implementation."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in figures:
        for name, value in one.options.items():
            values[one.implementation, name].add(written(value))
    return values


def labelled(
    implementation: str, options: dict[str, Any], values: dict[tuple[str, str], set[str]]
) -> str:
    """The implementation with those of its options that are not the same everywhere."""
    told = [f"{n}={written(v)}" for n, v in options.items() if len(values[implementation, n]) > 1]
    return " ".join([implementation, *told])


def written(value: Any) -> str:
    """An option's value."""
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value)
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def settings_text(trial: Trial) -> str:
    """Settings by which a figure is another."""
    said = [
        *["fits only"] * trial.fit_only,
        *["recomputed"] * (trial.keep == "inputs"),
        *["over its inputs"] * (trial.keep == "nothing"),
        *["expandable segments"] * (trial.allocator == "expandable"),
        *["offloaded"] * (trial.options.get("offload", "none") != "none"),
    ]
    return f" ({', '.join(said)})" if said else ""


def per_pass(record: Record, rank: int) -> list[tuple[float, float]]:
    """(bytes sent, bytes by formula) of a rank, where it has both."""
    both = (on_rank(record, name, rank) for name in ("bytes_sent", "bytes_formula"))
    return list(zip(*both, strict=False))
