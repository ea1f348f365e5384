"""Figures as characters: sparklines, bars, and what a chart says without a picture."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉█"
FAILED, ABSENT = "×", "·"
FLATTEST = 0.1
"""Samples that lie within this share of their median look flat, as they are."""


@dataclass(frozen=True)
class Scale:
    """What the lowest and the highest character mean; log: equal steps are equal ratios."""

    low: float
    high: float
    log: bool = False

    def level(self, value: float) -> int:
        """Which of the eight characters a value has; outside the scale, the nearest."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        if high <= low:
            return 0
        share = (at - low) / (high - low)
        return min(len(LEVELS) - 1, max(0, int(share * len(LEVELS))))

    def character(self, value: float) -> str:
        """The block of a value, as high as it is."""
        return LEVELS[self.level(value)]


def scale_of(values: Iterable[float], log: bool = False) -> Scale | None:
    """From the least to the largest value; None for none. Logarithmic only where all are > 0."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    return Scale(min(known), max(known), log and min(known) > 0)


def samples_line(samples: Sequence[float], most: int) -> str:
    """Samples in their order, from the least up to the largest or a tenth above the median.

    At most `most` characters: of samples that share one the largest is shown, so that no outlier
    is hidden. No samples give an empty line.
    """
    known = [sample for sample in samples if math.isfinite(sample)]
    if not known:
        return ""
    middle, low = median(known), min(known)
    scale = Scale(low, max(max(known), low + FLATTEST * middle))
    return "".join(scale.character(max(part)) for part in _parts(known, most))


def _parts(values: Sequence[float], most: int) -> list[Sequence[float]]:
    """Values in order, in as many even parts as there may be."""
    n = min(len(values), most)
    return [values[len(values) * i // n : len(values) * (i + 1) // n] for i in range(n)]


@dataclass(frozen=True)
class Slots:
    """Places along x: one an x that any series has, or, where there are too many, one for
    several neighbours."""

    xs: Sequence[float]
    count: int

    def line(
        self, points: Iterable[tuple[float, float]], failures: Iterable[float], scale: Scale | None
    ) -> str:
        """A sparkline of (x, y): the median of a place, × where something failed there, · where
        there is nothing."""
        there: dict[int, list[float]] = defaultdict(list)
        for x, y in points:
            if math.isfinite(y):
                there[self._place(x)].append(y)
        failed = {self._place(x) for x in failures}
        return "".join(self._character(i, failed, there[i], scale) for i in range(self.count))

    def _place(self, x: float) -> int:
        at = bisect_left(self.xs, x)
        return min(at, len(self.xs) - 1) * self.count // len(self.xs)

    def _character(
        self, i: int, failed: set[int], there: Sequence[float], scale: Scale | None
    ) -> str:
        if i in failed:
            return FAILED
        return scale.character(median(there)) if there and scale else ABSENT


def slots_of(xs: Iterable[float], most: int) -> Slots:
    """Places for every x, in their order, at most so many."""
    ordered = sorted(set(xs))
    return Slots(ordered, min(len(ordered), max(1, most)))


def bar(value: float, largest: float, width: int) -> str:
    """A bar from 0, as long as the value is beside the largest, to an eighth of a character."""
    if not math.isfinite(value) or value <= 0 or largest <= 0:
        return ""
    eighths = max(1, round(min(1.0, value / largest) * width * len(EIGHTHS)))
    whole, rest = divmod(eighths, len(EIGHTHS))
    return LEVELS[-1] * whole + (EIGHTHS[rest - 1] if rest else "")
