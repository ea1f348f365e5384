"""Bracket search for the longest length that fits: integers only, no tensors.

Runs are few and expensive. A bracket [longest that passed, shortest that failed] is narrowed:

1. Run just under the edge that the model expects, shorter lengths if that fails. Without a model,
   run two small lengths.
2. Correct the model by what the runs used: each reports its loads, the fraction of each limit
   (memory, time) that it used. Two runs without a model give a line (search/edge_model.py).
3. Run just under the length at which the first load would reach 1. Where the model is wrong twice,
   bisect, so that the search always ends.
4. Stop when the bracket is closed (1 % or 64 tokens), or wider if times are noisy. Run the winner
   again in another process to confirm it.

After a wrong output a short length runs, then half of the shortest wrong one. Two wrong lengths
that far apart end the search: no budget is the cause.

A length passes on time if the median of its times is within the limit, and a bracket limited by
time stays as wide as the spread of the edges that the runs near it imply. A failure below a length
that passed is ignored.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from statistics import median

from longseq_bench.core.model import Purpose
from longseq_bench.search.edge_model import MARGIN, EdgeModel, ExpectedLoads, History

TOLERANCE_TOKENS, TOLERANCE_SHARE = 64, 0.01
MAX_SPREAD = 0.16  # maximum tolerance of a noisy machine, as a share of the length
MAX_GROWTH = 16  # factor beyond the longest pass up to which a prediction is trusted
FALLBACK_SHARES = (1.0, 0.97, 0.9, 0.7, 0.35)  # of the first length, while none has passed
LATE_LOAD = 1.05  # assumed time load of a run that was killed at its limit
MAX_RUNS = 16  # stop narrowing after this many; a quiet machine needs three to eight
MAX_TIME = 4.0  # stop narrowing by time after this many time limits spent in passes
EXTRA_TIME = 2.0  # time limits added to MAX_TIME while the bracket is wider than noise can explain
MAX_CONFIRMATIONS = 4  # further runs to confirm a winner, or the next lower one
CONFIRMATIONS = 1  # required passes of the winner in other processes
MUCH_SHORTER = 8  # divisor of a length that failed, for one that should pass
FAR_APART = 2  # ratio of two lengths with a wrong output that ends the search


@dataclass(frozen=True)
class Request:
    """A length to run, the reason, and the edge that the model expects (None: no model yet)."""

    tokens: int
    purpose: Purpose
    predicted: int | None = None


@dataclass(frozen=True)
class Result:
    """The result of one run.

    loads: fraction of each limit that it used. Of a failed run, at most its time.
    late: it failed on the time limit alone.
    wrong: its output was wrong.
    hopeless: it failed for a reason that no shorter length would fix.
    """

    passed: bool
    loads: Mapping[str, float] = field(default_factory=dict)
    hopeless: bool = False
    late: bool = False
    wrong: bool = False


Search = Generator[Request, Result, History]
Steps = Generator[Request, Result, None]


def tolerance(tokens: int, contradictions: int = 0) -> int:
    """Return the width of a closed bracket at this length: 1 % or 64 tokens, the larger.

    The width doubles with each contradiction (a length passed and failed, or failed below one that
    passed): a machine whose noise moves the edge cannot locate it more precisely.
    """
    widened = min(TOLERANCE_SHARE * 2**contradictions, MAX_SPREAD)
    return max(TOLERANCE_TOKENS, int(tokens * widened))


def find_longest(start: int, ceiling: int, expected: ExpectedLoads | None = None) -> Search:
    """Yield lengths to run, receive their results, return the history.

    start: a length that is probably small enough.  ceiling: the longest length to request.
    """
    search = _BracketSearch(start, ceiling, expected)
    if search.first:
        yield from _down_from(search, search.first)
    shorter = min(start, ceiling, (search.history.high or start + 1) - 1)
    if search.wants_first and shorter:
        yield from _first_steps(search, shorter)
    while not search.hopeless:
        step = search.next() if search.may_narrow else None
        if step is not None:
            yield from search.run(step)
        elif search.wants_confirmation and search.runs < MAX_RUNS + MAX_CONFIRMATIONS:
            yield from search.run(search.history.low, "confirm")
        else:
            break
    return search.history


def _down_from(search: "_BracketSearch", first: int) -> Steps:
    """Request the length expected to pass, then shorter ones until one does."""
    history = search.history
    for share in FALLBACK_SHARES:
        step = max(1, int(first * share))
        known = step in history.failures or step in history.times
        if known or not search.wants_first:
            return
        yield from search.run(step)


def _first_steps(search: "_BracketSearch", start: int) -> Steps:
    """Request two lengths that pass, to define a line; shorter ones while nothing passes."""
    step, history = start, search.history
    yield from search.run(step, "probe")
    while search.wants_first and step > 1:
        step = max(1, step // MUCH_SHORTER)
        yield from search.run(step, "probe")
    if history.loads and not history.wrong and not search.hopeless:
        low, high = history.low, history.high
        second = min(low * 4, (low + (search.ceiling + 1 if high is None else high)) // 2)
        if second > low:
            yield from search.run(second, "probe")


class _BracketSearch:
    """The bracket so far, the rules when to stop, and the choice of the next length."""

    def __init__(self, start: int, ceiling: int, expected: ExpectedLoads | None) -> None:
        self._start, self.ceiling, self.history = start, ceiling, History()
        self.model = EdgeModel(self.history, expected, ceiling)
        self.predicted, self.first = self.model.expected_edge()
        self.hopeless, self.runs = False, 0
        self._time_spent = 0.0
        self._misses = 0  # failed runs in a row: how often the model was wrong
        self._contradictions = 0
        self._right = 0  # longest length that passed after a wrong output

    @property
    def wants_first(self) -> bool:
        """Return True until a length has passed or had a wrong output, or none can pass."""
        return not (self.history.loads or self.history.wrong or self.hopeless)

    # ---- results -------------------------------------------------------------------------------

    def run(self, tokens: int, purpose: Purpose | None = None) -> Steps:
        """Request a run and learn from its result; the purpose follows from the length."""
        result = yield Request(tokens, purpose or self._purpose(tokens), self.predicted)
        self._learn(tokens, result)

    def _purpose(self, tokens: int) -> Purpose:
        """Return `confirm` for a tie, `edge` below a failure or near the prediction, or `probe`."""
        if self.history.is_tied(tokens):
            return "confirm"
        near = self.predicted is not None and tokens > 0.9 * self.predicted
        return "edge" if near or self.history.high is not None else "probe"

    def _learn(self, tokens: int, result: Result) -> None:
        low, history = self.history.low, self.history
        self.hopeless = self.hopeless or result.hopeless
        self.runs += 1
        if result.wrong:
            history.wrong.add(tokens)
            self.hopeless |= max(history.wrong) >= FAR_APART * min(history.wrong)
        elif result.passed and history.wrong:
            self._right = max(self._right, tokens)
        time = result.loads.get("time", LATE_LOAD if result.late else None)
        if not result.passed and not result.late:
            history.failures.add(tokens)
        elif time is not None:
            history.times[tokens].append(time)
            self._time_spent += min(time, 1.0)
        if not result.passed:
            self._contradictions += tokens <= low
            # that a winner fails in a later run is not an error of the model
            self._misses = 1 if tokens in history.loads else self._misses + 1
            return
        self._misses = 0
        late_before = any(t > 1 for t in history.times.get(tokens, ()))
        self._contradictions += tokens in history.failures or late_before
        history.passes[tokens] += 1
        history.loads[tokens] = result.loads
        if self.predicted is None and (edge := self.model.edge()) is not None:
            self.predicted = min(edge[0], self.ceiling)

    # ---- the end -------------------------------------------------------------------------------

    @property
    def wants_confirmation(self) -> bool:
        """Return True while the winner has not passed again in another process."""
        return self.history.low > 0 and self.history.passes[self.history.low] <= CONFIRMATIONS

    @property
    def may_narrow(self) -> bool:
        """Return False once the runs, or the time of a time-limited search, are used up."""
        low, high = self.history.low, self.history.high
        if low == 0 or high is None or not self._high_is_late:
            return self.runs < MAX_RUNS
        wide = high - low > MAX_SPREAD * low
        return self.runs < MAX_RUNS and self._time_spent < MAX_TIME + wide * EXTRA_TIME

    @property
    def _high_is_late(self) -> bool:
        return self.history.high is not None and self.history.high not in self.history.failures

    def _width(self) -> int:
        """Return the width of a closed bracket: the tolerance, or the spread of the time edges."""
        width = tolerance(self.history.low, self._contradictions)
        edges = self.model.time_edges()
        if not edges or not self._high_is_late:
            return width
        middle = median(edges)
        # twice the median deviation: the range of two estimates; with three it ignores an outlier
        spread = 2 * median([abs(edge - middle) for edge in edges])
        return max(width, int(min(spread, MAX_SPREAD * self.history.low)))

    # ---- the next length -----------------------------------------------------------------------

    def next(self) -> int | None:
        """Return the next length to run; None if the bracket is closed or the ceiling passed."""
        low, high = self.history.low, self.history.high
        if high is not None and self.history.is_tied(high):
            return high
        if high in self.history.wrong and self._right < high // FAR_APART:
            short = max(1, min(self._start, high // MUCH_SHORTER))
            return high // FAR_APART if low else short
        if self._high_is_late and not self.wants_confirmation:
            return None  # the winner is confirmed; that run only changed the estimate of the noise
        if low >= self.ceiling or (high is not None and high - low <= self._width()):
            return None
        if high is None:
            return max(low + 1, min(self._guess(low, self.ceiling + 1), self.ceiling))
        # the edge may be far below a failure, so a run right under the failure shows little
        return max(low + 1, min(self._guess(low, high), high - self._width() // 2))

    def _guess(self, low: int, top: int) -> int:
        """Return a length between low and top: just below the predicted edge if that is between."""
        if low == 0:
            return top // MUCH_SHORTER
        edge, limit = self.model.edge() or (0, "")
        if not edge and self.history.high is None:
            return low * MAX_GROWTH
        edge_is_outside = edge >= top and self.history.high is not None
        if not edge or self._misses > 1 or edge_is_outside:
            return self._between(low, top)
        if limit == "time" and edge > 4 * low:
            # half the length takes a quarter of the time; a pass that is stopped shows less
            return edge // 2
        width = self._width()
        aim = min(int(edge * (1 - MARGIN)), edge - width // 2 if limit == "time" else edge)
        if aim <= low + width // 2:
            return low + width
        return min(aim, low * MAX_GROWTH)

    def _between(self, low: int, top: int) -> int:
        """Return a length in the bracket: near its top after one error of the model, else mid."""
        width = self._width()
        if top - low <= 2 * width:
            return low + width
        middle = math.isqrt(low * top) if top > 2 * low else (low + top) // 2
        near_top = self._misses <= 1 and top < 3 * low
        return max(middle, top - 4 * width) if near_top else middle
