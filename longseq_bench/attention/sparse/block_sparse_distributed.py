"""Block-sparse attention with rows split over ranks, and keys and values with their rows.

Each rank fetches the key blocks that its rows see, a few key heads at a time; the next heads are
transferred during the computation with the current ones.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.one_rank import masked_steps
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.kv_exchange import KVPair
from longseq_bench.kernels.base import OutputAndLse, Queries, Triple
from longseq_bench.kernels.spans import HeadSpans, SpanKernel, SpanTask, StepMap
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout, Owners
from longseq_bench.patterns.spans import Spans, ranges

MAX_STAGES = 8
"""Maximum number of stages of key heads for fetching, so that fetched keys need little memory."""


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """A layout whose rows are split over ranks; a rank holds the tokens of its rows, ascending.

    owners: the rank of each row and of its key block.

    Example: blocks of 2 tokens, owners 0 1 1 0. Rank 0 has the rows 0 and 3, and the tokens 0, 1,
    6 and 7.
    """

    layout: BlockLayout
    owners: Owners
    rank: int
    ranks: int
    scores: Scores = PLAIN_SCORES

    def rows(self, rank: int) -> Ints:
        """Return the blocks that a rank holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    def tokens(self, blocks: Ints) -> Ints:
        """Return the positions of the tokens of some blocks, block by block."""
        return ranges(blocks * self.layout.block, self.sizes[blocks])

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each block."""
        return self.layout.block_sizes

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


class FetchPlan:
    """The tokens that a rank sends (to each rank), receives and attends to by a layout."""

    def __init__(self, sharded: ShardedLayout) -> None:
        layout, rank, ranks, sizes = sharded.layout, sharded.rank, sharded.ranks, sharded.sizes
        own, fetched = sharded.rows(rank), sharded.fetched[rank]
        in_buffer = np.concatenate((own, fetched))
        buffer_start = np.zeros(layout.rows, dtype=np.int64)
        buffer_start[in_buffer] = np.cumsum(sizes[in_buffer]) - sizes[in_buffer]
        # this rank's rows are tiles; each kept block is a run of keys
        kept = layout.row_lengths[own]
        key = layout.indices[ranges(layout.indptr[own], kept)]
        self.spans = Spans(
            tile_start=buffer_start[own].astype(np.int32),
            tile_count=sizes[own].astype(np.int32),
            runs=np.concatenate(([0], np.cumsum(kept))).astype(np.int64),
            start=buffer_start[key].astype(np.int32),
            count=sizes[key].astype(np.int32),
        )
        self.is_masked, self.scores = layout.causal or layout.mask is not None, sharded.scores
        positions, key_positions = sharded.tokens(own), sharded.tokens(in_buffer)
        steps = StepMap(q_at=positions.astype(np.int32))
        if layout.mask is not None:
            steps = masked_steps(layout.mask, positions)
        self.steps = replace(steps, k_at=key_positions.astype(np.int32))
        self.own_count = len(positions)
        owners = sharded.owners
        received = np.bincount(owners[fetched], weights=sizes[fetched], minlength=ranks)
        self.received = [int(n) for n in received]
        # own blocks that each rank fetches, in its order
        sent = [blocks[owners[blocks] == rank] for blocks in sharded.fetched]
        tokens = [ranges(buffer_start[blocks], sizes[blocks]) for blocks in sent]
        self.sent = [len(of_rank) for of_rank in tokens]
        self.sent_tokens = torch.from_numpy(np.concatenate(tokens))

    def task(self, heads: slice) -> SpanTask:
        """Return the task of the kernel for some query heads."""
        parts = [HeadSpans(self.spans, range(heads.stop - heads.start))]
        return SpanTask(parts, self.is_masked, self.steps, self.scores)


class FetchKernel:
    """Attention to the rank's own and fetched keys, a stage of key heads at a time.

    An AttentionKernel by one layout for all key heads, or by one for each. A buffer (tokens, 2, B,
    heads, D) holds keys and values of a stage: first the rank's own tokens, then the fetched ones.
    """

    def __init__(self, sharded: Sequence[ShardedLayout], group: Group, kernel: SpanKernel) -> None:
        self._group, self._kernel = group, kernel
        self._plans = [FetchPlan(one) for one in sharded]

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Return the bytes that this rank sends in one pass, by formula.

        Arguments are those of RingExchange.bytes_sent. In training keys are fetched twice, and the
        gradients of fetched keys go back to their owners.
        """
        plans = self._plans  # each for an equal share of the key heads
        sent = sum(sum(plan.sent) for plan in plans) * token_bytes // len(plans)
        received = sum(sum(plan.received) for plan in plans) * gradient_bytes // len(plans)
        return 2 * sent + received if gradient_bytes else sent

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for _, heads, plan, buffer in self._stages(q, k, v):
            if self._group.computes:
                keys, stage_lse = _keys_and_values(buffer), None if lse is None else lse[:, heads]
                task = plan.task(heads)
                self._kernel.forward(q[:, heads], *keys, out[:, heads], stage_lse, task)
        return out, lse

    def backward(self, queries: Queries, keys: KVPair) -> Triple:
        """Return the gradients of q, k and v; those of fetched keys go back to their owners."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for kv_heads, heads, plan, buffer in self._stages(q, k, v):
            sums = buffer.new_zeros(buffer.shape, dtype=torch.float32)
            if self._group.computes:
                stage = grad_out[:, heads], q[:, heads], out[:, heads], lse[:, heads]
                self._kernel.backward(
                    stage, _keys_and_values(buffer), dq[:, heads], _keys_and_values(sums),
                    range(kv_heads.stop - kv_heads.start), plan.task(heads),
                )  # fmt: skip
            returned = buffer.new_empty(len(plan.sent_tokens), *buffer.shape[1:])
            remote = sums[plan.own_count :].to(buffer.dtype)
            self._group.all_to_all(returned, remote, plan.sent, plan.received).wait()
            own = sums[: plan.own_count]
            own.index_add_(0, plan.sent_tokens.to(sums.device), returned.to(sums.dtype))
            for grad, total in zip((dk, dv), _keys_and_values(own), strict=True):
                grad[:, kv_heads] = total
        return dq, dk, dv

    def _stages(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, slice, FetchPlan, Tensor]]:
        """Yield key heads, query heads, plan and buffer of a stage.

        The next one is transferred meanwhile.
        """
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        count = -(-heads // MAX_STAGES) if len(self._plans) == 1 else 1
        stages = [slice(i, min(i + count, heads)) for i in range(0, heads, count)]
        # one plan for all stages, or one for each
        plans = self._plans * len(stages)
        next_fetch = self._fetch(k, v, stages[0], plans[0])
        for i, kv_heads in enumerate(stages):
            buffer, pending, _ = next_fetch
            pending.wait()
            if i + 1 < len(stages):
                next_fetch = self._fetch(k, v, stages[i + 1], plans[i + 1])
            yield kv_heads, slice(kv_heads.start * group, kv_heads.stop * group), plans[i], buffer

    def _fetch(
        self, k: Tensor, v: Tensor, kv_heads: slice, plan: FetchPlan
    ) -> tuple[Tensor, Pending, Tensor]:
        """Start filling a buffer; return it, the transfer, and the sent tensor (keep it alive)."""
        b, _, _, d = k.shape
        shape = (2, b, kv_heads.stop - kv_heads.start, d)
        buffer = k.new_zeros(plan.own_count + sum(plan.received), *shape)
        sent = k.new_empty(len(plan.sent_tokens), *shape)
        for i, t in enumerate((k, v)):
            tokens = t[:, kv_heads].permute(2, 0, 1, 3)
            buffer[: plan.own_count, i] = tokens
            sent[:, i] = tokens.index_select(0, plan.sent_tokens.to(t.device))
        pending = self._group.all_to_all(buffer[plan.own_count :], sent, plan.received, plan.sent)
        return buffer, pending, sent


def _keys_and_values(buffer: Tensor) -> KVPair:
    """Return keys and values (B, heads, tokens, D) of a buffer (tokens, 2, B, heads, D)."""
    k, v = (buffer[:, i].permute(1, 2, 0, 3) for i in range(2))
    return k, v
