"""Attention over block layouts on any device: tiles are gathered, and an exact kernel runs.

Tiles of equally many queries that see equally many keys in full are the batch of one call. Blocks
of keys of which a tile sees a part (on a diagonal, at the ends of a window) are further calls, one
for each shape of the part. Results merge by log-sum-exp, as in tiling.py. spans.py has the
contract; here tiles follow each other, tiles and runs have steps of 1, and steps are rows.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.workload import Scores
from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import Pair, Queries
from longseq_bench.kernels.exact.base import AUTO, ExactKernel, Use, select
from longseq_bench.kernels.spans import SpanTask
from longseq_bench.kernels.tiling import Piece, RowBlock, wide
from longseq_bench.meta_mode import are_loops_limited, device_kind, limited
from longseq_bench.patterns.spans import Spans, ranges

Steps = NDArray[np.integer]

ROWS = {"cpu": 2048, "cuda": 32 * 1024}
"""Queries of the tiles that are prepared together."""

MIN_GATHERED_BYTES = 8 * 2**20
GATHERED_SHARE_OF_Q = 32
"""Gathered keys and values take MIN_GATHERED_BYTES or 1 / GATHERED_SHARE_OF_Q of q, if larger."""

LEAST_KEYS = 1024
"""Keys of a call, however many heads they are gathered for."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, task: SpanTask
) -> None:
    """See SpanKernel.forward."""
    exact = _exact(device_kind(q), q.dtype, q.shape[3], task.scores)
    for part in task.parts:
        for block in limited(_row_blocks(part.spans, part.heads, task, q, k)):
            own, own_lse = tiling.forward_rows(exact, q, (k, v), block)
            tiling.store(out, block, own)
            if lse is not None:
                tiling.store(lse, block, own_lse)
            del own, own_lse


