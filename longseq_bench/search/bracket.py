"""Bracket search for the longest length that fits: integers only, no tensors.

Runs are few and expensive. A bracket [longest that passed, shortest that failed] is narrowed:

1. Run just under the edge that the model expects, shorter lengths if that fails. Without a model,
   run two small lengths.
2. Correct the model by what the runs used: each reports its loads, the fraction of each limit
   (memory, time) that it used. Two runs without a model give a line (search/edge_model.py).
3. Run just under the length at which the first load would reach 1. Where the model is wrong twice,
   bisect, so that the search always ends.
4. Stop when the bracket is closed: 1 % or 64 tokens. Run the winner again in another process to
   confirm it.

Where time is the limit, few runs must do: short ones show the rate, the next takes almost the
limit, and that one is confirmed. None is foreseen to be stopped, so no failure may be known.

After a wrong output a short length runs, then half of the shortest wrong one. Two wrong lengths
that far apart end the search: no budget is the cause. A length passes on time if the median of its
times is within the limit. A failure below a length that passed is ignored.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from longseq_bench.core.model import Purpose
from longseq_bench.search.edge_model import MARGIN, EdgeModel, ExpectedLoads, History

TOLERANCE_TOKENS, TOLERANCE_SHARE = 64, 0.01
MAX_SPREAD = 0.16  # maximum tolerance of a noisy machine, as a share of the length
MAX_GROWTH = 16  # factor beyond the longest pass up to which a prediction is trusted
FALLBACK_SHARES = (1.0, 0.97, 0.9, 0.7, 0.35)  # of the first length, while none has passed
LATE_LOADS = (1.25, 2.0, 4.0)  # assumed time loads of runs in a row that were killed at the limit
RATE_SHARE = 5  # a run of this part of the expected length shows the rate, in 4 % of the time
LONG_LOAD, LONG_RUNS = 0.3, 3  # runs of at least this time load, late ones included; 4 if all are
TIME_MARGIN = 0.03  # the aim is this share below the edge that times imply
NEAR_LIMIT, SURELY_NEAR = 0.9, 0.8  # of that edge: what is confirmed, and what may be the end
MAX_RUNS = 16  # stop narrowing after this many; a quiet machine needs three to eight
MAX_CONFIRMATIONS = 4  # further runs to confirm a winner, or the next lower one
CONFIRMATIONS = 1  # required passes of the winner in other processes
MUCH_SHORTER = 8  # divisor of a length that failed, for one that should pass
FAR_APART = 2  # ratio of two lengths with a wrong output that ends the search


@dataclass(frozen=True)
class Request:
    """A length to run, the reason, and the edge that the model expects (None: no model yet).

    shows_rate: its passes are short, and several show how fast the machine is.
    """

    tokens: int
    purpose: Purpose
    predicted: int | None = None
    shows_rate: bool = False


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
    if search.expects_time_limit:
        yield from search.run((search.predicted or 0) // RATE_SHARE, "probe", shows_rate=True)
    elif search.first:
        yield from _down_from(search, search.first)
    shorter = min(start, ceiling, (search.history.high or start + 1) - 1)
    if search.wants_first and shorter and not search.is_limited_by_time:
        yield from _first_steps(search, shorter)
    while not (search.hopeless or search.is_closed_by_time):
        step = search.next() if search.runs < MAX_RUNS else None
        if search.is_limited_by_time and search.has_long_runs:
            yield from _time_step(search)
        elif step is not None:
            yield from search.run(step)
        elif search.wants_confirmation and search.runs < MAX_RUNS + MAX_CONFIRMATIONS:
            yield from search.run(search.history.low, "confirm")
        else:
            break
    return search.history


def _time_step(search: "_BracketSearch") -> Steps:
    """Request a length just below the time limit, that one again, or one that shows the rate."""
    edge, low = search.model.time_edge(), search.history.low
    if edge > 2 * RATE_SHARE * max(low, 1):
        yield from search.run(max(low + 1, edge // RATE_SHARE), "probe", shows_rate=True)
        return
    near = low >= NEAR_LIMIT * edge
    tokens = low if near else max(1, int(edge * (1 - TIME_MARGIN)))
    if near or search.long_runs == LONG_RUNS - 1:
        yield from search.run(tokens, "confirm", predicted=max(edge, tokens + 1))
    else:
        yield from search.run(tokens, "edge")


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
        is_long = (self.predicted or 0) > TOLERANCE_TOKENS
        self.expects_time_limit = is_long and self.model.is_time(self.predicted)
        self.hopeless, self.runs, self.long_runs = False, 0, 0
        self._misses = 0  # failed runs in a row: how often the model was wrong
        self._contradictions = 0
        self._right = 0  # longest length that passed after a wrong output

    @property
    def wants_first(self) -> bool:
        """Return True until a length has passed or had a wrong output, or none can pass."""
        return not (self.history.loads or self.history.wrong or self.hopeless)

    # ---- results -------------------------------------------------------------------------------

    def run(
        self, tokens: int, purpose: Purpose | None = None,
        shows_rate: bool = False, predicted: int | None = None,
    ) -> Steps:  # fmt: skip
        """Request a run and learn from its result. The usual purpose: `edge` near an edge."""
        near = self.predicted is not None and tokens > 0.9 * self.predicted
        usual: Purpose = "edge" if near or self.history.high is not None else "probe"
        edge = predicted or self.predicted
        result = yield Request(tokens, purpose or usual, edge, shows_rate)
        self._learn(tokens, result)

    def _learn(self, tokens: int, result: Result) -> None:
        low, history = self.history.low, self.history
        self.hopeless = self.hopeless or result.hopeless
        self.runs += 1
        if result.wrong:
            history.wrong.add(tokens)
            self.hopeless |= max(history.wrong) >= FAR_APART * min(history.wrong)
        elif result.passed and history.wrong:
            self._right = max(self._right, tokens)
        late = LATE_LOADS[min(self._misses, 2)] if result.late else None
        time = result.loads.get("time", late)
        if not result.passed and not result.late:
            history.failures.add(tokens)
        elif time is not None:
            history.times[tokens].append(time)
            self.long_runs += time >= LONG_LOAD
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
            self.predicted = min(edge, self.ceiling)

    # ---- the end -------------------------------------------------------------------------------

    @property
    def is_limited_by_time(self) -> bool:
        """Return True while runs show that time is the limit, and nothing else below it."""
        edge, history = self.model.time_edge(), self.history
        is_lowest = TOLERANCE_TOKENS < edge <= min([self.ceiling, *history.failures])
        return is_lowest and not history.wrong and self.model.is_time(edge)

    @property
    def has_long_runs(self) -> bool:
        """Return True while runs near a time limit are left."""
        is_long = self.history.loads.get(self.history.low, {}).get("time", 0.0) >= LONG_LOAD
        return self.long_runs < LONG_RUNS + (not is_long)

    @property
    def is_closed_by_time(self) -> bool:
        """Return True if a longer pass would take too long, and no run is left to tell more."""
        was_late = any(t > 1 for times in self.history.times.values() for t in times)
        is_near = self.history.low >= SURELY_NEAR * self.model.time_edge()
        is_confirmed = is_near and self.history.low > 0 and not self.wants_confirmation
        has_ended = is_confirmed or not self.has_long_runs
        return self.is_limited_by_time and (was_late or is_near) and has_ended

    @property
    def wants_confirmation(self) -> bool:
        """Return True while the winner has not passed again in another process."""
        return self.history.low > 0 and self.history.passes[self.history.low] <= CONFIRMATIONS

    def _width(self) -> int:
        return tolerance(self.history.low, self._contradictions)

    # ---- the next length -----------------------------------------------------------------------

    def next(self) -> int | None:
        """Return the next length to run; None if the bracket is closed or the ceiling passed."""
        low, high = self.history.low, self.history.high
        if high in self.history.wrong and self._right < high // FAR_APART:
            short = max(1, min(self._start, high // MUCH_SHORTER))
            return high // FAR_APART if low else short
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
        edge = self.model.edge() or 0
        if not edge and self.history.high is None:
            return low * MAX_GROWTH
        edge_is_outside = edge >= top and self.history.high is not None
        if not edge or self._misses > 1 or edge_is_outside:
            return self._between(low, top)
        aim, width = int(edge * (1 - MARGIN)), self._width()
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
