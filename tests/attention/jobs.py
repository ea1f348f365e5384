"""Functions that each rank of a test runs: one pass of its shard, and its results.

Every rank draws the same full inputs and takes its shard of them. Results are pickled here:
otherwise torch would pass tensors in shared memory.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.attention.tiles import SIZES, TileSizes
from longseq_bench.core.model import DType, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions, Shard
from longseq_bench.kernels import native
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.spans import HeadSpans, SpanTask
from longseq_bench.testing.definition import Options, Tensors, make_inputs, make_output_gradient
from tests.spans import tiles_of, visible_pairs

FINE = 6
"""Tokens of a piece, a transfer or a tile in cases with small ones."""


@dataclass(frozen=True)
class Case:
    """One pass of an implementation.

    fine: with many small pieces, transfers and tiles.
    future: all tokens from this one on have other values.
    """

    name: str
    options: Options
    workload: Workload
    fine: bool = False
    future: int | None = None


@dataclass
class PassResult:
    """Results of a rank after a pass. gradients: of q, k, v, projections and sinks (prefix W).

    calls, pairs: kernel calls, and the query-key pairs that they computed.
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

    def equals(self, other: PassResult) -> bool:
        """Compare bit by bit; gradients of projections, summed in varying order, within 1e-4."""
        return torch.equal(self.out, other.out) and all(
            torch.allclose(own, other.gradients[n], rtol=1e-4, atol=1e-4)
            if n.startswith("W")
            else torch.equal(own, other.gradients[n])
            for n, own in self.gradients.items()
        )


def passes(group: Group, cases: list[Case]) -> bytes:
    """Run one pass of each case."""
    results = []
    for case in cases:
        with _prepared(group, case) as (attention, qkv):
            results.append(_pass(attention, qkv))
    return pickle.dumps(results)


def halves(group: Group, case: Case) -> bytes:
    """Run a full pass and each half alone, with a full pass after each half."""
    with _prepared(group, case) as (attention, qkv):
        found = {"full": _pass(attention, qkv)}
        with group.only(compute=False):
            found["sending alone"] = _pass(attention, qkv)
        found["after sending"] = _pass(attention, qkv)
        with group.only(communicate=False):
            found["computing alone"] = _pass(attention, qkv)
        found["after computing"] = _pass(attention, qkv)
    return pickle.dumps(found)


def delayed(group: Group, case: Case, times: int) -> list[int]:
    """Return the passes, of many with random delays around transfers, that differ from one
    without delays."""
    generator = random.Random(group.rank)
    with _prepared(group, case) as (attention, qkv):
        undelayed = _pass(attention, qkv)
        with _delays(generator):
            return [i for i in range(times) if not _pass(attention, qkv).equals(undelayed)]


@contextmanager
def _prepared(group: Group, case: Case) -> Iterator[tuple[Attention, Tensors]]:
    """Yield an attention with this rank's inputs."""
    with ExitStack() as stack:
        if case.fine:
            _use_small_sizes(stack)
        kind = IMPLEMENTATIONS.get(case.name)
        attention = kind(case.workload, group, **case.options)
        attention.prepare("cpu")
        yield attention, _share(attention, case.future)


def _use_small_sizes(stack: ExitStack) -> None:
    chunk = 4 * (FINE + 4)
    tiles = TileSizes(FINE + 4, FINE + 4, chunk, chunk, FINE, 4096, chunk)
    stack.enter_context(patch.dict(SIZES, cpu=tiles))
    sizes = {"BLOCKS_PER_SHARD": 1000, "MIN_TRANSFER": FINE, "TRANSFERS": 1000}
    packages = ("longseq_bench.attention.", "longseq_bench.distributed.")
    modules = [m for name, m in sys.modules.items() if name.startswith(packages)]
    for name, size in sizes.items():
        owners = [module for module in modules if hasattr(module, name)]
        assert owners, f"no module has {name} any more, so it was not made small"
        for module in owners:
            stack.enter_context(patch.object(module, name, size))


def take(tensor: Tensor, batch: range, heads: range, tokens: Positions) -> Tensor:
    """Return a shard of a full tensor (B, H, N, D)."""
    part = tensor[batch.start : batch.stop, heads.start : heads.stop]
    return part[:, :, torch.from_numpy(tokens)].contiguous()


