"""Exact attention over any set of tiles: the loop behind ring, collective and sparse patterns.

A tiling is a sequence of row blocks. A row block lists the rows of the output that are computed
together, their heads, and pieces: which rows see which keys. Pieces are merged by their
log-sum-exp, so the result is one softmax over the multiset union of their keys (a key in two
pieces counts twice). Backward uses the same tiling with the log-sum-exp of the whole softmax, as in
FlashAttention (arXiv 2205.14135) and Ring Attention (arXiv 2310.01889).

Memory beyond q, k, v and out is one row block and one piece. Rows and keys that are slices are
views; index tensors are gathered, one piece at a time. Slices with `sets`, or an index of two
dimensions (sets, tokens), are many pieces in one call: each set of rows sees the set of keys at the
same place, and the sets become rows of the batch. With a `shift` each head has rows and keys of its
own.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D), v and out with Dv instead of D where a workload
has another v_head_dim; log-sum-exp (B, Hq, N), float32. "Wide" tensors
are float32, or float64 for float64 inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.merge import merge_part
from longseq_bench.meta_mode import device_kind, limited

Index = slice | Tensor
Tensors = Sequence[Tensor]
ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """Rows of a block and the keys they see: every pair, or (causal) the lower triangle.

    rows: into the block's rows, none twice.  keys: into the tokens of k and v.
    heads: query heads of the whole tensor, a slice with start and stop.
    mask: (rows, keys), True for a visible pair; None for every pair or a triangle.
    sets: so many pieces at equal distances of `apart` tokens; rows and keys are then slices, those
    of the first one. shift: rows and keys of each head are so many tokens after those of the head
    before; with grouped heads, for the heads of one KV head. Both are for a batch of 1.
    """

    rows: Index
    keys: Index
    heads: slice
    causal: bool = False
    mask: Tensor | None = None
    sets: int = 1
    apart: int = 0
    shift: int = 0


@dataclass(frozen=True)
class RowBlock:
    """Rows computed together, for consecutive query heads (a slice with start and stop).

    gathers_keys: k and v are gathered like q, by the index tensor of the rows; rows and keys of
    pieces are slices into it.
    """

    rows: Index
    heads: slice
    pieces: tuple[Piece, ...]
    gathers_keys: bool = False


Tiling = Callable[[], Iterator[RowBlock]]
"""Row blocks, generated again for every pass."""


class TiledKernel:
    """An AttentionKernel that computes a tiling, each piece by an exact kernel.

    Every row and head is in exactly one row block.
    """

    def __init__(self, tiling: Tiling, exact: ExactKernel) -> None:
        self._tiling, self._exact = tiling, exact

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp (-inf for rows that see nothing)."""
        out = _empty_output(q, v)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide(q)) if keep_lse else None
        for block in limited(self._tiling()):
            block_forward(self._exact, q, (k, v), block, out, lse)
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v, summed in wide tensors."""
        (_, q, _, _), (k, v) = queries, keys
        dq, dk, dv = torch.zeros_like(q), *(torch.zeros_like(t, dtype=wide(t)) for t in keys)
        for block in limited(self._tiling()):
            store_gradients(self._exact, queries, keys, block, dq, (dk, dv))
        dk = dk.to(k.dtype)
        return dq, dk, dv.to(v.dtype)

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the output over q and return it."""
        for block in limited(self._tiling()):
            acc, _ = _forward_copy(self._exact, q, k, v, block)
            _store(q, block, acc)
            del acc
        return q

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k and v, recomputing the output of each row block.

        inplace: the gradient of q is written over q.
        """
        dq = q if inplace else torch.zeros_like(q)
        dk, dv = (torch.zeros_like(t, dtype=wide(t)) for t in (k, v))
        for block in limited(self._tiling()):
            acc, lse = _forward_copy(self._exact, q, k, v, block)
            out = acc.to(q.dtype)
            del acc
            do, rows = (_take(t, block.heads, block.rows) for t in (grad_out, q))
            dq_rows = torch.zeros_like(rows, dtype=wide(q))
            group = q.shape[1] // k.shape[1]
            own = do, rows, out, lse
            _add_rows(self._exact, own, (k, v), group, block, (dq_rows, dk, dv))
            _store(dq, block, dq_rows)
            del do, rows, out, own, dq_rows
        dk = dk.to(k.dtype)
        return dq, dk, dv.to(v.dtype)


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Return zeros (B, Hq, N, Dv)."""
    if v.shape[3] == q.shape[3]:
        return torch.zeros_like(q)
    return q.new_zeros(*q.shape[:3], v.shape[3])


