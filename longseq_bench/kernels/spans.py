"""Attention of tiles of queries to runs of keys: the contract, and an AttentionKernel built on it.

`spans_reference` is the slow, obvious kernel, `native` the compiled one. Any pattern is a few
parts: spans (patterns/spans.py) with the query heads that share them, and an index from steps to
rows and positions.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D), Hk divides Hq; log-sum-exp (B, Hq, N) float32.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UserError
from longseq_bench.kernels.base import Triple
from longseq_bench.patterns.spans import Spans

Ints32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Part:
    """Spans and the query heads that share them."""

    spans: Spans
    heads: Sequence[int]
    head: Ints32 = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", np.asarray(self.heads, dtype=np.int32))


@dataclass(frozen=True, eq=False)
class Index:
    """Rows of tensors and positions of the sequence for each step, all int32.

    q_row, k_row: row of each step; None: the step is the row.
    q_at, k_at: position of each step, which decides causality; None: the row is the position.
    """

    q_row: Ints32 | None = None
    k_row: Ints32 | None = None
    q_at: Ints32 | None = None
    k_at: Ints32 | None = None


NO_INDEX = Index()


class SpanKernel(Protocol):
    """The two functions of a module that computes attention over spans."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        parts: Iterable[Part],
        causal: bool,
        index: Index = NO_INDEX,
        merge: bool = False,
    ) -> None:
        """Fill out and lse of every query of a part, for the part's heads.

        out: like q, or float32. Rows that see nothing get 0 and -inf.  merge: out (float32) and
        lse hold a softmax already, to which these keys are added.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dq: Tensor,
        sums: tuple[Tensor, Tensor],
        kv_heads: range,
        parts: Iterable[Part],
        causal: bool,
        index: Index = NO_INDEX,
        merge: bool = False,
        bias: Sequence[NDArray[np.float32]] = (),
    ) -> None:
        """Fill dq of the query heads of some KV heads, and add the gradients of k and v to sums.

        dq: like q or float32 (merge: float32, added to).  sums: float32 (B, len(kv_heads), M, D).
        out (like q) and lse belong to the whole softmax.  bias: one array per part, float32
        (B, heads, runs), to which the sum of the score gradients of each run is added.
        """
        ...


class SpanAttention:
    """An AttentionKernel over parts, for tensors of `shape` = (query heads, tokens).

    Raises UserError for other shapes: the kernel would read beyond the tensors.
    """

    def __init__(
        self, kernel: SpanKernel, parts: Callable[[], Iterable[Part]], causal: bool,
        shape: tuple[int, int], index: Index = NO_INDEX,
    ) -> None:  # fmt: skip
        self._kernel, self._parts, self._shape = kernel, parts, shape
        self._mask_and_index = causal, index

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        self._check(q, k, v)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        self._kernel.forward(q, k, v, out, lse, self._parts(), *self._mask_and_index)
        return out, lse

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.shape[1:3] != self._shape or k.shape[2] != self._shape[1] or k.shape != v.shape:
            heads, tokens = self._shape
            raise UserError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}, but this "
                f"attention was prepared for {heads} query heads and {tokens} tokens"
            )

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        """Return the gradients of q, k, v, given out and lse of the whole softmax."""
        return self._gradients(grad_out, q, k, v, out, lse, torch.empty_like(q))

    def _gradients(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor,
    ) -> Triple:  # fmt: skip
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)

        def add(heads: range, sums: tuple[Tensor, Tensor]) -> None:
            self._kernel.backward(
                grad_out, q, k, v, out, lse, dq, sums, heads, self._parts(), *self._mask_and_index
            )

        sum_by_heads(dk, dv, add)
        return dq, dk, dv

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the output over q and return it."""
        self._check(q, k, v)
        # a kernel reads the queries of a tile before it writes their output
        self._kernel.forward(q, k, v, q, None, self._parts(), *self._mask_and_index)
        return q

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k, v from the inputs alone; inplace: that of q over q."""
        out, lse = self.forward(q, k, v, True)
        assert lse is not None
        return self._gradients(grad_out, q, k, v, out, lse, q if inplace else torch.empty_like(q))


def sum_by_heads(
    dk: Tensor, dv: Tensor, add: Callable[[range, tuple[Tensor, Tensor]], None]
) -> None:
    """Fill dk and dv (B, Hk, M, D), zeros, with what `add` adds to float32 sums of some KV heads.

    For 16-bit tensors it takes as few heads at a time as keep every thread busy, since float32
    sums of all heads would need twice the memory.
    """
    if dk.dtype == torch.float32:
        add(range(dk.shape[1]), (dk, dv))
        return
    count = min(dk.shape[1], max(1, -(-torch.get_num_threads() // dk.shape[0])))
    for start in range(0, dk.shape[1], count):
        heads = range(start, min(start + count, dk.shape[1]))
        shape = (dk.shape[0], len(heads), *dk.shape[2:])
        sums = tuple(dk.new_zeros(shape, dtype=torch.float32) for _ in range(2))
        add(heads, (sums[0], sums[1]))
        dk[:, heads.start : heads.stop] = sums[0]
        dv[:, heads.start : heads.stop] = sums[1]
