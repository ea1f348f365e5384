"""Block-sparse attention that keeps the key blocks with the highest scores of each row and head.

The score of a block of queries and a block of keys is the product of their representatives. A block
of keys is represented by the mean of its tokens, and so is a block of queries; with a causal mask
by its first query, because a mean would let later queries decide what earlier ones see. Scores are
averaged over the batch, so each head has one layout.

With scorer=learned, representatives are multiplied by a weight matrix first. The choice of blocks
is not differentiable by those matrices. So the gradient of a block's score is defined as that of a
bias of 0 added to all attention scores of the block: the sum of the gradients of those scores (a
straight-through estimate, arXiv 1308.3432). q, k and v get their exact gradients for the chosen
layout.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.sparse.block_sparse import (
    BlockOption,
    LayoutAttention,
    SparseKernelOption,
    SparsityOption,
    build_layout_kernel,
)
from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import (
    attend,
    disable_autocast,
    refuse_second_derivative,
    with_dense_rows,
)
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, span_gradients
from longseq_bench.meta_mode import device_for
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout, visible_blocks
from longseq_bench.patterns.blocks import check_sparsity, kept_counts, make_layout
from longseq_bench.patterns.spans import spans_of

if TYPE_CHECKING:
    from longseq_bench.kernels.triton_topk import TopBlocks

_INIT_NOISE = 0.1
"""Noise of the scorer's initial matrices around the identity; the identity equals scorer=means."""

CHUNK = {"cpu": 2**18, "cuda": 2**20}
"""Scores that are requested together, by device: about 10 and 40 MB of working memory."""


