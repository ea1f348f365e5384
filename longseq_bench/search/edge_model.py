"""Estimates of the edge of a search: the length at which its runs reach a limit.

A load is the fraction of a limit (memory, time) that a run uses; the edge is where the first load
reaches 1. Memory is nearly the same in every run, time is not: each run near the edge gives its own
estimate of the time edge.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_high

MIN_LENGTH_RATIO = 1.02  # lengths closer than this factor define no memory line: only noise differs
NEAR_EDGE = 1.25  # runs within this factor of the longest pass estimate the time edge
MARGIN = 0.005  # start this share below a predicted edge: more than the usual error of a prediction


@dataclass(frozen=True)
class ExpectedLoads:
    """Loads expected before any run.

    loads: the fraction of each limit at a length, growing with the length; unknown loads are left
    out.  uncertainty: the factor by which a load may be wrong, where that is more than a few
    percent; the search starts at a length that fits even if the load is wrong by that factor.
    """

    loads: Callable[[int], Mapping[str, float]]
    uncertainty: Mapping[str, float] = field(default_factory=dict)


class History:
    """The results of the runs so far, by length.

    loads: of the last pass.  times: load of time of every run that did not fail otherwise.
    passes: number of passes.  failures: lengths that failed for another reason than time.
    wrong: failures by a wrong output. No length above one passes, though its check saw nothing.
    """

    def __init__(self) -> None:
        self.loads: dict[int, Mapping[str, float]] = {}
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self.passes: Counter[int] = Counter()
        self.failures: set[int] = set()
        self.wrong: set[int] = set()

    def is_passing(self, tokens: int) -> bool:
        """Return True if a run of this length passed and none failed, by its median time."""
        times = self.times.get(tokens)
        in_time = not times or median_high(times) <= 1
        failed = tokens in self.failures or tokens > min(self.wrong, default=tokens)
        return tokens in self.loads and in_time and not failed

    @property
    def low(self) -> int:
        """The longest length that passes; 0 if there is none. A later failure can lower it."""
        return max(filter(self.is_passing, self.loads), default=0)

    @property
    def high(self) -> int | None:
        """The shortest failed length above it; None if nothing failed there."""
        low = self.low
        longer = (n for n in self.failures | self.times.keys() if n > low)
        return min((n for n in longer if not self.is_passing(n)), default=None)


class EdgeModel:
    """Predicts the edge: before any run from the expected loads, then corrected by the runs."""

    def __init__(self, history: History, expected: ExpectedLoads | None, ceiling: int) -> None:
        self.history, self.expected, self.ceiling = history, expected, ceiling

    def expected_edge(self) -> tuple[int | None, int]:
        """Return the edge by the expected loads alone, and the first length to run below it.

        (None, 0) without expected loads. The first length fits even if uncertain loads are higher.
        """
        if self.expected is None:
            return None, 0
        edge = _find_edge(self.expected.loads, {}, self.ceiling)
        if edge is None:
            return None, 0
        cautious = {name: u / (1 - MARGIN) for name, u in self.expected.uncertainty.items()}
        first = _find_edge(self.expected.loads, cautious, self.ceiling) or 1
        below = edge if edge == self.ceiling else int(edge * (1 - MARGIN))
        return edge, max(1, min(first, below))

    def is_time(self, edge: int | None) -> bool:
        """Return True if a length is an edge by time: no other load reaches 1 below it."""
        other = self._other_edge()
        return edge is not None and edge < min(self.ceiling, (other or math.inf) * (1 - MARGIN))

    def edge(self) -> int | None:
        """Return the length at which the first load reaches 1; None before a length has passed."""
        edges = [edge for edge in (self.time_edge(), self._other_edge()) if edge]
        return min(edges, default=None) if self.history.low else None

    def _other_edge(self) -> int | None:
        """Find the edge of all loads but time: the expected one, corrected by the longest pass."""
        expected = self.expected
        if expected is None:
            return self._extrapolated()

        def loads(tokens: int) -> Mapping[str, float]:
            return {k: x for k, x in expected.loads(tokens).items() if k != "time"}

        low = self.history.low
        measured, predicted = self.history.loads.get(low, {}), loads(low) if low else {}
        factors = {n: measured[n] / x for n, x in predicted.items() if measured.get(n) and x > 0}
        return _find_edge(loads, factors, self.ceiling) or self._extrapolated()

    def _extrapolated(self) -> int | None:
        """Find the edge of memory by a line through the two longest passes that are not too close.

        Memory is piecewise linear and convex in the length, so the longest ones fit best.
        """
        b, loads = self.history.low, self.history.loads
        shorter = [n for n in loads if n <= b / MIN_LENGTH_RATIO and self.history.is_passing(n)]
        if not shorter:
            return None
        a = max(shorter)
        edges = [
            max(1, int(b + (1 - at_b) * (b - a) / (at_b - at_a)))
            for name, at_b in loads[b].items()
            if name != "time" and 0 < (at_a := loads[a].get(name, 0.0)) < at_b
        ]
        return min(edges, default=None)

    def time_edge(self) -> int:
        """Return the edge by the longest runs, the least if one was late; 0 without runs."""
        times = self.history.times
        near = [(n, t) for n in times if n * NEAR_EDGE >= max(times) for t in times[n] if t > 0]
        edges = [self._time_edge(n, t) for n, t in near]
        was_late = any(t > 1 for _, t in near)
        return int(min(edges) if was_late else median(edges)) if edges else 0

    def _time_edge(self, tokens: int, time: float) -> float:
        """Return the edge by one run: the length at which its time would reach 1."""
        expected = self.expected
        if expected and (predicted := expected.loads(tokens).get("time", 0.0)) > 0:
            factor, loads = {"time": time / predicted}, expected.loads
            return _find_edge(lambda n: {"time": loads(n)["time"]}, factor, self.ceiling) or 1
        return max(1.0, tokens * math.exp(-math.log(time) / self._time_exponent()))

    def _time_exponent(self) -> float:
        """Return the power of the length by which time grows up to the longest pass.

        Values outside 0.5 to 3 are noise: attention's time grows between linear and quadratic.
        """
        times, b = self.history.times, self.history.low
        passing = [n for n in times if self.history.is_passing(n)]
        a = max((n for n in passing if n <= b / NEAR_EDGE), default=b)
        if a == b or not times.get(b):
            return 2.0
        at_a, at_b = median(times[a]), median(times[b])
        return min(3.0, max(0.5, math.log(at_b / at_a) / math.log(b / a))) if at_a else 2.0


def _find_edge(
    loads: Callable[[int], Mapping[str, float]], factors: Mapping[str, float], ceiling: int
) -> int | None:
    """Find the longest length at which every load times its factor is at most 1.

    Returns 1 if no length is that short, None if no load is known.
    """

    def load(n: int) -> float:
        return max((x * factors.get(k, 1.0) for k, x in loads(n).items()), default=0.0)

    return max(1, bisect_right(range(1, ceiling + 1), 1.0, key=load)) if load(ceiling) > 0 else None
