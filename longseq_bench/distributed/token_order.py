"""Which tokens each rank holds: orders of a sequence over ranks. Pure index arithmetic.

contiguous  rank r holds one run; causal work grows with the rank
zigzag      2p runs, rank r holds run r and run 2p-1-r: causal work is even (as in the context
            parallelism of Llama 3, arXiv 2407.21783)
striped     rank r holds every p-th token from r on (Striped Attention, arXiv 2311.09431)

A run is a range of global positions. The local order of a rank's tokens is that of its runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Name = Literal["contiguous", "zigzag", "striped"]


def even(total: int, parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of `parts` runs of `total` things that differ by one at most."""
    return total * part // parts, total * (part + 1) // parts


@dataclass(frozen=True)
class Order:
    """A sequence of `tokens` over `ranks`; no rank is without where there is one for each."""

    name: Name
    tokens: int
    ranks: int

    def runs(self, rank: int) -> tuple[range, ...]:
        """The positions of a rank's tokens, none of the runs empty."""
        if self.name == "striped":
            found = [range(rank, self.tokens, self.ranks)]
        elif self.name == "zigzag" and self.tokens >= 2 * self.ranks > 2:
            parts = 2 * self.ranks
            found = [range(*even(self.tokens, parts, i)) for i in (rank, parts - 1 - rank)]
        else:
            found = [range(*even(self.tokens, self.ranks, rank))]
        return tuple(run for run in found if len(run))

    def count(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(map(len, self.runs(rank)))

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Global position of each of a rank's tokens, in local order."""
        return positions_of(self.runs(rank))


def positions_of(runs: tuple[range, ...]) -> NDArray[np.int64]:
    """All positions of some runs, in their order."""
    parts = [np.arange(r.start, r.stop, r.step) for r in runs] or [np.arange(0)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def cut(runs: tuple[range, ...], start: int, stop: int) -> tuple[range, ...]:
    """The runs of the local tokens from start to stop."""
    found, at = [], 0
    for run in runs:
        part = run[max(0, start - at) : max(0, stop - at)]
        if len(part):
            found.append(part)
        at += len(run)
    return tuple(found)


@dataclass(frozen=True)
class Stair:
    """Queries rows see keys `keys`: all of them, or, causal, a lower triangle of equal sides."""

    rows: slice
    keys: slice
    causal: bool = False


def stairs(rows: range, keys: range) -> tuple[Stair, ...]:
    """What queries at positions `rows` see, causally, of keys at positions `keys`: a rectangle
    before the diagonal, the triangles on it, the rows after it that see every key. Both have one
    step, so row i sees key j where j <= i - shift.

    Slices are into rows and keys.
    """
    shift = -((rows.start - keys.start) // rows.step)
    on_from = min(max(0, shift), len(rows))
    on_to = min(max(on_from, len(keys) + shift), len(rows))
    found = []
    if on_from < on_to:
        before, last = on_from - shift, on_to - shift
        if before:
            found.append(Stair(slice(on_from, on_to), slice(0, before)))
        found.append(Stair(slice(on_from, on_to), slice(before, last), causal=True))
    if on_to < len(rows):
        found.append(Stair(slice(on_to, len(rows)), slice(0, len(keys))))
    return tuple(found)
