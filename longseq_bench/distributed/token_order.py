"""Assignment of the tokens of a sequence to ranks, and the shard of a rank, as index arithmetic.

contiguous  rank r holds one run of tokens; causal work grows with the rank
zigzag      2p runs, rank r holds runs r and 2p-1-r; causal work is even (as in the context
            parallelism of Llama 3, arXiv 2407.21783); under another mask more runs, so that ranks
            have equally many visible pairs (balanced_runs)
striped     rank r holds every p-th token, from token r (Striped Attention, arXiv 2311.09431)

A run is a range of global positions. The local order of a rank's tokens is the order of its runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.patterns import Tokens
from longseq_bench.patterns.visible_keys import MaskTile, VisibleKeys, visible_keys

OrderName = Literal["contiguous", "zigzag", "striped"]
Runs = tuple[range, ...]
Positions = NDArray[np.int64]


def even_span(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return start and stop of one of `parts` parts of `total`; sizes differ by one at most."""
    return total * part // parts, total * (part + 1) // parts


def check_tokens(tokens: int, ranks: int) -> None:
    """Raise WorldError if there are fewer tokens than ranks."""
    if tokens < ranks:
        raise WorldError(f"{tokens} tokens are too few for {ranks} ranks; each needs at least one")


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows of the batch, heads, and global positions of tokens, each in local order.

    Several ranks may hold the same part of q, or of k and v; their values are then equal.
    A dry run of many million tokens reads no position, so their arrays are made when read.
    """

    batch: range
    heads: range
    kv_heads: range
    query_tokens: Tokens
    key_tokens: Tokens

    @cached_property
    def queries(self) -> Positions:
        """Positions of its queries, (queries,)."""
        return positions_of(self.query_tokens)

    @cached_property
    def keys(self) -> Positions:
        """Positions of its keys, (keys,)."""
        is_same = self.key_tokens is self.query_tokens
        return self.queries if is_same else positions_of(self.key_tokens)

    @property
    def tokens(self) -> int:
        """Number of its tokens: of its queries, or of its part of a cache, which are more."""
        return max(map(count_tokens, (self.query_tokens, self.key_tokens)))

    @classmethod
    def full(cls, w: Workload) -> Shard:
        """Return a shard that holds everything."""
        return cls.of_tokens(w, (w.queries,), (range(w.seq_len),))

    @classmethod
    def of_tokens(cls, w: Workload, queries: Tokens, keys: Tokens | None = None) -> Shard:
        """Return all heads of some queries and of some keys; keys default to the same tokens."""
        keys = queries if keys is None else keys
        return cls(range(w.batch), range(w.heads), range(w.kv_heads), queries, keys)


@dataclass(frozen=True)
class TokenOrder:
    """An assignment of `tokens` tokens to `ranks` ranks; each rank holds at least one.

    visible: the mask that zigzag balances; None: full or causal.

    Raises WorldError for fewer tokens than ranks.
    """

    name: OrderName
    tokens: int
    ranks: int
    visible: VisibleKeys | None = None

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.ranks)

    def runs(self, rank: int) -> Runs:
        """Return the positions of a rank's tokens as non-empty runs."""
        if self.name == "striped":
            runs = [range(rank, self.tokens, self.ranks)]
        elif self.name == "zigzag" and self.tokens >= 2 * self.ranks > 2:
            if self.visible is not None:
                return balanced_runs(self.visible, self.ranks)[rank]
            parts = 2 * self.ranks
            runs = [range(*even_span(self.tokens, parts, i)) for i in (rank, parts - 1 - rank)]
        else:
            runs = [range(*even_span(self.tokens, self.ranks, rank))]
        return tuple(run for run in runs if len(run))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(count_tokens(self.runs(rank)) for rank in range(self.ranks))

    @cached_property
    def hops(self) -> int:
        """Largest distance, in ranks round a ring, from a key's owner to a rank that sees it.

        0: no other rank sees it. The keys that a run of queries sees are an interval, which the
        first and the last query give.
        """
        if self.visible is None:
            return self.ranks - 1
        runs = [self.runs(rank) for rank in range(self.ranks)]
        ranks = np.repeat(np.arange(self.ranks), [len(own) for own in runs])
        first = self.visible.first(np.array([run[0] for own in runs for run in own]))
        stop = self.visible.stop(np.array([run[-1] for own in runs for run in own]))
        hops = 0
        for owner, own in enumerate(runs):
            starts, lasts = (np.array([run[end] for run in own]) for end in (0, -1))
            nearest = np.searchsorted(lasts, first)
            seen = np.append(starts, self.tokens)[nearest] < stop
            hops = max(hops, *((ranks[seen] - owner) % self.ranks).tolist())
        return hops


