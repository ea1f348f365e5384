"""Slow reference for native.py, on any device: all scores of a tile, and a plain softmax.

Sums are float32 (float64 for float64).
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.kernels.base import Pair, Queries
from longseq_bench.kernels.spans import Ints32, SpanTask
from longseq_bench.kernels.tiling import wide
from longseq_bench.meta_mode import are_loops_limited
from longseq_bench.patterns.spans import Spans

Steps = NDArray[np.int64]


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, task: SpanTask
) -> None:
    """See SpanKernel.forward."""
    if are_loops_limited():
        return
    for part in task.parts:
        for queries, keys, _ in tiles_of(part.spans):
            rows, columns = _rows(queries, task.steps.q_row, q), _rows(keys, task.steps.k_row, k)
            for h in part.heads:
                kv = h * k.shape[1] // q.shape[1]
                scores = _scores(q[:, h, rows], k[:, kv, columns], queries, keys, task)
                total = torch.logsumexp(scores, -1)
                weights = _softmax_weights(scores, total)
                result = weights @ v[:, kv, columns].to(scores.dtype)
                if task.merge:
                    assert lse is not None
                    old = lse[:, h, rows]
                    merged = torch.logaddexp(old, total)
                    shares = [_softmax_weights(x[..., None], merged) for x in (old, total)]
                    result, total = shares[0] * out[:, h, rows] + shares[1] * result, merged
                out[:, h, rows] = result.to(out.dtype)
                if lse is not None:
                    lse[:, h, rows] = total.to(lse.dtype)


def backward(
    queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
) -> None:
    """See SpanKernel.backward."""
    if are_loops_limited():
        return
    (grad_out, q, out, lse), (k, v) = queries, keys
    scale = 1 / math.sqrt(q.shape[-1])
    for i, part in enumerate(task.parts):
        for q_steps, k_steps, run_of in tiles_of(part.spans):
            rows = _rows(q_steps, task.steps.q_row, q)
            columns = _rows(k_steps, task.steps.k_row, k)
            for j, h in enumerate(part.heads):
                kv = h * k.shape[1] // q.shape[1]
                if kv not in kv_heads:
                    continue
                q_h, k_h = q[:, h, rows], k[:, kv, columns]
                scores = _scores(q_h, k_h, q_steps, k_steps, task)
                grad = grad_out[:, h, rows].to(scores.dtype)
                weights = _softmax_weights(scores, lse[:, h, rows])
                delta = (grad * out[:, h, rows].to(scores.dtype)).sum(-1, keepdim=True)
                inner = grad @ v[:, kv, columns].to(scores.dtype).transpose(-1, -2)
                d_scores = weights * (inner - delta)
                dq_rows = (d_scores @ k_h.to(scores.dtype) * scale).to(dq.dtype)
                dq[:, h, rows] = dq[:, h, rows] + dq_rows if task.merge else dq_rows
                kv_index = kv - kv_heads.start
                dk = (d_scores.transpose(-1, -2) @ q_h.to(scores.dtype) * scale).to(sums[0].dtype)
                dv = (weights.transpose(-1, -2) @ grad).to(sums[1].dtype)
                for total, gradient in zip(sums, (dk, dv), strict=True):
                    total[:, kv_index].index_add_(1, columns, gradient)
                if task.bias:
                    d_keys = d_scores.sum(-2).float().cpu().numpy()
                    for run_sums, batch_keys in zip(task.bias[i][:, j], d_keys, strict=True):
                        np.add.at(run_sums, run_of, batch_keys)


def tiles_of(spans: Spans) -> Iterator[tuple[Steps, Steps, Steps]]:
    """Yield the steps of each tile's queries and keys, and the run of each key."""
    for t in range(spans.tiles):
        queries = spans.tile_start[t] + np.arange(spans.tile_count[t], dtype=np.int64) * (
            spans.tile_step
        )
        runs = np.arange(spans.runs[t], spans.runs[t + 1])
        counts = spans.count[runs].astype(np.int64)
        within: Steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        step = 1 if spans.step is None else np.repeat(spans.step[runs].astype(np.int64), counts)
        keys: Steps = np.repeat(spans.start[runs].astype(np.int64), counts) + within * step
        yield queries, keys, np.repeat(runs, counts)


def _softmax_weights(scores: Tensor, total: Tensor) -> Tensor:
    """Return the weights of scores (..., keys) for a log-sum-exp (...), 0 for one of -inf."""
    finite = total.masked_fill(total == -math.inf, math.inf)
    return torch.exp(scores - finite.unsqueeze(-1))


def _rows(steps: Steps, row: Ints32 | None, like: Tensor) -> Tensor:
    rows = steps if row is None else row[steps].astype(np.int64)
    return torch.from_numpy(rows).to(like.device)


def _scores(q: Tensor, k: Tensor, queries: Steps, keys: Steps, task: SpanTask) -> Tensor:
    scores = q.to(wide(q)) @ k.to(wide(q)).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if not task.causal:
        return scores
    q_at = positions(queries, task.steps.q_row, task.steps.q_at)
    k_at = positions(keys, task.steps.k_row, task.steps.k_at)
    hidden = k_at[None, :] > q_at[:, None]
    if task.steps.q_first is not None:
        hidden |= k_at[None, :] < task.steps.q_first[queries, None]
    return scores.masked_fill(torch.from_numpy(hidden).to(q.device), -math.inf)


def positions(steps: Steps, row: Ints32 | None, at: Ints32 | None) -> Steps:
    """Return the sequence positions of some steps of an index."""
    if at is not None:
        return at[steps].astype(np.int64)
    return steps if row is None else row[steps].astype(np.int64)
