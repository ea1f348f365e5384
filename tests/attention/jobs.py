"""What each rank of a test does: one pass of its share, with everything that it has to show.

All inputs are drawn whole on every rank, equal everywhere, and a rank takes its shard of them.
Results are pickled here: as they are, torch would hand tensors over in shared memory.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import DType, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Positions, Shard
from longseq_bench.kernels import native, spans_reference, torch_fused
from longseq_bench.kernels.spans import HeadSpans, SpanTask
from longseq_bench.testing.definition import Options, Tensors, make_inputs, make_output_gradient

FINE = 6
"""Tokens of a piece, a transfer or a tile where passes are cut fine."""


@dataclass(frozen=True)
class Case:
    """One pass: which implementation on what.

    fine: cut into many small pieces, transfers and tiles.
    future: all tokens from here on are others.
    """

    name: str
    options: Options
    workload: Workload
    fine: bool = False
    future: int | None = None


@dataclass
class Passed:
    """What a rank has after a pass. gradients: of q, k, v, and of projections after a W.

    calls, pairs: of kernels, and the query-key pairs that they were asked for.
    """

    shard: Shard
    tolerance_of: DType
    out: Tensor
    gradients: dict[str, Tensor]
    projections: dict[str, Tensor]
    sent: int
    formula: int
    calls: int
    pairs: int

    def equals(self, other: Passed) -> bool:
        """Bit for bit, but for gradients of projections, which others sum in orders of their
        own."""
        return torch.equal(self.out, other.out) and all(
            torch.allclose(own, other.gradients[n], rtol=1e-4, atol=1e-4)
            if n.startswith("W")
            else torch.equal(own, other.gradients[n])
            for n, own in self.gradients.items()
        )


def passes(group: Group, cases: list[Case]) -> bytes:
    """One pass of each, forward or both ways."""
    found = []
    for case in cases:
        with _made(group, case) as (attention, qkv):
            found.append(_pass(attention, qkv))
    return pickle.dumps(found)


def halves(group: Group, case: Case) -> bytes:
    """A full pass, both halves alone, and each again."""
    with _made(group, case) as (attention, qkv):
        found = {"full": _pass(attention, qkv)}
        with group.only(compute=False):
            found["sending alone"] = _pass(attention, qkv)
        found["after sending"] = _pass(attention, qkv)
        with group.only(communicate=False):
            found["computing alone"] = _pass(attention, qkv)
        found["after computing"] = _pass(attention, qkv)
    return pickle.dumps(found)


def delayed(group: Group, case: Case, times: int) -> list[int]:
    """Which of many passes, ranks late at random before and after what they start to send, differ
    from one without delays."""
    draw = random.Random(group.rank)
    with _made(group, case) as (attention, qkv):
        calm = _pass(attention, qkv)
        with _late(draw):
            return [i for i in range(times) if not _pass(attention, qkv).equals(calm)]


@contextmanager
def _made(group: Group, case: Case) -> Iterator[tuple[Attention, Tensors]]:
    """Planned, with this rank's share of the inputs; process groups that it makes are ended."""
    made: list[Any] = []
    new_group = dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(new_group(*args, **kwargs))
        return made[-1]

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "new_group", recorded))
        if case.fine:
            _cut_fine(stack)
        kind = IMPLEMENTATIONS.get(case.name)
        attention = kind(case.workload, group, **case.options)
        attention.prepare("cpu")
        yield attention, _share(attention, case.future)
    for handle in made:
        if handle is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(handle)


def _cut_fine(stack: ExitStack) -> None:
    sizes = {
        "TILE_ROWS": FINE + 4,
        "RING_TILE_ROWS": FINE + 4,
        "MIN_TILE_BYTES": 4096,
        "MIN_BLOCK": FINE,
        "BLOCKS_PER_SHARD": 1000,
        "MIN_TRANSFER": FINE,
        "TRANSFERS": 1000,
    }
    ours = ("longseq_bench.attention.", "longseq_bench.distributed.")
    modules = [m for name, m in sys.modules.items() if name.startswith(ours)]
    for name, size in sizes.items():
        having = [module for module in modules if hasattr(module, name)]
        assert having, f"nothing is called {name} any more, so nothing was cut fine"
        for module in having:
            stack.enter_context(patch.object(module, name, size))


def take(tensor: Tensor, batch: range, heads: range, tokens: Positions) -> Tensor:
    """A shard of a whole tensor (B, H, N, D)."""
    part = tensor[batch.start : batch.stop, heads.start : heads.stop]
    return part[:, :, torch.from_numpy(tokens)].contiguous()