def order_for(name: OrderName, w: Workload, ranks: int) -> TokenOrder:
    """Return the assignment of a workload's tokens. Raises WorldError as TokenOrder does."""
    return TokenOrder(name, w.seq_len, ranks, None if w.mask is None else visible_keys(w))


def positions_of(tokens: Tokens) -> Positions:
    """Return all positions of some tokens, in their order."""
    if not isinstance(tokens, tuple):
        return tokens
    return np.concatenate([np.arange(0), *(np.arange(r.start, r.stop, r.step) for r in tokens)])


def count_tokens(tokens: Tokens) -> int:
    """Return the number of some tokens."""
    return sum(map(len, tokens)) if isinstance(tokens, tuple) else len(tokens)


def indexed_runs(runs: Runs) -> Iterator[tuple[int, range]]:
    """Yield each run with the local index of its first token."""
    yield from zip(accumulate(map(len, runs), initial=0), runs, strict=False)


def slice_runs(runs: Runs, start: int, stop: int) -> Runs:
    """Return the runs of the local tokens from start to stop."""
    parts = (run[max(0, start - i) : max(0, stop - i)] for i, run in indexed_runs(runs))
    return tuple(part for part in parts if len(part))


def causal_tiles(rows: range, keys: range) -> tuple[MaskTile, ...]:
    """Return the tiles that queries at positions `rows` see of keys at positions `keys`.

    There are at most three: a rectangle before the diagonal, the triangle on the diagonal, and the
    last rows, which see every key. Both ranges have the same step, so row i sees key j if
    j <= i - shift. The slices of a tile index into `rows` and `keys`.
    """
    shift = -((rows.start - keys.start) // rows.step)
    first_row = min(max(0, shift), len(rows))
    full_row = min(max(first_row, len(keys) + shift), len(rows))
    tiles = []
    if first_row < full_row:
        before, last = first_row - shift, full_row - shift
        if before:
            tiles.append(MaskTile(slice(first_row, full_row), slice(0, before)))
        tiles.append(MaskTile(slice(first_row, full_row), slice(before, last), causal=True))
    if full_row < len(rows):
        tiles.append(MaskTile(slice(full_row, len(rows)), slice(0, len(keys))))
    return tuple(tiles)


# ---- tokens with equally many visible pairs ------------------------------------------------------
# The sequence is cut into equally long pieces, and every rank gets equally many of them. The pieces
# with most pairs are given out first, in turns; the rank with fewest pairs so far is first. With a
# causal mask and two pieces per rank this is the zigzag of Llama 3; documents need more pieces.
# MagiAttention (github.com/SandAI-org/MagiAttention) has the same idea.

MAX_IMBALANCE = 0.02
"""Pairs of the fullest rank above the mean at which no more pieces are tried."""

MIN_PIECE = 128
"""Tokens of a piece beyond the first two of a rank: kernels compute as many queries together."""

MAX_PIECES = 256
"""Pieces of a rank: more would cost more calls than their balance saves."""


@lru_cache(maxsize=8)
def balanced_runs(visible: VisibleKeys, ranks: int) -> tuple[Runs, ...]:
    """Return the positions of each rank's tokens as ascending runs, with as few pieces as possible.

    visible: has at least two tokens per rank.
    """
    tokens = visible.tokens
    best: tuple[float, tuple[Runs, ...]] | None = None
    pieces = 2
    while best is None or (pieces <= MAX_PIECES and tokens // (pieces * ranks) >= MIN_PIECE):
        ends = np.arange(pieces * ranks + 1) * tokens // (pieces * ranks)
        pairs = np.diff([visible.mask.pairs_before(end, tokens) for end in ends.tolist()])
        owners, sums = np.empty(len(pairs), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        for turn in np.argsort(-pairs, kind="stable").reshape(pieces, ranks):
            receivers = np.argsort(sums, kind="stable")
            owners[turn] = receivers
            sums[receivers] += pairs[turn]
        imbalance = float(sums.max() / sums.mean()) - 1
        if best is None or imbalance < best[0]:
            owned = (np.flatnonzero(owners == rank) for rank in range(ranks))
            best = imbalance, tuple(_join(own, ends) for own in owned)
        if imbalance <= MAX_IMBALANCE:
            break
        pieces *= 2
    return best[1]


def _join(pieces: Positions, ends: Positions) -> Runs:
    """Return ascending pieces as runs; neighbours are one run."""
    cuts = np.flatnonzero(np.diff(pieces) > 1) + 1
    return tuple(
        range(int(ends[pieces[a]]), int(ends[pieces[b - 1] + 1]))
        for a, b in pairwise([0, *cuts.tolist(), len(pieces)])
    )
