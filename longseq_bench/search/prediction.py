"""What a trial will take, from what was foreseen of it and how fast things are: pure arithmetic.

Memory is what the implementation's own walk without data held (Foresight). Time is a roofline
(Williams et al., doi 10.1145/1498765.1498785): the larger of computing at the rate that attention
reaches and of touching each byte once, and beside it what communication adds, by latency and
bandwidth of the network (the alpha-beta model). Rates come from records of the same machine where
there are any (Pace), else from a profile (hardware.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.core.cost import (
    BACKWARD_MATMULS,
    FORWARD_MATMULS,
    attention_flops,
    floor_bytes_per_token,
    floor_tokens,
)
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import Foreseen, Foresight, Record, Trial

Term = Literal["compute", "memory bandwidth", "communication"]
Foresee = Callable[[Sequence[Trial]], list[Foresight]]
"""A launcher's `foresee`: what each of some trials would take."""

GRID = (0.02, 0.2, 0.5, 0.8, 0.9, 0.96, 1.0)
"""Lengths at which a trial is looked at, as shares of the longest that any could take: memory is
nearly a line in between, and most edges lie near the end."""

REFINED, NEAR, CLOSE = 6, 0.002, 1.07
"""Further looks at the edge that the curve has, where none was as near to it and those round it are
not as close to each other."""

LEAST_TREND = 0.5
"""Memory grows beyond the last length at least as half of it did from nothing."""

TOUCHES = 2.0
"""How often each byte of the peak is moved at least: written once and read once."""

WALKED_FROM, BEYOND = 4096, 4.0
"""Tokens a rank that are always walked; how far beyond what time allows lengths are."""

ROUGH_GUESS = 6.0
"""By which factor a rate from a profile may be off."""

ROUGH_RECORD = 1.3
"""The same of a rate from records of this machine."""


@dataclass(frozen=True)
class Curve:
    """What was foreseen of a trial at some lengths, and in between; ascending."""

    points: tuple[tuple[int, Foresight], ...]

    def peak(self, tokens: int) -> float:
        """Bytes of the fullest rank, by the line through the lengths round it."""
        return self._between(tokens, lambda seen: float(seen.peak_bytes), power=False)

    def at(self, tokens: int) -> Foresight:
        """What is seen in between: of a rank, by a power of the length but for the peak."""
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
        """The ratio of the lengths round it, infinite where there is none on a side."""
        (a, _), (b, _) = self._round(tokens)
        return b / a if a <= tokens <= b else math.inf

    def _round(self, tokens: int) -> tuple[tuple[int, Foresight], tuple[int, Foresight]]:
        lengths = [n for n, _ in self.points]
        at = min(max(1, bisect_left(lengths, tokens)), len(lengths) - 1)
        return self.points[at - 1], self.points[at]

    def _between(self, tokens: int, value: Callable[[Foresight], float], power: bool) -> float:
        (a, first), (b, last) = self._round(tokens)
        low, high = value(first), value(last)
        if power and min(low, high) > 0:
            slope = math.log(high / low) / math.log(b / a)
            return float(low * (tokens / a) ** slope)
        line = low + (high - low) * (tokens - a) / (b - a)
        # lengths differ in how they are cut, and the longer may hold less: that is no trend
        least = high + LEAST_TREND * high * (tokens - b) / b
        return max(line, least) if tokens > b else max(0.0, line)


def curve(trial: Trial, budget: int, foresee: Foresee, ceiling: int) -> Curve | str:
    """A trial's curve up to where the floor meets the budget, or why nothing can be foreseen."""
    floor = floor_tokens(trial.workload, budget, trial.world_size)
    least = 2 * trial.world_size
    lengths = sorted({max(least, min(ceiling, round(share * floor))) for share in GRID})
    lengths = lengths if len(lengths) > 1 else [lengths[0], 2 * lengths[0]]
    found = foresee([trial.at(n).but(repeats=0, round=0) for n in lengths])
    known = [(n, seen) for n, seen in zip(lengths, found, strict=True) if not seen.unsupported]
    if len(known) < 2:
        return next((seen.unsupported for seen in found if seen.unsupported), "too short")
    for _ in range(REFINED):
        made = Curve(tuple(sorted(known)))
        at = max(least, edge(made, budget, ceiling))
        if made.gap(at) <= CLOSE or any(abs(at - n) <= NEAR * n for n, _ in known):
            break
        (seen,) = foresee([trial.at(at).but(repeats=0, round=0)])
        if seen.unsupported:
            break
        known.append((at, seen))
    return Curve(tuple(sorted(known)))