def _share(attention: Attention, future: int | None) -> Tensors:
    w, s = attention.workload, attention.shard
    whole = [t.detach() for t in make_inputs(w)]
    if future is not None:
        others = make_inputs(w, seed=future)
        for tensor, other in zip(whole, others, strict=True):
            tensor[:, :, future:] = 30 * other.detach()[:, :, future:]
    q, k, v = whole
    return (
        take(q, s.batch, s.heads, s.queries).requires_grad_(w.train),
        take(k, s.batch, s.kv_heads, s.keys).requires_grad_(w.train),
        take(v, s.batch, s.kv_heads, s.keys).requires_grad_(w.train),
    )


def _pass(attention: Attention, qkv: Tensors) -> Passed:
    w, s = attention.workload, attention.shard
    matrices = attention.projections()
    for leaf in (*qkv, *matrices.values()):
        leaf.grad = None
    traffic = attention.group.traffic
    traffic.bytes_sent = 0
    with _counted() as kernels:
        out = attention(*qkv)
        if w.train:
            out.backward(take(make_output_gradient(w), s.batch, s.heads, s.queries))
    gradients = {n: t.grad for n, t in zip("qkv", qkv, strict=True) if t.grad is not None}
    if w.train:
        gradients |= {f"W{n}": t.clone() for n, t in attention.parameter_gradients().items()}
    return Passed(
        shard=s,
        tolerance_of=attention.coarsest_dtype,
        out=out.detach(),
        gradients=gradients,
        projections={n: t.detach() for n, t in matrices.items()},
        sent=traffic.bytes_sent,
        formula=attention.cost().bytes_sent,
        calls=kernels.calls,
        pairs=kernels.pairs,
    )


@dataclass
class Kernels:
    """What kernels were asked for. pairs: forward only, over heads and the batch."""

    calls: int = 0
    pairs: int = 0


@contextmanager
def _counted() -> Iterator[Kernels]:
    """Counts calls of our kernels and of torch's, forward and backward."""
    found = Kernels()
    forward, backward = torch_fused.forward, torch_fused.backward
    from longseq_bench.attention.exact import sdpa

    torchs = sdpa.scaled_dot_product_attention

    def visible(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> int:
        rows, keys = q.shape[2], k.shape[2]
        seen = rows * (rows + 1) // 2 if causal else rows * keys
        return q.shape[0] * q.shape[1] * (seen if mask is None else int(mask.sum()))

    def counted_forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
    ) -> Any:
        found.calls += 1
        found.pairs += visible(q, k, causal, mask)
        return forward(q, k, v, causal, mask)

    def counted_backward(*args: Any) -> Any:
        found.calls += 1
        return backward(*args)

    def counted_torchs(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        found.calls += 1
        found.pairs += visible(q, k, how["is_causal"], None)
        return torchs(q, k, v, **how)

    def counted_spans(kernel: Any) -> Any:
        start = kernel.forward

        def counted(q: Tensor, *others: Any) -> None:
            task: SpanTask = others[-1]
            found.calls += 1
            found.pairs += q.shape[0] * sum(seen_in(part, task) for part in task.parts)
            start(q, *others)

        return counted

    def counted_back(kernel: Any) -> Any:
        start = kernel.backward

        def counted(*args: Any, **how: Any) -> None:
            found.calls += 1
            start(*args, **how)

        return counted

    with ExitStack() as stack:
        for kernel in (native, spans_reference):
            stack.enter_context(patch.object(kernel, "forward", counted_spans(kernel)))
            stack.enter_context(patch.object(kernel, "backward", counted_back(kernel)))
        stack.enter_context(patch.object(torch_fused, "forward", counted_forward))
        stack.enter_context(patch.object(torch_fused, "backward", counted_backward))
        stack.enter_context(patch.object(sdpa, "scaled_dot_product_attention", counted_torchs))
        yield found


def seen_in(part: HeadSpans, task: SpanTask) -> int:
    """Pairs of a part, of all its heads."""
    seen = 0
    for queries, keys, _ in spans_reference.tiles_of(part.spans):
        pairs = len(queries) * len(keys)
        if task.causal:
            q_at = spans_reference.positions(queries, task.steps.q_row, task.steps.q_at)
            k_at = spans_reference.positions(keys, task.steps.k_row, task.steps.k_at)
            pairs = int((k_at[None, :] <= q_at[:, None]).sum())
        seen += pairs
    return seen * len(part.heads)


@contextmanager
def _late(draw: random.Random) -> Iterator[None]:
    """Whatever is started to be sent starts late, and what comes after it comes late."""

    def late(start: Any) -> Any:
        def started(*args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.001, 0.002)))
            pending = start(*args, **kwargs)
            time.sleep(draw.choice((0.0, 0.0, 0.001, 0.002)))
            return pending

        return started

    with ExitStack() as stack:
        for name in ("exchange", "all_gather", "all_to_all"):
            stack.enter_context(patch.object(Group, name, late(getattr(Group, name))))
        yield
