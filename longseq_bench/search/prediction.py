"""Predictions of a trial's memory and time, from a dry run and known rates: pure arithmetic.

Memory is the peak of the implementation's own dry run without data (DryRunEstimate). Time is a
roofline (Williams et al., doi 10.1145/1498765.1498785): the larger of computing at the rate that
attention reaches and of moving each byte, plus the part of communication that does not overlap, by
latency and bandwidth of the network (the alpha-beta model). Rates come from records of the same
machine where there are any (RateModel), else from a profile (core/hardware.py).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Literal, NamedTuple

from longseq_bench.analysis.runs import pass_seconds, per_iteration
from longseq_bench.core.cost import (
    BACKWARD_MATMULS,
    FORWARD_MATMULS,
    attention_flops,
    floor_bytes_per_token,
)
from longseq_bench.core.hardware import Hardware, KernelRate
from longseq_bench.core.model import DryRunEstimate, Record, Trial, TrialPrediction, Workload
from longseq_bench.core.units import MAX_RANKS
from longseq_bench.search.memory_curve import (
    Curve,
    DryRun,
    add_outside,
    add_rest,
    dry_run_curve,
    find_edge,
)

MOVES_PER_BYTE = 2.0  # minimum moves of each byte of the peak: it is written once and read once
ALWAYS_DRY_RUN_TOKENS = 4096  # dry runs up to this many tokens per rank ignore the time limit
DRY_RUN_TIME_FACTOR = 4.0  # longer ones: while a pass may take at most this many time limits
PROFILE_UNCERTAINTY = 6.0  # the factor by which a rate from a profile may be wrong
CEILING_TOKENS = 2**30  # per rank; longer lengths are not tried
PLAN_DRY_RUN_LIMIT_S = 300.0
RECORD_UNCERTAINTY = 1.3  # the factor by which a rate from records of this machine may be wrong


# ---- rates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a rank, and their source.

    uncertainty: the factor by which they may be wrong.  exposed: seconds per byte sent that
    communication added to a pass; None without a record.  figure: that of the kernel, if it is
    used.  best: that of the fastest kernel.
    """

    flops: float
    uncertainty: float
    source: str
    exposed: float | None = None
    figure: KernelRate | None = None
    best: KernelRate | None = None