def _forward_copy(
    exact: ExactKernel, q: Tensor, k: Tensor, v: Tensor, block: RowBlock
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one row block, in new wide tensors."""
    rows = _take(q, block.heads, block.rows)
    acc = rows.new_zeros(*rows.shape[:3], v.shape[3], dtype=wide(q))
    acc_lse = acc.new_full(acc.shape[:3], -math.inf)
    _merge_pieces(exact, rows, (k, v), q.shape[1] // k.shape[1], block, (acc, acc_lse))
    return acc, acc_lse


def block_forward(
    exact: ExactKernel, q: Tensor, keys: Pair, block: RowBlock, out: Tensor, lse: Tensor | None
) -> None:
    """Compute one row block into `out` and `lse`, whose rows are 0 and -inf before."""
    q_block = _take(q, block.heads, block.rows)
    acc = _accumulator(out, block)
    acc_lse = acc.new_full(acc.shape[:3], -math.inf, dtype=wide(q))
    _merge_pieces(exact, q_block, keys, q.shape[1] // keys[0].shape[1], block, (acc, acc_lse))
    _store(out, block, acc)
    if lse is not None:
        _store(lse, block, acc_lse)


def merge(
    exact: ExactKernel, q: Tensor, keys: Pair, block: RowBlock, out: Tensor, lse: Tensor
) -> None:
    """Add these keys to the softmax that `out` and `lse` hold for a row block, in place.

    out (B, Hq, N, D) is wide or like q, and lse (B, Hq, N) is wide; rows without any key so far are
    0 and -inf. Rows are a slice, or keys are gathered with them.
    """
    group = q.shape[1] // keys[0].shape[1]
    (own,), keys, sums = _tensors_of(block, group, (q,), keys, (out, lse), ())
    _merge_pieces(exact, own, keys, group, block, sums)


def add_gradients(
    exact: ExactKernel, queries: Queries, keys: Pair, block: RowBlock, dq: Tensor, d_keys: Pair
) -> None:
    """Add the gradients of one row block over these keys to dq and d_keys, in place.

    queries: the output and lse belong to the whole softmax.  d_keys: dk and dv of all these keys.
    Rows are as in `merge`.
    """
    group = queries[0].shape[1] // keys[0].shape[1]
    own, keys, sums = _tensors_of(block, group, queries, keys, (dq,), d_keys)
    if not isinstance(block.rows, Tensor):
        _add_rows(exact, own, keys, group, block, sums)
        return
    dq, dk, dv = (t.index_select(2, block.rows) for t in sums)
    _add_rows(exact, own, keys, group, block, (dq, dk, dv))
    for total, value in zip(sums, (dq, dk, dv), strict=True):
        total.index_copy_(2, block.rows, value)


def _tensors_of(
    block: RowBlock, group: int, own: Tensors, keys: Pair, sums: Tensors, d_keys: Tensors
) -> tuple[Any, Any, Any]:
    """Return the queries, the keys and the sums of a row block, which have every row if gathered.

    sums: those of rows.  d_keys: those of keys.
    """
    rows, heads = block.rows, block.heads
    own = [_take(t, heads, rows) for t in own]
    if not isinstance(rows, Tensor):
        return own, keys, (*(t[:, heads, rows] for t in sums), *d_keys)
    kv_heads = slice(heads.start // group, heads.stop // group)
    keys = _take(keys[0], kv_heads, rows), _take(keys[1], kv_heads, rows)
    return own, keys, (*(t[:, heads] for t in sums), *(t[:, kv_heads] for t in d_keys))


def _merge_pieces(
    exact: ExactKernel, q: Tensor, keys: Pair, group: int, block: RowBlock, sums: Pair
) -> None:
    """Merge all pieces into sums, acc and acc_lse, which hold the block's rows and heads, as q.

    With gathered keys the sums hold every row.
    """
    acc, acc_lse = sums
    for heads, kv_heads, piece in limited(calls(block, group, q.device)):
        k, v = (_take(t, kv_heads, piece.keys, piece) for t in keys)
        own = _take(q, heads, piece.rows, piece)
        if block.gathers_keys and isinstance(block.rows, Tensor):
            part = exact.forward(own, k, v, piece.causal, piece.mask)
            places = _take(block.rows[None, None, :, None], ALL, piece.rows, piece)[..., 0]
            merge_part(acc[:, heads], acc_lse[:, heads], *part, places)
            del part
        else:
            out, lse = (_take(t, heads, piece.rows, piece) for t in (acc, acc_lse))
            exact.merge(own, (k, v), (out, lse), piece.causal, piece.mask)
            if isinstance(piece.rows, Tensor):
                _put(acc, heads, piece.rows, out)
                _put(acc_lse, heads, piece.rows, lse)
            del out, lse
        del k, v, own


def store_gradients(
    exact: ExactKernel, queries: Queries, keys: Pair, block: RowBlock, dq: Tensor, d_keys: Pair
) -> None:
    """Write dq of one row block over these keys, and add the gradients of keys to d_keys."""
    acc, group = _accumulator(dq, block), queries[0].shape[1] // keys[0].shape[1]
    grad_out, q, out, lse = (_take(t, block.heads, block.rows) for t in queries)
    _add_rows(exact, (grad_out, q, out, lse), keys, group, block, (acc, *d_keys))
    _store(dq, block, acc)


def _add_rows(
    exact: ExactKernel, own: Queries, keys: Pair, group: int, block: RowBlock, sums: Triple
) -> None:
    """Add gradients as `add_gradients` does; `own` has only the rows and heads of the block."""
    acc, *d_keys = sums
    for heads, kv_heads, piece in limited(calls(block, group, acc.device)):
        grad_out, q, out, lse = (_take(t, heads, piece.rows, piece) for t in own)
        k, v = (_take(t, kv_heads, piece.keys, piece) for t in keys)
        queries, mask = (grad_out, q, out, lse), piece.mask
        if isinstance(piece.rows, Tensor) or isinstance(piece.keys, Tensor):
            parts = exact.backward(queries, (k, v), piece.causal, mask)
            _add(acc, heads, piece.rows, parts[0])
            _add(d_keys[0], kv_heads, piece.keys, parts[1])
            _add(d_keys[1], kv_heads, piece.keys, parts[2])
            del parts
        else:
            dq = _take(acc, heads, piece.rows, piece)
            dk, dv = (_take(t, kv_heads, piece.keys, piece) for t in d_keys)
            exact.add_gradients(queries, (k, v), (dq, dk, dv), piece.causal, mask)
        del grad_out, q, out, queries, k, v


def calls(
    block: RowBlock, group: int, device: torch.device
) -> Iterator[tuple[slice, slice, Piece]]:
    """Yield the kernel calls of a row block: query heads (within the block), KV heads, piece.

    The piece's index tensors are on the device. KV heads are within the block if it gathers keys.
    """
    first, first_kv = block.heads.start, block.heads.start // group * block.gathers_keys
    for piece in block.pieces:
        if isinstance(piece.rows, Tensor):
            piece = replace(piece, rows=piece.rows.to(device))
        if isinstance(piece.keys, Tensor):
            piece = replace(piece, keys=piece.keys.to(device))
        for heads, kv in kv_heads_of(piece.heads, group):
            kv_heads = slice(kv.start - first_kv, kv.stop - first_kv, kv.step)
            yield slice(heads.start - first, heads.stop - first, heads.step), kv_heads, piece


def kv_heads_of(heads: slice, group: int) -> Iterator[tuple[slice, slice]]:
    """Yield query heads with the KV heads they use, in as few parts as possible.

    group: query heads per KV head.
    """
    start, stop, step = heads.start, heads.stop, heads.step or 1
    if group == 1:
        yield heads, heads
    elif step == 1 and start % group == 0 and stop % group == 0:
        yield heads, slice(start // group, stop // group)
    elif step % group == 0:
        last = range(start, stop, step)[-1]
        yield heads, slice(start // group, last // group + 1, step // group)
    else:
        q_heads = range(start, stop, step)
        for kv in sorted({h // group for h in q_heads}):
            own = [h for h in q_heads if h // group == kv]
            yield slice(own[0], own[-1] + 1, step), slice(kv, kv + 1)


def _put(target: Tensor, heads: slice, rows: Tensor, value: Tensor) -> None:
    """Write what `_take` returns for an index tensor back to its places."""
    target[:, heads].index_copy_(2, rows.flatten().to(target.device), _as_rows(value, rows))


def _as_rows(value: Tensor, index: Tensor) -> Tensor:
    """Return a tensor (B S, H, tokens, D) of sets as (B, H, S tokens, D)."""
    if index.dim() == 1:
        return value
    return torch.unflatten(value, 0, (-1, len(index))).transpose(1, 2).flatten(2, 3)


def _accumulator(target: Tensor, block: RowBlock) -> Tensor:
    """Return zeros for a row block: a view of the target if that is wide enough, or wide ones.

    The sum of two parts is rounded once, wherever it is stored; kernels for CPUs add to wide sums.
    """
    is_wide = target.dtype == wide(target)
    if isinstance(block.rows, Tensor):
        count = block.rows.numel()
    elif is_wide or (len(block.pieces) <= 2 and device_kind(target) == "cuda"):
        return target[:, block.heads, block.rows]
    else:
        count = len(range(*block.rows.indices(target.shape[2])))
    heads = block.heads.stop - block.heads.start
    return target.new_zeros(target.shape[0], heads, count, target.shape[3], dtype=wide(target))


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for a float64 tensor."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _store(target: Tensor, block: RowBlock, value: Tensor) -> None:
    if isinstance(block.rows, Tensor):
        rows = block.rows.to(target.device)
        target[:, block.heads].index_copy_(2, rows, value.to(target.dtype))
        return
    view = target[:, block.heads, block.rows]
    if view.data_ptr() != value.data_ptr():
        view.copy_(value)


def _add(total: Tensor, heads: slice, tokens: Index, part: Tensor) -> None:
    if isinstance(tokens, Tensor):
        rows = tokens.flatten().to(total.device)
        total[:, heads].index_add_(2, rows, _as_rows(part, tokens).to(total.dtype))
    else:
        total[:, heads, tokens].add_(part)


def _take(tensor: Tensor, heads: slice, tokens: Index, piece: Piece | None = None) -> Tensor:
    """Return heads and tokens of a tensor: a view for slices, a copy for an index tensor.

    Sets of tokens are rows of the batch: (B S, H, tokens, D) for an index (S, tokens), or for a
    slice with the sets of a piece.
    """
    if isinstance(tokens, slice):
        view = tensor[:, heads, tokens]
        if piece is None or (piece.sets == 1 and not piece.shift):
            return view
        shape, strides, token = list(view.shape), list(view.stride()), tensor.stride(2)
        shape[0], strides[0] = piece.sets, piece.apart * token
        if piece.shift:
            # one KV head has the keys of all heads of the piece
            strides[1] = (strides[1] if shape[1] > 1 else 0) + piece.shift * token
            shape[1] = len(range(piece.heads.start, piece.heads.stop))
        return view.as_strided(shape, strides, view.storage_offset())
    taken = tensor[:, heads].index_select(2, tokens.flatten().to(tensor.device))
    if tokens.dim() == 1:
        return taken
    return torch.unflatten(taken, 2, tuple(tokens.shape)).transpose(1, 2).flatten(0, 1)
