"""From shards of tokens with all heads to all tokens of some heads, and back.

AllToAll       each rank gets its heads' part of every shard (DeepSpeed-Ulysses, arXiv 2309.14509)
GatherScatter  every shard whole to every rank, outputs summed over ranks and scattered (Megatron's
               sequence parallelism, arXiv 2205.05198)

Shapes: a shard (B, H, m, D) with this rank's m tokens; all tokens (B, h, M, D) with h of its heads,
in the order of the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import even
from longseq_bench.meta_mode import STEPS, limited

LEAST_TRANSFER = 256
TRANSFERS = 16
"""A shard travels in so many parts, so that what is packed to be sent stays small beside it."""


@dataclass(frozen=True)
class Stage:
    """The heads of one stage: `first` is the first of them all, `each` how many a rank takes."""

    first: int
    each: int

    def of(self, rank: int) -> slice:
        """The heads that a rank takes."""
        return slice(self.first + rank * self.each, self.first + (rank + 1) * self.each)


class HeadExchange(ABC):
    """counts: tokens of each rank's shard."""

    def __init__(self, group: Group, counts: tuple[int, ...]) -> None:
        self.group, self.counts = group, counts
        self.starts = [sum(counts[:rank]) for rank in range(len(counts))]

    @abstractmethod
    def to_heads(self, shard: Tensor, stage: Stage) -> Tensor:
        """(B, H, m, D) -> (B, h, M, D)."""

    @abstractmethod
    def to_tokens(self, whole: Tensor, shard: Tensor, stage: Stage) -> None:
        """(B, h, M, D) into the stage's heads of `shard` (B, H, m, D)."""

    @abstractmethod
    def bytes_sent(self, head_bytes: int, heads: int, there: int, back: int) -> int:
        """What this rank sends, by formula, when `there` tensors go to heads and `back` come to
        tokens, of `heads` heads with head_bytes a token each."""


class AllToAll(HeadExchange):
    """In parts of some tokens: beside shard and result only one part is held, packed."""

    def __init__(self, group: Group, counts: tuple[int, ...]) -> None:
        super().__init__(group, counts)
        part = max(LEAST_TRANSFER, -(-max(counts) // TRANSFERS))
        self.parts = -(-max(counts) // part)

    def to_heads(self, shard: Tensor, stage: Stage) -> Tensor:
        size, rank = self.group.size, self.group.rank
        b, _, _, d = shard.shape
        whole = shard.new_empty(b, stage.each, sum(self.counts), d)
        for part in limited(range(self.parts), STEPS):
            spans = [even(count, self.parts, part) for count in self.counts]
            mine = slice(*spans[rank])
            given = [shard[:, stage.of(r), mine] for r in range(size)]
            taken = [
                whole[:, :, self.starts[r] + start : self.starts[r] + stop]
                for r, (start, stop) in enumerate(spans)
            ]
            self._swap(given, taken)
        return whole

    def to_tokens(self, whole: Tensor, shard: Tensor, stage: Stage) -> None:
        size, rank = self.group.size, self.group.rank
        for part in limited(range(self.parts), STEPS):
            spans = [even(count, self.parts, part) for count in self.counts]
            mine = slice(*spans[rank])
            given = [
                whole[:, :, self.starts[r] + start : self.starts[r] + stop]
                for r, (start, stop) in enumerate(spans)
            ]
            self._swap(given, [shard[:, stage.of(r), mine] for r in range(size)])

    def bytes_sent(self, head_bytes: int, heads: int, there: int, back: int) -> int:
        size, mine = self.group.size, self.counts[self.group.rank]
        each = heads // size * head_bytes
        return each * (there * mine * (size - 1) + back * (sum(self.counts) - mine))

    def _swap(self, given: list[Tensor], taken: list[Tensor]) -> None:
        """Part r of `given` to rank r; what rank r gave into part r of `taken`, which are views."""
        packed = given[0].new_empty(sum(t.numel() for t in given))
        arrived = packed.new_zeros(sum(t.numel() for t in taken))
        sizes = [t.numel() for t in given]
        for room, tensor in zip(torch.split(packed, sizes), given, strict=True):
            room.view(tensor.shape).copy_(tensor)
        out_sizes = [t.numel() for t in taken]
        self.group.all_to_all(arrived, packed, out_sizes, sizes).wait()
        for tensor, room in zip(taken, torch.split(arrived, out_sizes), strict=True):
            tensor.copy_(room.view(tensor.shape))


class GatherScatter(HeadExchange):
    """Whole tensors, as a tensor-parallel layer sees them: each rank holds all of one for a moment.

    The heads of a rank are its part of a product that is summed over ranks; the others' are zero.
    """

    def to_heads(self, shard: Tensor, stage: Stage) -> Tensor:
        whole = shard.new_empty(self.group.size, *self._padded(shard))
        own = shard.new_zeros(self._padded(shard))
        own[:, :, : shard.shape[2]] = shard
        self.group.all_gather(whole, own).wait()
        del own
        b, d, mine = shard.shape[0], shard.shape[3], stage.of(self.group.rank)
        joined = shard.new_empty(b, stage.each, sum(self.counts), d)
        for rank, count in enumerate(self.counts):
            start = self.starts[rank]
            joined[:, :, start : start + count] = whole[rank][:, mine, :count]
        return joined

    def to_tokens(self, whole: Tensor, shard: Tensor, stage: Stage) -> None:
        partial = shard.new_zeros(self.group.size, *self._padded(shard))
        mine = stage.of(self.group.rank)
        for rank, count in enumerate(self.counts):
            start = self.starts[rank]
            partial[rank][:, mine, :count] = whole[:, :, start : start + count]
        own = shard.new_zeros(self._padded(shard))
        self.group.reduce_scatter(own, partial).wait()
        heads = slice(stage.first, stage.first + self.group.size * stage.each)
        shard[:, heads] = own[:, heads, : shard.shape[2]]

    def bytes_sent(self, head_bytes: int, heads: int, there: int, back: int) -> int:
        tokens = (self.group.size - 1) * max(self.counts)
        return tokens * heads * head_bytes * (there + back)

    def _padded(self, shard: Tensor) -> tuple[int, int, int, int]:
        b, h, _, d = shard.shape
        return b, h, max(self.counts), d