# ---- how fast ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a rank; by which factor it may be off; where it comes from.

    exposed: seconds that communication added to a pass, a byte sent; None where no record tells.
    """

    flops: float
    rough: float
    source: str
    exposed: float | None = None


class Pace:
    """Rates of trials on one machine: from its records where there are any alike."""

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
        flops, seconds = outcome.largest("flops"), took(record)
        sent, apart = outcome.largest("bytes_sent"), per_iteration(record, "communication_time")
        if seconds and flops:
            # with communication switched off, where that was timed: it grows otherwise
            computing = per_iteration(record, "compute_time")
            busy = min(seconds, median(computing)) if computing and sent else seconds
            alike = self._alike.setdefault(_alike(trial), [])
            rate = flops / trial.world_size / busy
            alike.append((trial.workload.seq_len, rate, (seconds - busy) / sent if sent else 0.0))
        if sent and apart:
            self._network.append(sent / median(apart))

    def rate(self, trial: Trial) -> Rate:
        """That of the records whose length is nearest; else of the profile. Raises UserError for a
        dtype that the hardware has not."""
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
            # the forward is run again, and counts as no work
            once = FORWARD_MATMULS + BACKWARD_MATMULS
            rate *= once / (once + FORWARD_MATMULS)
        return Rate(rate, ROUGH_GUESS, f"profile of {self.hardware.name}")

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s that a rank sends."""
        known = median(self._network) if self._network else 0.0
        return known or self.hardware.link(ranks).bandwidth


def _alike(trial: Trial) -> tuple[object, ...]:
    """What has to be the same for a rate to carry over to another length."""
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
        return max(self.compute, self.memory) + self.exposed

    @property
    def limit(self) -> Term:
        """What most of it goes to."""
        terms: dict[Term, float] = {
            "compute": self.compute, "memory bandwidth": self.memory, "communication": self.exposed,
        }  # fmt: skip
        return max(terms, key=lambda name: terms[name])


def times(trial: Trial, seen: Foresight, pace: Pace, rate: Rate | None = None) -> Times:
    """Of one pass. Transfers that overlap hide behind computing, but for the first of them.

    rate: another than that of this length.
    """
    link, rate = pace.hardware.link(trial.world_size), rate or pace.rate(trial)
    # a rate of records is that of all ranks, however uneven their work
    uneven = seen.busiest if rate.exposed is None else 1.0
    compute = seen.flops * uneven / rate.flops
    memory = TOUCHES * seen.peak_bytes / pace.hardware.bandwidth
    transfers = seen.transfers * link.latency + seen.bytes_sent / pace.bandwidth(trial.world_size)
    exposed = transfers
    if rate.exposed is not None:
        exposed = rate.exposed * seen.bytes_sent
    elif seen.overlaps and seen.transfers:
        exposed = max(transfers - max(compute, memory), transfers / seen.transfers)
    return Times(compute, memory, transfers, exposed)


# ---- how far -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What a trial is predicted to take at one length. `fits`: in the budget."""

    trial: Trial
    seen: Foresight
    times: Times
    rate: Rate
    fits: bool

    @property
    def fraction_of_floor(self) -> float:
        """The floor of this length over the budget of all ranks."""
        assert self.trial.memory_budget
        floor = floor_bytes_per_token(self.trial.workload) * self.trial.workload.seq_len
        return floor / (self.trial.memory_budget * self.trial.world_size)


