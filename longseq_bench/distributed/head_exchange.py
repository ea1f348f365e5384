"""Exchange of token shards with all heads for all tokens of some heads, and back.

AllToAll       each rank gets its heads of every shard (DeepSpeed-Ulysses, arXiv 2309.14509)
GatherScatter  every rank gets every shard; outputs are summed over ranks and scattered (sequence
               parallelism of Megatron, arXiv 2205.05198)

Shapes: a shard (B, H, m, D) with this rank's m tokens; all tokens (B, h, M, D) with h of its heads,
in the order of the ranks.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import even_span
from longseq_bench.meta_mode import MAX_STEPS, limited

MIN_TRANSFER = 256
TRANSFERS = 16
"""Number of parts in which a shard is sent, so that packed copies are small relative to it."""


@dataclass(frozen=True)
class HeadStage:
    """The heads exchanged in one stage: each rank takes `count` heads, from head `first` on.

    copies: successive ranks that take the same heads.
    """

    first: int
    count: int
    copies: int = 1

    def of(self, rank: int) -> slice:
        """Return the heads that a rank takes."""
        start = self.first + rank // self.copies * self.count
        return slice(start, start + self.count)


class AllToAll:
    """Exchange by all-to-all, some tokens at a time: only one part is packed at any moment.

    counts: tokens of each rank's shard.
    """

    def __init__(self, group: Group, counts: tuple[int, ...]) -> None:
        self.group, self.counts = group, counts
        self.starts = [0, *accumulate(counts[:-1])]
        part = max(MIN_TRANSFER, -(-max(counts) // TRANSFERS))
        self.parts = -(-max(counts) // part)

    def to_heads(self, shard: Tensor, stage: HeadStage) -> Tensor:
        """Return all tokens of this rank's heads: (B, H, m, D) -> (B, h, M, D)."""
        full = shard.new_empty(shard.shape[0], stage.count, sum(self.counts), shard.shape[3])
        for part in limited(range(self.parts), MAX_STEPS):
            by_heads, by_tokens = self._views(shard, full, stage, part)
            self._swap(by_heads, by_tokens)
        return full

    def to_tokens(self, full: Tensor, shard: Tensor, stage: HeadStage) -> None:
        """Write its heads, copies summed, into a shard: (B, h, M, D) -> (B, H, m, D)."""
        for part in limited(range(self.parts), MAX_STEPS):
            by_heads, by_tokens = self._views(shard, full, stage, part)
            self._swap(by_tokens, by_heads, stage.copies)

    def bytes_sent(self, head_bytes: int, heads: int, to_heads: int, to_tokens: int) -> int:
        """Return the bytes that this rank sends, by formula.

        head_bytes: bytes of one head of one token. heads: heads of a tensor; of fewer than ranks
        each rank takes one. to_heads, to_tokens: number of tensors exchanged in each direction.
        """
        size, own = self.group.size, self.counts[self.group.rank]
        token_bytes = max(1, heads // size) * head_bytes
        return token_bytes * (to_heads * own * (size - 1) + to_tokens * (sum(self.counts) - own))

    def _views(
        self, shard: Tensor, full: Tensor, stage: HeadStage, part: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return one part as views: of the shard per rank of the heads, of `full` per owner."""
        spans = [even_span(count, self.parts, part) for count in self.counts]
        own = slice(*spans[self.group.rank])
        by_heads = [shard[:, stage.of(rank), own] for rank in range(self.group.size)]
        by_tokens = [
            full[:, :, first + start : first + stop]
            for first, (start, stop) in zip(self.starts, spans, strict=True)
        ]
        return by_heads, by_tokens

    def _swap(self, sent: list[Tensor], received: list[Tensor], copies: int = 1) -> None:
        """Send sent[r] to each rank r and receive received[r] from it, the sum of its copies."""
        sizes, received_sizes = ([t.numel() for t in views] for views in (sent, received))
        packed = sent[0].new_empty(sum(sizes))
        packed_received = packed.new_zeros(sum(received_sizes))
        for target, tensor in zip(torch.split(packed, sizes), sent, strict=True):
            target.view(tensor.shape).copy_(tensor)
        self.group.all_to_all(packed_received, packed, received_sizes, sizes).wait()
        sources = torch.split(packed_received, received_sizes)
        for i in range(0, len(received), copies):
            same = torch.stack(sources[i : i + copies]).sum(0) if copies > 1 else sources[i]
            received[i].copy_(same.view(received[i].shape))


class GatherScatter(AllToAll):
    """Exchange of full tensors, as a tensor-parallel layer does it.

    A rank's heads are its part of a product that is summed over ranks; the other heads are zero.
    """

    @override
    def to_heads(self, shard: Tensor, stage: HeadStage) -> Tensor:
        gathered = shard.new_empty(self.group.size, *self._padded(shard))
        own = shard.new_zeros(self._padded(shard))
        own[:, :, : shard.shape[2]] = shard
        self.group.all_gather(gathered, own).wait()
        del own
        full = shard.new_empty(shard.shape[0], stage.count, sum(self.counts), shard.shape[3])
        heads = stage.of(self.group.rank)
        for rank, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            full[:, :, start : start + count] = gathered[rank][:, heads, :count]
        return full

    @override
    def to_tokens(self, full: Tensor, shard: Tensor, stage: HeadStage) -> None:
        partial = shard.new_zeros(self.group.size, *self._padded(shard))
        heads = stage.of(self.group.rank)
        for rank, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            partial[rank][:, heads, :count] = full[:, :, start : start + count]
        own = shard.new_zeros(self._padded(shard))
        self.group.reduce_scatter(own, partial).wait()
        all_heads = slice(stage.first, stage.first + self.group.size * stage.count)
        shard[:, all_heads] = own[:, all_heads, : shard.shape[2]]

    @override
    def bytes_sent(self, head_bytes: int, heads: int, to_heads: int, to_tokens: int) -> int:
        tokens = (self.group.size - 1) * max(self.counts)
        return tokens * heads * head_bytes * (to_heads + to_tokens)

    def _padded(self, shard: Tensor) -> tuple[int, int, int, int]:
        b, h, _, d = shard.shape
        return b, h, max(self.counts), d
