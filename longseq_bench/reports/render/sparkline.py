"""Figures as characters: sparklines and bars."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from longseq_bench.analysis.grouping import group_by

LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉█"
FAILED, ABSENT = "×", "·"
MIN_SPAN = 0.1
"""Minimum span of a scale, relative to the median: smaller differences look almost flat."""


@dataclass(frozen=True)
class Scale:
    """Values of the lowest and the highest character.  log: equal steps are equal ratios."""

    low: float
    high: float
    log: bool = False

    def level(self, value: float) -> int:
        """Return the index of a value among the eight characters; the nearest outside the scale."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        if high <= low:
            return 0
        share = (at - low) / (high - low)
        return min(len(LEVELS) - 1, max(0, int(share * len(LEVELS))))

    def character(self, value: float) -> str:
        """Return the character of a value."""
        return LEVELS[self.level(value)]


def scale_of(values: Iterable[float], log: bool = False) -> Scale | None:
    """Return the scale of finite values; None for no value; logarithmic only if all are > 0."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    return Scale(min(known), max(known), log and min(known) > 0)


def samples_line(samples: Sequence[float], max_characters: int) -> str:
    """Return samples as a sparkline, in their order.

    The scale goes from the smallest to the largest sample and spans at least MIN_SPAN of the
    median. A character for several samples shows the largest, so that no outlier is hidden.
    """
    known = [sample for sample in samples if math.isfinite(sample)]
    if not known:
        return ""
    middle, low = median(known), min(known)
    scale = Scale(low, max(max(known), low + MIN_SPAN * middle))
    n, parts = len(known), min(len(known), max_characters)
    even = (known[n * i // parts : n * (i + 1) // parts] for i in range(parts))
    return "".join(scale.character(max(part)) for part in even)


@dataclass(frozen=True)
class Slots:
    """Positions along x: one for each x of any series; if they are too many, neighbours share."""

    xs: Sequence[float]
    count: int

    def line(
        self, points: Iterable[tuple[float, float]], failures: Iterable[float], scale: Scale | None
    ) -> str:
        """Return a sparkline of (x, y): the median of a position, × for a failure, · for none."""
        by_place = group_by((p for p in points if math.isfinite(p[1])), lambda p: self._place(p[0]))
        characters = [ABSENT] * self.count
        for place, some in by_place.items():
            characters[place] = scale.character(median(y for _, y in some)) if scale else ABSENT
        for x in failures:
            characters[self._place(x)] = FAILED
        return "".join(characters)

    def _place(self, x: float) -> int:
        at = bisect_left(self.xs, x)
        return min(at, len(self.xs) - 1) * self.count // len(self.xs)


def slots_of(xs: Iterable[float], max_slots: int) -> Slots:
    """Return the position of each x, in ascending order; at most `max_slots`."""
    ordered = sorted(set(xs))
    return Slots(ordered, min(len(ordered), max(1, max_slots)))


def bar(value: float, largest: float, width: int) -> str:
    """Return a bar from 0, `width` characters long for the largest value, to an eighth of one."""
    if not math.isfinite(value) or value <= 0 or largest <= 0:
        return ""
    eighths = max(1, round(min(1.0, value / largest) * width * len(EIGHTHS)))
    whole, rest = divmod(eighths, len(EIGHTHS))
    return LEVELS[-1] * whole + (EIGHTHS[rest - 1] if rest else "")