def predicted(trial: Trial, foresee: Foresee, pace: Pace) -> Prediction | str:
    """Of one length, or why nothing can be foreseen."""
    assert trial.memory_budget
    (seen,) = foresee([trial.but(repeats=0, round=0)])
    if seen.unsupported:
        return seen.unsupported
    fits = seen.peak_bytes <= trial.memory_budget
    return Prediction(trial, seen, times(trial, seen, pace), pace.rate(trial), fits)


def longest_fit(trial: Trial, foresee: Foresee, pace: Pace, ceiling: int) -> Prediction | str:
    """The longest length that is predicted to fit in the budget of each rank, or why none can be
    told."""
    assert trial.memory_budget
    found = curve(trial, trial.memory_budget, foresee, ceiling)
    if isinstance(found, str):
        return found
    walked = dict(found.points)

    def again(trials: Sequence[Trial]) -> list[Foresight]:
        lengths = [one.workload.seq_len for one in trials]
        return [walked[n] for n in lengths] if walked.keys() >= set(lengths) else foresee(trials)

    low = edge(found, trial.memory_budget, ceiling)
    for _ in range(4):
        made = predicted(trial.at(max(low, trial.world_size)), again, pace)
        if isinstance(made, str):
            # so long that it can't be walked: the longest that was
            fits = [n for n, seen in found.points if seen.peak_bytes <= trial.memory_budget]
            return predicted(trial.at(max(fits)), again, pace) if fits else made
        if made.fits:
            return made
        # a little over: the line between two lengths lay under the truth
        low = int(low * min(0.999, max(0.98, trial.memory_budget / made.seen.peak_bytes)))
    return made


def smallest_world(trial: Trial, foresee: Foresee, pace: Pace, most: int) -> Prediction | None:
    """The fewest ranks on which a length is predicted to fit, found by doubling and then between
    the last two; None where none does, up to `most`."""
    assert trial.memory_budget
    budget = trial.memory_budget
    floor = floor_bytes_per_token(trial.workload) * trial.workload.seq_len

    def fitting(ranks: int) -> Prediction | None:
        if trial.keep == "all" and floor > budget * ranks:
            return None
        made = predicted(trial.but(world_size=ranks), foresee, pace)
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


def edge(found: Curve, budget: int, ceiling: int) -> int:
    """The longest length whose peak is in the budget, by a curve; 0 where none is."""
    low, high = 0, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if found.peak(middle) <= budget else (low, middle - 1)
    return low


