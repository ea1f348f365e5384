"""What to run next: generators that yield steps and are sent the records they led to.

A plan knows nothing of processes, files or devices, so it can be driven by hand in a test, by a
simulated launcher, or resumed from records.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby

from longseq_bench.cost import floor_tokens
from longseq_bench.model import Purpose, Record, Trial
from longseq_bench.search import Answer, longest

FIRST_TOKENS = 2048
"""The first length of a search at most: a pass of it takes milliseconds."""

CEILING_TOKENS = 2**30
HOPELESS = ("unsupported", "error")
"""A shorter length would not mend these."""


@dataclass(frozen=True)
class Step:
    """A trial to be run, why, and what maximum was expected when it was asked for."""

    trial: Trial
    purpose: Purpose = "measure"
    predicted_tokens: int | None = None


Plan = Generator[Step, Record, list[Record]]


def sweep(trials: Sequence[Trial], rounds: int) -> Plan:
    """Each trial `rounds` times, in fresh processes, what is compared being interleaved.

    Trials on the same workload take turns, so that a drift of the machine meets them all: those on
    one rank and on several too, as a speed-up compares them. A trial that did not end ok is not
    visited again.
    """
    records: list[Record] = []
    for _, compared in groupby(trials, key=lambda t: (t.workload, t.device)):
        left = list(compared)
        for visit in range(rounds):
            again = []
            for trial in left:
                record = yield Step(trial.but(round=visit))
                records.append(record)
                if record.outcome.status == "ok":
                    again.append(trial)
            left = again
    return records


def maxlen(trials: Sequence[Trial], ceiling: int | None = None) -> Plan:
    """The longest length of each trial, one search after the other; their seq_len is ignored."""
    records: list[Record] = []
    for trial in trials:
        records += yield from _maxlen(trial, ceiling)
    return records


def _maxlen(trial: Trial, ceiling: int | None) -> Plan:
    """One search. A confirmation is another round of the same trial, so it is another record.

    Fewer tokens than ranks can't be shared, and say nothing about memory: the search, which counts
    from 1, is of the tokens beyond those.
    """
    assert trial.memory_budget
    below = trial.world_size - 1
    floor = floor_tokens(trial.workload, trial.memory_budget, trial.world_size)
    # beyond twice the floor nothing exact can fit, but a budget that is not enforced might let it
    top = min(ceiling or CEILING_TOKENS, 2 * floor)
    first = min(floor // 8, FIRST_TOKENS)
    search = longest(start=max(1, first - below), ceiling=max(1, top - below))
    records: list[Record] = []
    ask = next(search)
    while True:
        tokens = ask.tokens + below
        visit = sum(r.trial.workload.seq_len == tokens for r in records)
        # a winner is confirmed in full: its peak exactly, and a timed pass
        run = trial.at(tokens).but(round=visit, repeats=1 if ask.purpose == "confirm" else 0)
        record = yield Step(run, ask.purpose, ask.predicted and ask.predicted + below)
        records.append(record)
        try:
            ask = search.send(_answer(record))
        except StopIteration:
            return records


def _answer(record: Record) -> Answer:
    outcome, trial = record.outcome, record.trial
    if outcome.status != "ok":
        return Answer(False, hopeless=outcome.status in HOPELESS)
    loads = {}
    peak = outcome.largest("peak") or outcome.largest("peak_bound")
    took = outcome.largest("pass_time")
    if peak is not None and trial.memory_budget:
        loads["memory"] = peak / trial.memory_budget
    if took is not None and trial.time_budget:
        loads["time"] = took / trial.time_budget
    return Answer(True, loads)
