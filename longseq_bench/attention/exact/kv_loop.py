"""Own queries, and keys and values that come by a courier: ring and collective, forward and back.

Every rank merges what its queries see of each piece by log-sum-exp; backward uses the log-sum-exp
of the whole softmax, so pieces may come in any order (arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longseq_bench.distributed.kv_exchange import KVExchange, Own, Pair, Piece
from longseq_bench.distributed.token_order import Stair, cut, even, stairs
from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import Triple
from longseq_bench.kernels.tiling import ALL, RowBlock, wide
from longseq_bench.meta_mode import STEPS, limited

LEAST_PIECE = 256
PIECES = 20
"""Pieces a shard: three places for a piece of k and v, as a ring has, are then 7 % of its floor."""

ROWS = 2048
"""Rows of a kernel call: the same few keys are then packed less often than in shorter ones."""

See = Callable[[Pair, Iterable[RowBlock], Pair], None]


class Rows(Protocol):
    """What own queries see: row blocks whose key indices are into own keys, or into a piece."""

    def own(self, share: int, shares: int) -> Iterable[RowBlock]:
        """Of own keys: one of so many shares, about even."""
        ...

    def of(self, piece: Piece) -> Iterable[RowBlock]:
        """Of another rank's piece."""
        ...


def piece_tokens(held: int, most: int) -> int:
    """Tokens that travel together, of `held` by a rank: small beside them, `most` at most."""
    return max(1, min(most, max(LEAST_PIECE, -(-held // PIECES))))


class Travelling:
    """An AttentionKernel over the ranks of a courier's group."""

    def __init__(self, courier: KVExchange, rows: Rows) -> None:
        self.courier, self.rows = courier, rows

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.zeros_like(q, dtype=wide(q))
        lse = out.new_full(q.shape[:3], -math.inf)

        def see(pair: Pair, blocks: Iterable[RowBlock]) -> None:
            for block in limited(blocks, STEPS) if self.courier.group.computes else ():
                tiling.merge(q, *pair, block, out, lse)

        def own(share: int, shares: int) -> None:
            see((k, v), self.rows.own(share, shares))

        self.courier.tour(k, v, lambda pair, piece: see(pair, self.rows.of(piece)), own)
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        dq = torch.zeros_like(q, dtype=wide(q))
        totals = wide_zeros((k, v))

        def see(pair: Pair, blocks: Iterable[RowBlock], sums: Pair) -> None:
            for block in limited(blocks, STEPS) if self.courier.group.computes else ():
                own = dq[:, block.heads, block.rows]
                tiling.add_gradients((grad_out, q, out), pair, lse, block, own, sums)

        def own(share: int, shares: int) -> None:
            see((k, v), self.rows.own(share, shares), totals)

        self._travel_back((k, v), see, own, totals)
        dk, dv = (total.to(k.dtype) for total in totals)
        return dq.to(q.dtype), dk, dv

    def _travel_back(self, own_keys: Pair, see: See, own: Own, totals: Pair) -> None:
        def visit(pair: Pair, piece: Piece) -> Pair:
            sums = wide_zeros(pair)
            see(pair, self.rows.of(piece), sums)
            return sums

        self.courier.tour_back(*own_keys, visit, own, totals)


class FullQueries(Travelling):
    """Every rank holds all queries, so each computes everything; keys and values alone travel.

    The gradients of own keys are whole already and none has to travel.
    """

    def _travel_back(self, own_keys: Pair, see: See, own: Own, totals: Pair) -> None:
        def visit(pair: Pair, piece: Piece) -> None:
            see(pair, self.rows.of(piece), wide_zeros(pair))

        self.courier.tour(*own_keys, visit, own)


@dataclass(frozen=True)
class ExactRows:
    """Own queries at some positions; all keys are seen, or, causal, those before.

    keys_of: positions of each rank's keys, in local order.  tile: rows of a kernel call.
    most_keys: of a kernel call with own keys.
    """

    rank: int
    queries: tuple[range, ...]
    keys_of: Callable[[int], tuple[range, ...]]
    causal: bool
    head_runs: tuple[slice, ...]
    tile: int
    most_keys: int

    def own(self, share: int, shares: int) -> Iterator[RowBlock]:
        """Some tiles of rows with all own keys."""
        held = self.keys_of(self.rank)
        for at, rows in self._tiles()[slice(*even(len(self._tiles()), shares, share))]:
            for start in range(0, sum(map(len, held)), self.most_keys):
                keys = cut(held, start, start + self.most_keys)
                for heads in self.head_runs:
                    yield from self._blocks(at, rows, keys, start, heads)

    def of(self, piece: Piece) -> Iterator[RowBlock]:
        keys = cut(self.keys_of(piece.owner), piece.start, piece.stop)
        for heads in self.head_runs:
            at = 0
            for run in self.queries:
                yield from self._blocks(at, run, keys, 0, heads)
                at += len(run)

    def _tiles(self) -> list[tuple[int, range]]:
        """Where each tile of rows stands among own rows, and its positions."""
        found, at = [], 0
        for run in self.queries:
            parts = max(1, len(run) // self.tile)
            for start, stop in (even(len(run), parts, part) for part in range(parts)):
                found.append((at + start, run[start:stop]))
            at += len(run)
        return found

    def _blocks(
        self, at: int, rows: range, keys: tuple[range, ...], first: int, heads: slice
    ) -> Iterator[RowBlock]:
        """Rows that stand at `at` see keys of which the first is number `first` of its tensor.

        Long runs of rows are cut evenly: kernels are slower on short ones.
        """
        for stair in self._stairs(rows, keys):
            seen = slice(first + stair.keys.start, first + stair.keys.stop)
            count = stair.rows.stop - stair.rows.start
            parts = 1 if stair.causal else max(1, count // self.tile)
            for start, stop in (even(count, parts, part) for part in range(parts)):
                own = slice(at + stair.rows.start + start, at + stair.rows.start + stop)
                yield RowBlock(own, heads, (tiling.Piece(ALL, seen, heads, stair.causal),))

    def _stairs(self, rows: range, keys: tuple[range, ...]) -> Iterator[Stair]:
        if not self.causal:
            yield Stair(slice(0, len(rows)), slice(0, sum(map(len, keys))))
            return
        at = 0
        for run in keys:
            for stair in stairs(rows, run):
                seen = slice(at + stair.keys.start, at + stair.keys.stop)
                yield Stair(stair.rows, seen, stair.causal)
            at += len(run)


def wide_zeros(pair: Pair) -> Pair:
    """Of the shapes of both, to sum in."""
    first, second = (torch.zeros_like(t, dtype=wide(t)) for t in pair)
    return first, second
