"""Functions that each rank of a test runs. Values of tensors identify their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.attention.exact.collective import GatherExchange, GatherKernel
from longseq_bench.attention.exact.ring import RingKernel
from longseq_bench.attention.exact.ulysses import Usp
from longseq_bench.attention.tiles import LocalShare
from longseq_bench.core.model import Workload
from longseq_bench.distributed.deepspeed_transport import DeepspeedRing, connect
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.kv_exchange import KVBlock, KVBlocks, KVPair, RingExchange

B, H, D = 2, 2, 3
TOKEN_BYTES = 2 * B * H * D * 4
"""Bytes of a token's key and value in float32."""


@dataclass(frozen=True)
class Plan:
    """An exchange and its tensors. hops: of a ring, if not all."""

    kind: str
    counts: tuple[int, ...]
    tokens: int
    hops: int | None = None
    wire: str | None = None
    rough: bool = False

    def exchange(self, group: Group) -> RingExchange | GatherExchange:
        blocks = KVBlocks(self.counts, self.tokens)
        wire = None if self.wire is None else getattr(torch, self.wire)
        hops = group.size - 1 if self.hops is None else self.hops
        if self.kind == "gather":
            return GatherExchange(group, blocks)
        if self.kind == "deepspeed":
            connect("cpu")
            return DeepspeedRing(group, blocks, hops, wire)
        return RingExchange(group, blocks, hops, wire)

    def keys(self, owner: int) -> KVPair:
        """Return keys and values of a rank: whole numbers, or (rough) inexact in 16 bits."""
        n = self.counts[owner]
        whole = torch.arange(B * H * n * D, dtype=torch.float32).view(B, H, n, D)
        k = (whole % 61 + 1) * (owner + 1)
        if self.rough:
            k = 1 + k / 8192
        return k, -2 * k


