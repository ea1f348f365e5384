"""What to run next: generators that yield steps and are sent the records they led to.

A plan knows nothing of processes, files or devices, so it can be driven by hand in a test, by a
simulated launcher, or resumed from records. What trials will take it may ask of an Outlook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.searches import merge_search
from longseq_bench.core.cost import floor_tokens
from longseq_bench.core.model import Foreseen, Purpose, Record, Trial
from longseq_bench.search.bracket import ExpectedLoads, Result, find_longest
from longseq_bench.search.prediction import ROUGH_GUESS, Outlook

FIRST_TOKENS = 2048
"""The first length of a search at most: a pass of it takes milliseconds."""

CEILING_TOKENS = 2**30
SEEN_AT = 0.999
"""A sparsity whose time is predicted, and with it that of others."""

PARTS = 2**22
"""Of a density of 1: how finely the least sparsity is searched."""

SHARES, TIMED = (8, 4, 2), 7
"""Lengths of a scaling study, as parts of the least maximum, and timed passes at each."""

HOPELESS = ("unsupported", "error")
"""A shorter length would not mend these."""


@dataclass(frozen=True)
class Step:
    """A trial to be run, why, and what maximum was expected when it was asked for."""

    trial: Trial
    purpose: Purpose = "measure"
    predicted_tokens: int | None = None
    foresee: Callable[[], Foreseen | None] = lambda: None
    """What is predicted of it; asked for only where it is run."""


Plan = Generator[Step, Record, list[Record]]


def sweep(trials: Sequence[Trial], rounds: int, outlook: Outlook | None = None) -> Plan:
    """Each trial `rounds` times, in fresh processes, what is compared being interleaved.

    Trials on the same workload take turns, so that a drift of the machine meets them all: those on
    one rank and on several too, as a speed-up compares them. A trial that did not end ok is not
    visited again.
    """
    records: list[Record] = []
    for _, compared in groupby(trials, key=lambda t: (t.workload, t.device)):
        left = list(compared)
        told = _Told(outlook, left)
        for visit in range(rounds):
            again = []
            for trial in left:
                record = yield Step(trial.but(round=visit), foresee=told.of(trial))
                records.append(record)
                if record.outcome.status == "ok":
                    again.append(trial)
            left = again
    return records


class _Told:
    """What is predicted of some trials, all together once one of them is to be run."""

    def __init__(self, outlook: Outlook | None, trials: Sequence[Trial]) -> None:
        self._outlook, self._trials = outlook, tuple(trials)
        self._known: dict[str, Foreseen | None] = {}

    def of(self, trial: Trial) -> Callable[[], Foreseen | None]:
        def tell() -> Foreseen | None:
            if self._outlook and not self._known:
                found = self._outlook.foreseen(self._trials)
                self._known = {t.key: one for t, one in zip(self._trials, found, strict=True)}
            return self._known.get(trial.key)

        return tell


def maxlen(
    trials: Sequence[Trial], ceiling: int | None = None, outlook: Outlook | None = None
) -> Plan:
    """The longest length of each trial, one search after the other; their seq_len is ignored."""
    records: list[Record] = []
    for trial in trials:
        records += yield from _maxlen(trial, ceiling, outlook)
    return records


def densest(trials: Sequence[Trial], outlook: Outlook | None = None) -> Plan:
    """The least sparsity with which each trial's length fits in its memory and time, one search
    after the other; their own sparsity is ignored. What is searched is the density, in parts."""
    records: list[Record] = []
    for trial in trials:
        search = find_longest(PARTS // 1000, PARTS, _expected_density(trial, outlook))
        ask, before = next(search), len(records)
        while True:
            options = {**trial.options, "sparsity": round(1 - ask.tokens / PARTS, 9)}
            visit = sum(r.trial.options == options for r in records[before:])
            run = trial.but(options=options, round=visit, repeats=int(ask.purpose == "confirm"))
            records.append((yield Step(run, "density", foresee=_Told(outlook, [run]).of(run))))
            try:
                ask = search.send(_result(records[-1]))
            except StopIteration:
                break
    return records


def _expected_density(trial: Trial, outlook: Outlook | None) -> ExpectedLoads | None:
    """Time is expected to grow with the density, and memory not to."""
    sparse = trial.but(options={**trial.options, "sparsity": SEEN_AT})
    told = outlook.foreseen([sparse])[0] if outlook else None
    if told is None or not told.seconds or not trial.time_budget:
        return None
    full = told.seconds / (1 - SEEN_AT) / trial.time_budget
    held = (told.peak_bytes or 0) / (trial.memory_budget or math.inf)
    if held > 1:
        return None
    return ExpectedLoads(lambda parts: {"time": full * parts / PARTS}, {"time": ROUGH_GUESS})


def scaling(
    trials: Sequence[Trial], worlds: Sequence[int], rounds: int, ceiling: int | None = None,
    outlook: Outlook | None = None,
) -> Plan:  # fmt: skip
    """The longest length of each trial in each world; then times at an eighth, a quarter and half
    of the least maximum above 0, in every world in turn."""
    spread = [trial.but(world_size=ranks) for trial in trials for ranks in worlds]
    records: list[Record] = []
    maxima: list[int] = []
    for trial in spread:
        found = yield from _maxlen(trial, ceiling, outlook)
        maxima.append(merge_search(found).max_tokens)
        records += found
    least = min((n for n in maxima if n), default=0)
    lengths = [n for n in (least // share for share in SHARES) if n >= max(worlds)]
    timed = [
        trial.at(n).but(repeats=TIMED, round=0)
        for n in lengths
        for trial, most in zip(spread, maxima, strict=True)
        if most
    ]
    return records + (yield from sweep(timed, rounds, outlook))


def _maxlen(trial: Trial, ceiling: int | None, outlook: Outlook | None) -> Plan:
    """One search. A confirmation is another round of the same trial, so it is another record.

    Fewer tokens than ranks can't be shared, and say nothing about memory: the search, which counts
    from 1, is of the tokens beyond those.
    """
    assert trial.memory_budget
    below = trial.world_size - 1
    floor = floor_tokens(trial.workload, trial.memory_budget, trial.world_size)
    # beyond twice the floor nothing exact can fit, but a budget that is not enforced might let it;
    # what lies in the host's memory is bound by no floor
    top = ceiling or CEILING_TOKENS
    if trial.options.get("offload", "none") == "none":
        top = min(top, 2 * floor)
    first = min(floor // 8, FIRST_TOKENS)
    ahead = outlook.ahead(trial, max(top, 2)) if outlook else None
    expected = ExpectedLoads(lambda n: ahead.loads(n + below), ahead.rough) if ahead else None
    search = find_longest(max(1, first - below), max(1, top - below), expected)
    records: list[Record] = []
    ask = next(search)
    while True:
        tokens = ask.tokens + below
        visit = sum(r.trial.workload.seq_len == tokens for r in records)
        # a winner whose passes had their upper bound of the peak only is confirmed in full
        bounded = not any(r.outcome.samples("peak") for r in records if _passed_at(r, tokens))
        timed = ask.purpose == "confirm" and bounded and not trial.fit_only
        run = trial.at(tokens).but(round=visit, repeats=1 if timed else 0)
        expects = ask.predicted and ask.predicted + below
        told = partial(ahead.foreseen, tokens) if ahead else lambda: None
        record = yield Step(run, ask.purpose, expects, told)
        records.append(record)
        try:
            ask = search.send(_result(record, exact=ahead is not None))
        except StopIteration:
            return records


def _passed_at(record: Record, tokens: int) -> bool:
    return record.trial.workload.seq_len == tokens and record.outcome.status == "ok"


def _result(record: Record, exact: bool = False) -> Result:
    """Return the result of a run for the search.

    exact: the expected peak is better than an upper bound of the measured one, which is left out.
    """
    outcome, trial = record.outcome, record.trial
    loads = {}
    timed = per_iteration(record, "time")
    took = median(timed) if timed else outcome.largest("pass_time")
    if took is not None and trial.time_budget:
        loads["time"] = took / trial.time_budget
    if outcome.status != "ok":
        late = outcome.status == "timeout"
        return Result(False, loads, hopeless=outcome.status in HOPELESS, late=late)
    peak = outcome.largest("peak") or (None if exact else outcome.largest("peak_bound"))
    if peak is not None and trial.memory_budget:
        loads["memory"] = peak / trial.memory_budget
    return Result(True, loads)