class RateModel:
    """Rates of trials on one machine, from its records of the same trial where there are any."""

    def __init__(self, hardware: Hardware, records: Iterable[Record] = ()) -> None:
        self.hardware = hardware
        # for each kind of trial: (length, rate, exposed) of its records
        self._rates: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
        self._bandwidths: list[float] = []
        for record in records:
            self._learn(record)

    def _learn(self, record: Record) -> None:
        outcome, trial = record.outcome, record.trial
        if outcome.status != "ok" or trial.device != self.hardware.device:
            return
        flops, sent = outcome.largest("flops"), outcome.largest("bytes_sent")
        if (seconds := pass_seconds(record)) and flops:
            # compute and communication grow differently: use the time without communication
            computing = per_iteration(record, "compute_time")
            compute_s = min(seconds, median(computing)) if computing and sent else seconds
            rate = flops / trial.world_size / compute_s
            exposed = (seconds - compute_s) / sent if sent else 0.0
            of_kind = self._rates.setdefault(_rate_key(trial), [])
            of_kind.append((trial.workload.seq_len, rate, exposed))
        if sent and (transfer_s := per_iteration(record, "communication_time")):
            self._bandwidths.append(sent / median(transfer_s))

    def rate(self, trial: Trial, kernel: str = "") -> Rate:
        """Return the rate of the records of the nearest length, else that of the profile.

        kernel: name of the kernel that computes most. Raises UserError for a dtype that the
        hardware does not have.
        """
        known = self._rates.get(_rate_key(trial))
        if known:
            tokens = trial.workload.seq_len
            nearest = min((n for n, _, _ in known), key=lambda n: abs(math.log(n / tokens)))
            rates, exposed = zip(*((r, e) for n, r, e in known if n == nearest), strict=True)
            source = f"{len(known)} record(s), nearest at {nearest:,} tokens"
            return Rate(median(rates), RECORD_UNCERTAINTY, source, median(exposed))
        w = trial.workload
        found = self._profile_rate(w, kernel)
        if w.train and trial.keep != "all":
            # the forward runs twice, but the FLOPs count it once
            matmuls = FORWARD_MATMULS + BACKWARD_MATMULS
            found = replace(found, flops=found.flops * matmuls / (matmuls + FORWARD_MATMULS))
        return found

    def _profile_rate(self, w: Workload, kernel: str) -> Rate:
        hardware, source = self.hardware, f"profile of {self.hardware.name}"
        usual, figures = hardware.rate(w.dtype, w.mode), {}
        if w.dtype != "float32" and not w.decode and w.v_head_dim == w.head_dim:
            figures = hardware.figures(w.train, w.head_dim, w.causal)
        if figure := figures.get(kernel):
            flops, source = figure.flops(w.train) or usual, f"{source}: {figure.words(w.train)}"
            best = max(figures.values(), key=lambda one: one.flops(w.train) or 0.0)
            return Rate(flops, PROFILE_UNCERTAINTY, source, figure=figure, best=best)
        if kernel and hardware.device == "cuda":
            what = f"{kernel}, {w.mode}, {w.dtype}, head_dim {w.head_dim}"
            what += f", v_head_dim {w.v_head_dim}" if w.v_head_dim != w.head_dim else ""
            source += f", which has no figure for {what}"
        return Rate(usual, PROFILE_UNCERTAINTY, source)

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes/s that a rank sends."""
        measured = median(self._bandwidths) if self._bandwidths else 0.0
        return measured or self.hardware.link(ranks).bandwidth


def _rate_key(trial: Trial) -> tuple[object, ...]:
    """Return what must be the same for a rate to be valid at another length."""
    shape = trial.workload.model_dump(exclude={"seq_len", "model"})
    options = tuple(sorted((k, str(v)) for k, v in trial.options.items()))
    how = trial.implementation, trial.source, trial.device, trial.world_size
    return (*how, options, trial.threads, trial.keep, trial.timing, tuple(shape.items()))


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
        """Name of the part that takes most of the time."""
        parts = {"compute": self.compute, "memory bandwidth": self.memory}
        parts["communication"] = self.exposed
        return max(parts, key=lambda name: parts[name])


def predict_times(
    trial: Trial, estimate: DryRunEstimate, rates: RateModel, rate: Rate | None = None
) -> Times:
    """Predict the time of one pass. Overlapping transfers are hidden, except for the first.

    Nothing is hidden if the cores that compute also copy what is sent.

    rate: a rate to use instead of that of this length.
    """
    hardware, ranks = rates.hardware, trial.world_size
    link, sharing = hardware.link(ranks), ranks if hardware.shared else 1
    rate = rate or rates.rate(trial, estimate.kernel)
    # a rate from records is mean FLOPs over the slowest rank's time: it includes imbalance, sharing
    slowed = estimate.busiest * sharing if rate.exposed is None else 1.0
    compute = estimate.flops * slowed / rate.flops
    memory = _moved_bytes(trial, estimate) * sharing / hardware.bandwidth
    transfers = estimate.transfers * link.latency + estimate.bytes_sent / rates.bandwidth(ranks)
    exposed = transfers
    if rate.exposed is not None:
        exposed = rate.exposed * estimate.bytes_sent
    elif estimate.overlaps and estimate.transfers and not hardware.shared:
        exposed = max(transfers - max(compute, memory), transfers / estimate.transfers)
    return Times(compute, memory, transfers, exposed)


def _moved_bytes(trial: Trial, estimate: DryRunEstimate) -> float:
    """Return the bytes that the busiest rank moves between its memory and its processor.

    A step of decoding only reads, and of the cache only what the new tokens see.
    """
    w = trial.workload
    if not w.decode:
        return MOVES_PER_BYTE * estimate.peak_bytes
    whole = attention_flops(w, float(w.new_tokens * w.seq_len))
    seen = estimate.flops * trial.world_size * estimate.busiest / whole
    return min(1.0, seen) * estimate.peak_bytes


# ---- predictions --------------------------------------------------------------------------------


class LengthLimit(NamedTuple):
    """The limit at which the longest length ends, and the reason in words if it is not memory."""

    name: Literal["memory", "kernel limit", "dry run", "longest length tried"]
    reason: str = ""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a trial at one length.

    fits: its peak is within the budget.  length_limit: the limit of the longest length that fits;
    None for a given length.
    """

    trial: Trial
    estimate: DryRunEstimate
    times: Times
    rate: Rate
    fits: bool
    length_limit: LengthLimit | None = None

    @property
    def fraction_of_floor(self) -> float:
        """The floor of this length over the budget of all ranks."""
        assert self.trial.memory_budget
        floor = floor_bytes_per_token(self.trial.workload) * self.trial.workload.seq_len
        return floor / (self.trial.memory_budget * self.trial.world_size)


