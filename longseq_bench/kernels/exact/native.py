"""Exact attention by the compiled CPU kernel of spans: a tile of queries sees one run of keys."""

import re
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.files import read_text
from longseq_bench.core.workload import ALL_SCORES
from longseq_bench.kernels import native
from longseq_bench.kernels.base import Mask, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.kernels.spans import HeadSpans, SpanTask, StepMap, span_gradients
from longseq_bench.patterns.spans import TILE, Spans


@exact_kernel("native")
class Native(ExactKernel):
    """The compiled CPU kernel of this package.

    It continues earlier softmaxes and sums in place, without temporaries.
    """

    device = "cpu"
    takes_scores = ALL_SCORES

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or native.unavailable_reason(use.dtype)

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return 0 if _MATRIX_UNITS.get(use.dtype) in _cpu_flags() else 10

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3] if keep_lse else (0,), dtype=torch.float32)
        native.forward(q, k, v, out, lse if keep_lse else None, self._task(q, k, causal, mask))
        return out, lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        dq = torch.empty_like(queries[1])
        return span_gradients(native, self._task(dq, keys[0], causal, mask), queries, keys, dq)

    @override
    def merge(
        self, q: Tensor, keys: Pair, sums: Pair, causal: bool = False, mask: Tensor | None = None
    ) -> None:
        if mask is not None or self._pads(q, keys[1]):
            super().merge(q, keys, sums, causal, mask)
            return
        self.calls["forward"] += 1
        native.forward(q, *keys, *sums, self._task(q, keys[0], causal, merge=True))

    @override
    def add_gradients(
        self, queries: Queries, keys: Pair, sums: Triple, causal: bool = False, mask: Mask = None
    ) -> None:
        if mask is not None or self._pads(queries[1], keys[1]):
            super().add_gradients(queries, keys, sums, causal, mask)
            return
        self.calls["backward"] += 1
        (dq, *dkv), kv_heads = sums, range(keys[0].shape[1])
        task = self._task(dq, keys[0], causal, merge=True)
        native.backward(queries, keys, dq, (dkv[0], dkv[1]), kv_heads, task)

    @override
    def _for(self, mask: Tensor | None) -> ExactKernel:
        # other kernels are faster with a mask, but know no soft cap
        return self if self.use.scores.given else super()._for(mask)

    def _task(
        self, q: Tensor, k: Tensor, causal: bool, mask: Mask = None, merge: bool = False
    ) -> SpanTask:
        """Return the task of a call. Raises UnsupportedError for rows that see no interval."""
        part = _part(q.shape[2], k.shape[2], q.shape[1], causal)
        if mask is None:
            return SpanTask([part], causal, scores=self.use.scores, merge=merge)
        count, first, behind = mask.sum(1), *(t.byte().argmax(1) for t in (mask, mask.flip(1)))
        stop = (mask.shape[1] - behind).where(count > 0, first)
        if not (stop - first).equal(count):
            raise UnsupportedError("kernel=native takes masks of an interval of keys per query")
        at, start = (ends.numpy().astype(np.int32) for ends in (stop - 1, first))
        return SpanTask([part], True, StepMap(q_at=at, q_first=start), self.use.scores, merge)


@lru_cache(maxsize=64)
def _part(queries: int, keys: int, heads: int, causal: bool) -> HeadSpans:
    """Return tiles of queries that see all keys, or (causal) those up to the tile's end."""
    first = np.arange(0, queries, TILE, dtype=np.int32)
    count = np.minimum(TILE, queries - first).astype(np.int32)
    seen = first + count if causal else np.full_like(first, keys)
    spans = Spans(first, count, np.arange(len(first) + 1), np.zeros_like(first), seen)
    return HeadSpans(spans, range(heads))


_MATRIX_UNITS = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
"""CPU flags of units that torch's kernel uses for 16-bit tensors, and the compiled one does not."""


@cache
def _cpu_flags() -> frozenset[str]:
    found = re.search(r"^flags\s*:(.*)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(found[1].split() if found else ())