@implementation("block-sparse-adaptive")
class AdaptiveBlockSparse(LayoutAttention):
    """Attention over the blocks with the highest scores."""

    summary = "each query block sees the key blocks with the highest scores, chosen for each head"
    chooses_layout = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        sparsity: SparsityOption = 0.9,
        block: BlockOption = 128,
        scorer: Annotated[
            Literal["means", "learned"],
            "means: scores of block means; learned: learned matrices are applied first",
        ] = "means",
        kernel: SparseKernelOption = "auto",
    ) -> None:
        check_sparsity(sparsity)
        super().__init__(workload, group, kernel)
        if scorer == "learned" and workload.sink:
            raise UnsupportedError("scorer=learned has no sinks; use scorer=means")
        if scorer == "learned" and kernel == "flex":
            raise UserError("kernel=flex can't train scorer=learned; use kernel=auto")
        if kernel == "flashinfer":
            raise UserError(
                "kernel=flashinfer plans before the passes, not in each; use kernel=auto"
            )
        self.block, self.sparsity, self.requested_density = block, sparsity, 1 - sparsity
        self.scorer = scorer
        self.matrices: tuple[Tensor, ...] = ()
        self._top: TopBlocks | None = None
        self._chosen: TopBlocks | tuple[BlockLayout, ...] = ()

    def prepare(self, device: str) -> None:
        """Choose the kernel and draw the scorer's matrices; each call chooses its layouts."""
        super().prepare(device)
        w, self._top = self.workload, None
        if self.kernel_name == "triton" and sparse_selection.has_triton():
            from longseq_bench.kernels.triton_topk import TopBlocks

            places = empty_layout(w.seq_len, self.block, self.sparsity, w.causal)
            self._top = TopBlocks(places, w.heads, w.scores)
        if self.scorer == "learned" and not self.matrices:
            generator = torch.Generator().manual_seed(0)
            noise = (torch.randn(w.head_dim, w.head_dim, generator=generator) for _ in range(2))
            scale = _INIT_NOISE / math.sqrt(w.head_dim)
            matrices = (torch.eye(w.head_dim) + n * scale for n in noise)
            self.matrices = tuple(
                m.to(device_for(device)).requires_grad_(w.train) for m in matrices
            )

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = time.perf_counter()
        with torch.no_grad(), disable_autocast(q):
            # representatives of blocks: (B, Hq, rows, D) and (B, Hk, rows, D), float32
            first_queries = q[:, :, :: self.block]
            queries = first_queries.float() if self.workload.causal else _means(q, self.block)
            keys = _means(k, self.block)
            chosen = self._choose(queries, keys)
        self._chosen = chosen
        if not isinstance(chosen, tuple):
            # the device chooses as a part of the pass, which nothing waits for
            return attend(q, k, v, self.add_sinks(chosen), self.workload.train)
        self.layout_s = time.perf_counter() - start
        if self.scorer == "learned" and self.workload.train:
            apply: Any = _Learned.apply
            tensors = map(with_dense_rows, (q, k, v))
            return cast(Tensor, apply(*tensors, *self.matrices, self, (queries, keys)))
        w = self.workload
        kernel = build_layout_kernel(self.kernel_name, self.layouts, w.heads, w.scores)
        return attend(q, k, v, self.add_sinks(kernel), w.train)

    @property
    def kernel_block(self) -> int | None:
        """None to train a scorer: only kernels of spans return the gradients of scores."""
        learns = self.scorer == "learned" and self.workload.train
        return None if learns else super().kernel_block

    @property
    @override
    def layouts(self) -> tuple[BlockLayout, ...]:
        if not isinstance(self._chosen, tuple):
            chosen = self._chosen
            self._chosen = self._stand_ins() if chosen.indices.is_meta else chosen.to_host()
        return self._chosen

    def _choose(self, queries: Tensor, keys: Tensor) -> "TopBlocks | tuple[BlockLayout, ...]":
        w = self.workload
        if self.matrices:
            queries, keys = queries @ self.matrices[0], keys @ self.matrices[1]
        # (H, rows, B D): one product sums over the batch too, to B √D times the scores
        queries, keys = (t.permute(1, 2, 0, 3).flatten(2) for t in (queries, keys))
        if self._top:
            return self._top.choose(queries, keys)
        if queries.is_meta:
            return self._stand_ins()
        pairs = ((q, keys[h * w.kv_heads // w.heads]) for h, q in enumerate(queries))
        return tuple(self._layout(q, k) for q, k in pairs)

    def _layout(self, queries: Tensor, keys: Tensor) -> BlockLayout:
        w, chunk = self.workload, CHUNK[queries.device.type]
        sizes = w.seq_len, self.block, self.sparsity, w.causal, chunk
        return top_layout(lambda start, stop: queries[start:stop] @ keys.T, *sizes)

    def _stand_ins(self) -> tuple[BlockLayout, ...]:
        """Return layouts with equally many blocks, where there are no scores."""
        w = self.workload
        layout = make_layout("local-window", w.seq_len, self.block, self.sparsity, w.causal)
        return (layout,) * w.heads


class _Learned(torch.autograd.Function):
    """Attention over the chosen blocks, with the scorer's straight-through gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor,
        attention: AdaptiveBlockSparse, pooled: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.kernel = sparse_selection.span_kernel(attention.kernel_name)
        ctx.layouts = attention.layouts
        parts = [HeadSpans(spans_of(layout), [h]) for h, layout in enumerate(ctx.layouts)]
        w = attention.workload
        ctx.task = SpanTask(parts, w.causal, scores=w.scores)
        attend_all = SpanAttention(ctx.kernel, ctx.task, (q.shape[1], q.shape[2]))
        with disable_autocast(q):
            out, lse = attend_all.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, w_q, w_k, out, lse, *pooled)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, w_q, w_k, out, lse, *pooled = ctx.saved_tensors
        bias = [np.zeros((q.shape[0], 1, len(x.indices)), np.float32) for x in ctx.layouts]
        task, queries = replace(ctx.task, bias=bias), (with_dense_rows(grad_out), q, out, lse)
        grads = span_gradients(ctx.kernel, task, queries, (k, v), torch.empty_like(q))
        d_matrices = _matrix_gradients(ctx.layouts, bias, (pooled[0], pooled[1]), (w_q, w_k))
        return *grads, *d_matrices, None, None


def _matrix_gradients(
    layouts: tuple[BlockLayout, ...],
    bias: list[NDArray[np.float32]],
    pooled: tuple[Tensor, Tensor],
    matrices: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both matrices.

    score(i, j) = mean over the batch of q_i Wq (k_j Wk)^T / √D.
    """
    queries, keys = pooled
    batch, heads, _, dim = queries.shape
    scale = 1 / (math.sqrt(dim) * batch)
    gradients = [torch.zeros_like(m) for m in matrices]
    for head, layout in enumerate(layouts):
        kv = head * keys.shape[1] // heads
        rows = np.repeat(np.arange(layout.rows), layout.row_lengths)
        score_gradients = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack((rows, layout.indices.astype(np.int64)))),
            torch.from_numpy(bias[head].sum((0, 1)) * np.float32(scale)),
            (layout.rows, layout.rows),
            is_coalesced=True,
            check_invariants=False,
        ).to(queries.device)
        for b in range(batch):
            weighted_keys = score_gradients @ keys[b, kv]
            gradients[0] += queries[b, head].T @ (weighted_keys @ matrices[1])
            gradients[1] += weighted_keys.T @ (queries[b, head] @ matrices[0])
    return gradients[0], gradients[1]


def _means(t: Tensor, block: int) -> Tensor:
    """Return means of blocks of tokens, (B, H, rows, D) float32; the last block may be short."""
    full = t.shape[2] // block
    blocks = torch.unflatten(t[:, :, : full * block], 2, (full, block))
    parts = blocks, t[:, :, None, full * block :]
    means = [part.mean(3, dtype=torch.float32) for part in parts if part.numel()]
    return torch.cat(means, 2) if len(means) > 1 else means[0]


# ---- layouts of the highest scores ---------------------------------------------------------------


def top_layout(
    scores: Callable[[int, int], Tensor],
    seq_len: int,
    block: int,
    sparsity: float,
    causal: bool,
    chunk: int = CHUNK["cpu"],
) -> BlockLayout:
    """Return the layout of the highest scores, with as many blocks per row as other patterns keep.

    scores(start, stop): scores of query blocks [start, stop) against all key blocks, (stop - start,
    key blocks) float32 on any device, requested once and in order; at most `chunk` scores, or one
    row. Scores of hidden blocks are ignored.  sparsity: share of visible blocks to skip, in [0, 1).
    The diagonal block is always kept. Of blocks with equal scores, the first are kept. Scores may
    be infinite.

    Raises UserError for bad lengths or sparsity, and for a score that is NaN.
    """
    layout = empty_layout(seq_len, block, sparsity, causal)
    rows, counts, indptr = layout.rows, layout.row_lengths, layout.indptr
    indices = np.empty(indptr[-1], dtype=np.int32)
    step = max(1, chunk // rows)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        visible = scores(start, stop)[:, : stop if causal else rows]
        kept = _top(visible, counts[start:stop, None], start, causal)
        indices[indptr[start] : indptr[stop]] = kept
    return replace(layout, indices=indices)


def empty_layout(seq_len: int, block: int, sparsity: float, causal: bool) -> BlockLayout:
    """Return a layout with the places of the kept blocks, and no block in them."""
    check_sparsity(sparsity)
    counts = kept_counts(visible_blocks(seq_len, block, causal, None)[1], sparsity)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    return BlockLayout(seq_len, block, causal, indptr, np.empty(0, dtype=np.int32))


def _top(scores: Tensor, counts: Ints, start: int, causal: bool) -> Ints:
    """Return the kept blocks of some rows, ascending, one row after the other."""
    rows, blocks = (torch.arange(size, device=scores.device) for size in scores.shape)
    own = rows + start
    if causal:
        scores = scores.masked_fill(blocks > own[:, None], -torch.inf)
    if (bad := scores.isnan()).any():
        row, key = bad.nonzero()[0].tolist()
        raise UserError(f"the score of query block {start + row} for key block {key} is NaN")
    # the diagonal comes before every score; -0.0 becomes 0.0
    scores = scores.clamp(max=torch.finfo(torch.float32).max) + 0.0
    scores[rows, own] = torch.inf
    widest = int(counts.max())
    # of equal scores the first; hidden blocks are after all visible ones
    ordered = torch.sort(scores, descending=True, stable=True).indices[:, :widest]
    kept = np.arange(widest) < counts
    chosen = np.where(kept, ordered.cpu().numpy(), len(blocks))
    chosen.sort(axis=1)
    return chosen[kept]
