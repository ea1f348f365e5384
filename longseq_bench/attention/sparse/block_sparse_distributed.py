"""Block-sparse attention with rows split over ranks, and keys and values with their rows.

FetchKernel  each rank fetches the key blocks that its rows see, a few key heads at a time; the next
             heads arrive while the current ones are computed with
SpanBlocks   for patterns that see nearly everything: blocks of keys travel round a ring (ring.py)

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.tiles import Block, LocalShare
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.kv_exchange import KVPair
from longseq_bench.distributed.token_order import even_span
from longseq_bench.kernels.base import OutputAndLse, Queries, Triple
from longseq_bench.kernels.spans import HeadSpans, SpanKernel, SpanTask, StepMap
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.placement import Owners
from longseq_bench.patterns.spans import Spans

Ints = NDArray[np.int64]

MAX_STAGES = 8
"""Maximum number of stages of key heads for fetching, so that fetched keys need little memory."""

RING_SHARE = 0.5
"""A ring is used if a rank would fetch more than this share of the other ranks' keys."""


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """A layout whose rows are split over ranks; a rank holds the tokens of its rows, ascending."""

    layout: BlockLayout
    owners: Owners
    rank: int
    ranks: int

    def rows(self, rank: int) -> Ints:
        """Return the blocks that a rank holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    def tokens(self, blocks: Ints) -> Ints:
        """Return the positions of the tokens of some blocks, in their order."""
        return _ranges(blocks * self.layout.block, self.sizes[blocks])

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each block."""
        return self.layout.block_sizes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        held = np.bincount(self.owners, weights=self.sizes, minlength=self.ranks)
        return tuple(int(n) for n in held)

    @cached_property
    def local(self) -> Ints:
        """First token of each block among the tokens of its owner."""
        local = np.empty(self.layout.rows, dtype=np.int64)
        for rank in range(self.ranks):
            own = self.rows(rank)
            local[own] = np.cumsum(self.sizes[own]) - self.sizes[own]
        return local

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """Positions of this rank's tokens."""
        return self.tokens(self.rows(self.rank)).astype(np.int32)

    @cached_property
    def entries(self) -> tuple[Ints, Ints]:
        """Kept blocks of this rank's rows: the number of the row among them, and the key block."""
        own = self.rows(self.rank)
        counts = self.layout.row_lengths[own]
        kept = self.layout.indices[_ranges(self.layout.indptr[own], counts)]
        return np.repeat(np.arange(len(own)), counts), kept.astype(np.int64)

    @cached_property
    def fetched(self) -> tuple[Ints, ...]:
        """Key blocks of other ranks that each rank's rows see, ordered by owner, ascending."""
        of_row = self.owners.astype(np.int64) * self.layout.rows
        pairs = np.unique(np.repeat(of_row, self.layout.row_lengths) + self.layout.indices)
        ranks, keys = np.divmod(pairs, self.layout.rows)
        foreign = self.owners[keys] != ranks
        by_rank = (keys[foreign & (ranks == rank)] for rank in range(self.ranks))
        return tuple(own[np.argsort(self.owners[own], kind="stable")] for own in by_rank)

    def sees_nearly_all(self) -> bool:
        """Return True if some rank would fetch nearly all keys of the others."""
        return any(
            self.sizes[self.fetched[rank]].sum()
            > RING_SHARE * (self.layout.seq_len - self.counts[rank])
            for rank in range(self.ranks)
        )

    def spans(self, row: Ints, start: Ints, count: Ints) -> Spans:
        """Return spans: this rank's rows as tiles, and for each a run of key tokens.

        row: number of the row of each run. start, count: tokens of the run.
        """
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


