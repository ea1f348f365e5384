"""The longest length that works: an integer search that knows no tensor.

Runs are few and dear, so the search is model-first. Each run that passes tells its loads, the
fractions it took of each limit (memory, time). The model is an expectation of those loads where
there is one, corrected by what the longest pass took; else two small runs give a line through them.
The search jumps to just under the length at which the first load would reach 1, learns from that
run, and closes a bracket [longest passed, shortest failed] round the edge. Where the model is wrong
it bisects, so it always ends. A failure below a length that passed says nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Purpose = Literal["probe", "edge", "confirm"]

TOLERANCE_TOKENS = 64
TOLERANCE_SHARE = 0.01
JUMP = 16
"""How far beyond what has passed a prediction is trusted, as a factor."""

UNDER = 0.005
"""Aim this share of the length under a predicted edge: inside the tolerance, and above what a
prediction is usually off by."""

SHARES = (1.0, 0.97, 0.9, 0.7, 0.35)
"""Of the first length expected to pass, where it does not: the ones that are tried next."""

APART = 1.02
"""Two lengths closer than this factor give no line: their difference is noise."""

MOST_RUNS = 16
"""A search stops looking here, whatever it knows. A calm machine needs five to eight."""

MOST_CONFIRMATIONS = 4
"""Tries to confirm a winner, or the next lower one, after that."""

CONFIRMATIONS = 1
"""Passes of the winner in further fresh processes."""


@dataclass(frozen=True)
class Ask:
    """A length to be run, and why; `predicted` is the edge the model expects, once there is one."""

    tokens: int
    purpose: Purpose
    predicted: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a run said. loads: fraction of each limit that it took (empty where it did not pass).

    hopeless: the run failed for a reason that no shorter length would mend.
    """

    passed: bool
    loads: Mapping[str, float] = field(default_factory=dict)
    hopeless: bool = False


@dataclass(frozen=True)
class Bracket:
    """The result: `passed` was run and never failed (0: nothing passed), `failed` was run and
    failed (None: nothing failed up to the ceiling)."""

    passed: int
    failed: int | None
    predicted: int | None
    confirmations: int


Search = Generator[Ask, Answer, Bracket]


@dataclass(frozen=True)
class Expected:
    """What a run is expected to take before any has been made.

    loads: the fraction of each limit at a length, growing with it; raises nothing, and names no
    load that it can't tell.  rough: by which factor each may be off, where that is more than a few
    percent: such a load is first met at a length at which it can't be over.
    """

    loads: Callable[[int], Mapping[str, float]]
    rough: Mapping[str, float] = field(default_factory=dict)


def tolerance(tokens: int, contradictions: int = 0) -> int:
    """How wide a closed bracket may be at this length: 1 %, or 64 tokens where that is more.

    Each time that runs contradict each other (a length passed and failed, or failed below one that
    passed) it doubles: a machine whose noise moves the edge can't place it any closer.
    """
    return max(TOLERANCE_TOKENS, int(tokens * TOLERANCE_SHARE * 2 ** min(contradictions, 4)))


def longest(start: int, ceiling: int, expected: Expected | None = None) -> Search:
    """Yield lengths to run, be sent their answers, return the bracket.

    start: a length expected to be small.  ceiling: no longer length is ever asked for.
    """
    state = _State(ceiling, expected)
    if expected and (first := state.first()):
        yield from _down_from(state, first)
    shorter = min(start, ceiling, (state.high or start + 1) - 1)
    if not state.loads and not state.hopeless and shorter:
        yield from _first_steps(state, shorter)
    while not state.hopeless:
        step = state.next() if state.runs < MOST_RUNS else None
        if step is not None:
            yield from _run(state, Ask(step, state.purpose(step), state.predicted))
        elif state.wants_confirmation and state.runs < MOST_RUNS + MOST_CONFIRMATIONS:
            yield from _run(state, Ask(state.low, "confirm", state.predicted))
        else:
            break
    return Bracket(state.low, state.high, state.predicted, max(0, state.passes[state.low] - 1))