# ---- how well ----------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """How far predictions of a kind of trial were off: predicted over measured, less one.

    missed: runs that were predicted to fit and ran out of memory.
    """

    implementation: str
    mode: str
    world_size: int
    device: str
    dtype: str
    keep: str
    memory: tuple[float, ...]
    time: tuple[float, ...]
    missed: int = 0

    def is_of(self, trial: Trial) -> bool:
        """Whether a prediction of this trial is of the kind."""
        return self[:6] == _kind(trial)


def accuracy(records: Iterable[Record]) -> list[Accuracy]:
    """Of records that keep what was predicted for them, by their kind."""
    kinds: dict[Kind, tuple[list[float], list[float]]] = {}
    missed: Counter[Kind] = Counter()
    for record in records:
        trial, foreseen = record.trial, record.foreseen
        if foreseen is None or trial.fit_only:
            continue
        memory, time = kinds.setdefault(_kind(trial), ([], []))
        fits = foreseen.peak_bytes and foreseen.peak_bytes <= (trial.memory_budget or 0)
        missed[_kind(trial)] += bool(fits and record.outcome.status == "oom")
        if record.outcome.status != "ok":
            continue
        peak, seconds = record.outcome.largest("peak"), took(record)
        if peak and foreseen.peak_bytes:
            memory.append(foreseen.peak_bytes / peak - 1)
        if seconds and foreseen.seconds:
            time.append(foreseen.seconds / seconds - 1)
    return [
        Accuracy(*key, memory=tuple(memory), time=tuple(time), missed=missed[key])
        for key, (memory, time) in sorted(kinds.items())
        if memory or time or missed[key]
    ]


Kind = tuple[str, str, int, str, str, str]


def _kind(trial: Trial) -> Kind:
    w = trial.workload
    return trial.implementation, w.mode, trial.world_size, trial.device, w.dtype, trial.keep


def took(record: Record) -> float | None:
    """Seconds of a pass on its slowest rank: the median of timed ones, else a search's own pass
    where that was one with the usual heap. Exact accounting is slower, and says nothing here."""
    if times := per_iteration(record, "time"):
        return median(times)
    quick = record.trial.device == "cuda" or record.outcome.samples("peak_bound")
    return record.outcome.largest("pass_time") if quick else None


# ---- for a plan --------------------------------------------------------------------------------


class Ahead:
    """What a search may expect of a trial at any length: a curve, and how fast things are."""

    def __init__(self, found: Curve, trial: Trial, pace: Pace) -> None:
        edge_of = trial.at(max(found.points[-1][0], trial.world_size))
        self._found, self._trial, self._pace = found, trial, pace
        self._rate = pace.rate(edge_of)
        self.rough = {"time": self._rate.rough}
        """By which factor a load may be off, where that is more than a few percent."""

    def loads(self, tokens: int) -> Mapping[str, float]:
        """The fraction of each limit that a pass takes."""
        told, trial = {}, self._trial
        if trial.memory_budget:
            told["memory"] = self._found.peak(tokens) / trial.memory_budget
        if trial.time_budget:
            told["time"] = self._seconds(tokens) / trial.time_budget
        return told

    def foreseen(self, tokens: int) -> Foreseen:
        """For the record of a run."""
        peak = round(self._found.peak(tokens))
        return Foreseen(peak_bytes=peak, seconds=self._seconds(tokens), rate=self._rate.source)

    def _seconds(self, tokens: int) -> float:
        return times(self._trial.at(tokens), self._found.at(tokens), self._pace, self._rate).total


class Outlook:
    """What a plan may ask of trials before they run."""

    def __init__(self, foresee: Foresee, pace: Pace) -> None:
        self._foresee, self._pace = foresee, pace

    def ahead(self, trial: Trial, ceiling: int) -> Ahead | None:
        """What a search of a trial may expect; None where nothing can be foreseen."""
        assert trial.memory_budget
        most = min(ceiling, self._worth_walking(trial))
        found = curve(trial, trial.memory_budget, self._foresee, most)
        return None if isinstance(found, str) else Ahead(found, trial, self._pace)

    def _worth_walking(self, trial: Trial) -> int:
        """No longer length has to be walked: dense attention, of which a sparsity is skipped, would
        take many times the time budget there, and a plan of so many blocks takes long itself."""
        if not trial.time_budget:
            return 2**62
        known = trial.at(WALKED_FROM * trial.world_size)
        sparsity = trial.options.get("sparsity")
        kept = 1 - (sparsity if isinstance(sparsity, float) else 0.0)
        flops = attention_flops(known.workload) * kept / trial.world_size
        rate = self._pace.rate(trial)
        most = trial.time_budget * rate.flops * rate.rough * BEYOND
        return max(known.workload.seq_len, int(known.workload.seq_len * math.sqrt(most / flops)))

    def foreseen(self, trials: Sequence[Trial]) -> list[Foreseen | None]:
        """For the records of single trials."""
        alike: dict[str, list[Trial]] = {}
        for trial in trials:
            alike.setdefault(trial.implementation, []).append(trial)
        # an implementation that dies in its walk takes no other with it
        walked = {
            trial.key: None if seen.unsupported else self._of(trial, seen)
            for group in alike.values()
            for trial, seen in zip(group, self._foresee(group), strict=True)
        }
        return [walked[trial.key] for trial in trials]

    def _of(self, trial: Trial, seen: Foresight) -> Foreseen:
        took = times(trial, seen, self._pace).total
        source = self._pace.rate(trial).source
        return Foreseen(peak_bytes=seen.peak_bytes, seconds=took, rate=source)