def predict(trial: Trial, dry_run: DryRun, rates: RateModel) -> Prediction | str:
    """Predict a trial at its length, or return the reason why it can't be predicted.

    The trial has a memory budget.
    """
    assert trial.memory_budget
    (estimate,) = dry_run([trial.replace(repeats=0, round=0)])
    if estimate.unsupported:
        return estimate.unsupported
    fits = estimate.budget_bytes <= trial.memory_budget
    rate = rates.rate(trial, estimate.kernel)
    return Prediction(trial, estimate, predict_times(trial, estimate, rates, rate), rate, fits)


def find_longest_fit(
    trial: Trial, dry_run: DryRun, rates: RateModel, ceiling: int
) -> Prediction | str:
    """Predict the longest length that fits the budget of each rank, or return why it can't."""
    assert trial.memory_budget
    curve = dry_run_curve(trial, trial.memory_budget, dry_run, ceiling)
    if isinstance(curve, str):
        return curve
    known = dict(curve.points)

    def cached_dry_run(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        lengths = [one.workload.seq_len for one in trials]
        return [known[n] for n in lengths] if known.keys() >= set(lengths) else dry_run(trials)

    tokens = find_edge(curve, trial.memory_budget, ceiling)
    for _ in range(4):
        result = predict(trial.at(max(tokens, trial.world_size)), cached_dry_run, rates)
        if isinstance(result, str):
            return _predict_last_fit(trial, curve, cached_dry_run, rates, refused=result)
        if result.fits:
            at_ceiling = tokens >= ceiling
            limit = LengthLimit("longest length tried" if at_ceiling else "memory")
            return replace(result, length_limit=limit)
        # a little over: the interpolation was below the real peak
        left = trial.memory_budget - result.estimate.outside_bytes
        ratio = left / (result.estimate.peak_bytes + result.estimate.rest_bytes)
        tokens = int(tokens * min(0.999, max(0.98, ratio)))
    return result


def _predict_last_fit(
    trial: Trial, curve: Curve, dry_run: DryRun, rates: RateModel, refused: str
) -> Prediction | str:
    """Predict the longest length of a curve that fits: longer ones can't have a dry run.

    refused: the reason of a longer length, returned if nothing fits.
    """
    assert trial.memory_budget
    fits = [n for n, e in curve.points if e.budget_bytes <= trial.memory_budget]
    result = predict(trial.at(max(fits)), dry_run, rates) if fits else refused
    if isinstance(result, str):
        return result
    of_kernel = curve.refused and curve.refused[1].unsupported
    limit = LengthLimit("kernel limit", of_kernel) if of_kernel else LengthLimit("dry run", refused)
    return replace(result, length_limit=limit)


def find_smallest_world(
    trial: Trial, dry_run: DryRun, rates: RateModel, max_ranks: int, unit: int = 1
) -> Prediction | None:
    """Find the fewest ranks on which a length is predicted to fit; None if `max_ranks` do not.

    unit: ranks are added this many at a time. Doubles the units, then bisects.
    """
    assert trial.memory_budget
    budget = trial.memory_budget
    floor = floor_bytes_per_token(trial.workload) * trial.workload.seq_len

    def predict_fit(units: int) -> Prediction | None:
        ranks = units * unit
        if trial.keep == "all" and floor > budget * ranks:
            return None
        result = predict(trial.replace(world_size=ranks), dry_run, rates)
        return result if not isinstance(result, str) and result.fits else None

    low = units = trial.world_size // unit
    best = None
    while best is None and (units := max(1, 2 * units)) * unit <= max_ranks:
        best = predict_fit(units)
        low = low if best else units
    while best is not None and best.trial.world_size // unit - low > 1:
        middle = (low + best.trial.world_size // unit) // 2
        result = predict_fit(middle)
        low, best = (low, result) if result else (middle, best)
    return best


def predict_best(
    trial: Trial,
    on_launcher: Callable[..., list[DryRunEstimate]],
    rates: RateModel,
    tokens: int | None,
    unit: int = 1,
    rest: Callable[[Trial], int] | None = None,
) -> Prediction | str:
    """Predict a trial at a target, on more ranks if it does not fit; else its longest length.

    on_launcher: dry run of a launcher.  unit: more ranks are added this many at a time.
    rest: bytes of a model beside the trial's layer on a rank.
    """
    limited = partial(on_launcher, limit=PLAN_DRY_RUN_LIMIT_S, capability=rates.hardware.capability)
    dry_run = add_outside(limited, rates.hardware)
    if rest:
        dry_run = add_rest(dry_run, rest)
    if tokens is None:
        return find_longest_fit(trial, dry_run, rates, CEILING_TOKENS * trial.world_size)
    result = predict(trial.at(tokens), dry_run, rates)
    if isinstance(result, str) or result.fits:
        return result
    return find_smallest_world(trial.at(tokens), dry_run, rates, MAX_RANKS, unit) or result


# ---- for schedules -----------------------------------------------------------------------------


class LengthModel:
    """Predicted memory and time of one trial at any length.

    uncertainty: the factor by which a load may be wrong, where that is more than a few percent.
    """

    def __init__(self, curve: Curve, trial: Trial, rates: RateModel) -> None:
        self._curve, self._trial, self._rates = curve, trial, rates
        longest, estimate = curve.points[-1]
        self._rate = rates.rate(trial.at(max(longest, trial.world_size)), estimate.kernel)
        self.uncertainty = {"time": self._rate.uncertainty}

    def calibrated(self, records: Iterable[Record]) -> "LengthModel":
        """Return the model with the rates of records of this machine."""
        return LengthModel(self._curve, self._trial, RateModel(self._rates.hardware, records))

    def loads(self, tokens: int) -> Mapping[str, float]:
        """Return the fraction of each limit that a pass uses."""
        loads, trial = {}, self._trial
        if trial.memory_budget:
            needed = self._curve.peak(tokens) + self._curve.outside_bytes
            loads["memory"] = needed / trial.memory_budget
        if trial.time_budget:
            loads["time"] = self.pass_seconds(tokens) / trial.time_budget
        return loads

    def predict_run(self, tokens: int) -> TrialPrediction:
        """Return the prediction for a run of this length."""
        return TrialPrediction(
            peak_bytes=round(self._curve.peak(tokens)),
            outside_bytes=self._curve.outside_bytes,
            seconds=self.pass_seconds(tokens),
            rate=self._rate.source,
            fits_tokens=self._fits,
            fits_seconds=self._fits and self.pass_seconds(self._fits),
        )

    @cached_property
    def _fits(self) -> int | None:
        """The longest length that memory allows; None if no length fits."""

        def load(tokens: int) -> float:
            return self.loads(tokens).get("memory", math.inf)

        refused, world = self._curve.refused, self._trial.world_size
        end = refused[0] if refused else CEILING_TOKENS * world + 1
        return bisect_right(range(1, end), 1.0, key=load) or None

    def share(self, tokens: int) -> float:
        """Return the FLOPs of a pass as a share of those of dense attention."""
        whole = attention_flops(self._trial.at(tokens).workload) / self._trial.world_size
        return min(1.0, self._curve.at(tokens).flops / whole)

    def pass_seconds(self, tokens: int) -> float:
        """Return the predicted time of a pass (s)."""
        trial, estimate = self._trial.at(tokens), self._curve.at(tokens)
        return predict_times(trial, estimate, self._rates, self._rate).total


class Predictor:
    """Predictions for the trials of a schedule before they run.

    Memory outside tensors is that of the profile in `rates`: a budget on CUDA counts it.
    """

    def __init__(self, dry_run: DryRun, rates: RateModel) -> None:
        self._dry_run, self._rates = add_outside(dry_run, rates.hardware), rates

    def length_model(self, trial: Trial, ceiling: int) -> LengthModel | None:
        """Return the model of a trial over its length; None if it cannot be predicted."""
        assert trial.memory_budget
        longest = min(ceiling, self._longest_dry_run(trial))
        curve = dry_run_curve(trial, trial.memory_budget, self._dry_run, longest)
        return None if isinstance(curve, str) else LengthModel(curve, trial, self._rates)

    def _longest_dry_run(self, trial: Trial) -> int:
        """Return the longest length that needs a dry run.

        Beyond it even the kept part of dense attention takes many times the time budget, and to
        prepare a layout of that many blocks takes long too.
        """
        of_window = "sparsity" not in trial.options and trial.options.get("window")
        if not trial.time_budget or of_window:  # of such a layout a row has as many blocks always
            return 2**62
        known = trial.at(ALWAYS_DRY_RUN_TOKENS * trial.world_size)
        sparsity = trial.options.get("sparsity")
        kept = 1 - (sparsity if isinstance(sparsity, float) else 0.0)
        flops = attention_flops(known.workload) * kept / trial.world_size
        rate = self._rates.rate(trial)
        max_flops = trial.time_budget * rate.flops * rate.uncertainty * DRY_RUN_TIME_FACTOR
        return int(known.workload.seq_len * max(1.0, math.sqrt(max_flops / flops)))
