"""Predictions of a trial's memory and time, from a dry run and known rates: pure arithmetic.

Memory is the peak of the implementation's own dry run without data (DryRunEstimate). Time is a
roofline (Williams et al., doi 10.1145/1498765.1498785): the larger of computing at the rate that
attention reaches and of moving each byte, plus the part of communication that does not overlap, by
latency and bandwidth of the network (the alpha-beta model). Rates come from records of the same
machine where there are any (RateModel), else from a profile (core/hardware.py).
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.core.cost import (
    BACKWARD_MATMULS,
    FORWARD_MATMULS,
    attention_flops,
    floor_bytes_per_token,
    floor_tokens,
)
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import DryRunEstimate, Record, Trial, TrialPrediction

DryRun = Callable[[Sequence[Trial]], list[DryRunEstimate]]
"""A launcher's `dry_run`: the predicted cost of each trial, by a dry run."""

GRID = (0.02, 0.2, 0.5, 0.8, 0.9, 0.96, 1.0)
"""Lengths of dry runs, as shares of the floor's length: memory is nearly linear in between, and
most edges are near the end."""
REFINED = 6  # most further dry runs at the edge of the curve, until one is near to it
NEAR, CLOSE = 0.002, 1.07  # near: by this share, or between two lengths apart by this factor
LEAST_TREND = 0.5  # least growth of memory beyond the last length, as a share of the mean before
TOUCHES = 2.0  # the least moves of each byte of the peak: written once and read once
WALKED_FROM = 4096  # tokens per rank that always have a dry run
BEYOND = 4.0  # factor beyond the time limit up to which longer lengths have a dry run
ROUGH_GUESS = 6.0  # the factor by which a rate from a profile may be wrong
ROUGH_RECORD = 1.3  # the factor by which a rate from records of this machine may be wrong


@dataclass(frozen=True)
class Curve:
    """Dry runs of a trial at some lengths, ascending, and the interpolation between them."""

    points: tuple[tuple[int, DryRunEstimate], ...]

    def peak(self, tokens: int) -> float:
        """Return the peak bytes of the fullest rank, interpolated linearly."""
        return self._between(tokens, lambda seen: float(seen.peak_bytes), power=False)

    def at(self, tokens: int) -> DryRunEstimate:
        """Return the cost at a length, interpolated by powers of the length, the peak linearly."""
        (_, near), _ = self._round(tokens)
        return near.model_copy(
            update={
                "peak_bytes": round(self.peak(tokens)),
                "flops": self._between(tokens, lambda seen: seen.flops, power=True),
                "bytes_sent": round(self._between(tokens, lambda s: s.bytes_sent, power=True)),
                "transfers": round(self._between(tokens, lambda s: s.transfers, power=True)),
            }
        )

    def gap(self, tokens: int) -> float:
        """Return the ratio of the neighbouring lengths; infinite beyond the last one."""
        (a, _), (b, _) = self._round(tokens)
        return b / a if a <= tokens <= b else math.inf

    def _round(self, tokens: int) -> tuple[tuple[int, DryRunEstimate], tuple[int, DryRunEstimate]]:
        lengths = [n for n, _ in self.points]
        at = min(max(1, bisect_left(lengths, tokens)), len(lengths) - 1)
        return self.points[at - 1], self.points[at]

    def _between(self, tokens: int, value: Callable[[DryRunEstimate], float], power: bool) -> float:
        (a, first), (b, last) = self._round(tokens)
        low, high = value(first), value(last)
        if power and min(low, high) > 0:
            slope = math.log(high / low) / math.log(b / a)
            return float(low * (tokens / a) ** slope)
        line = low + (high - low) * (tokens - a) / (b - a)
        # a longer length that is cut differently may hold less, which is no trend
        least = high + LEAST_TREND * high * (tokens - b) / b
        return max(line, least) if tokens > b else max(0.0, line)


def dry_run_curve(trial: Trial, budget: int, dry_run: DryRun, ceiling: int) -> Curve | str:
    """Return a trial's curve up to where the floor reaches the budget, or why there is none."""
    floor = floor_tokens(trial.workload, budget, trial.world_size)
    least = 2 * trial.world_size
    lengths = sorted({max(least, min(ceiling, round(share * floor))) for share in GRID})
    lengths = lengths if len(lengths) > 1 else [lengths[0], 2 * lengths[0]]
    found = dry_run([trial.at(n).replace(repeats=0, round=0) for n in lengths])
    known = [(n, seen) for n, seen in zip(lengths, found, strict=True) if not seen.unsupported]
    if len(known) < 2:
        return next((seen.unsupported for seen in found if seen.unsupported), "too short")
    for _ in range(REFINED):
        made = Curve(tuple(sorted(known)))
        at = max(least, find_edge(made, budget, ceiling))
        if made.gap(at) <= CLOSE or any(abs(at - n) <= NEAR * n for n, _ in known):
            break
        (seen,) = dry_run([trial.at(at).replace(repeats=0, round=0)])
        if seen.unsupported:
            break
        known.append((at, seen))
    return Curve(tuple(sorted(known)))


