"""LongNet's dilated attention (arXiv 2307.02486): segments with a dilation rate and head offsets.

For a pair (segment w, rate r) and head h, positions a and b see each other if they lie in the same
segment, a // w == b // w, and both at the head's offset in it, (a mod w) mod r == h mod r.
Positions are steps of a walk: the sequence or a permutation of it. Causality compares the original
positions. A token pair that several (w, r) pairs allow counts once for each.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.patterns import Ints

TokenSet = tuple[int, int, int]
"""Segment, rate and offset of tokens that see each other."""

CHUNK = 2**20
"""Steps processed together, so that memory does not grow with the sequence."""


class DilatedSegment(NamedTuple):
    """One pair (segment, rate) and the heads that use it."""

    segment: int
    rate: int
    heads: range

    def calls(
        self, heads: slice, length: int, group: int = 0, wraps: bool = False
    ) -> list[tuple[int, slice, int]]:
        """Return the offset, the heads and the shift of as few calls as possible for some heads.

        Head h has offset h mod rate. A call is of heads that share an offset (shift 0), or of
        successive ones whose offsets ascend by 1 (shift 1), with as many tokens each and, if
        grouped, the same KV head.  length: of the segment.  group: query heads per KV head; 0: no
        shifts.  wraps: ungrouped heads of a call may begin again with offset 0.
        """
        first, stop = max(self.heads.start, heads.start), min(self.heads.stop, heads.stop)
        shared, runs = [], defaultdict(list)
        wraps = wraps and group == 1 and first % self.rate == length % self.rate == 0
        for offset in range(min(self.rate, length)):
            head = first + (offset - first) % self.rate
            if head < stop:
                shared.append((offset, slice(head, stop, self.rate), 0))
        for head in range(first, stop if group else first):
            if head % self.rate < length:
                tokens = -(-(length - head % self.rate) // self.rate)
                turn = not wraps and head // self.rate
                runs[turn, tokens, group > 1 and head // group].append(head)
        shifted = [(run[0] % self.rate, slice(run[0], run[-1] + 1), 1) for run in runs.values()]
        return min(shared, shifted or shared, key=len)


@dataclass(frozen=True)
class DilationRule:
    """Pairs (segment, rate) and the heads that use them.

    mix: `softmax`, every head uses every pair; `groups`, equal groups of heads, one pair each.
    A segment may be longer than the sequence.

    Raises UserError for segments and rates of different counts and for fewer heads than groups.
    """

    segments: tuple[int, ...]
    dilation: tuple[int, ...]
    heads: int
    mix: Literal["softmax", "groups"] = "softmax"

    def __post_init__(self) -> None:
        if len(self.segments) != len(self.dilation) or not self.segments:
            raise UserError(
                f"{len(self.segments)} segments {self.segments} but {len(self.dilation)} rates "
                f"{self.dilation}: give one rate per segment, as in segments=1024,2048 dilation=1,2"
            )
        if self.mix == "groups" and self.heads < len(self.segments):
            raise UserError(
                f"mix=groups needs a head per pair: {len(self.segments)} pairs, {self.heads} heads"
            )

    def pairs(self) -> Iterator[DilatedSegment]:
        """Yield each pair with the heads that use it."""
        count = len(self.segments)
        for p, (segment, rate) in enumerate(zip(self.segments, self.dilation, strict=True)):
            heads = range(self.heads)
            if self.mix == "groups":
                heads = heads[-(-p * self.heads // count) : -(-(p + 1) * self.heads // count)]
            yield DilatedSegment(segment, rate, heads)

    def sets_of_head(self, head: int) -> tuple[TokenSet, ...]:
        """Return the set of each pair that a head uses."""
        return tuple((w, rate, head % rate) for w, rate, heads in self.pairs() if head in heads)

    def multiplicity(
        self,
        q_positions: Ints,
        k_positions: Ints,
        head: int,
        causal: bool,
        step_of: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int32]:
        """Return how often each query sees each key, (queries, keys).

        step_of: walk step of each original position; None if the walk is the sequence.
        """
        q, k = (p if step_of is None else step_of[p] for p in (q_positions, k_positions))
        count = np.zeros((len(q), len(k)), dtype=np.int32)
        for segment, rate, offset in self.sets_of_head(head):
            of_query, of_key = (
                np.where(p % segment % rate == offset, p // segment, outside)
                for p, outside in ((q, -1), (k, -2))
            )
            # many queries share a segment
            segments, index = np.unique(of_query, return_inverse=True)
            count += (segments[:, None] == of_key[None, :])[index]
        if causal:
            count *= k_positions[None, :] <= q_positions[:, None]
        return count

    def steps_seen(self, q_steps: Ints, head: int, seq_len: int) -> Ints:
        """Return the steps of the walk in a set of any of some steps, ascending."""
        seen = [np.empty(0, dtype=np.int64)]
        for segment, rate, offset in self.sets_of_head(head):
            starts = np.unique(q_steps[q_steps % segment % rate == offset] // segment) * segment
            members = np.arange(offset, min(segment, seq_len), rate)
            seen.append((starts[:, None] + members).ravel())
        steps = np.unique(np.concatenate(seen))
        return steps[steps < seq_len]

    def visible_pairs(self, seq_len: int, causal: bool) -> int:
        """Return the visible query-key pairs, with multiplicity, summed over heads."""
        total = 0
        for head in range(self.heads):
            for segment, rate, offset in self.sets_of_head(head):
                whole, rest = divmod(seq_len, segment)
                for length, segments in ((segment, whole), (rest, 1)):
                    members = max(0, -(-(length - offset) // rate))
                    pairs = members * (members + 1) // 2 if causal else members**2
                    total += pairs * segments
        return total

    def uncovered_share(self, seq_len: int) -> float:
        """Return the share of (token, head) pairs that see no key, not even their own."""
        heads_of_sets = Counter(self.sets_of_head(head) for head in range(self.heads))
        uncovered = sum(n * _uncovered(sets, seq_len) for sets, n in heads_of_sets.items())
        return uncovered / (seq_len * self.heads)


def _uncovered(sets: tuple[TokenSet, ...], seq_len: int) -> int:
    """Count the steps that are in none of the sets; the sets repeat with a period."""
    if any(rate == 1 for _, rate, _ in sets):
        return 0
    period, uncovered = math.lcm(*(segment for segment, _, _ in sets)), 0
    stop = min(period, seq_len)
    for start in range(0, stop, CHUNK):
        steps = np.arange(start, min(start + CHUNK, stop), dtype=np.int64)
        for segment, rate, offset in sets:
            steps = steps[steps % segment % rate != offset]
        # each comes again in every period
        uncovered += int((-((steps - seq_len) // period)).sum())
    return uncovered


# ---- a walk along the Hilbert curve (Hilbert, Math. Ann. 38, 1891) -------------------------------
# The sequence fills a square grid row by row; its side is the smallest power of two that holds it.
# The walk follows the Hilbert curve over the grid and skips cells beyond the sequence. Neighbours
# on the walk are neighbours on the grid, except where cells are skipped.

MAX_SIDE = 2**15
"""The largest side of a grid whose cells can be numbered in int32."""


def hilbert_order(n: int) -> NDArray[np.int32]:
    """Return the position of each step of the walk, (n,) int32: a permutation of range(n).

    Raises UnsupportedError for n > 2^30, the limit of int32.
    """
    side = 1 << math.isqrt(n - 1).bit_length()
    if side > MAX_SIDE:
        raise UnsupportedError(
            f"the Hilbert walk numbers its grid in int32: {MAX_SIDE**2} tokens at most, not {n}"
        )
    row = col = np.zeros(1, dtype=np.int32)
    half = 1
    while half < side:
        # the four quarters: transposed, plain, plain, anti-transposed
        row, col = (
            np.concatenate((col, row, row + half, 2 * half - 1 - col)),
            np.concatenate((row, col + half, col + half, half - 1 - row)),
        )
        half *= 2
    walk = row * np.int32(side)
    walk += col
    return walk[walk < n]