def backward(
    queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
) -> None:
    """See SpanKernel.backward. With a bias each part has one head."""
    q, group = queries[1], queries[1].shape[1] // keys[0].shape[1]
    exact = _exact(device_kind(q), q.dtype, q.shape[3], task.scores)
    first = kv_heads.start * group
    own_heads = slice(first, kv_heads.stop * group)
    grad_out, q, out, lse = (t[:, own_heads] for t in queries)
    k, v = (t[:, kv_heads.start : kv_heads.stop] for t in keys)
    given, own_dq = (grad_out, q, out, lse), dq[:, own_heads]
    for i, part in enumerate(task.parts):
        heads = [h - first for h in part.heads if h // group in kv_heads]
        for block in limited(_row_blocks(part.spans, heads, task, q, k)):
            rows = q[:, block.heads, block.rows]
            d_rows = rows.new_zeros(rows.shape, dtype=wide(q))
            tiling.add_block_gradients(exact, given, (k, v), block, [d_rows, *sums])
            tiling.store(own_dq, block, d_rows)
            del d_rows
        if task.bias and heads and not are_loops_limited():
            grad, own, result, own_lse = (t[:, heads[0]] for t in given)
            seen, values = (t[:, heads[0] // group] for t in (k, v))
            of_head = (grad, own, result, own_lse), (seen, values)
            _add_bias(*of_head, part.spans, task, task.bias[i][:, 0])


def torch_kernel(use: Use) -> ExactKernel:
    """Return the kernel of gathered keys and tiles: torch's on a CPU, on CUDA the fastest one."""
    return select("aten-flash-cpu" if use.device == "cpu" else AUTO, use)[0]


@lru_cache(maxsize=16)
def _exact(device: str, dtype: torch.dtype, head_dim: int, scores: Scores) -> ExactKernel:
    return torch_kernel(Use(device, dtype, head_dim, train=True, scores=scores))


def _row_blocks(
    spans: Spans, heads: Sequence[int], task: SpanTask, q: Tensor, k: Tensor
) -> Iterator[RowBlock]:
    """Yield row blocks of some tiles each; heads: successive query heads of q, or none."""
    if not heads:
        return
    run = slice(heads[0], heads[-1] + 1)
    token_bytes = 2 * k.shape[0] * k.shape[1] * k.shape[3] * k.element_size()
    gathered = max(MIN_GATHERED_BYTES, q.numel() * q.element_size() // GATHERED_SHARE_OF_Q)
    most = max(LEAST_KEYS, gathered // token_bytes)
    block_of = np.cumsum(spans.tile_count, dtype=np.int64) // ROWS[device_kind(q)]
    blocks = np.split(np.arange(len(block_of)), np.flatnonzero(np.diff(block_of)) + 1)
    if are_loops_limited():  # the one with the most keys needs the most memory
        sums = np.concatenate(([0], np.cumsum(spans.count, dtype=np.int64)))[spans.runs]
        blocks = [max(blocks, key=lambda tiles: np.diff(sums)[tiles].sum())]
    for tiles in blocks:
        rows = slice(int(spans.tile_start[tiles[0]]), int(_stops(spans, tiles)[-1]))
        pieces = limited(_pieces(spans, task, tiles, most))
        yield RowBlock(rows, run, tuple(Piece(r, c, run, t, m) for r, c, t, m in pieces))


_Call = tuple[Tensor, Tensor, bool, Tensor | None]
"""Rows (sets, queries), keys (sets, keys), whether they are a triangle, and their mask."""


def _pieces(spans: Spans, task: SpanTask, tiles: Steps, max_keys: int) -> Iterator[_Call]:
    """Yield the calls for some successive tiles; rows count from the first of them.

    max_keys: of a call.
    """
    starts, stops = spans.tile_start[tiles], _stops(spans, tiles)
    runs = np.arange(spans.runs[tiles[0]], spans.runs[tiles[-1] + 1])
    tile_of = np.repeat(np.arange(len(tiles)), np.diff(spans.runs)[tiles])
    if task.causal:
        # positions ascend from query to query, and so do those of the keys of a run
        (first_begin, last_begin), (first_end, last_end) = (
            _sight(task, queries) for queries in (starts, stops - 1)
        )
        low, high = (
            _positions(keys, task.steps.k_at)
            for keys in (spans.start[runs], spans.start[runs] + spans.count[runs] - 1)
        )
        seen = (low <= last_end[tile_of]) & (high >= first_begin[tile_of])
        is_full = seen & (high <= last_begin[tile_of]) & (low >= first_end[tile_of])
        part = np.flatnonzero(seen & ~is_full)
        yield from _partly_seen(spans, task, runs[part], tile_of[part], (starts, stops))
        runs, tile_of = runs[is_full], tile_of[is_full]
    begin = np.searchsorted(tile_of, np.arange(len(tiles) + 1))
    counts, per_tile = stops - starts, np.bincount(tile_of, spans.count[runs], len(tiles))
    for queries, keys in sorted({*zip(counts.tolist(), per_tile.tolist(), strict=True)}):
        alike, count = np.flatnonzero((counts == queries) & (per_tile == keys)), int(keys)
        sets = max(1, max_keys // max(1, count))
        for some in (alike[j : j + sets] for j in range(0, len(alike) if count else 0, sets)):
            own = np.concatenate([runs[begin[t] : begin[t + 1]] for t in some])
            columns = ranges(spans.start[own], spans.count[own]).reshape(len(some), count)
            rows = _index(starts[some, None] - starts[0] + np.arange(queries))
            for n in range(0, count, max_keys):
                yield rows, _index(columns[:, n : n + max_keys]), False, None


def _partly_seen(
    spans: Spans, task: SpanTask, runs: Steps, tile_of: Steps, queries: tuple[Steps, Steps]
) -> Iterator[_Call]:
    """Yield the calls for runs of which their tile sees a part, by the shape of the part.

    queries: the first one of each tile, and the one after its last.
    """
    starts, stops = queries
    groups: dict[tuple[int, tuple[int, ...], bytes], list[tuple[Steps, Steps]]] = defaultdict(list)
    # number of the run in its tile: a tile may be only once in a call
    number = np.arange(len(runs)) - np.searchsorted(tile_of, tile_of)
    for run, tile, nth in zip(runs, tile_of, number.tolist(), strict=True):
        rows = np.arange(starts[tile], stops[tile])
        keys = spans.start[run] + np.arange(spans.count[run], dtype=np.int64)
        first, last = _sight(task, rows)
        places = _positions(keys, task.steps.k_at)
        mask = (places >= first[:, None]) & (places <= last[:, None])
        groups[nth, mask.shape, mask.tobytes()].append((rows - starts[0], keys))
    for (_, shape, text), members in groups.items():
        mask = np.frombuffer(text, dtype=np.bool_).reshape(shape).copy()
        is_triangle = bool(np.array_equal(mask, np.tri(len(mask), dtype=np.bool_)))
        call_rows, call_keys = (_index(np.stack(steps)) for steps in zip(*members, strict=True))
        yield call_rows, call_keys, is_triangle, None if is_triangle else torch.from_numpy(mask)


def _stops(spans: Spans, tiles: Steps) -> Steps:
    """Return the query after the last one of each tile."""
    stops: Steps = spans.tile_start[tiles] + spans.tile_count[tiles]
    return stops


def _sight(task: SpanTask, queries: Steps) -> tuple[Steps, Steps]:
    """Return the first and the last position that each query sees."""
    first = task.steps.q_first
    of_queries = np.zeros_like(queries) if first is None else first[queries]
    return of_queries, _positions(queries, task.steps.q_at)


def _positions(steps: Steps, at: Steps | None) -> Steps:
    return steps if at is None else at[steps]


def _index(tokens: Steps) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))


def _add_bias(
    queries: Queries, keys: Pair, spans: Spans, task: SpanTask, sums: NDArray[np.float32]
) -> None:
    """Add the score gradients of each run of one head to sums (B, runs), tile by tile.

    Tensors are those of the head, (B, N, D); every query sees its own key.
    """
    (_, q, _, _), dtype = queries, wide(queries[1])
    for t, (start, count) in enumerate(zip(spans.tile_start, spans.tile_count, strict=True)):
        rows, runs = slice(start, start + count), slice(spans.runs[t], spans.runs[t + 1])
        columns = _index(ranges(spans.start[runs], spans.count[runs])).to(q.device)
        grad, own, out, lse = (tensor[:, rows].to(dtype) for tensor in queries)
        k, v = (tensor[:, columns].to(dtype) for tensor in keys)
        scores = task.scores.of(own @ k.mT * task.scores.scale_for(q.shape[-1]))
        slopes = task.scores.slopes(scores)
        if task.causal:
            positions = torch.arange(start, start + count, device=q.device)
            scores = scores.masked_fill(columns > positions[:, None], -math.inf)
        d_weights = (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * slopes
        of_keys = (torch.exp(scores - lse[..., None]) * d_weights).sum(-2).float().cpu().numpy()
        firsts = np.cumsum(spans.count[runs]) - spans.count[runs]
        sums[:, runs] += np.add.reduceat(of_keys, firsts, axis=1)
