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
from typing import Literal, NamedTuple

from longseq_bench.core.cost import attention_flops, floor_bytes_per_token
from longseq_bench.core.model import DryRunEstimate, Record, Trial, TrialPrediction
from longseq_bench.core.units import MAX_RANKS
from longseq_bench.search.memory_curve import (
    Curve,
    DryRun,
    add_outside,
    add_rest,
    dry_run_curve,
    find_edge,
)
from longseq_bench.search.rates import Rate, RateModel

MOVES_PER_BYTE = 2.0  # minimum moves of each byte of the peak: it is written once and read once
ALWAYS_DRY_RUN_TOKENS = 4096  # dry runs up to this many tokens per rank ignore the time limit
DRY_RUN_TIME_FACTOR = 4.0  # longer ones: while a pass may take at most this many time limits
CEILING_TOKENS = 2**30  # per rank; longer lengths are not tried
PLAN_DRY_RUN_LIMIT_S = 300.0
PLAN_GRID = (0.02, 0.5, 1.0)  # shares as in GRID: a plan needs the edge alone, and refines it
PEAK_SHARES = (0.75, 0.3)
"""Shares of a GPU's peak FLOP/s that a kernel without a figure may reach: those of the figures
(data/kernel_rates.yaml) are 0.30 for flash with a head_dim of 64, 0.76 for flash-attn-3."""
BANDWIDTH_SHARES = (0.9, 0.5)
"""The same of its memory's bandwidth: whole steps of decoding on an H100 read with 0.47 to 0.83 of
it, their kernels alone with 0.91 (results/h100/decode)."""


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
    trial: Trial,
    estimate: DryRunEstimate,
    rates: RateModel,
    rate: Rate | None = None,
    bandwidth_share: float = 1.0,
) -> Times:
    """Predict the time of one pass. Overlapping transfers are hidden, except for the first.

    Nothing is hidden if the cores that compute also copy what is sent.

    rate: a rate to use instead of that of this length.  bandwidth_share: of the memory's bandwidth.
    """
    hardware, ranks = rates.hardware, trial.world_size
    link, sharing = hardware.link(ranks), ranks if hardware.shared else 1
    rate = rate or rates.rate(trial, estimate.kernel)
    # a rate from records is mean FLOPs over the slowest rank's time: it includes imbalance, sharing
    slowed = estimate.busiest * sharing if rate.exposed is None else 1.0
    compute = estimate.flops * slowed / rate.flops
    memory = _moved_bytes(trial, estimate) * sharing / (hardware.bandwidth * bandwidth_share)
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
    kinds = w.of_kinds()
    whole = sum(n * attention_flops(one, w.new_tokens * one.seq_len) for n, one in kinds)
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
    None for a given length.  ends: the shortest and the longest time where
    nothing was measured on this GPU, each with its share of the bandwidth; else that time.  fewest:
    the fewest ranks on which the length fits; None without a target.  alone: tokens of one request
    alone where a batch of them decodes; None elsewhere.
    """

    trial: Trial
    estimate: DryRunEstimate
    times: Times
    rate: Rate
    fits: bool
    length_limit: LengthLimit | None = None
    ends: tuple[tuple[Times, float], ...] = ()
    fewest: int | None = None
    alone: int | None = None

    @property
    def tokens(self) -> int:
        """The length over all ranks."""
        return self.trial.workload.seq_len

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
    ends = [(rate, 1.0)]
    if rate.peak:
        ends = [
            (replace(rate, flops=rate.peak * of_peak), of_bandwidth)
            for of_peak, of_bandwidth in zip(PEAK_SHARES, BANDWIDTH_SHARES, strict=True)
        ]
    times = [(predict_times(trial, estimate, rates, one, share), share) for one, share in ends]
    best_guess = predict_times(trial, estimate, rates, rate)
    return Prediction(trial, estimate, best_guess, rate, fits, ends=tuple(times))


def find_longest_fit(
    trial: Trial, dry_run: DryRun, rates: RateModel, ceiling: int
) -> Prediction | str:
    """Predict the longest length that fits the budget of each rank, or return why it can't."""
    assert trial.memory_budget
    curve = dry_run_curve(trial, trial.memory_budget, dry_run, ceiling, PLAN_GRID)
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
    trial: Trial, dry_run: DryRun, rates: RateModel, above: int, max_ranks: int, unit: int = 1
) -> Prediction | None:
    """Find the fewest ranks on which a length is predicted to fit; None if `max_ranks` do not.

    above: as many ranks are too few.  unit: ranks are added this many at a time. Doubles the units,
    then bisects.
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

    low, most, best = above // unit, max_ranks // unit, None
    while best is None and low < most:
        units = min(max(1, 2 * low), most)
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
    unit: int | None = None,
    rest: Callable[[Trial], int] | None = None,
) -> Prediction | str:
    """Predict a trial at a target, on more ranks if it does not fit; else its longest length.

    on_launcher: dry run of a launcher.  unit: ranks are added this many at a time; None: one at a
    time in a node, then whole nodes.
    rest: bytes of a model beside the trial's layer on a rank.
    """
    limited = partial(on_launcher, limit=PLAN_DRY_RUN_LIMIT_S, capability=rates.hardware.capability)
    dry_run = add_outside(limited, rates.hardware)
    if rest:
        dry_run = add_rest(dry_run, rest)
    if tokens is None:
        longest = find_longest_fit(trial, dry_run, rates, _ceiling(trial, rest))
        w = trial.workload
        if w.batch == 1 or not w.decode or isinstance(longest, str):
            return longest
        single = trial.replace(workload=w.model_copy(update={"batch": 1}).model_dump())
        alone = find_longest_fit(single, dry_run, rates, _ceiling(single, rest))
        return longest if isinstance(alone, str) else replace(longest, alone=alone.tokens)
    trial, asked = trial.at(tokens), trial.world_size
    result = predict(trial, dry_run, rates)
    if isinstance(result, str):
        return result
    above, most = (0, asked - 1) if result.fits else (asked, MAX_RANKS)
    hardware, fewest = rates.hardware, None
    node = hardware.per_node if unit is None and not hardware.shared else MAX_RANKS
    if above < node:
        fewest = find_smallest_world(trial, dry_run, rates, above, min(node, most), unit or 1)
    if fewest is None and most > node:
        fewest = find_smallest_world(trial, dry_run, rates, max(above, node), most, node)
    shown = result if result.fits or not fewest else fewest
    ranks = (fewest or result).trial.world_size
    return replace(shown, fewest=ranks if shown.fits else None)


def _ceiling(trial: Trial, rest: Callable[[Trial], int] | None) -> int:
    """Return a length that is too long by formula, so that dry runs are near that of a model."""
    ranks, budget = trial.world_size, trial.memory_budget or 0
    most = CEILING_TOKENS * ranks
    if rest is None:
        return most
    floor = floor_bytes_per_token(trial.workload) if trial.keep == "all" else 0

    def formula(tokens: int) -> int:
        return rest(trial.at(tokens)) + floor * tokens // ranks

    longest: int = bisect_right(range(1, most + 1), budget, key=formula)
    return 1 + round(1.01 * longest)


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
