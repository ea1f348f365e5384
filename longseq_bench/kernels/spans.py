"""Attention of tiles of queries to runs of keys: the contract, and an AttentionKernel built on it.

`native` is the compiled kernel for CPUs; `torch_spans` computes those of block layouts anywhere.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D), Hk divides Hq; log-sum-exp (B, Hq, N) float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UserError
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.tiling import wide
from longseq_bench.meta_mode import device_kind
from longseq_bench.patterns.spans import Spans

Ints32 = NDArray[np.int32]

STEP_ARRAYS = ("q_row", "k_row", "q_at", "k_at", "q_first")
"""Arrays of a StepMap, in the order in which compiled kernels take them."""

SPAN_ARRAYS = ("tile_start", "tile_count", "runs", "start", "count", "step")
"""Arrays of Spans, in the order in which compiled kernels take them."""


@dataclass(frozen=True, eq=False)
class HeadSpans:
    """Spans, and the query heads that use them."""

    spans: Spans
    heads: Sequence[int]

    @cached_property
    def head(self) -> Ints32:
        """The heads as an array."""
        return np.asarray(self.heads, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class StepMap:
    """The tensor row and the sequence position of each step, all int32.

    q_row, k_row: row of each step; None: the step is the row.
    q_at, k_at: position of each step, for causality; None: the row is the position. Those of the
    keys of a run ascend.
    q_first: first position that each query sees; None: 0. With it, and q_at as the last one, a
    causal task is one of any interval of keys per query.
    """

    q_row: Ints32 | None = None
    k_row: Ints32 | None = None
    q_at: Ints32 | None = None
    k_at: Ints32 | None = None
    q_first: Ints32 | None = None


@dataclass(frozen=True, eq=False)
class SpanTask:
    """Input of a kernel: a pattern as parts.

    merge: out (forward) and dq (backward) are float32 and contain results of other keys; the
    results of these keys are added to them.
    bias: one array per part, float32 (B, heads, runs); a backward pass adds to it the sum of the
    score gradients of each run.
    """

    parts: Sequence[HeadSpans]
    causal: bool
    steps: StepMap = StepMap()
    scores: Scores = PLAIN_SCORES
    merge: bool = False
    bias: Sequence[NDArray[np.float32]] = ()


def check_shapes(q: Tensor, k: Tensor, v: Tensor, heads: int, tokens: int) -> None:
    """Raise UserError for other shapes than a kernel is for: it would read beyond the tensors."""
    if q.shape[1:3] != (heads, tokens) or k.shape[2] != tokens or k.shape != v.shape:
        raise UserError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}, but this "
            f"attention was prepared for {heads} query heads and {tokens} tokens"
        )


class SpanKernel(Protocol):
    """The two functions of a module that computes attention over spans."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, task: SpanTask
    ) -> None:
        """Fill out (like q, or float32) and lse of every query of a part, for the part's heads.

        Rows that see nothing get 0 and -inf.
        """

    def backward(
        self, queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
    ) -> None:
        """Fill dq of the query heads of some KV heads, and add the gradients of k and v to sums.

        queries: out (like q) and lse belong to the whole softmax.  dq: like q, or float32.
        sums: float32 (B, len(kv_heads), M, D).
        """


class SpanAttention:
    """An AttentionKernel over parts, for tensors of `shape` = (query heads, tokens)."""

    def __init__(self, kernel: SpanKernel, task: SpanTask, shape: tuple[int, int]) -> None:
        self._kernel, self._task, self._shape = kernel, task, shape

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        check_shapes(q, k, v, *self._shape)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=wide(q)) if keep_lse else None
        self._kernel.forward(q, k, v, out, lse, self._task)
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v, given out and lse of the whole softmax."""
        dq = torch.empty_like(queries[1])
        return span_gradients(self._kernel, self._task, queries, keys, dq)

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the output over q and return it."""
        check_shapes(q, k, v, *self._shape)
        # a kernel reads the queries of a tile before it writes their output
        self._kernel.forward(q, k, v, q, None, self._task)
        return q

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k, v from the inputs alone; inplace: that of q over q."""
        out, lse = self.forward(q, k, v, True)
        assert lse is not None
        dq = q if inplace else torch.empty_like(q)
        return span_gradients(self._kernel, self._task, (grad_out, q, out, lse), (k, v), dq)


def span_gradients(
    kernel: SpanKernel, task: SpanTask, queries: Queries, keys: Pair, dq: Tensor
) -> Triple:
    """Fill dq, and return it with the gradients of k and v.

    16-bit tensors need float32 sums, which take twice their memory. So only a few KV heads are
    computed at a time: as many as keep all threads busy, on a GPU an eighth of them.
    """
    dk, dv = (torch.zeros_like(t) for t in keys)
    batch, kv_heads = dk.shape[:2]
    if dk.dtype == wide(dk):
        kernel.backward(queries, keys, dq, (dk, dv), range(kv_heads), task)
        return dq, dk, dv
    count = -(-kv_heads // 8) if device_kind(dk) == "cuda" else torch.get_num_threads()
    count = min(kv_heads, max(1, -(-count // batch)))
    for start in range(0, kv_heads, count):
        heads = range(start, min(start + count, kv_heads))
        shape = (batch, len(heads), *dk.shape[2:])
        sums = tuple(dk.new_zeros(shape, dtype=torch.float32) for _ in range(2))
        kernel.backward(queries, keys, dq, (sums[0], sums[1]), heads, task)
        dk[:, heads.start : heads.stop] = sums[0]
        dv[:, heads.start : heads.stop] = sums[1]
    return dq, dk, dv
