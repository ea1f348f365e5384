"""Bracket search for the longest length that fits: integers only, no tensors.

Runs are few and expensive. A bracket [longest that passed, shortest that failed] is narrowed:

1. Run just under the edge that the model expects, shorter lengths if that fails. Without a model,
   run two small lengths.
2. Correct the model by what the runs used: each reports its loads, the fraction of each limit
   (memory, time) that it used. Two runs without a model give a line.
3. Run just under the length at which the first load would reach 1. Where the model is wrong twice,
   bisect, so that the search always ends.
4. Stop when the bracket is closed (1 % or 64 tokens), or wider if times are noisy. Run the winner
   again in another process to confirm it.

Memory is nearly the same in every run; time is not. A length passes on time if the median of its
times is within the limit, and a bracket limited by time stays as wide as the spread of the edges
that the runs near it imply. A failure below a length that passed is ignored.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import Literal

Purpose = Literal["probe", "edge", "confirm"]

TOLERANCE_TOKENS, TOLERANCE_SHARE = 64, 0.01
MOST_SPREAD = 0.16  # the widest tolerance, as a share of the length: noise widens it up to here
JUMP = 16  # factor beyond the longest pass up to which a prediction is trusted
UNDER = 0.005  # aim this share below a predicted edge: more than the usual error of a prediction
FALLBACK_SHARES = (1.0, 0.97, 0.9, 0.7, 0.35)  # of the first length, while none has passed
APART = 1.02  # two lengths closer than this factor define no memory line: their difference is noise
NEAR = 1.25  # runs within this factor of the longest pass estimate the time edge
LATE_LOAD = 1.05  # assumed time load of a run that was killed at its limit
MOST_RUNS = 16  # stop narrowing after this many; a quiet machine needs three to eight
MOST_TIME = 4.0  # stop narrowing by time after this many time limits spent in passes
MORE_TIME = 2.0  # time limits added to MOST_TIME while the bracket is wider than noise can explain
MOST_CONFIRMATIONS = 4  # further runs to confirm a winner, or the next lower one
CONFIRMATIONS = 1  # required passes of the winner in other processes


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
    hopeless: it failed for a reason that no shorter length would fix.
    """

    passed: bool
    loads: Mapping[str, float] = field(default_factory=dict)
    hopeless: bool = False
    late: bool = False


@dataclass(frozen=True)
class Bracket:
    """The result of a search.

    passed: the longest length that passed (0: none).  failed: the shortest failed length above it
    (None: nothing failed up to the ceiling).
    """

    passed: int
    failed: int | None
    predicted: int | None
    confirmations: int


Search = Generator[Request, Result, Bracket]


@dataclass(frozen=True)
class ExpectedLoads:
    """Loads expected before any run.

    loads: the fraction of each limit at a length, growing with the length; unknown loads are left
    out.  rough: the factor by which a load may be wrong, where that is more than a few percent; the
    search starts at a length that is certain to fit within that factor.
    """

    loads: Callable[[int], Mapping[str, float]]
    rough: Mapping[str, float] = field(default_factory=dict)


def tolerance(tokens: int, contradictions: int = 0) -> int:
    """Return the width of a closed bracket at this length: 1 % or 64 tokens, the larger.

    The width doubles with each contradiction (a length passed and failed, or failed below one that
    passed): a machine whose noise moves the edge cannot locate it more precisely.
    """
    widened = min(TOLERANCE_SHARE * 2**contradictions, MOST_SPREAD)
    return max(TOLERANCE_TOKENS, int(tokens * widened))


def find_longest(start: int, ceiling: int, expected: ExpectedLoads | None = None) -> Search:
    """Yield lengths to run, receive their results, return the bracket.

    start: a length that is probably small enough.  ceiling: the longest length to request.
    """
    state = _State(ceiling, expected)
    if first := state.first():
        yield from _down_from(state, first)
    shorter = min(start, ceiling, (state.high or start + 1) - 1)
    if not state.loads and not state.hopeless and shorter:
        yield from _first_steps(state, shorter)
    while not state.hopeless:
        step = state.next() if state.may_narrow else None
        if step is not None:
            yield from _run(state, Request(step, state.purpose(step), state.predicted))
        elif state.wants_confirmation and state.runs < MOST_RUNS + MOST_CONFIRMATIONS:
            yield from _run(state, Request(state.low, "confirm", state.predicted))
        else:
            break
    return Bracket(state.low, state.high, state.predicted, max(0, state.passes[state.low] - 1))


