"""Attention over spans on any device: tiles are gathered, and a kernel of exact attention runs.

Tiles of equally many queries that see equally many keys in full are the batch of one call. Runs of
keys of which a tile sees a part (on a diagonal, at the ends of a window) are further calls, one for
each shape of the part. Results merge by log-sum-exp, as in tiling.py. spans.py has the contract.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import Pair, Queries
from longseq_bench.kernels.exact.base import AUTO, ExactKernel, Use, select
from longseq_bench.kernels.spans import Ints32, SpanTask
from longseq_bench.kernels.tiling import ALL, Index, Piece, RowBlock, add_gradients, calls, wide
from longseq_bench.meta_mode import are_loops_limited, device_kind, limited
from longseq_bench.patterns.spans import Spans

Steps = NDArray[np.int64]

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
    exact = _exact(device_kind(q), q.dtype, q.shape[3])
    for part in task.parts:
        for block in limited(_row_blocks(part.spans, part.heads, task, q, k)):
            if task.merge:
                assert lse is not None
                tiling.merge(exact, q, (k, v), [out, lse], calls(block.pieces, q, k))
            else:
                tiling.block_forward(exact, q, (k, v), block, out, lse)


def backward(
    queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
) -> None:
    """See SpanKernel.backward."""
    q, group = queries[1], queries[1].shape[1] // keys[0].shape[1]
    exact, first = _exact(device_kind(q), q.dtype, q.shape[3]), kv_heads.start * group
    own_heads = slice(first, kv_heads.stop * group)
    grad_out, q, out, lse = (t[:, own_heads] for t in queries)
    k, v = (t[:, kv_heads.start : kv_heads.stop] for t in keys)
    given, own_dq = (grad_out, q, out, lse), dq[:, own_heads]
    for i, part in enumerate(task.parts):
        heads = [h - first for h in part.heads if h // group in kv_heads]
        for block in limited(_row_blocks(part.spans, heads, task, q, k)):
            if task.merge:
                add_gradients(exact, given, (k, v), [own_dq, *sums], calls(block.pieces, q, k))
            else:
                tiling.store_gradients(exact, given, (k, v), block, own_dq, sums)
        if task.bias and not are_loops_limited():
            for j, h in enumerate(part.heads):
                if h - first in heads:
                    head, kv = slice(h - first, h - first + 1), (h - first) // group
                    of_head = grad_out[:, head], q[:, head], out[:, head], lse[:, head]
                    own_keys = k[:, kv : kv + 1], v[:, kv : kv + 1]
                    _add_bias(of_head, own_keys, part.spans, task, task.bias[i][:, j])


def torch_kernel(use: Use) -> ExactKernel:
    """Return the kernel of gathered keys and tiles: torch's on a CPU, on CUDA the fastest one."""
    return select("aten-flash-cpu" if use.device == "cpu" else AUTO, use)[0]


@lru_cache(maxsize=16)
def _exact(device: str, dtype: torch.dtype, head_dim: int) -> ExactKernel:
    return torch_kernel(Use(device, dtype, head_dim, train=True))


