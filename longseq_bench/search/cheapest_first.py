"""A sweep within a time: the cheapest runs first, and predictions of those that did not run.

Each kind of trial (an implementation with its options) begins with short lengths, whose times
predict longer ones. A record has the predictions for all lengths that were asked for, so that a
report can tell what was run from what was not. Durations are those of the records, so a run that
is resumed makes the same decisions.
"""

import math
from collections.abc import Sequence
from functools import partial

from longseq_bench.analysis.runs import group_by, pass_seconds
from longseq_bench.core.model import Record, Trial, TrialPrediction
from longseq_bench.search.estimate import run_seconds
from longseq_bench.search.prediction import CEILING_TOKENS, Predictor
from longseq_bench.search.strategy import Schedule, Step

SHORTEST, STEP = 2048, 4
"""Tokens of a first run at least, and the ratio of the lengths up to the shortest asked for."""
CHECKED = 1.5
"""Checks of long lengths take about half as long as passes: 27 s where the formula says 17 s."""


def cheapest_first(trials: Sequence[Trial], predictor: Predictor, limit_s: float) -> Schedule:
    """Run the trials that are predicted to end within a limit, the cheapest first, and one of each.

    A trial whose pass is predicted to exceed its memory or time budget is not run.
    """
    groups = group_by(trials, lambda trial: trial.key_without("seq_len")).values()
    kinds = [_Kind(asked, predictor) for asked in groups]
    records: list[Record] = []
    while waiting := [kind for kind in kinds if kind.waiting]:
        cheapest = min(waiting, key=_Kind.cost)
        cost = cheapest.cost()
        if cost and sum(record.wall_s for record in records) + cost > limit_s:
            break
        record = yield cheapest.step()
        cheapest.learn(record)
        records.append(record)
    return records


class _Kind:
    """One implementation with its options: the trials that wait, and the runs that passed.

    asked: the same trial at each length that was asked for.
    """

    def __init__(self, asked: Sequence[Trial], predictor: Predictor) -> None:
        first = asked[0]
        self._asked = sorted(trial.workload.seq_len for trial in asked)
        lengths = list(self._asked)
        while lengths[0] >= STEP * SHORTEST and not first.workload.visibility.lengths:
            lengths.insert(0, lengths[0] // STEP)
        self.waiting = [first.at(tokens) for tokens in lengths]
        self.passed: list[Record] = []
        # a time budget would end the dry runs early, but the longest length is asked for too
        ceiling = CEILING_TOKENS * first.world_size
        self._model = predictor.length_model(first.replace(time_budget=None), ceiling)

    def cost(self) -> float:
        """Return the predicted seconds of the next run; infinite if it should not run."""
        if not self.passed:
            return 0.0
        trial, last = self.waiting[0], self.passed[-1]
        tokens = trial.workload.seq_len
        seconds = self._pass_seconds(tokens)
        fits = not self._model or self._model.loads(tokens)["memory"] <= 1
        if not fits or seconds > (trial.time_budget or math.inf):
            return math.inf
        before = run_seconds(last.trial, self._pass_seconds(last.trial.workload.seq_len))
        return last.wall_s + CHECKED * (run_seconds(trial, seconds) - before)

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
        share = self._model.share if self._model else lambda tokens: None
        asked = {n: (self._pass_seconds(n), share(n)) for n in self._asked}
        if self._model:
            return self._model.predict_run(tokens).model_copy(update={"asked": asked})
        return TrialPrediction(seconds=self._pass_seconds(tokens), asked=asked)

    def _pass_seconds(self, tokens: int) -> float:
        """Return the predicted time of a pass: quadratic in tokens if nothing else is known."""
        if self._model:
            return self._model.pass_seconds(tokens)
        last = self.passed[-1]
        return (pass_seconds(last) or 0.0) * (tokens / last.trial.workload.seq_len) ** 2
