"""Keys and values go from rank to rank, a block at a time, and their gradients follow them.

The loop of Ring Attention (arXiv 2310.01889) is in attention/exact/ring.py, the calls of
torch.distributed in Group.exchange (distributed/group.py).

Shapes: k, v (B, Hk, N, D) of this rank; a block (B, Hk, M, D). v may have another D than k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.token_order import even_span
from longseq_bench.meta_mode import MAX_STEPS, limited

KVPair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""

BLOCKS_PER_SHARD = 20
"""A ring holds three blocks of k and v: with 20 blocks per shard that is 7 % of its floor."""

ALIGNMENT = 64
"""In tokens. Kernels are up to 20 % slower if the keys are not a multiple of their vector width."""


@dataclass(frozen=True)
class KVBlock:
    """Local tokens start to stop of the rank that owns them."""

    owner: int
    start: int
    stop: int

    @property
    def tokens(self) -> slice:
        """The local tokens as a slice."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


class KVBlocks:
    """The blocks into which the tokens of every rank are cut; all ranks have equally many.

    counts: tokens of each rank. limit: maximum tokens of a block.
    """

    def __init__(self, counts: tuple[int, ...], limit: int) -> None:
        self.counts = counts
        self._unit = ALIGNMENT if limit >= ALIGNMENT else 1
        units = [-(-count // self._unit) for count in counts]
        # one block holds a whole shard also where the shard ends inside an aligned unit
        needed = 1 if limit >= max(counts) else -(-max(units) // max(1, limit // self._unit))
        self.per_rank = min(needed, max(1, min(units)))
        # ranks with equally many tokens have blocks of the same lengths
        owners = {count: rank for rank, count in enumerate(counts)}.values()
        self.longest = max(len(self.block(r, i)) for r in owners for i in range(self.per_rank))

    def block(self, owner: int, index: int) -> KVBlock:
        """Return a block of a rank, alternately from the first and the second half of its tokens.

        In zigzag order a rank after the owner sees only the first half, with all its queries; a
        rank before the owner sees both halves, with half of its queries. With blocks in local
        order, one kind of rank would wait for the other at each step.
        """
        count = self.counts[owner]
        half, turn = divmod(index, 2)
        part = half + turn * ((self.per_rank + 1) // 2)
        span = even_span(-(-count // self._unit), self.per_rank, part)
        start, stop = (min(count, self._unit * unit) for unit in span)
        return KVBlock(owner, start, stop)


def ring_blocks(counts: tuple[int, ...], smallest: int, limit: int | None = None) -> KVBlocks:
    """Return the blocks of a ring: few tokens relative to the shards, and at most `limit`.

    smallest: tokens that a block should have at least, because shorter ones are slower.
    """
    tokens = max(smallest, -(-max(counts) // BLOCKS_PER_SHARD))
    return KVBlocks(counts, max(1, min(limit or max(counts), tokens)))


class BlockBuffer:
    """Memory for one block: one buffer for its keys and one for its values."""

    def __init__(self, like: KVPair, max_tokens: int, dtype: torch.dtype) -> None:
        self._shapes = [t.shape for t in like]
        self._flat = [
            torch.zeros(b * h * max_tokens * d, dtype=dtype, device=like[0].device)
            for b, h, _, d in self._shapes
        ]

    def view(self, tokens: int) -> KVPair:
        """Return contiguous views (B, Hk, tokens, D)."""
        first, second = (
            flat[: b * h * tokens * d].view(b, h, tokens, d)
            for flat, (b, h, _, d) in zip(self._flat, self._shapes, strict=True)
        )
        return first, second

    def load(self, pair: KVPair) -> None:
        """Copy a block into the buffer."""
        for target, source in zip(self.view(pair[0].shape[2]), pair, strict=True):
            target.copy_(source)


@dataclass(frozen=True)
class RingStep:
    """A step of a ring: block `index` is here, and it comes from `hop` ranks back."""

    index: int
    hop: int


@dataclass(frozen=True)
class RingExchange:
    """Transfers of a ring: each block visits the next `hops` ranks, one after the other.

    wire: dtype in which keys and values are sent; None: their own. Gradients are never compressed.
    """

    group: Group
    blocks: KVBlocks
    hops: int
    wire: torch.dtype | None = None

    def steps(self) -> list[RingStep]:
        """Return the steps of a pass in order.

        With limited loops: the first few and the last, at which gradients return to the owner.
        """
        if not self.hops:
            return []
        before_last = range(self.blocks.per_rank * self.hops - 1)
        steps = (RingStep(i // self.hops, i % self.hops + 1) for i in before_last)
        return [*limited(steps, MAX_STEPS), RingStep(self.blocks.per_rank - 1, self.hops)]

    def block_at(self, step: RingStep) -> KVBlock:
        """Return the block that is on this rank at a step."""
        return self.blocks.block((self.group.rank - step.hop) % self.group.size, step.index)

    def send_and_receive(self, sent: KVPair, received: KVPair, hops: int = 1) -> Pending:
        """Start sending `hops` ranks ahead and receiving from as many ranks back.

        Other transports override this.
        """
        size, rank = self.group.size, self.group.rank
        return self.group.exchange(sent, received, (rank + hops) % size, (rank - hops) % size)

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Return the bytes that this rank sends in one pass, by formula.

        token_bytes: bytes of one token's key and value as they are sent. gradient_bytes: those of
        their gradients, in a training pass; 0: forward only.
        """
        size, rank, counts = self.group.size, self.group.rank, self.blocks.counts
        passed_on = sum(counts[(rank - hop) % size] for hop in range(self.hops))
        if not gradient_bytes:
            return passed_on * token_bytes
        gradients = sum(counts[(rank - hop) % size] for hop in range(1, self.hops + 1))
        return 2 * passed_on * token_bytes + gradients * gradient_bytes


class RingBuffers:
    """Buffers on one rank during a pass: an own block to send, the current block, the next one."""

    def __init__(self, ring: RingExchange, k: Tensor, v: Tensor) -> None:
        self._ring, self._k, self._v = ring, k, v
        self._buffers = [
            BlockBuffer((k, v), ring.blocks.longest, ring.wire or k.dtype)
            for _ in range(3 if ring.hops else 0)
        ]

    def start(self, step: RingStep | None) -> Pending:
        """Start the transfers that bring the block of a step; each rank passes on what it has."""
        if step is None:
            return Pending()
        ring = self._ring
        leaving, current, arriving = self._buffers
        sent = ring.block_at(RingStep(step.index, step.hop - 1))
        if step.hop == 1:
            leaving.load((self._k[:, :, sent.tokens], self._v[:, :, sent.tokens]))
        source = leaving if step.hop == 1 else current
        return ring.send_and_receive(
            source.view(len(sent)), arriving.view(len(ring.block_at(step)))
        )

    def take_block(self, step: RingStep) -> KVPair:
        """Return the keys and values of a step whose transfer is done; they become current."""
        leaving, current, arriving = self._buffers
        self._buffers = [leaving, arriving, current]
        k_block, v_block = arriving.view(len(self._ring.block_at(step)))
        return k_block.to(self._k.dtype), v_block.to(self._v.dtype)


class RingGradients:
    """Gradients of blocks. They follow their block round the ring, one step behind it.

    The last rank sends them to the owner, which adds them to its totals.
    """

    def __init__(self, ring: RingExchange, keys: KVPair, totals: KVPair) -> None:
        self._ring, self._totals = ring, totals
        self._leaving, self._arriving = (
            BlockBuffer(keys, ring.blocks.longest, keys[0].dtype) for _ in range(2)
        )
        self._steps = iter(ring.steps())
        self._previous_step: RingStep | None = None
        self._current: KVPair | None = None
        self._targets: Sequence[Tensor] = ()
        self._transfer = Pending()

    def start(self, current: KVPair | None) -> None:
        """Send the gradients of the previous step on; after the last hop to the owner.

        current: this rank's gradients of the block that is here now (None after the last step).
        Received gradients are added to it, after the last hop to the totals of this rank's block.
        """
        self._current, ring, previous = current, self._ring, self._previous_step
        if previous is None:
            return
        to_owner = previous.hop == ring.hops
        block = ring.block_at(RingStep(previous.index, 0 if to_owner else previous.hop + 1))
        if to_owner:
            self._targets = [total[:, :, block.tokens] for total in self._totals]
        elif current is not None:
            self._targets = current
        sent = self._leaving.view(len(ring.block_at(previous)))
        received = self._arriving.view(len(block))
        self._transfer = ring.send_and_receive(sent, received, -ring.hops if to_owner else 1)

    def collect(self) -> None:
        """Add the received gradients. Those of the current block are complete and are sent next."""
        self._transfer.wait()
        for i, target in enumerate(self._targets):
            target.add_(self._arriving.view(target.shape[2])[i])
        if self._current is not None:
            self._leaving.load(self._current)
            self._previous_step = next(self._steps)
        self._targets, self._current = (), None
