"""Block-sparse attention with rows split over ranks, and keys and values with their rows.

FetchKernel  each rank fetches the key blocks that its rows see, a few key heads at a time; the next
             heads are transferred during the computation with the current ones
SpanBlocks   for patterns that see nearly everything: blocks of keys go round a ring (ring.py)

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from longseq_bench.patterns.block_layout import BlockLayout, Owners
from longseq_bench.patterns.spans import Spans

Ints = NDArray[np.int64]

MAX_STAGES = 8
"""Maximum number of stages of key heads for fetching, so that fetched keys need little memory."""

RING_SHARE = 0.5
"""A ring is used if a rank would fetch more than this share of the other ranks' keys."""


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """A layout whose rows are split over ranks; a rank holds the tokens of its rows, ascending.

    owners: the rank of each row and of its key block.

    Example: blocks of 2 tokens, owners 0 1 1 0. Rank 0 has the rows 0 and 3, and the tokens 0, 1,
    6 and 7. `local_start` is 0 0 2 2: block 3 starts at local token 2 of rank 0.
    """

    layout: BlockLayout
    owners: Owners
    rank: int
    ranks: int

    def rows(self, rank: int) -> Ints:
        """Return the blocks that a rank holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    def tokens(self, blocks: Ints) -> Ints:
        """Return the positions of the tokens of some blocks, block by block."""
        return _ranges(blocks * self.layout.block, self.sizes[blocks])

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each block."""
        return self.layout.block_sizes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        tokens = np.bincount(self.owners, weights=self.sizes, minlength=self.ranks)
        return tuple(int(n) for n in tokens)

    @cached_property
    def local_start(self) -> Ints:
        """Index of the first token of each block among the tokens of its owner."""
        local_start = np.empty(self.layout.rows, dtype=np.int64)
        for rank in range(self.ranks):
            own = self.rows(rank)
            local_start[own] = np.cumsum(self.sizes[own]) - self.sizes[own]
        return local_start

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """Positions of this rank's tokens."""
        return self.tokens(self.rows(self.rank)).astype(np.int32)

    @property
    def is_masked(self) -> bool:
        """True if some pairs of kept blocks are hidden, by causality or another mask."""
        return self.layout.causal or self.layout.mask is not None

    @cached_property
    def query_steps(self) -> StepMap:
        """First and last key of each local query; without a mask its position."""
        if (mask := self.layout.mask) is None:
            return StepMap(q_at=self.positions)
        positions = self.positions.astype(np.int64)
        last, first = mask.stop(positions) - 1, mask.first(positions)
        return StepMap(q_at=last.astype(np.int32), q_first=first.astype(np.int32))

    @cached_property
    def kept_blocks(self) -> tuple[Ints, Ints]:
        """Kept blocks of this rank's rows: the index of the row among them, and the key block."""
        own = self.rows(self.rank)
        counts = self.layout.row_lengths[own]
        kept = self.layout.indices[_ranges(self.layout.indptr[own], counts)]
        return np.repeat(np.arange(len(own)), counts), kept.astype(np.int64)

    @cached_property
    def fetched(self) -> tuple[Ints, ...]:
        """Key blocks of other ranks that each rank's rows see, ordered by owner, ascending."""
        # rank and key block as one integer, rank * rows + block, so that each pair is kept once
        rank_of_row = self.owners.astype(np.int64) * self.layout.rows
        pairs = np.unique(np.repeat(rank_of_row, self.layout.row_lengths) + self.layout.indices)
        ranks, keys = np.divmod(pairs, self.layout.rows)
        is_remote = self.owners[keys] != ranks
        by_rank = (keys[is_remote & (ranks == rank)] for rank in range(self.ranks))
        return tuple(x[np.argsort(self.owners[x], kind="stable")] for x in by_rank)

    def sees_nearly_all(self) -> bool:
        """Return True if some rank would fetch nearly all keys of the others."""
        return any(
            self.sizes[self.fetched[rank]].sum()
            > RING_SHARE * (self.layout.seq_len - self.counts[rank])
            for rank in range(self.ranks)
        )

    def spans(self, row: Ints, start: Ints, count: Ints) -> Spans:
        """Return spans: this rank's rows as tiles, and for each a run of key tokens.

        row: index of each run's row among this rank's rows. start, count: tokens of the run.
        """
        order = np.argsort(row, kind="stable")
        per_row = np.bincount(row, minlength=len(self.rows(self.rank)))
        with_runs = np.flatnonzero(per_row)
        tiles = self.rows(self.rank)[with_runs]
        return Spans(
            tile_start=self.local_start[tiles].astype(np.int32),
            tile_count=self.sizes[tiles].astype(np.int32),
            runs=np.concatenate(([0], np.cumsum(per_row[with_runs]))).astype(np.int64),
            start=start[order].astype(np.int32),
            count=count[order].astype(np.int32),
        )