class FetchKernel:
    """Attention to the rank's own keys and fetched ones, a stage of key heads at a time.

    An AttentionKernel. A buffer (tokens, 2, B, heads, D) holds keys and values of a stage: first
    the rank's own tokens, then the fetched ones.
    """

    def __init__(
        self, sharded: ShardedLayout, group: Group, kernel: SpanKernel, causal: bool
    ) -> None:
        self._group, self._kernel, self._causal = group, kernel, causal
        rank, ranks = sharded.rank, sharded.ranks
        fetched = sharded.fetched[rank]
        in_buffer = np.concatenate((sharded.rows(rank), fetched))
        starts = np.zeros(sharded.layout.rows, dtype=np.int64)
        starts[in_buffer] = np.cumsum(sharded.sizes[in_buffer]) - sharded.sizes[in_buffer]
        row, key = sharded.entries
        self._spans = sharded.spans(row, starts[key], sharded.sizes[key])
        key_positions = sharded.tokens(in_buffer).astype(np.int32)
        self._steps = StepMap(q_at=sharded.positions, k_at=key_positions)
        self._own = sharded.counts[rank]
        received = np.bincount(
            sharded.owners[fetched], weights=sharded.sizes[fetched], minlength=ranks
        )
        self._received = [int(n) for n in received]
        sent = [_tokens_for(sharded, other) for other in range(ranks)]
        self._sent = [len(tokens) for tokens in sent]
        self._sent_tokens = torch.from_numpy(np.concatenate(sent))

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Return what this rank sends in one pass, by formula; arguments as of RingExchange.

        In training keys are fetched twice, and the gradients of fetched keys go back.
        """
        sent = sum(self._sent) * token_bytes
        return 2 * sent + sum(self._received) * gradient_bytes if gradient_bytes else sent

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for _, heads, buffer in self._stages(q, k, v):
            if self._group.computes:
                keys, stage_lse = _keys_and_values(buffer), None if lse is None else lse[:, heads]
                task = self._task(heads)
                self._kernel.forward(q[:, heads], *keys, out[:, heads], stage_lse, task)
        return out, lse

    def backward(self, queries: Queries, keys: KVPair) -> Triple:
        """Return the gradients of q, k and v; those of fetched keys go back to their owners."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for kv_heads, heads, buffer in self._stages(q, k, v):
            sums = buffer.new_zeros(buffer.shape, dtype=torch.float32)
            if self._group.computes:
                of_heads = grad_out[:, heads], q[:, heads], out[:, heads], lse[:, heads]
                self._kernel.backward(
                    of_heads, _keys_and_values(buffer), dq[:, heads], _keys_and_values(sums),
                    range(kv_heads.stop - kv_heads.start), self._task(heads),
                )  # fmt: skip
            returned = buffer.new_empty(len(self._sent_tokens), *buffer.shape[1:])
            leaving = sums[self._own :].to(buffer.dtype)
            self._group.all_to_all(returned, leaving, self._sent, self._received).wait()
            own = sums[: self._own]
            own.index_add_(0, self._sent_tokens.to(sums.device), returned.to(sums.dtype))
            for grad, total in zip((dk, dv), _keys_and_values(own), strict=True):
                grad[:, kv_heads] = total
        return dq, dk, dv

    def _task(self, heads: slice) -> SpanTask:
        parts = [HeadSpans(self._spans, range(heads.stop - heads.start))]
        return SpanTask(parts, self._causal, self._steps)

    def _stages(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield key heads, their query heads and the buffer; the next stage is transferred."""
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        count = -(-heads // MAX_STAGES)
        stages = [slice(at, min(at + count, heads)) for at in range(0, heads, count)]
        next_fetch = self._fetch(k, v, stages[0])
        for i, kv_heads in enumerate(stages):
            buffer, pending, _ = next_fetch
            pending.wait()
            if i + 1 < len(stages):
                next_fetch = self._fetch(k, v, stages[i + 1])
            yield kv_heads, slice(kv_heads.start * group, kv_heads.stop * group), buffer

    def _fetch(self, k: Tensor, v: Tensor, kv_heads: slice) -> tuple[Tensor, Pending, Tensor]:
        """Start filling a buffer; the sent tensor, returned last, has to live until the wait."""
        b, _, _, d = k.shape
        shape = (2, b, kv_heads.stop - kv_heads.start, d)
        buffer = k.new_zeros(self._own + sum(self._received), *shape)
        sent = k.new_empty(len(self._sent_tokens), *shape)
        for i, t in enumerate((k, v)):
            tokens = t[:, kv_heads].permute(2, 0, 1, 3)
            buffer[: self._own, i] = tokens
            sent[:, i] = tokens.index_select(0, self._sent_tokens.to(t.device))
        pending = self._group.all_to_all(buffer[self._own :], sent, self._received, self._sent)
        return buffer, pending, sent


class SpanBlocks:
    """A BlockAttention for a ring: rows of a layout see spans of a block of keys."""

    def __init__(
        self, sharded: ShardedLayout, group: Group, kernel: SpanKernel, causal: bool
    ) -> None:
        self._sharded, self._group = sharded, group
        self._kernel, self._causal = kernel, causal
        ranks = range(sharded.ranks)
        self._positions = [sharded.tokens(sharded.rows(rank)).astype(np.int32) for rank in ranks]

    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge the block into out and lse."""
        if task := self._task(block, q.shape[1]):
            self._kernel.forward(q, *kv, out, lse, task)

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv."""
        if task := self._task(block, dq.shape[1]):
            self._kernel.backward(queries, kv, dq, dkv, range(kv[0].shape[1]), task)

    def _task(self, block: Block, heads: int) -> SpanTask | None:
        """Return what local rows see of a block; None for nothing, or if nothing is computed.

        The block may cut blocks of the layout.
        """
        sharded = self._sharded
        row, key = sharded.entries
        if isinstance(block, LocalShare):
            first, last = even_span(len(sharded.rows(sharded.rank)), block.count, block.index)
            seen = (sharded.owners[key] == sharded.rank) & (row >= first) & (row < last)
            row, key = row[seen], key[seen]
            spans = sharded.spans(row, sharded.local[key], sharded.sizes[key])
            key_positions = sharded.positions
        else:
            seen = sharded.owners[key] == block.owner
            row, key = row[seen], key[seen]
            start = np.maximum(sharded.local[key], block.start)
            stop = np.minimum(sharded.local[key] + sharded.sizes[key], block.stop)
            seen = start < stop
            spans = sharded.spans(row[seen], start[seen] - block.start, (stop - start)[seen])
            key_positions = self._positions[block.owner][block.tokens]
        if not (self._group.computes and spans.tiles):
            return None
        steps = StepMap(q_at=sharded.positions, k_at=key_positions)
        return SpanTask([HeadSpans(spans, range(heads))], self._causal, steps, merge=True)


def _tokens_for(sharded: ShardedLayout, other: int) -> Ints:
    """Return this rank's tokens that another rank fetches, in the order in which it takes them."""
    if other == sharded.rank:
        return np.empty(0, dtype=np.int64)
    fetched = sharded.fetched[other]
    own = fetched[sharded.owners[fetched] == sharded.rank]
    return _ranges(sharded.local[own], sharded.sizes[own])


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Return counts[i] consecutive numbers from starts[i], for all i, one after the other."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Ints = np.repeat(starts, counts) + within
    return numbers


def _keys_and_values(buffer: Tensor) -> KVPair:
    """Return keys and values (B, heads, tokens, D) of a buffer (tokens, 2, B, heads, D)."""
    k, v = (buffer[:, i].permute(1, 2, 0, 3) for i in range(2))
    return k, v