class _State:
    """What is known of each length, and the next one to ask for."""

    def __init__(self, ceiling: int, expected: Expected | None = None) -> None:
        self.ceiling, self.expected = ceiling, expected
        self.loads: dict[int, Mapping[str, float]] = {}
        self.passes: Counter[int] = Counter()
        self.failures: set[int] = set()
        self.hopeless = False
        self.predicted: int | None = None
        self.runs = 0
        self._missed = 0
        self._contradictions = 0

    @property
    def low(self) -> int:
        """The longest that passed and never failed; 0 where there is none. A winner that fails
        its confirmation is no winner: the search goes on below it."""
        return max((n for n in self.loads if n not in self.failures), default=0)

    @property
    def wants_confirmation(self) -> bool:
        return self.low > 0 and self.passes[self.low] <= CONFIRMATIONS

    @property
    def high(self) -> int | None:
        """The shortest failure above it; None where nothing failed there."""
        return min((n for n in self.failures if n > self.low), default=None)

    def learn(self, tokens: int, answer: Answer) -> None:
        self.hopeless = self.hopeless or answer.hopeless
        self.runs += 1
        if not answer.passed:
            self._contradictions += tokens <= self.low
            self.failures.add(tokens)
            # a winner that fails again was no miss of the model
            self._missed = 1 if tokens in self.loads else self._missed + 1
            return
        self._missed = 0
        self._contradictions += tokens in self.failures
        self.passes[tokens] += 1
        self.loads[tokens] = answer.loads
        if self.predicted is None and (edge := self._edge()) is not None:
            self.predicted = min(edge[1], self.ceiling)

    def first(self) -> int:
        """Just under the edge that is expected, or as far from it as what is rough may be off; 0
        where nothing is expected."""
        expected = self.expected
        assert expected is not None
        found = _solve(expected.loads, {}, self.ceiling)
        if found is None:
            return 0
        self.predicted = found
        wary = {n: r / (1 - UNDER) for n, r in expected.rough.items()}
        careful = _solve(expected.loads, wary, self.ceiling) or 1
        return max(1, min(careful, found if found == self.ceiling else int(found * (1 - UNDER))))

    def next(self) -> int | None:
        """The next length to run; None when the bracket is closed or the ceiling has passed."""
        low, high = self.low, self.high
        if low >= self.ceiling or (high is not None and high - low <= self._width()):
            return None
        if high is None:
            return max(low + 1, min(self._guess(low, self.ceiling + 1), self.ceiling))
        # a failure is no exact edge: right under it tells little
        return max(low + 1, min(self._guess(low, high), high - self._width() // 2))

    def purpose(self, tokens: int) -> Purpose:
        """`edge` once a failure above, or the prediction, is near."""
        near = self.predicted is not None and tokens > 0.9 * self.predicted
        return "edge" if near or self.high is not None else "probe"

    def _guess(self, low: int, top: int) -> int:
        """Just under the predicted edge; just over what passed once the edge is that near."""
        width = self._width()
        limit, edge = self._edge() or ("", 0)
        if low == 0:
            return top // 8
        if not edge and self.high is None:
            return low * JUMP
        if not edge or self._missed > 1 or edge >= top != self.ceiling + 1:
            return _between(low, top, self._missed, width)
        if limit == "time" and edge > 4 * low:
            # half the length takes a quarter of the time, and tells more than a pass cut short
            return edge // 2
        aim = int(edge * (1 - UNDER))
        if aim <= low + width // 2:
            return low + width
        return min(aim, low * JUMP)

    def _width(self) -> int:
        return tolerance(self.low, self._contradictions)

    def _edge(self) -> tuple[str, int] | None:
        """Which load reaches 1 first, and where, by the line through the longest that passed and
        the next one that is not beside it.

        Memory is piecewise linear and convex in the length, so the longest are the ones to go by.
        Time is a power of the length.
        """
        good = sorted(n for n in self.loads if n not in self.failures)
        b = good[-1] if good else 0
        if b and (edge := self._corrected(b)):
            return edge
        a = max((n for n in good if n <= b / APART), default=0)
        if not a:
            return None
        edges = []
        for name, at_b in self.loads[b].items():
            at_a = self.loads[a].get(name, 0.0)
            if 0 < at_a < at_b:
                reach = _power if name == "time" else _line
                edges.append((max(1, int(reach(a, at_a, b, at_b))), name))
        return min(edges)[::-1] if edges else None

    def _corrected(self, at: int) -> tuple[str, int] | None:
        """Which expected load reaches 1 first, and where, corrected by what a pass took."""
        if self.expected is None:
            return None
        told, took = self.expected.loads(at), self.loads[at]
        factors = {n: took[n] / told[n] for n in told if took.get(n) and told[n] > 0}
        if not factors:
            return None
        # a load that was not measured is expected as it is
        edge = _solve(self.expected.loads, factors, self.ceiling)
        if edge is None or edge <= 0:
            return None
        there = self.expected.loads(edge)
        return max(there, key=lambda n: factors.get(n, 1.0) * there[n]), edge


def _solve(
    loads: Callable[[int], Mapping[str, float]],
    factors: Mapping[str, float],
    ceiling: int,
) -> int | None:
    """The longest length at which no load times its factor is above 1, to a part in a thousand;
    the ceiling where none is there, None where no load is told. Few lengths are looked at."""

    def load(n: int) -> float:
        told = loads(n)
        return max((x * factors.get(k, 1.0) for k, x in told.items()), default=0.0)

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
        # a line through both in logarithms; the middle now and then, so that it ends
        share = math.log(1 / max(at_low, 1e-12)) / math.log(at_high / max(at_low, 1e-12))
        middle = low * (high / low) ** (0.5 if turn % 4 == 3 else share)
        at = max(low + 1, min(high - 1, round(middle)))
        there = load(at)
        low, at_low, high, at_high = (
            (at, there, high, at_high) if there <= 1 else (low, at_low, at, there)
        )
    return low


def _between(low: int, top: int, missed: int, width: int) -> int:
    """Inside the bracket: just under its top after one miss of the model, then its middle."""
    if top - low <= 2 * width:
        return low + width
    middle = math.isqrt(low * top) if top > 2 * low else (low + top) // 2
    return max(middle, top - 4 * width) if missed <= 1 and top < 3 * low else middle


def _line(a: int, at_a: float, b: int, at_b: float) -> float:
    return b + (1 - at_b) * (b - a) / (at_b - at_a)


def _power(a: int, at_a: float, b: int, at_b: float) -> float:
    """Exponents outside 0.5 to 3 are noise: attention's time grows between linear and quadratic."""
    exponent = min(3.0, max(0.5, math.log(at_b / at_a) / math.log(b / a)))
    return float(b * (1 / at_b) ** (1 / exponent))


def _run(state: _State, ask: Ask) -> Generator[Ask, Answer, None]:
    state.learn(ask.tokens, (yield ask))


def _down_from(state: _State, first: int) -> Generator[Ask, Answer, None]:
    """The length that is expected to pass; where it does not, ones that are less and less so."""
    for share in SHARES:
        step = max(1, int(first * share))
        if state.loads or state.hopeless or step in state.failures:
            return
        yield from _run(state, Ask(step, state.purpose(step), state.predicted))


def _first_steps(state: _State, start: int) -> Generator[Ask, Answer, None]:
    """Two lengths that pass, so that there is a line; shorter ones while nothing passes."""
    step = start
    yield from _run(state, Ask(step, "probe"))
    while not state.loads and not state.hopeless and step > 1:
        step = max(1, step // 8)
        yield from _run(state, Ask(step, "probe"))
    if state.loads and not state.hopeless:
        top = state.ceiling + 1 if state.high is None else state.high
        second = min(state.low * 4, (state.low + top) // 2)
        if second > state.low:
            yield from _run(state, Ask(second, "probe"))
