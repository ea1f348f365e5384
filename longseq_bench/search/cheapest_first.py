"""The schedule of `recommend`: the cheapest runs first, as many as end within a time limit.

Each kind of trial (an implementation with its options) begins with short lengths, whose times
predict longer ones. Records have the prediction for every length that was asked for, so a report
can tell what was run from what was not. Durations are those of the records: a run that is resumed
makes the same decisions. What time is left goes to searches for the longest length that fits.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial

from longseq_bench.analysis.runs import group_by, pass_seconds
from longseq_bench.core.model import Record, Trial, TrialPrediction
from longseq_bench.search.estimate import run_seconds
from longseq_bench.search.prediction import CEILING_TOKENS, Predictor
from longseq_bench.search.strategy import Schedule, Step, search_length

SHORTEST, STEP = 2048, 4
"""Tokens of a first run at least, and the ratio of the lengths up to the shortest asked for."""
CHECKED = 1.5
"""Checks of long lengths take about half as long as passes: 27 s where the formula says 17 s."""
SEARCH_S_PER_GIB = {"cpu": 9.0, "cuda": 1.0}
"""A fit-only search of three runs: on two cores a run of 12 GiB takes 31 s."""


def fit_trial(trial: Trial) -> Trial:
    """Return the trial of a search for the longest length that fits in memory."""
    return trial.replace(fit_only=True, time_budget=None)


def cheapest_first(trials: Sequence[Trial], predictor: Predictor, limit_s: float) -> Schedule:
    """Run the trials that are predicted to end within a limit, the cheapest first.

    A trial whose pass is predicted to exceed its memory or time budget is not run.
    """
    groups = group_by(trials, lambda trial: trial.key_without("seq_len")).values()
    kinds = [_Kind(asked, predictor) for asked in groups]
    records: list[Record] = []
    while waiting := [kind for kind in kinds if kind.waiting]:
        cheapest = min(waiting, key=_Kind.cost)
        if _seconds(records) + cheapest.cost() > limit_s:
            break
        record = yield cheapest.step()
        cheapest.learn(record)
        records.append(record)
    for trial in (kind.passed[-1].trial for kind in kinds if kind.passed):
        assert trial.memory_budget
        all_ranks_gib = trial.world_size * trial.memory_budget / 2**30
        if _seconds(records) + all_ranks_gib * SEARCH_S_PER_GIB[trial.device] <= limit_s:
            records += yield from search_length(fit_trial(trial), None, predictor)
    return records


def _seconds(records: Iterable[Record]) -> float:
    return sum(record.wall_s for record in records)


class _Kind:
    """One implementation with its options: the trials that wait, and the runs that passed.

    asked: the same trial at each length that was asked for.
    """

    def __init__(self, asked: Sequence[Trial], predictor: Predictor) -> None:
        self._asked = sorted(trial.workload.seq_len for trial in asked)
        lengths = list(self._asked)
        while lengths[0] >= STEP * SHORTEST and not asked[0].workload.visibility.lengths:
            lengths.insert(0, lengths[0] // STEP)
        self.waiting = [asked[0].at(tokens) for tokens in lengths]
        self.passed: list[Record] = []
        # the time budget would end the dry runs early, and memory is asked for too
        ceiling = CEILING_TOKENS * asked[0].world_size
        self._model = predictor.length_model(asked[0].replace(time_budget=None), ceiling)

    def cost(self) -> float:
        """Return the predicted seconds of the next run; infinite if it should not run.

        It takes what the last run took, and more for its longer passes.
        """
        if not self.passed:
            return 0.0
        trial, last = self.waiting[0], self.passed[-1]
        tokens = trial.workload.seq_len
        seconds, fits = self._pass_seconds(tokens), True
        if self._model:
            fits = self._model.loads(tokens)["memory"] <= 1
        if not fits or seconds > (trial.time_budget or math.inf):
            return math.inf
        by_formula = run_seconds(last.trial, self._pass_seconds(last.trial.workload.seq_len))
        return last.wall_s + CHECKED * (run_seconds(trial, seconds) - by_formula)

    def step(self) -> Step:
        """Return the next run, which no longer waits."""
        trial = self.waiting.pop(0)
        return Step(trial, predict=partial(self._predict, trial.workload.seq_len))

    def learn(self, record: Record) -> None:
        """Take the result of the last step; after a failure no longer length runs."""
        if record.outcome.status != "ok":
            self.waiting.clear()
            return
        self.passed.append(record)
        if self._model:
            self._model = self._model.calibrated(self.passed)

    def _predict(self, tokens: int) -> TrialPrediction | None:
        if not self._model and not self.passed:
            return None
        found = self._model.predict_run(tokens) if self._model else TrialPrediction()
        share = self._model.share if self._model else lambda tokens: None
        asked = {n: (self._pass_seconds(n), share(n)) for n in self._asked}
        return found.model_copy(update={"seconds": self._pass_seconds(tokens), "asked": asked})

    def _pass_seconds(self, tokens: int) -> float:
        """Return the predicted time of a pass: quadratic in tokens if nothing else is known."""
        if self._model:
            return self._model.pass_seconds(tokens)
        last = self.passed[-1]
        return (pass_seconds(last) or 0.0) * (tokens / last.trial.workload.seq_len) ** 2
