"""Block-sparse attention whose rows are spread over ranks, keys and values with their rows.

Either each rank fetches only the key blocks that its rows see, a few key heads at a time and the
next ones while the present ones are computed; or, for patterns that see nearly everything, keys and
values go round a ring in small pieces and results merge by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.exact.kv_loop import piece_tokens, wide_zeros
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.kv_exchange import Pair, Piece, Ring
from longseq_bench.distributed.token_order import even
from longseq_bench.kernels.base import Triple
from longseq_bench.kernels.spans import Index, Part, SpanKernel
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.placement import Owners
from longseq_bench.patterns.spans import Spans

Ints = NDArray[np.int64]

STAGES = 8
"""Key heads are fetched in so many parts, so that what is fetched stays small beside the rest."""

NEARLY_ALL = 0.5
"""A rank that would fetch this share of all other keys has them come by in a ring."""


@dataclass(frozen=True, eq=False)
class Held:
    """A layout with its rows spread: local tokens of a rank are those of its rows, ascending."""

    layout: BlockLayout
    owners: Owners
    rank: int
    ranks: int

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each block."""
        sizes = np.full(self.layout.rows, self.layout.block, dtype=np.int64)
        sizes[-1] = self.layout.seq_len - (self.layout.rows - 1) * self.layout.block
        return sizes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        held = np.bincount(self.owners, weights=self.sizes, minlength=self.ranks)
        return tuple(int(n) for n in held)

    @cached_property
    def local(self) -> Ints:
        """Where each block starts among its owner's tokens."""
        local = np.empty(self.layout.rows, dtype=np.int64)
        for rank in range(self.ranks):
            own = self.rows(rank)
            local[own] = np.cumsum(self.sizes[own]) - self.sizes[own]
        return local

    @cached_property
    def entries(self) -> tuple[Ints, Ints]:
        """Of own rows: number of the row among them, and key block, of each kept block."""
        own = self.rows(self.rank)
        counts = self.layout.row_lengths[own]
        kept = self.layout.indices[_runs(self.layout.indptr[own], counts)]
        return np.repeat(np.arange(len(own)), counts), kept.astype(np.int64)

    def rows(self, rank: int) -> Ints:
        """Blocks that a rank holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    def tokens(self, blocks: Ints) -> Ints:
        """Positions of the tokens of some blocks, in their order."""
        return _runs(blocks * self.layout.block, self.sizes[blocks])

    @cached_property
    def seen(self) -> tuple[Ints, ...]:
        """Key blocks of others that each rank's rows see: rank 0's first, ascending in each."""
        of_row = self.owners.astype(np.int64) * self.layout.rows
        pairs = np.unique(np.repeat(of_row, self.layout.row_lengths) + self.layout.indices)
        ranks, keys = np.divmod(pairs, self.layout.rows)
        foreign = self.owners[keys] != ranks
        found = (keys[foreign & (ranks == rank)] for rank in range(self.ranks))
        return tuple(own[np.argsort(self.owners[own], kind="stable")] for own in found)

    def spans(self, row: Ints, start: Ints, count: Ints) -> Spans:
        """Own rows that see anything as tiles; runs of key tokens, each of a row."""
        order = np.argsort(row, kind="stable")
        per_row = np.bincount(row, minlength=len(self.rows(self.rank)))
        kept = np.flatnonzero(per_row)
        own = self.rows(self.rank)[kept]
        return Spans(
            self.local[own].astype(np.int32),
            self.sizes[own].astype(np.int32),
            np.concatenate(([0], np.cumsum(per_row[kept]))).astype(np.int64),
            start[order].astype(np.int32),
            count[order].astype(np.int32),
        )

    @cached_property
    def at(self) -> NDArray[np.int32]:
        """Positions of own tokens."""
        return self.tokens(self.rows(self.rank)).astype(np.int32)


class Fetched:
    """An AttentionKernel: own and fetched keys share a buffer, one stage of heads at a time."""

    def __init__(self, held: Held, group: Group, kernel: SpanKernel, causal: bool) -> None:
        self._held, self._group, self._kernel, self._causal = held, group, kernel, causal
        rank, ranks = held.rank, held.ranks
        sees = held.seen[rank]
        own = held.rows(rank)
        room = np.concatenate((own, sees))
        starts = np.zeros(held.layout.rows, dtype=np.int64)
        starts[room] = np.cumsum(held.sizes[room]) - held.sizes[room]
        row, key = held.entries
        self._spans = held.spans(row, starts[key], held.sizes[key])
        self._index = Index(q_at=held.at, k_at=held.tokens(room).astype(np.int32))
        self._own = held.counts[rank]
        taken = np.bincount(held.owners[sees], weights=held.sizes[sees], minlength=ranks)
        self._take = [int(n) for n in taken]
        given = [self._asked(other) for other in range(ranks)]
        self._give = [len(tokens) for tokens in given]
        self._given = torch.from_numpy(np.concatenate(given))

    def bytes_sent(self, token_bytes: int, train: bool) -> int:
        """token_bytes: of a token's key and value. In train keys are fetched twice, and gradients
        of what was fetched go back."""
        sent = sum(self._give) * token_bytes
        return 2 * sent + sum(self._take) * token_bytes if train else sent

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for _, queries, room in self._stages(q, k, v):
            parts = [Part(self._spans, range(queries.stop - queries.start))]
            own_lse = None if lse is None else lse[:, queries]
            if self._group.computes:
                self._kernel.forward(
                    q[:, queries], *_pair(room), out[:, queries], own_lse, parts, self._causal,
                    self._index,
                )  # fmt: skip
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for kv, queries, room in self._stages(q, k, v):
            sums = room.new_zeros(room.shape, dtype=torch.float32)
            parts = [Part(self._spans, range(queries.stop - queries.start))]
            if self._group.computes:
                self._kernel.backward(
                    grad_out[:, queries], q[:, queries], *_pair(room), out[:, queries],
                    lse[:, queries], dq[:, queries], _pair(sums), range(kv.stop - kv.start),
                    parts, self._causal, self._index,
                )  # fmt: skip
            back = room.new_empty(len(self._given), *room.shape[1:])
            leaving = sums[self._own :].to(room.dtype)
            self._group.all_to_all(back, leaving, self._give, self._take).wait()
            sums[: self._own].index_add_(0, self._given.to(sums.device), back.to(sums.dtype))
            for grad, total in zip((dk, dv), _pair(sums[: self._own]), strict=True):
                grad[:, kv] = total
        return dq, dk, dv

    def _stages(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Key heads, their query heads, and the room with their keys and values; the next stage
        is on its way meanwhile. A room is (tokens, 2, B, heads, D)."""
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        some = -(-heads // STAGES)
        stages = [slice(at, min(at + some, heads)) for at in range(0, heads, some)]
        coming = self._fetch(k, v, stages[0])
        for i, kv in enumerate(stages):
            room, pending, _ = coming
            pending.wait()
            if i + 1 < len(stages):
                coming = self._fetch(k, v, stages[i + 1])
            yield kv, slice(kv.start * group, kv.stop * group), room

    def _fetch(self, k: Tensor, v: Tensor, kv: slice) -> tuple[Tensor, Pending, Tensor]:
        """Start filling a room; what is sent has to live as long."""
        b, _, _, d = k.shape
        shape = (2, b, kv.stop - kv.start, d)
        room = k.new_zeros(self._own + sum(self._take), *shape)
        given = k.new_empty(len(self._given), *shape)
        for i, t in enumerate((k, v)):
            tokens = t[:, kv].permute(2, 0, 1, 3)
            room[: self._own, i] = tokens
            given[:, i] = tokens.index_select(0, self._given.to(t.device))
        pending = self._group.all_to_all(room[self._own :], given, self._take, self._give)
        return room, pending, given

    def _asked(self, other: int) -> Ints:
        """Own tokens that another rank sees, in the order in which it takes them."""
        held = self._held
        if other == held.rank:
            return np.empty(0, dtype=np.int64)
        sees = held.seen[other]
        mine = sees[held.owners[sees] == held.rank]
        return _runs(held.local[mine], held.sizes[mine])


class BlockRing:
    """An AttentionKernel: keys and values travel round the ring and merge by log-sum-exp."""

    def __init__(self, held: Held, group: Group, kernel: SpanKernel, causal: bool) -> None:
        self._held, self._kernel, self._causal = held, kernel, causal
        most = piece_tokens(max(held.counts), max(held.counts))
        self.courier = Ring(group, held.counts, most)
        self._at = [held.tokens(held.rows(rank)).astype(np.int32) for rank in range(held.ranks)]

    def bytes_sent(self, token_bytes: int, train: bool) -> int:
        """token_bytes: of a token's key and value."""
        return self.courier.bytes_sent(token_bytes, token_bytes if train else 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = out.new_full(q.shape[:3], -math.inf)

        def see(pair: Pair, spans: Spans, at: NDArray[np.int32]) -> None:
            if self.courier.group.computes and spans.tiles:
                parts, index = [Part(spans, range(q.shape[1]))], Index(q_at=self._held.at, k_at=at)
                self._kernel.forward(q, *pair, out, lse, parts, self._causal, index, merge=True)

        def own(share: int, shares: int) -> None:
            see((k, v), self._own_spans(share, shares), self._held.at)

        self.courier.tour(k, v, lambda pair, piece: see(pair, *self._piece(piece)), own)
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        dq = torch.zeros_like(q, dtype=torch.float32)
        totals = wide_zeros((k, v))

        def see(pair: Pair, spans: Spans, at: NDArray[np.int32], sums: Pair) -> None:
            if self.courier.group.computes and spans.tiles:
                parts, index = [Part(spans, range(q.shape[1]))], Index(q_at=self._held.at, k_at=at)
                self._kernel.backward(
                    grad_out, q, *pair, out, lse, dq, sums, range(k.shape[1]), parts,
                    self._causal, index, merge=True,
                )  # fmt: skip

        def visit(pair: Pair, piece: Piece) -> Pair:
            sums = wide_zeros(pair)
            see(pair, *self._piece(piece), sums)
            return sums

        def own(share: int, shares: int) -> None:
            see((k, v), self._own_spans(share, shares), self._held.at, totals)

        self.courier.tour_back(k, v, visit, own, totals)
        dk, dv = (t.to(k.dtype) for t in totals)
        return dq.to(q.dtype), dk, dv

    def _own_spans(self, share: int, shares: int) -> Spans:
        """Own keys, of some of own rows."""
        held = self._held
        first, last = even(len(held.rows(held.rank)), shares, share)
        row, key = held.entries
        mine = (held.owners[key] == held.rank) & (row >= first) & (row < last)
        return held.spans(row[mine], held.local[key[mine]], held.sizes[key[mine]])

    def _piece(self, piece: Piece) -> tuple[Spans, NDArray[np.int32]]:
        """What own rows see of a piece, which may cut blocks, and the positions of its keys."""
        held = self._held
        row, key = held.entries
        theirs = held.owners[key] == piece.owner
        row, key = row[theirs], key[theirs]
        start = np.maximum(held.local[key], piece.start)
        stop = np.minimum(held.local[key] + held.sizes[key], piece.stop)
        some = start < stop
        spans = held.spans(row[some], start[some] - piece.start, (stop - start)[some])
        return spans, self._at[piece.owner][piece.own]


def sees_nearly_all(held: Held) -> bool:
    """Whether some rank would fetch nearly all keys of the others."""
    for rank in range(held.ranks):
        others = held.layout.seq_len - held.counts[rank]
        if held.sizes[held.seen[rank]].sum() > NEARLY_ALL * others:
            return True
    return False


def _runs(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... counts[0] numbers, then those from starts[1] on, ..."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Ints = np.repeat(starts, counts) + within
    return found


def _pair(room: Tensor) -> Pair:
    """Keys and values (B, heads, tokens, D) of a room (tokens, 2, B, heads, D)."""
    first, second = (room[:, i].permute(1, 2, 0, 3) for i in range(2))
    return first, second
