"""Schedules: generators that yield the next trial and receive its record.

A schedule knows nothing of processes, files or devices. A test can drive it by hand, and it can be
resumed from records. A Predictor predicts the memory and time of its trials.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.searches import merge_search
from longseq_bench.core.cost import floor_tokens
from longseq_bench.core.model import Purpose, Record, Trial, TrialPrediction
from longseq_bench.search.bracket import Result, find_longest
from longseq_bench.search.edge_model import ExpectedLoads
from longseq_bench.search.prediction import CEILING_TOKENS, Predictor

FIRST_TOKENS = 2048  # the longest first length of a search: a pass of it takes milliseconds

LENGTH_DIVISORS, TIMED_PASSES = (8, 4, 2), 7
"""Lengths of a scaling study, as parts of the shortest maximum, and timed passes at each."""

FINAL_STATUSES = ("unsupported", "error")  # statuses that no shorter length would change


@dataclass(frozen=True)
class Step:
    """A trial to run, its purpose, and the maximum expected when it was requested.

    predict: returns the prediction for the trial; called only if it is run.
    """

    trial: Trial
    purpose: Purpose = "measure"
    predicted_tokens: int | None = None
    predict: Callable[[], TrialPrediction | None] = lambda: None


Schedule = Generator[Step, Record, list[Record]]


def sweep(trials: Sequence[Trial], rounds: int) -> Schedule:
    """Run each trial `rounds` times, in fresh processes, interleaving trials to compare.

    Trials on the same workload take turns, so that a drift of the machine affects them all alike.
    So do those on one and on several ranks, because a speed-up compares them. A trial that did not
    end with status ok has no further rounds.
    """
    records: list[Record] = []
    for _, compared in groupby(trials, key=lambda t: (t.workload, t.device)):
        remaining = list(compared)
        for index in range(rounds):
            passed = []
            for trial in remaining:
                record = yield Step(trial.replace(round=index))
                records.append(record)
                if record.outcome.status == "ok":
                    passed.append(trial)
            remaining = passed
    return records


def maxlen(
    trials: Sequence[Trial], ceiling: int | None = None, predictor: Predictor | None = None
) -> Schedule:
    """Search for the longest length of each trial, one after the other; seq_len is ignored."""
    records: list[Record] = []
    for trial in trials:
        records += yield from _search_length(trial, ceiling, predictor)
    return records


def scaling(trials: Sequence[Trial], rounds: int, predictor: Predictor | None = None) -> Schedule:
    """Search for the longest length of each trial, then time shorter ones on all numbers of ranks.

    The timed lengths are an eighth, a quarter and half of the shortest maximum above 0.
    """
    records: list[Record] = []
    maxima: list[int] = []
    for trial in trials:
        runs = yield from _search_length(trial, None, predictor)
        maxima.append(merge_search(runs).max_tokens)
        records += runs
    shortest = min((n for n in maxima if n), default=0)
    ranks = max(trial.world_size for trial in trials)
    lengths = [n for n in (shortest // divisor for divisor in LENGTH_DIVISORS) if n >= ranks]
    timed = [
        trial.at(n).replace(repeats=TIMED_PASSES, round=0)
        for n in lengths
        for trial, maximum in zip(trials, maxima, strict=True)
        if maximum
    ]
    return records + (yield from sweep(timed, rounds))


def _search_length(trial: Trial, ceiling: int | None, predictor: Predictor | None) -> Schedule:
    """Run one search. A confirmation is another round of the same trial, so another record.

    Fewer tokens than ranks can't be split, and show nothing about memory. So length 1 of the search
    is one token per rank: `offset` is the difference.
    """
    assert trial.memory_budget
    offset = trial.world_size - 1
    floor = floor_tokens(trial.workload, trial.memory_budget, trial.world_size)
    # no exact attention fits beyond the floor's length; up to twice of it the search can show that
    # the budget is not enforced. Tensors in host memory don't count for the budget.
    top = ceiling or CEILING_TOKENS
    if trial.options.get("offload", "none") == "none":
        top = min(top, 2 * floor)
    first = min(floor // 8, FIRST_TOKENS)
    model = predictor.length_model(trial, max(top, 2)) if predictor else None
    expected = None
    if model:
        expected = ExpectedLoads(lambda n: model.loads(n + offset), model.uncertainty)
    search = find_longest(max(1, first - offset), max(1, top - offset), expected)
    records: list[Record] = []
    request = next(search)
    while True:
        tokens = request.tokens + offset
        earlier = [r.outcome for r in records if r.trial.workload.seq_len == tokens]
        # a winner whose peak is known as an upper bound only is confirmed with exact accounting,
        # which a timed trial has in any case
        measured = any(one.status == "ok" and one.samples("peak") for one in earlier)
        exact = request.purpose == "confirm" and not measured
        # after a wrong output every run is timed, because a timed trial checks every row: else each
        # further winner would fail its confirmation
        was_wrong = any(r.outcome.status == "wrong" for r in records)
        repeats = 2 if request.shows_rate else int(exact or was_wrong)
        record = yield Step(
            trial.at(tokens).replace(round=len(earlier), repeats=0 if trial.fit_only else repeats),
            request.purpose,
            request.predicted and request.predicted + offset,
            partial(model.predict_run, tokens) if model else lambda: None,
        )
        records.append(record)
        try:
            request = search.send(result_of(record, skip_bound=model is not None))
        except StopIteration:
            return records


def result_of(record: Record, skip_bound: bool = False) -> Result:
    """Return the result of a run for the search.

    skip_bound: leave out the upper bound of a peak, because the expected peak is better.
    """
    outcome, trial = record.outcome, record.trial
    loads = {}
    timed = per_iteration(record, "time")
    seconds = median(timed) if timed else outcome.largest("pass_time")
    if seconds is not None and trial.time_budget:
        loads["time"] = seconds / trial.time_budget
    if outcome.status != "ok":
        late, wrong = outcome.status == "timeout", outcome.status == "wrong"
        return Result(False, loads, outcome.status in FINAL_STATUSES, late, wrong)
    peak = outcome.largest("peak") or (None if skip_bound else outcome.largest("peak_bound"))
    if peak is not None and trial.memory_budget:
        # a budget on CUDA counts what lies outside the allocator, too
        outside = outcome.largest("outside_allocator") or 0
        loads["memory"] = (peak + outside) / trial.memory_budget
    return Result(True, loads)