def _share(attention: Attention, future: int | None) -> Tensors:
    w, s = attention.workload, attention.shard
    full = [t.detach() for t in make_inputs(w)]
    if future is not None:
        others = make_inputs(w, seed=future)
        for tensor, other in zip(full, others, strict=True):
            tensor[:, :, future:] = 30 * other.detach()[:, :, future:]
    q, k, v = full
    own_k, own_v = (take(t, s.batch, s.kv_heads, s.keys) for t in (k, v))
    return (
        take(q, s.batch, s.heads, s.queries - w.queries.start).requires_grad_(w.train),
        own_k.requires_grad_(w.train),
        own_k[..., : w.v_head_dim] if w.latent else own_v.requires_grad_(w.train),
    )


def _pass(attention: Attention, qkv: Tensors) -> PassResult:
    w, s = attention.workload, attention.shard
    matrices = attention.projections()
    if attention.sinks is not None:
        matrices |= {"sink": attention.sinks}
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
    if w.train and w.sink:
        gradients["Wsink"] = attention.sink_gradient()
    return PassResult(
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
    """Calls of kernels. pairs: of forward calls only, over heads and the batch."""

    calls: int = 0
    pairs: int = 0


def _visible(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> int:
    rows, keys = q.shape[2], k.shape[2]
    pairs = rows * (rows + 1) // 2 if causal else rows * keys
    return q.shape[0] * q.shape[1] * (pairs if mask is None else int(mask.sum()))


def _count_exact(start: Any, kernels: Kernels) -> Any:
    """Count the calls of a method of ExactKernel, and the pairs of a forward."""

    def counted(self: ExactKernel, *args: Any, **options: Any) -> Any:
        bound = signature(start).bind(self, *args, **options)
        bound.apply_defaults()
        of = bound.arguments
        if self._for(of["mask"]).name != "native":  # its calls of native.py are counted
            kernels.calls += 1
            if "q" in of:
                k = of["k"] if "k" in of else of["keys"][0]
                kernels.pairs += _visible(of["q"], k, of["causal"], of["mask"])
        return start(self, *args, **options)

    return counted


@contextmanager
def _counted() -> Iterator[Kernels]:
    """Count calls of our kernels and of torch's, forward and backward."""
    kernels = Kernels()
    from longseq_bench.attention.exact import sdpa

    torch_sdpa = sdpa.scaled_dot_product_attention

    def counted_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        kernels.calls += 1
        kernels.pairs += _visible(q, k, options["is_causal"], mask)
        return torch_sdpa(q, k, v, mask, **options)

    def count_forward(kernel: Any) -> Any:
        start = kernel.forward

        def counted(q: Tensor, *others: Any) -> None:
            task: SpanTask = others[-1]
            kernels.calls += 1
            kernels.pairs += q.shape[0] * sum(pairs_in(part, task) for part in task.parts)
            start(q, *others)

        return counted

    def count_backward(kernel: Any) -> Any:
        start = kernel.backward

        def counted(*args: Any, **options: Any) -> None:
            kernels.calls += 1
            start(*args, **options)

        return counted

    with ExitStack() as stack:
        stack.enter_context(patch.object(native, "forward", count_forward(native)))
        stack.enter_context(patch.object(native, "backward", count_backward(native)))
        for name in ("forward", "backward"):
            counted = _count_exact(getattr(ExactKernel, name), kernels)
            stack.enter_context(patch.object(ExactKernel, name, counted))
        stack.enter_context(patch.object(sdpa, "scaled_dot_product_attention", counted_sdpa))
        yield kernels


def pairs_in(part: HeadSpans, task: SpanTask) -> int:
    """Return the visible pairs of a part, over its heads."""
    total = 0
    for queries, keys, _ in tiles_of(part.spans):
        total += int(visible_pairs(task, queries, keys).sum())
    return total * len(part.heads)


@contextmanager
def _delays(generator: random.Random) -> Iterator[None]:
    """Delay the start of every transfer, and the code after it."""

    def delay(start: Any) -> Any:
        def started(*args: Any, **kwargs: Any) -> Any:
            time.sleep(generator.choice((0.0, 0.0, 0.001, 0.002)))
            pending = start(*args, **kwargs)
            time.sleep(generator.choice((0.0, 0.0, 0.001, 0.002)))
            return pending

        return started

    with ExitStack() as stack:
        for name in ("exchange", "all_gather", "all_to_all"):
            stack.enter_context(patch.object(Group, name, delay(getattr(Group, name))))
        yield