@dataclass
class Recorder:
    """Stands for BlockAttention: it records the blocks instead of computing.

    wrong: blocks whose values are not those of their owner. idle: calls without a transfer in
    progress. The gradients of a block are its values times rank + 1; those of own keys are 0.
    """

    plan: Plan
    rank: int
    communicates: bool
    watch: Watch
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    wrong: list[tuple[int, int, int]] = field(default_factory=list)
    shares: list[tuple[int, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def forward(
        self, q: Tensor, v: Tensor, visits: Iterable[tuple[KVBlock | LocalShare, KVPair]]
    ) -> KVPair:
        for block, kv in visits:
            self.visit(kv, block)
        return q, q

    def visit(self, kv: KVPair, block: KVBlock | LocalShare) -> None:
        kind = "own" if isinstance(block, LocalShare) else "block"
        self.calls.append(kind)
        if not self.watch.in_progress:
            self.idle.append(kind)
        if isinstance(block, LocalShare):
            self.shares.append((block.index, block.count))
            return
        place = (block.owner, block.start, block.stop)
        self.blocks.append(place)
        for got, whole in zip(kv, self.plan.keys(block.owner), strict=True):
            expected = whole[:, :, block.tokens]
            if self.plan.wire:
                expected = expected.to(getattr(torch, self.plan.wire)).to(whole.dtype)
            arrived = torch.equal(got, expected) or not self.communicates
            if got.dtype != whole.dtype or not arrived:
                self.wrong.append(place)

    def backward(
        self, queries: Any, kv: KVPair, block: KVBlock | LocalShare, dq: Any, dkv: KVPair
    ) -> None:
        self.visit(kv, block)
        if isinstance(block, KVBlock):
            for gradient, t in zip(dkv, kv, strict=True):
                gradient.add_(t.float() * (self.rank + 1))


@dataclass
class Result:
    """Results of a rank."""

    recorder: Recorder
    clashes: list[str]
    totals: list[list[float]]
    sent: int
    formula: int


def run_exchange(group: Group, plan: Plan, back: bool = False, communicate: bool = True) -> Result:
    """Run one pass, forward or backward."""
    exchange = plan.exchange(group)
    k, v = plan.keys(group.rank)
    q = torch.zeros(B, H, 1, D)
    totals: list[list[float]] = []
    with watched(group) as watch, group.only(communicate=communicate):
        recorder = Recorder(plan, group.rank, communicate, watch)
        gathers = isinstance(exchange, GatherExchange)
        kernel: Any = (GatherKernel if gathers else RingKernel)(exchange, recorder)
        if back:
            _, dk, dv = kernel.backward((q, q, q, q[..., 0]), (k, v))
            totals = [t.flatten().tolist() for t in (dk, dv)]
        else:
            kernel.forward(q, k, v, False)
    recorder.watch = Watch()
    token = TOKEN_BYTES // 2 if plan.wire else TOKEN_BYTES
    return Result(
        recorder=recorder,
        clashes=watch.clashes,
        totals=totals,
        sent=group.traffic.bytes_sent,
        # a backward pass sends what a training pass sends beyond its forward
        formula=exchange.bytes_sent(token, TOKEN_BYTES) - exchange.bytes_sent(token)
        if back
        else exchange.bytes_sent(token),
    )


def expected_totals(plan: Plan, owner: int, visited: list[int]) -> list[list[float]]:
    """Return the gradients of a rank's keys that visited these ranks."""
    share = sum(rank + 1 for rank in visited)
    return [(t.float() * share).flatten().tolist() for t in plan.keys(owner)]


@dataclass
class Watch:
    """Buffers of transfers without a wait so far."""

    sending: list[range] = field(default_factory=list)
    receiving: list[range] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)

    @property
    def in_progress(self) -> int:
        return len(self.sending) + len(self.receiving)

    def begin(self, sent: list[Tensor], received: list[Tensor]) -> tuple[list[range], list[range]]:
        """Record a transfer. A buffer in use may be sent again, but not received into."""
        out, into = [_memory(t) for t in sent], [_memory(t) for t in received]
        for a in into:
            others = [r for r in into if r is not a]
            if any(_overlap(a, b) for b in [*out, *others, *self.sending, *self.receiving]):
                self.clashes.append("received into a buffer in use")
        if any(_overlap(a, b) for a in out for b in self.receiving):
            self.clashes.append("sent a buffer that is being received into")
        self.sending += out
        self.receiving += into
        return out, into


class Watched(Pending):
    """A Pending that calls `done` after the wait."""

    def __init__(self, inner: Pending, done: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._done = inner, done

    def wait(self) -> None:
        self._inner.wait()
        self._done()
        self._done = lambda: None


def _memory(t: Tensor) -> range:
    return range(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


@contextmanager
def watched(group: Group) -> Iterator[Watch]:
    """Record the buffers of every transfer, from its start to its wait."""
    watch = Watch()

    def follow(name: str, buffers: Callable[..., tuple[list[Tensor], list[Tensor]]]) -> Any:
        start = getattr(Group, name)

        def started(self: Group, *args: Any, **kwargs: Any) -> Pending:
            sent, received = buffers(*args, **kwargs)
            if self.size > 1 and self.traffic.communicates:
                out, into = watch.begin(sent, received)
            else:
                out, into = [], []

            def done() -> None:
                watch.sending = [r for r in watch.sending if all(r is not o for o in out)]
                watch.receiving = [r for r in watch.receiving if all(r is not o for o in into)]

            return Watched(start(self, *args, **kwargs), done)

        return patch.object(Group, name, started)

    with (
        follow("exchange", lambda send, receive, *to: (list(send), list(receive))),
        follow("all_gather", lambda out, own: ([own], [out])),
        follow("all_to_all", lambda out, sent, *sizes: ([sent], [out])),
    ):
        yield watch


# ---- the group itself --------------------------------------------------------------------------


def collectives(group: Group) -> dict[str, Any]:
    """Run each transfer once; return its result and the bytes that it counted."""
    size, rank = group.size, group.rank
    found: dict[str, Any] = {}

    def counted(name: str, *tensors: Tensor) -> None:
        found[name] = ([t.flatten().tolist() for t in tensors], group.traffic.bytes_sent)
        group.traffic.bytes_sent = 0

    def of(rank: int, *shape: int) -> Tensor:
        return torch.full(shape, float(rank))

    received = (torch.empty(4), torch.empty(2))
    group.exchange(
        (of(rank, 4), of(10 * rank, 2)), received, (rank + 1) % size, (rank - 1) % size
    ).wait()
    counted("exchange", *received)

    gathered = torch.empty(size, 3)
    group.all_gather(gathered, of(rank, 3)).wait()
    counted("all_gather", gathered)

    own = torch.empty(2)
    group.reduce_scatter(own, torch.arange(2.0 * size).view(size, 2) + rank).wait()
    counted("reduce_scatter", own)

    parts = torch.empty(size)
    group.all_to_all(parts, 10.0 * rank + torch.arange(float(size))).wait()
    counted("all_to_all", parts)

    # rank r sends r + 1 rows to each rank
    uneven = torch.empty(sum(range(1, size + 1)), 2)
    sent = torch.full((size * (rank + 1), 2), float(rank))
    group.all_to_all(uneven, sent, list(range(1, size + 1)), [rank + 1] * size).wait()
    counted("uneven", uneven)

    found["largest"] = group.all_max(rank, -rank)
    found["total"] = group.all_sum(torch.tensor([1, rank])).tolist()
    group.barrier()
    found["uncounted"] = group.traffic.bytes_sent
    return found


def shared_parts(group: Group) -> dict[str, Any]:
    """Make the subgroups of two equal attentions, and count the process groups that torch makes."""
    made: list[list[int]] = []

    def new_group(ranks: list[int], **settings: Any) -> Any:
        made.append(ranks)
        return connect_ranks(ranks, **settings)

    connect_ranks = dist.new_group
    workload = Workload(seq_len=64, heads=2)
    with patch.object(dist, "new_group", new_group):
        one, other = (Usp(workload, group, ulysses=2) for _ in range(2))
        Usp(workload, group, ulysses=1)
    pairs = [
        (one.exchange.group, other.exchange.group),
        (one.stage_ring.group, other.stage_ring.group),
    ]
    return {
        "made": made,
        "shared": [a.data is b.data for a, b in pairs],
        "connected": [a.data is not None for a, _ in pairs],
        "kinds": len({id(a.data) for a, _ in pairs}),
    }