# ---- rates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a rank, the factor by which it may be wrong, and its source.

    exposed: seconds per byte sent that communication added to a pass; None without a record.
    """

    flops: float
    rough: float
    source: str
    exposed: float | None = None


class RateModel:
    """Rates of trials on one machine, from its records of the same trial where there are any."""

    def __init__(self, hardware: Hardware, records: Iterable[Record] = ()) -> None:
        self.hardware = hardware
        self._alike: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
        self._network: list[float] = []
        for record in records:
            self._learn(record)

    def _learn(self, record: Record) -> None:
        outcome, trial = record.outcome, record.trial
        if outcome.status != "ok" or trial.device != self.hardware.device:
            return
        flops, seconds = outcome.largest("flops"), pass_seconds(record)
        sent, apart = outcome.largest("bytes_sent"), per_iteration(record, "communication_time")
        if seconds and flops:
            # compute and communication grow differently: use the time without communication
            computing = per_iteration(record, "compute_time")
            busy = min(seconds, median(computing)) if computing and sent else seconds
            alike = self._alike.setdefault(_alike(trial), [])
            rate = flops / trial.world_size / busy
            alike.append((trial.workload.seq_len, rate, (seconds - busy) / sent if sent else 0.0))
        if sent and apart:
            self._network.append(sent / median(apart))

    def rate(self, trial: Trial) -> Rate:
        """Return the rate of the records of the nearest length, else that of the profile.

        Raises UserError for a dtype that the hardware does not have.
        """
        known = self._alike.get(_alike(trial))
        if known:
            tokens = trial.workload.seq_len
            nearest = min(known, key=lambda one: abs(math.log(one[0] / tokens)))[0]
            rates, added = zip(*((r, e) for n, r, e in known if n == nearest), strict=True)
            source = f"{len(known)} record(s), nearest at {nearest:,} tokens"
            return Rate(median(rates), ROUGH_RECORD, source, median(added))
        w = trial.workload
        rate = self.hardware.rate(w.dtype, w.mode)
        if w.train and trial.keep != "all":
            # the forward is run again, and is not counted in the FLOPs
            once = FORWARD_MATMULS + BACKWARD_MATMULS
            rate *= once / (once + FORWARD_MATMULS)
        return Rate(rate, ROUGH_GUESS, f"profile of {self.hardware.name}")

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes/s that a rank sends."""
        known = median(self._network) if self._network else 0.0
        return known or self.hardware.link(ranks).bandwidth


def _alike(trial: Trial) -> tuple[object, ...]:
    """Return what must be the same for a rate to be valid at another length."""
    shape = trial.workload.model_dump(exclude={"seq_len"})
    options = tuple(sorted((k, str(v)) for k, v in trial.options.items()))
    return (
        trial.implementation, options, trial.device, trial.world_size, trial.threads, trial.keep,
        tuple(shape.items()),
    )  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Seconds of one pass and of its parts; `exposed` is what communication adds."""

    compute: float
    memory: float
    transfers: float
    exposed: float

    @property
    def total(self) -> float:
        """Predicted time of a pass (s)."""
        return max(self.compute, self.memory) + self.exposed

    @property
    def limit(self) -> str:
        """The part that takes most of the time."""
        parts = {"compute": self.compute, "memory bandwidth": self.memory}
        parts["communication"] = self.exposed
        return max(parts, key=lambda name: parts[name])


def predict_times(
    trial: Trial, seen: DryRunEstimate, rates: RateModel, rate: Rate | None = None
) -> Times:
    """Predict the time of one pass. Overlapping transfers are hidden, except for the first.

    rate: a rate to use instead of that of this length.
    """
    link, rate = rates.hardware.link(trial.world_size), rate or rates.rate(trial)
    # a rate from records is that of all ranks, also where their work is uneven
    uneven = seen.busiest if rate.exposed is None else 1.0
    compute = seen.flops * uneven / rate.flops
    memory = TOUCHES * seen.peak_bytes / rates.hardware.bandwidth
    transfers = seen.transfers * link.latency + seen.bytes_sent / rates.bandwidth(trial.world_size)
    exposed = transfers
    if rate.exposed is not None:
        exposed = rate.exposed * seen.bytes_sent
    elif seen.overlaps and seen.transfers:
        exposed = max(transfers - max(compute, memory), transfers / seen.transfers)
    return Times(compute, memory, transfers, exposed)


# ---- predictions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a trial at one length. fits: its peak is within the budget."""

    trial: Trial
    seen: DryRunEstimate
    times: Times
    rate: Rate
    fits: bool

    @property
    def fraction_of_floor(self) -> float:
        """The floor of this length over the budget of all ranks."""
        assert self.trial.memory_budget
        floor = floor_bytes_per_token(self.trial.workload) * self.trial.workload.seq_len
        return floor / (self.trial.memory_budget * self.trial.world_size)