class _State:
    """The results of all lengths so far, and the choice of the next one."""

    def __init__(self, ceiling: int, expected: ExpectedLoads | None = None) -> None:
        self.ceiling, self.expected = ceiling, expected
        self.loads: dict[int, Mapping[str, float]] = {}
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self.passes: Counter[int] = Counter()
        self.failures: set[int] = set()
        self.hopeless = False
        self.predicted: int | None = None
        self.runs = 0
        self._spent = 0.0
        self._solved: dict[tuple[int, float], int] = {}
        self._missed = 0
        self._contradictions = 0

    # ---- the bracket ---------------------------------------------------------------------------

    def _passes(self, tokens: int) -> bool:
        """Return True if a run of this length passed and none failed, by its median time."""
        times = self.times.get(tokens)
        in_time = not times or median_high(times) <= 1
        return tokens in self.loads and tokens not in self.failures and in_time

    @property
    def low(self) -> int:
        """The longest length that passes; 0 if there is none. A later failure can lower it."""
        return max(filter(self._passes, self.loads), default=0)

    @property
    def high(self) -> int | None:
        """The shortest failed length above it; None if nothing failed there."""
        low = self.low
        longer = (n for n in self.failures | self.times.keys() if n > low)
        return min((n for n in longer if not self._passes(n)), default=None)

    @property
    def wants_confirmation(self) -> bool:
        """Return True while the winner has not passed again in another process."""
        return self.low > 0 and self.passes[self.low] <= CONFIRMATIONS

    @property
    def may_narrow(self) -> bool:
        """Return False once the runs, or the time of a time-limited search, are used up."""
        low, high = self.low, self.high
        if low == 0 or high is None or not self._high_is_late:
            return self.runs < MOST_RUNS
        wide = high - low > MOST_SPREAD * low
        return self.runs < MOST_RUNS and self._spent < MOST_TIME + wide * MORE_TIME

    @property
    def _high_is_late(self) -> bool:
        """Return True if the bracket ends where only time failed."""
        return self.high is not None and self.high not in self.failures

    def learn(self, tokens: int, result: Result) -> None:
        """Add the result of a run."""
        low = self.low
        self.hopeless = self.hopeless or result.hopeless
        self.runs += 1
        time = result.loads.get("time", LATE_LOAD if result.late else None)
        if not result.passed and not result.late:
            self.failures.add(tokens)
        elif time is not None:
            self.times[tokens].append(time)
            self._spent += min(time, 1.0)
        if not result.passed:
            self._contradictions += tokens <= low
            # a winner that fails again is no error of the model
            self._missed = 1 if tokens in self.loads else self._missed + 1
            return
        self._missed = 0
        late_before = any(t > 1 for t in self.times.get(tokens, ()))
        self._contradictions += tokens in self.failures or late_before
        self.passes[tokens] += 1
        self.loads[tokens] = result.loads
        if self.predicted is None and (edge := self._edge()) is not None:
            self.predicted = min(edge[0], self.ceiling)

    # ---- the next length -----------------------------------------------------------------------

    def first(self) -> int:
        """Return a length just below the expected edge, or as far below as rough loads may be off.

        0 if nothing is expected.
        """
        if self.expected is None:
            return 0
        self.predicted = found = _solve(self.expected.loads, {}, self.ceiling)
        if found is None:
            return 0
        cautious = {n: r / (1 - UNDER) for n, r in self.expected.rough.items()}
        careful = _solve(self.expected.loads, cautious, self.ceiling) or 1
        return max(1, min(careful, found if found == self.ceiling else int(found * (1 - UNDER))))

    def next(self) -> int | None:
        """Return the next length to run; None if the bracket is closed or the ceiling passed."""
        low, high = self.low, self.high
        if high is not None and self._is_tied(high):
            return high
        if self._high_is_late and not self.wants_confirmation:
            return None  # the information of a confirmation about noise is no reason to continue
        if low >= self.ceiling or (high is not None and high - low <= self._width()):
            return None
        if high is None:
            return max(low + 1, min(self._guess(low, self.ceiling + 1), self.ceiling))
        # the edge is below a failure by an unknown amount: a run right under it shows little
        return max(low + 1, min(self._guess(low, high), high - self._width() // 2))

    def _is_tied(self, tokens: int) -> bool:
        """Return True if one run passed and one was late: a third decides the median."""
        times = self.times.get(tokens, [])
        return tokens not in self.failures and len(times) == 2 and min(times) <= 1 < max(times)

    def purpose(self, tokens: int) -> Purpose:
        """Return `edge` once a failure above, or the prediction, is near; `confirm` for a tie."""
        if self._is_tied(tokens):
            return "confirm"
        near = self.predicted is not None and tokens > 0.9 * self.predicted
        return "edge" if near or self.high is not None else "probe"

    def _guess(self, low: int, top: int) -> int:
        """Return a length just below the predicted edge, or just above a pass that near to it."""
        width = self._width()
        edge, limit = self._edge() or (0, "")
        if low == 0:
            return top // 8
        if not edge and self.high is None:
            return low * JUMP
        if not edge or self._missed > 1 or edge >= top != self.ceiling + 1:
            return _between(low, top, self._missed, width)
        if limit == "time" and edge > 4 * low:
            # half the length takes a quarter of the time, and shows more than a pass cut short
            return edge // 2
        aim = min(int(edge * (1 - UNDER)), edge - width // 2 if limit == "time" else edge)
        if aim <= low + width // 2:
            return low + width
        return min(aim, low * JUMP)

    def _width(self) -> int:
        width = tolerance(self.low, self._contradictions)
        edges = self._time_edges()
        if not edges or not self._high_is_late:
            return width
        middle = median(edges)
        # twice the median deviation: the range of two estimates, and robust to one outlier of three
        spread = 2 * median([abs(edge - middle) for edge in edges])
        return max(width, int(min(spread, MOST_SPREAD * self.low)))

    # ---- the model -----------------------------------------------------------------------------

    def _edge(self) -> tuple[int, str] | None:
        """Return the length at which the first load reaches 1, and the name of that load."""
        good = sorted(filter(self._passes, self.loads))
        if not good:
            return None
        edges = [(int(median(times)), "time")] if (times := self._time_edges()) else []
        if other := self._corrected(good[-1]) or self._extrapolated(good):
            edges.append(other)
        return min(edges, default=None)

    def _corrected(self, at: int) -> tuple[int, str] | None:
        """Find the edge by the expected loads, corrected by what the pass at `at` used.

        A load that was not measured is used as expected. Time is left out where runs estimate it.
        """
        if self.expected is None:
            return None
        expected, timed = self.expected.loads, bool(self._time_edges())

        def loads(tokens: int) -> Mapping[str, float]:
            return {k: x for k, x in expected(tokens).items() if k != "time" or not timed}

        used, before = self.loads[at], loads(at)
        factors = {n: used[n] / x for n, x in before.items() if used.get(n) and x > 0}
        if not factors and not timed:
            return None
        edge = _solve(loads, factors, self.ceiling)
        if not edge:
            return None
        there = loads(edge)
        return edge, max(there, key=lambda n: factors.get(n, 1.0) * there[n])

    def _extrapolated(self, good: list[int]) -> tuple[int, str] | None:
        """Find the edge by a line through the two longest passes that are not too close.

        Memory is piecewise linear and convex in the length, so the longest ones fit best.
        """
        b = good[-1]
        a = max((n for n in good if n <= b / APART), default=None)
        if a is None:
            return None
        edges = [
            (max(1, int(b + (1 - at_b) * (b - a) / (at_b - at_a))), name)
            for name, at_b in self.loads[b].items()
            if name != "time" and 0 < (at_a := self.loads[a].get(name, 0.0)) < at_b
        ]
        return min(edges, default=None)

    def _time_edges(self) -> list[float]:
        """Return the edge by each run near it: the length at which its time would reach 1."""
        near = [n for n in self.times if self.low / NEAR <= n <= self.low * NEAR]
        exponent = self._time_exponent()
        found = [self._time_edge(n, t, exponent) for n in near for t in self.times[n] if t > 0]
        return [edge for edge in found if edge is not None]

    def _time_edge(self, tokens: int, time: float, exponent: float | None) -> float | None:
        """Return the edge by one run; None where nothing shows how time grows."""
        expected = self.expected
        if expected and (before := expected.loads(tokens).get("time", 0.0)) > 0:
            if (tokens, time) not in self._solved:
                factor, loads = {"time": time / before}, expected.loads
                edge = _solve(lambda n: {"time": loads(n)["time"]}, factor, self.ceiling)
                self._solved[tokens, time] = edge or 1
            return self._solved[tokens, time]
        return max(1.0, tokens * time ** (-1 / exponent)) if exponent else None

    def _time_exponent(self) -> float | None:
        """Return the power of the length by which time grows up to the longest pass.

        Values outside 0.5 to 3 are noise: attention's time grows between linear and quadratic.
        """
        b, good = self.low, [n for n in self.times if self._passes(n)]
        a = max((n for n in good if n <= b / NEAR), default=min(good, default=b))
        if a == b or not self.times.get(b):
            return None
        at_a, at_b = median(self.times[a]), median(self.times[b])
        if not 0 < at_a < at_b:
            return None
        return min(3.0, max(0.5, math.log(at_b / at_a) / math.log(b / a)))


def _solve(
    loads: Callable[[int], Mapping[str, float]],
    factors: Mapping[str, float],
    ceiling: int,
) -> int | None:
    """Find the longest length at which no load times its factor exceeds 1, within 0.1 %.

    The ceiling if none does so there; None if no load is known. Evaluates few lengths.
    """

    def load(n: int) -> float:
        return max((x * factors.get(k, 1.0) for k, x in loads(n).items()), default=0.0)

    low, high = 1, ceiling
    at_low, at_high = load(low), load(high)
    if at_high <= 0:
        return None
    if at_high <= 1:
        return ceiling
    if at_low > 1:
        return 1
    for turn in range(60):
        if high - low <= max(1, low // 1000):
            break
        # interpolate in logarithms; bisect now and then, so that it ends
        share = math.log(1 / max(at_low, 1e-12)) / math.log(at_high / max(at_low, 1e-12))
        middle = low * (high / low) ** (0.5 if turn % 4 == 3 else share)
        at = max(low + 1, min(high - 1, round(middle)))
        there = load(at)
        low, at_low, high, at_high = (
            (at, there, high, at_high) if there <= 1 else (low, at_low, at, there)
        )
    return low


def _between(low: int, top: int, missed: int, width: int) -> int:
    """Return a length inside the bracket: near its top after one error of the model, else mid."""
    if top - low <= 2 * width:
        return low + width
    middle = math.isqrt(low * top) if top > 2 * low else (low + top) // 2
    return max(middle, top - 4 * width) if missed <= 1 and top < 3 * low else middle


def _run(state: _State, request: Request) -> Generator[Request, Result, None]:
    state.learn(request.tokens, (yield request))


def _down_from(state: _State, first: int) -> Generator[Request, Result, None]:
    """Request the length expected to pass, then shorter ones until one does."""
    for share in FALLBACK_SHARES:
        step = max(1, int(first * share))
        if state.loads or state.hopeless or step in state.failures or step in state.times:
            return
        yield from _run(state, Request(step, state.purpose(step), state.predicted))


def _first_steps(state: _State, start: int) -> Generator[Request, Result, None]:
    """Request two lengths that pass, to define a line; shorter ones while nothing passes."""
    step = start
    yield from _run(state, Request(step, "probe"))
    while not state.loads and not state.hopeless and step > 1:
        step = max(1, step // 8)
        yield from _run(state, Request(step, "probe"))
    if state.loads and not state.hopeless:
        top = state.ceiling + 1 if state.high is None else state.high
        second = min(state.low * 4, (state.low + top) // 2)
        if second > state.low:
            yield from _run(state, Request(second, "probe"))
