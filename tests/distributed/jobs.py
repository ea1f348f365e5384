"""What each rank of a test of comm does. Numbers say where they are from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longseq_bench.attention.exact.collective import GatherKernel
from longseq_bench.attention.exact.ring import RingKernel
from longseq_bench.attention.tiles import LocalShare
from longseq_bench.distributed import head_exchange as heads_module
from longseq_bench.distributed.deepspeed_transport import DeepspeedRing, connect
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.head_exchange import AllToAll, GatherScatter, HeadExchange, HeadStage
from longseq_bench.distributed.kv_exchange import (
    GatherExchange,
    KVBlock,
    KVBlocks,
    KVPair,
    RingExchange,
)

B, H, D = 2, 2, 3
TOKEN_BYTES = 2 * B * H * D * 4
"""Of a token's key and value in float32."""


@dataclass(frozen=True)
class Plan:
    """An exchange and what it carries. hops: of a ring, if not all."""

    kind: str
    counts: tuple[int, ...]
    tokens: int
    hops: int | None = None
    wire: str | None = None
    dtype: str = "float32"
    rough: bool = False

    def exchange(self, group: Group) -> RingExchange | GatherExchange:
        blocks = KVBlocks(self.counts, self.tokens)
        wire = None if self.wire is None else getattr(torch, self.wire)
        if self.kind == "gather":
            return GatherExchange(group, blocks)
        if self.kind == "deepspeed":
            connect("cpu")
            return DeepspeedRing(group, blocks, wire, self.hops)
        return RingExchange(group, blocks, wire, self.hops)

    def keys(self, owner: int) -> KVPair:
        """Keys and values of a rank: whole numbers, or (rough) too fine ones for 16 bits."""
        n = self.counts[owner]
        whole = torch.arange(B * H * n * D, dtype=torch.float32).view(B, H, n, D)
        k = (whole % 61 + 1) * (owner + 1)
        if self.rough:
            k = 1 + k / 8192
        dtype = getattr(torch, self.dtype)
        return k.to(dtype), (-2 * k).to(dtype)


@dataclass
class Recorder:
    """A BlockAttention that records what a rank sees, in place of computing.

    wrong: blocks whose numbers were not those of their owner. idle: calls with nothing under way.
    The gradients of a block are its numbers times this rank's number plus one; those of own keys 0.
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

    def forward(self, q: Any, kv: KVPair, block: KVBlock | LocalShare, *results: Any) -> None:
        what = "own" if isinstance(block, LocalShare) else "block"
        self.calls.append(what)
        if not self.watch.under_way:
            self.idle.append(what)
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
        self.forward(queries, kv, block)
        if isinstance(block, KVBlock):
            for gradient, t in zip(dkv, kv, strict=True):
                gradient.add_(t.float() * (self.rank + 1))


@dataclass
class Result:
    """What a rank saw and got back."""

    seen: Recorder
    clashes: list[str]
    totals: list[list[float]]
    sent: int
    formula: int


def run_exchange(group: Group, plan: Plan, back: bool = False, communicate: bool = True) -> Result:
    """One pass, forward or backward."""
    exchange = plan.exchange(group)
    k, v = plan.keys(group.rank)
    q = torch.zeros(B, H, 1, D)
    totals: list[list[float]] = []
    with watched(group) as watch, group.only(communicate=communicate):
        seen = Recorder(plan, group.rank, communicate, watch)
        gathers = isinstance(exchange, GatherExchange)
        kernel: Any = GatherKernel(exchange, seen) if gathers else RingKernel(exchange, seen)
        if back:
            _, dk, dv = kernel.backward((q, q, q, q[..., 0]), (k, v))
            totals = [t.flatten().tolist() for t in (dk, dv)]
        else:
            kernel.forward(q, k, v, False)
    seen.watch = Watch()
    token = TOKEN_BYTES // 2 if plan.wire else TOKEN_BYTES
    return Result(
        seen=seen,
        clashes=watch.clashes,
        totals=totals,
        sent=group.traffic.bytes_sent,
        # a backward pass sends what a training pass sends beyond its forward
        formula=exchange.bytes_sent(token, TOKEN_BYTES) - exchange.bytes_sent(token)
        if back
        else exchange.bytes_sent(token),
    )


def wanted_totals(plan: Plan, owner: int, seen_by: list[int]) -> list[list[float]]:
    """Gradients of a rank's keys that those ranks saw."""
    share = sum(rank + 1 for rank in seen_by)
    return [(t.float() * share).flatten().tolist() for t in plan.keys(owner)]


@dataclass
class Watch:
    """Buffers of transfers that nobody has waited for."""

    sending: list[range] = field(default_factory=list)
    receiving: list[range] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)

    @property
    def under_way(self) -> int:
        return len(self.sending) + len(self.receiving)

    def begin(self, sent: list[Tensor], received: list[Tensor]) -> tuple[list[range], list[range]]:
        """A buffer may be sent twice at once, but never received into while it is sent, or
        received into twice."""
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
    """Says when it has been waited for."""

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
    """Watches what every transfer sends and receives, from its start to the wait for it."""
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
        follow("all_to_all", lambda out, given, *sizes: ([given], [out])),
    ):
        yield watch