def predict(trial: Trial, dry_run: DryRun, rates: RateModel) -> Prediction | str:
    """Predict a trial at its length, or return why that is impossible."""
    assert trial.memory_budget
    (seen,) = dry_run([trial.replace(repeats=0, round=0)])
    if seen.unsupported:
        return seen.unsupported
    fits = seen.peak_bytes <= trial.memory_budget
    return Prediction(trial, seen, predict_times(trial, seen, rates), rates.rate(trial), fits)


def find_longest_fit(
    trial: Trial, dry_run: DryRun, rates: RateModel, ceiling: int
) -> Prediction | str:
    """Predict the longest length that fits in the budget of each rank, or return why not."""
    assert trial.memory_budget
    found = dry_run_curve(trial, trial.memory_budget, dry_run, ceiling)
    if isinstance(found, str):
        return found
    walked = dict(found.points)

    def again(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        lengths = [one.workload.seq_len for one in trials]
        return [walked[n] for n in lengths] if walked.keys() >= set(lengths) else dry_run(trials)

    low = find_edge(found, trial.memory_budget, ceiling)
    for _ in range(4):
        made = predict(trial.at(max(low, trial.world_size)), again, rates)
        if isinstance(made, str):
            # too long for a dry run: take the longest length that had one
            fits = [n for n, seen in found.points if seen.peak_bytes <= trial.memory_budget]
            return predict(trial.at(max(fits)), again, rates) if fits else made
        if made.fits:
            return made
        # a little over: the interpolation was below the real peak
        low = int(low * min(0.999, max(0.98, trial.memory_budget / made.seen.peak_bytes)))
    return made


def find_smallest_world(
    trial: Trial, dry_run: DryRun, rates: RateModel, most: int
) -> Prediction | None:
    """Find the fewest ranks on which a length is predicted to fit, up to `most`; None without any.

    Doubles the ranks, then bisects.
    """
    assert trial.memory_budget
    budget = trial.memory_budget
    floor = floor_bytes_per_token(trial.workload) * trial.workload.seq_len

    def fitting(ranks: int) -> Prediction | None:
        if trial.keep == "all" and floor > budget * ranks:
            return None
        made = predict(trial.replace(world_size=ranks), dry_run, rates)
        return made if not isinstance(made, str) and made.fits else None

    low, ranks, best = trial.world_size, trial.world_size, None
    while best is None and (ranks := 2 * ranks) <= most:
        best = fitting(ranks)
        low = low if best else ranks
    while best is not None and best.trial.world_size - low > 1:
        middle = (low + best.trial.world_size) // 2
        found = fitting(middle)
        low, best = (low, found) if found else (middle, best)
    return best


def find_edge(found: Curve, budget: int, ceiling: int) -> int:
    """Return the longest length whose peak on a curve is within the budget; 0 without any."""
    return bisect_right(range(1, ceiling + 1), budget, key=lambda n: math.ceil(found.peak(n)))


# ---- accuracy ----------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Errors of the predictions for one kind of trial: predicted over measured, less 1.

    missed: runs that were predicted to fit and ran out of memory.
    """

    implementation: str
    mode: str
    world_size: int
    device: str
    dtype: str
    keep: str
    memory_errors: tuple[float, ...]
    time_errors: tuple[float, ...]
    missed: int

    def matches(self, trial: Trial) -> bool:
        """Return True if a prediction for this trial is of this kind."""
        return self[:6] == _kind(trial)


def find_accuracy(records: Iterable[Record]) -> list[Accuracy]:
    """Return the errors of predictions that records hold, by kind of trial."""
    kinds: dict[Kind, tuple[list[float], list[float]]] = {}
    missed: Counter[Kind] = Counter()
    for record in records:
        outcome, trial, foreseen = record.outcome, record.trial, record.foreseen
        if foreseen is None or trial.fit_only:
            continue
        memory, time = kinds.setdefault(_kind(trial), ([], []))
        fits = foreseen.peak_bytes and foreseen.peak_bytes <= (trial.memory_budget or 0)
        missed[_kind(trial)] += bool(fits and outcome.status == "oom")
        if outcome.status != "ok":
            continue
        if foreseen.peak_bytes and (peak := outcome.largest("peak")):
            memory.append(foreseen.peak_bytes / peak - 1)
        if foreseen.seconds and (seconds := pass_seconds(record)):
            time.append(foreseen.seconds / seconds - 1)
    return [
        Accuracy(*key, tuple(memory), tuple(time), missed[key])
        for key, (memory, time) in sorted(kinds.items())
        if memory or time or missed[key]
    ]


Kind = tuple[str, str, int, str, str, str]


def _kind(trial: Trial) -> Kind:
    w = trial.workload
    return trial.implementation, w.mode, trial.world_size, trial.device, w.dtype, trial.keep


def pass_seconds(record: Record) -> float | None:
    """Return the seconds of a pass on its slowest rank; None where only a slower pass was timed.

    The median of timed passes, else the pass of a search that ran with the usual heap: exact
    accounting of memory is slower.
    """
    if times := per_iteration(record, "time"):
        return median(times)
    quick = record.trial.device == "cuda" or record.outcome.samples("peak_bound")
    return record.outcome.largest("pass_time") if quick else None


# ---- for schedules -----------------------------------------------------------------------------


class LengthModel:
    """Predicted memory and time of one trial at any length.

    rough: the factor by which a load may be wrong, where that is more than a few percent.
    """

    def __init__(self, found: Curve, trial: Trial, rates: RateModel) -> None:
        edge_of = trial.at(max(found.points[-1][0], trial.world_size))
        self._found, self._trial, self._rates = found, trial, rates
        self._rate = rates.rate(edge_of)
        self.rough = {"time": self._rate.rough}

    def loads(self, tokens: int) -> Mapping[str, float]:
        """Return the fraction of each limit that a pass uses."""
        loads, trial = {}, self._trial
        if trial.memory_budget:
            loads["memory"] = self._found.peak(tokens) / trial.memory_budget
        if trial.time_budget:
            loads["time"] = self._seconds(tokens) / trial.time_budget
        return loads

    def foreseen(self, tokens: int) -> TrialPrediction:
        """Return the prediction for the record of a run."""
        peak = round(self._found.peak(tokens))
        return TrialPrediction(
            peak_bytes=peak, seconds=self._seconds(tokens), rate=self._rate.source
        )

    def _seconds(self, tokens: int) -> float:
        return predict_times(
            self._trial.at(tokens), self._found.at(tokens), self._rates, self._rate
        ).total


class Predictor:
    """Predictions for the trials of a schedule before they run."""

    def __init__(self, dry_run: DryRun, rates: RateModel) -> None:
        self._dry_run, self._rates = dry_run, rates

    def length_model(self, trial: Trial, ceiling: int) -> LengthModel | None:
        """Return the model of a trial over its length; None if it cannot be predicted."""
        assert trial.memory_budget
        most = min(ceiling, self._longest_dry_run(trial))
        found = dry_run_curve(trial, trial.memory_budget, self._dry_run, most)
        return None if isinstance(found, str) else LengthModel(found, trial, self._rates)

    def _longest_dry_run(self, trial: Trial) -> int:
        """Return the longest length that needs a dry run.

        Beyond it even the kept part of dense attention takes many times the time budget, and a
        layout of so many blocks takes long itself.
        """
        if not trial.time_budget:
            return 2**62
        known = trial.at(WALKED_FROM * trial.world_size)
        sparsity = trial.options.get("sparsity")
        kept = 1 - (sparsity if isinstance(sparsity, float) else 0.0)
        flops = attention_flops(known.workload) * kept / trial.world_size
        rate = self._rates.rate(trial)
        most = trial.time_budget * rate.flops * rate.rough * BEYOND
        return max(known.workload.seq_len, int(known.workload.seq_len * math.sqrt(most / flops)))

    def foreseen(self, trials: Sequence[Trial]) -> list[TrialPrediction | None]:
        """Return the prediction for each trial; None where there is none."""
        alike: dict[str, list[Trial]] = {}
        for trial in trials:
            alike.setdefault(trial.implementation, []).append(trial)
        # one call per implementation: one that dies in its dry run affects no other
        predictions = {
            trial.key: TrialPrediction(
                peak_bytes=seen.peak_bytes,
                seconds=predict_times(trial, seen, self._rates).total,
                rate=self._rates.rate(trial).source,
            )
            for group in alike.values()
            for trial, seen in zip(group, self._dry_run(group), strict=True)
            if not seen.unsupported
        }
        return [predictions.get(trial.key) for trial in trials]