class FetchKernel:
    """Attention to the rank's own and fetched keys, a stage of key heads at a time.

    An AttentionKernel. A buffer (tokens, 2, B, heads, D) holds keys and values of a stage: first
    the rank's own tokens, then the fetched ones.
    """

    def __init__(self, sharded: ShardedLayout, group: Group, kernel: SpanKernel) -> None:
        self._group, self._kernel, self._is_masked = group, kernel, sharded.is_masked
        rank, ranks = sharded.rank, sharded.ranks
        fetched = sharded.fetched[rank]
        in_buffer = np.concatenate((sharded.rows(rank), fetched))
        buffer_start = np.zeros(sharded.layout.rows, dtype=np.int64)
        buffer_start[in_buffer] = np.cumsum(sharded.sizes[in_buffer]) - sharded.sizes[in_buffer]
        row, key = sharded.kept_blocks
        self._spans = sharded.spans(row, buffer_start[key], sharded.sizes[key])
        key_positions = sharded.tokens(in_buffer).astype(np.int32)
        self._steps = replace(sharded.query_steps, k_at=key_positions)
        self._own_count = sharded.counts[rank]
        received = np.bincount(
            sharded.owners[fetched], weights=sharded.sizes[fetched], minlength=ranks
        )
        self._received = [int(n) for n in received]
        sent = [_tokens_for(sharded, other) for other in range(ranks)]
        self._sent = [len(tokens) for tokens in sent]
        self._sent_tokens = torch.from_numpy(np.concatenate(sent))

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Return the bytes that this rank sends in one pass, by formula.

        Arguments are those of RingExchange.bytes_sent. In training keys are fetched twice, and the
        gradients of fetched keys go back to their owners.
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
                stage = grad_out[:, heads], q[:, heads], out[:, heads], lse[:, heads]
                self._kernel.backward(
                    stage, _keys_and_values(buffer), dq[:, heads], _keys_and_values(sums),
                    range(kv_heads.stop - kv_heads.start), self._task(heads),
                )  # fmt: skip
            returned = buffer.new_empty(len(self._sent_tokens), *buffer.shape[1:])
            remote = sums[self._own_count :].to(buffer.dtype)
            self._group.all_to_all(returned, remote, self._sent, self._received).wait()
            own = sums[: self._own_count]
            own.index_add_(0, self._sent_tokens.to(sums.device), returned.to(sums.dtype))
            for grad, total in zip((dk, dv), _keys_and_values(own), strict=True):
                grad[:, kv_heads] = total
        return dq, dk, dv

    def _task(self, heads: slice) -> SpanTask:
        parts = [HeadSpans(self._spans, range(heads.stop - heads.start))]
        return SpanTask(parts, self._is_masked, self._steps)

    def _stages(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield key heads, query heads and buffer of a stage; the next is transferred meanwhile."""
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        count = -(-heads // MAX_STAGES)
        stages = [slice(i, min(i + count, heads)) for i in range(0, heads, count)]
        next_fetch = self._fetch(k, v, stages[0])
        for i, kv_heads in enumerate(stages):
            buffer, pending, _ = next_fetch
            pending.wait()
            if i + 1 < len(stages):
                next_fetch = self._fetch(k, v, stages[i + 1])
            yield kv_heads, slice(kv_heads.start * group, kv_heads.stop * group), buffer

    def _fetch(self, k: Tensor, v: Tensor, kv_heads: slice) -> tuple[Tensor, Pending, Tensor]:
        """Start filling a buffer; return it, the transfer, and the sent tensor (keep it alive)."""
        b, _, _, d = k.shape
        shape = (2, b, kv_heads.stop - kv_heads.start, d)
        buffer = k.new_zeros(self._own_count + sum(self._received), *shape)
        sent = k.new_empty(len(self._sent_tokens), *shape)
        for i, t in enumerate((k, v)):
            tokens = t[:, kv_heads].permute(2, 0, 1, 3)
            buffer[: self._own_count, i] = tokens
            sent[:, i] = tokens.index_select(0, self._sent_tokens.to(t.device))
        pending = self._group.all_to_all(
            buffer[self._own_count :], sent, self._received, self._sent
        )
        return buffer, pending, sent


class SpanBlocks:
    """A BlockAttention for a ring: rows of a layout see spans of a block of keys."""

    def __init__(self, sharded: ShardedLayout, group: Group, kernel: SpanKernel) -> None:
        self._sharded, self._group, self._kernel = sharded, group, kernel
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
        """Return the task of local rows with a block; None if there is nothing to compute.

        The block's ends may lie inside blocks of the layout.
        """
        sharded = self._sharded
        row, key = sharded.kept_blocks
        if isinstance(block, LocalShare):
            first, last = even_span(len(sharded.rows(sharded.rank)), block.count, block.index)
            in_share = (sharded.owners[key] == sharded.rank) & (row >= first) & (row < last)
            row, key = row[in_share], key[in_share]
            spans = sharded.spans(row, sharded.local_start[key], sharded.sizes[key])
            key_positions = sharded.positions
        else:
            is_owners = sharded.owners[key] == block.owner
            row, key = row[is_owners], key[is_owners]
            start = np.maximum(sharded.local_start[key], block.start)
            stop = np.minimum(sharded.local_start[key] + sharded.sizes[key], block.stop)
            visible = start < stop
            row, start, stop = row[visible], start[visible], stop[visible]
            spans = sharded.spans(row, start - block.start, stop - start)
            key_positions = self._positions[block.owner][block.tokens]
        if not (self._group.computes and spans.tiles):
            return None
        steps = replace(sharded.query_steps, k_at=key_positions)
        part = HeadSpans(spans, range(heads))
        return SpanTask([part], sharded.is_masked, steps, merge=True)


def _tokens_for(sharded: ShardedLayout, other: int) -> Ints:
    """Return this rank's tokens that another rank fetches, in the order of its `fetched`."""
    if other == sharded.rank:
        return np.empty(0, dtype=np.int64)
    fetched = sharded.fetched[other]
    own = fetched[sharded.owners[fetched] == sharded.rank]
    return _ranges(sharded.local_start[own], sharded.sizes[own])


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Return counts[i] numbers from starts[i] on: starts 10 50, counts 2 3 give 10 11 50 51 52."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Ints = np.repeat(starts, counts) + within
    return numbers


def _keys_and_values(buffer: Tensor) -> KVPair:
    """Return keys and values (B, heads, tokens, D) of a buffer (tokens, 2, B, heads, D)."""
    k, v = (buffer[:, i].permute(1, 2, 0, 3) for i in range(2))
    return k, v