# ---- heads -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swap:
    """An exchange of tokens for heads: tokens of each rank, heads, heads a rank takes a stage."""

    kind: str
    counts: tuple[int, ...]
    heads: int
    each: int
    part: int = 2


@dataclass
class Swapped:
    """there: right on this rank; back: what it gave came back."""

    there: bool
    back: bool
    sent: int
    formula: int


def swap(group: Group, plan: Swap, communicate: bool = True) -> Swapped:
    """All stages of heads to the ranks that take them and home again."""
    n = sum(plan.counts)
    whole = torch.arange(B * plan.heads * n * D, dtype=torch.float32).view(B, plan.heads, n, D)
    first = sum(plan.counts[: group.rank])
    mine = whole[:, :, first : first + plan.counts[group.rank]].contiguous()
    home = torch.full_like(mine, torch.nan)
    there = True
    with (
        patch.object(heads_module, "MIN_TRANSFER", plan.part),
        patch.object(heads_module, "TRANSFERS", 1000),
        group.only(communicate=communicate),
    ):
        kinds: dict[str, Callable[..., HeadExchange]] = {"all": AllToAll, "gather": GatherScatter}
        exchange = kinds[plan.kind](group, plan.counts)
        for start in range(0, plan.heads, plan.each * group.size):
            stage = HeadStage(start, plan.each)
            got = exchange.to_heads(mine, stage)
            there = there and torch.equal(got, whole[:, stage.of(group.rank)])
            exchange.to_tokens(got, home, stage)
    return Swapped(
        there=there,
        back=torch.equal(home, mine),
        sent=group.traffic.bytes_sent,
        formula=exchange.bytes_sent(B * D * 4, plan.heads, 1, 1),
    )


# ---- the group itself --------------------------------------------------------------------------


def collectives(group: Group) -> dict[str, Any]:
    """Each of them once, with the bytes that it counted."""
    size, rank = group.size, group.rank
    found: dict[str, Any] = {}

    def counted(name: str, *tensors: Tensor) -> None:
        found[name] = ([t.flatten().tolist() for t in tensors], group.traffic.bytes_sent)
        group.traffic.bytes_sent = 0

    def of(rank: int, *shape: int) -> Tensor:
        return torch.full(shape, float(rank))

    here = (torch.empty(4), torch.empty(2))
    group.exchange(
        (of(rank, 4), of(10 * rank, 2)), here, (rank + 1) % size, (rank - 1) % size
    ).wait()
    counted("exchange", *here)

    gathered = torch.empty(size, 3)
    group.all_gather(gathered, of(rank, 3)).wait()
    counted("all_gather", gathered)

    own = torch.empty(2)
    group.reduce_scatter(own, torch.arange(2.0 * size).view(size, 2) + rank).wait()
    counted("reduce_scatter", own)

    parts = torch.empty(size)
    group.all_to_all(parts, 10.0 * rank + torch.arange(float(size))).wait()
    counted("all_to_all", parts)

    # rank r gives r + 1 rows to each, so gets as many from rank r
    uneven = torch.empty(sum(range(1, size + 1)), 2)
    given = torch.full((size * (rank + 1), 2), float(rank))
    group.all_to_all(uneven, given, list(range(1, size + 1)), [rank + 1] * size).wait()
    counted("uneven", uneven)

    found["largest"] = group.all_max(rank, -rank)
    found["total"] = group.all_sum(torch.tensor([1, rank])).tolist()
    group.barrier()
    found["uncounted"] = group.traffic.bytes_sent
    return found


def muted(group: Group) -> list[int]:
    """Bytes counted with communication off, and whether it is on again even after an error."""
    with group.only(communicate=False):
        found = collectives(group)
    names = ("exchange", "all_gather", "reduce_scatter", "all_to_all", "uneven")
    with suppress(KeyError), group.only(compute=False, communicate=False):
        assert not group.computes
        raise KeyError
    sent = [found[name][1] for name in names]
    return [*sent, int(group.computes), int(group.traffic.communicates)]


def parts(group: Group, split: list[list[int]]) -> dict[str, Any]:
    """A ring step inside a part of the world."""
    part = group.subgroup(split)
    got = torch.empty(2)
    step = (torch.full((2,), float(group.rank)),), (got,)
    part.exchange(*step, (part.rank + 1) % part.size, (part.rank - 1) % part.size).wait()
    gathered = torch.empty(part.size, 1)
    part.all_gather(gathered, torch.tensor([float(group.rank)])).wait()
    return {
        "rank": part.rank,
        "size": part.size,
        "ranks": part.ranks,
        "came": got.tolist(),
        "gathered": gathered.flatten().tolist(),
        "sent": group.traffic.bytes_sent,
    }