def _row_blocks(
    spans: Spans, heads: Sequence[int], task: SpanTask, q: Tensor, k: Tensor
) -> Iterator[RowBlock]:
    """Yield row blocks of some tiles each; to merge, each has all rows, of which pieces have some.

    heads: query heads of q.
    """
    head_runs = [slice(h, h + 1) for h in heads]
    if len(heads) and heads[-1] - heads[0] == len(heads) - 1:
        head_runs = [slice(heads[0], heads[-1] + 1)]
    token_bytes = 2 * k.shape[0] * k.shape[1] * k.shape[3] * k.element_size()
    gathered = max(MIN_GATHERED_BYTES, q.numel() * q.element_size() // GATHERED_SHARE_OF_Q)
    block_of = np.cumsum(spans.tile_count, dtype=np.int64) // ROWS[device_kind(q)]
    blocks = np.split(np.arange(len(block_of)), np.flatnonzero(np.diff(block_of)) + 1)
    if are_loops_limited():  # the one with the most keys needs the most memory
        sums = np.concatenate(([0], np.cumsum(spans.count, dtype=np.int64)))[spans.runs]
        blocks = [max(blocks, key=lambda tiles: np.diff(sums)[tiles].sum())]
    for tiles in blocks:
        if not len(tiles) or not head_runs:
            continue
        counts = spans.tile_count[tiles, None]
        place = np.arange(counts.max())
        exists = place < counts
        # a shorter tile repeats its last query
        steps = spans.tile_start[tiles, None] + np.minimum(place, counts - 1) * spans.tile_step
        rows = _rows(steps, task.steps.q_row)
        block_rows: Index = ALL
        index = rows
        if not task.merge:
            block_rows, index = _index(rows[exists]), np.zeros_like(rows)
            index[exists] = np.arange(exists.sum())
        most = max(LEAST_KEYS, gathered // token_bytes)
        pieces = list(limited(_pieces(spans, task, tiles, steps, index, most)))
        for run in head_runs:
            yield RowBlock(block_rows, run, tuple(Piece(r, c, run, t, m) for r, c, t, m in pieces))


_Call = tuple[Tensor, Tensor, bool, Tensor | None]
"""Rows (sets, queries), keys (sets, keys), whether they are a triangle, and their mask."""


def _pieces(
    spans: Spans, task: SpanTask, tiles: Steps, q_steps: Steps, rows: Steps, max_keys: int
) -> Iterator[_Call]:
    """Yield the calls for some successive tiles.

    q_steps, rows: of each query of a tile, (tiles, queries), some unused.  max_keys: of a call.
    """
    counts = spans.tile_count[tiles].astype(np.int64)
    runs = np.arange(spans.runs[tiles[0]], spans.runs[tiles[-1] + 1])
    tile_of = np.repeat(np.arange(len(tiles)), np.diff(spans.runs)[tiles])
    runs, tile_of = (numbers[spans.count[runs] > 0] for numbers in (runs, tile_of))
    if task.causal:
        last = positions(q_steps, task.steps.q_row, task.steps.q_at)
        first = np.zeros_like(last)
        if task.steps.q_first is not None:
            first = task.steps.q_first[q_steps].astype(np.int64)
        # positions of a run ascend
        start, step = spans.start[runs].astype(np.int64), spans.step
        end = start + (spans.count[runs] - 1) * (1 if step is None else step[runs])
        low, high = (positions(key, task.steps.k_row, task.steps.k_at) for key in (start, end))
        seen = (low <= last.max(1)[tile_of]) & (high >= first.min(1)[tile_of])
        is_full = seen & (high <= last.min(1)[tile_of]) & (low >= first.max(1)[tile_of])
        part = np.flatnonzero(seen & ~is_full)
        yield from _partly_seen(spans, task, runs[part], tile_of[part], (counts, rows, first, last))
        runs, tile_of = runs[is_full], tile_of[is_full]
    begin = np.searchsorted(tile_of, np.arange(len(tiles) + 1))
    per_tile = np.bincount(tile_of, spans.count[runs], len(tiles)).astype(np.int64)
    for queries, count in sorted({*zip(counts.tolist(), per_tile.tolist(), strict=True)}):
        alike = np.flatnonzero((counts == queries) & (per_tile == count))
        sets = max(1, max_keys // max(1, count))
        for some in (alike[j : j + sets] for j in range(0, len(alike) if count else 0, sets)):
            own_runs = np.concatenate([runs[begin[t] : begin[t + 1]] for t in some])
            keys = _rows(_key_steps(spans, own_runs), task.steps.k_row).reshape(len(some), count)
            for n in range(0, count, max_keys):
                yield _index(rows[some, :queries]), _index(keys[:, n : n + max_keys]), False, None


def _partly_seen(
    spans: Spans, task: SpanTask, runs: Steps, tile_of: Steps, queries: tuple[Steps, ...]
) -> Iterator[_Call]:
    """Yield the calls for runs of which their tile sees a part, by the shape of the part.

    queries: their number in each tile, and of each the row, and the first and last position that it
    sees, (tiles, queries).
    """
    counts, rows, first, last = queries
    groups: dict[tuple[int, int, int, bytes], list[tuple[int, Steps]]] = defaultdict(list)
    # number of the run in its tile: a tile may be only once in a call
    number = np.arange(len(runs)) - np.searchsorted(tile_of, tile_of)
    for run, tile, nth in zip(runs, tile_of.tolist(), number.tolist(), strict=True):
        count, steps = int(counts[tile]), _key_steps(spans, np.array([run]))
        places = positions(steps, task.steps.k_row, task.steps.k_at)
        mask = places <= last[tile, :count, None]
        mask &= places >= first[tile, :count, None]
        groups[nth, count, len(steps), mask.tobytes()].append((tile, steps))
    for (_, count, size, text), members in groups.items():
        mask = np.frombuffer(text, dtype=np.bool_).reshape(count, size).copy()
        is_triangle = count == size and bool((mask == np.tri(count, dtype=np.bool_)).all())
        call_rows = _index(rows[[tile for tile, _ in members], :count])
        keys = _index(_rows(np.stack([steps for _, steps in members]), task.steps.k_row))
        yield call_rows, keys, is_triangle, None if is_triangle else torch.from_numpy(mask)


def _key_steps(spans: Spans, runs: Steps) -> Steps:
    """Return the steps of the keys of some runs, one after the other."""
    counts = spans.count[runs].astype(np.int64)
    within: Steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    step = 1 if spans.step is None else np.repeat(spans.step[runs].astype(np.int64), counts)
    steps: Steps = np.repeat(spans.start[runs].astype(np.int64), counts) + within * step
    return steps


def _index(tokens: Steps) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tokens))


def _rows(steps: Steps, row: Ints32 | None) -> Steps:
    return steps if row is None else row[steps].astype(np.int64)


def positions(steps: Steps, row: Ints32 | None, at: Ints32 | None) -> Steps:
    """Return the sequence positions of some steps of an index."""
    return _rows(steps, row) if at is None else at[steps].astype(np.int64)


def _add_bias(
    queries: Queries, keys: Pair, spans: Spans, task: SpanTask, sums: NDArray[np.float32]
) -> None:
    """Add the score gradients of each run of one head to sums (B, runs), tile by tile."""
    (grad_out, q, out, lse), (k, v) = queries, keys
    for q_steps, k_steps, run_of in tiles_of(spans):
        rows, columns = (
            _index(_rows(steps, row)).to(q.device)
            for steps, row in ((q_steps, task.steps.q_row), (k_steps, task.steps.k_row))
        )
        q_rows, grad, result = (t[:, 0, rows].to(wide(q)) for t in (q, grad_out, out))
        seen, values = (t[:, 0, columns].to(wide(q)) for t in (k, v))
        scores = q_rows @ seen.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if task.causal:
            last = positions(q_steps, task.steps.q_row, task.steps.q_at)
            at = positions(k_steps, task.steps.k_row, task.steps.k_at)
            hidden = at[None, :] > last[:, None]
            if task.steps.q_first is not None:
                hidden |= at[None, :] < task.steps.q_first[q_steps, None]
            scores = scores.masked_fill(torch.from_numpy(hidden).to(q.device), -math.inf)
        own_lse = lse[:, 0, rows].masked_fill(lse[:, 0, rows] == -math.inf, math.inf)
        inner = grad @ values.transpose(-1, -2) - (grad * result).sum(-1, keepdim=True)
        of_keys = (torch.exp(scores - own_lse[..., None]) * inner).sum(-2).float().cpu().numpy()
        for run_sums, of_batch in zip(sums, of_keys, strict=True):
            np.add.at(run_sums, run_of, of_batch)


def tiles_of(spans: Spans) -> Iterator[tuple[Steps, Steps, Steps]]:
    """Yield the steps of each tile's queries and keys, and the run of each key."""
    for t in range(len(spans.tile_start)):
        queries = spans.tile_start[t] + np.arange(spans.tile_count[t], dtype=np.int64) * (
            spans.tile_step
        )
        runs = np.arange(spans.runs[t], spans.runs[t + 1])
        yield queries, _key_steps(spans, runs), np.repeat(runs, spans.count[runs])
