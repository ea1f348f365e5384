"""Exact attention over any set of tiles: the loop behind ring, collective and sparse patterns.

A tiling is a sequence of row blocks. A row block lists the rows of the output that are computed
together, their heads, and pieces: which rows see which keys. Pieces are merged by their
log-sum-exp, so the result is one softmax over the multiset union of their keys (a key in two
pieces counts twice). Backward uses the same tiling with the log-sum-exp of the whole softmax, as in
FlashAttention (arXiv 2205.14135) and Ring Attention (arXiv 2310.01889).

Memory beyond q, k, v and out is one row block and one piece. Rows and keys that are slices are
views; index tensors (sets, tokens) are gathered, one piece at a time. Each set of rows sees the set
of keys at the same place, and the sets become rows of the batch.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D), v and out with Dv instead of D where a workload
has another v_head_dim; log-sum-exp (B, Hq, N), float32. "Wide" tensors are float32, or float64 for
float64 inputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.merge import Tensors, merge_part, put_rows, take_rows
from longseq_bench.meta_mode import device_kind, limited

Index = slice | Tensor
ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """Rows of a block and the keys they see: every pair, or (causal) the lower triangle.

    rows: into the block's rows, none twice.  keys: into the tokens of k and v.
    heads: query heads of the whole tensor, a slice with start and stop.
    mask: (rows, keys), True for a visible pair; None for every pair or a triangle.
    sets: so many pieces at equal distances of `apart` tokens; rows and keys are then slices, those
    of the first one. With a distance a call has one sequence of the batch.
    shift: rows and keys of each head are so many tokens after those of the head before; with
    grouped heads, for the heads of one KV head.
    index: the tokens of rows and keys, of one sequence, as in merge.py.
    is_first: no earlier piece has these rows, nor these keys.
    """

    rows: Index
    keys: Index
    heads: slice
    causal: bool = False
    mask: Tensor | None = None
    sets: int = 1
    apart: int = 0
    shift: int = 0
    index: Tensor | None = None
    is_first: bool = False


@dataclass(frozen=True)
class RowBlock:
    """Rows computed together, for consecutive query heads (a slice with start and stop)."""

    rows: slice
    heads: slice
    pieces: tuple[Piece, ...]


Tiling = Callable[[], Iterator[RowBlock]]
"""Row blocks, generated again for every pass."""


class TiledKernel:
    """An AttentionKernel that computes a tiling, each piece by an exact kernel.

    Every row and head is in exactly one row block.
    whole: a kernel that computes passes which don't write over their inputs; None: this one does.
    """

    def __init__(
        self, tiling: Tiling, exact: ExactKernel, whole: AttentionKernel | None = None
    ) -> None:
        self._tiling, self._exact, self._whole = tiling, exact, whole

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp (-inf for rows that see nothing)."""
        if self._whole:
            return self._whole.forward(q, k, v, keep_lse)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide(q)) if keep_lse else None
        for block in limited(self._tiling()):
            acc, acc_lse = forward_rows(self._exact, q, (k, v), block, _accumulator(out, block))
            store(out, block, acc)
            if lse is not None:
                store(lse, block, acc_lse)
            del acc, acc_lse
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v, summed in wide tensors."""
        if self._whole:
            return self._whole.backward(queries, keys)
        (_, q, _, _), (k, v) = queries, keys
        dq, dk, dv = torch.zeros_like(q), *(torch.zeros_like(t, dtype=wide(t)) for t in keys)
        for block in limited(self._tiling()):
            acc = _accumulator(dq, block)
            add_block_gradients(self._exact, queries, keys, block, [acc, dk, dv])
            store(dq, block, acc)
            del acc
        dk = dk.to(k.dtype)
        return dq, dk, dv.to(v.dtype)

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the output over q and return it."""
        for block in limited(self._tiling()):
            acc, _ = forward_rows(self._exact, q, (k, v), block)
            store(q, block, acc)
            del acc
        return q

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k and v from the inputs alone; inplace: that of q over q."""
        dq = q if inplace else torch.zeros_like(q)
        dk, dv = (torch.zeros_like(t, dtype=wide(t)) for t in (k, v))
        for block in limited(self._tiling()):
            acc, lse = forward_rows(self._exact, q, (k, v), block)
            out = acc.to(q.dtype)
            del acc
            do, rows = (t[:, block.heads, block.rows] for t in (grad_out, q))
            dq_rows = torch.zeros_like(rows, dtype=wide(q))
            own, of_block = (do, rows, out, lse), calls(block.pieces, q, k, block.heads.start)
            add_gradients(self._exact, own, (k, v), [dq_rows, dk, dv], of_block)
            store(dq, block, dq_rows)
            del do, rows, out, own, dq_rows
        dk = dk.to(k.dtype)
        return dq, dk, dv.to(v.dtype)


class SetKernel:
    """An AttentionKernel of few large pieces, with sums like their results.

    pieces: generated again for every pass. None is a first one, or those that are have every row;
    the results of one with all rows and heads are those of the pass, or the first sums.
    """

    def __init__(self, exact: ExactKernel, pieces: Callable[[], Iterable[Piece]]) -> None:
        self._exact, self._pieces = exact, pieces

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and its log-sum-exp."""
        pieces, sums = list(self._pieces()), list[Tensor]()
        if not _has_all(pieces[0], q):
            new = q.new_empty if pieces[0].is_first else q.new_zeros
            sums = [new(*q.shape[:3], v.shape[3]), new(q.shape[:3], dtype=wide(q))]
            if not pieces[0].is_first:
                sums[1].fill_(-math.inf)
        merge(self._exact, q, (k, v), sums, calls(pieces, q, k))
        return sums[0], sums[1]

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        q, (k, v), pieces, sums = queries[1], keys, list(self._pieces()), list[Tensor]()
        if not _has_all(pieces[0], q):
            new = torch.empty_like if pieces[0].is_first else torch.zeros_like
            sums = [new(q), new(k), new(v)]
        add_gradients(self._exact, queries, keys, sums, calls(pieces, q, k))
        return sums[0], sums[1], sums[2]


def _has_all(piece: Piece, q: Tensor) -> bool:
    """Return True if a piece has all rows and heads of q."""
    (batch, heads, tokens), rows = q.shape[:3], piece.rows
    if piece.index is not None or not piece.is_first or isinstance(rows, Tensor):
        return False
    has_rows = len(range(tokens)[rows]) * piece.sets == tokens and (batch == 1 or not piece.apart)
    return has_rows and len(range(heads)[piece.heads]) == heads


@dataclass(frozen=True)
class Call:
    """A kernel call of a piece, with its query heads, KV heads and sequences of the batch."""

    piece: Piece
    heads: slice
    kv_heads: slice
    batch: slice

    def take(self, rows: Tensors, keys: Tensors) -> Tensors:
        """Return rows and keys of tensors, (B S, H, tokens, D): views for slices, else copies."""
        places = self.places(rows, keys)
        return places if self.piece.index is None else take_rows(places, self.piece.index)

    def places(self, rows: Tensors, keys: Tensors) -> Tensors:
        """Return what `take` returns; if the piece has an index, all rows and keys."""
        piece = self.piece
        given = [(t, self.heads, piece.rows) for t in rows]
        given += [(t, self.kv_heads, piece.keys) for t in keys]
        if piece.index is not None:
            return [t[self.batch, heads] for t, heads, _ in given]
        return [take(t[self.batch], heads, tokens, piece) for t, heads, tokens in given]


def calls(pieces: Iterable[Piece], q: Tensor, k: Tensor, first: int = 0) -> Iterator[Call]:
    """Yield the kernel calls of pieces, whose index tensors are on the device.

    first: head from which the heads of calls are counted.
    """
    for piece in limited(pieces):
        both = piece.rows, piece.keys
        rows, keys = (t.to(q.device) if isinstance(t, Tensor) else t for t in both)
        piece = replace(piece, rows=rows, keys=keys)
        # sets are rows of the batch, so that each sequence is a call
        batches = [slice(b, b + 1) for b in range(q.shape[0])] if piece.apart else [ALL]
        of_heads = kv_heads_of(piece.heads, q.shape[1] // k.shape[1])
        for (heads, kv_heads), batch in product(of_heads, batches):
            own = slice(heads.start - first, heads.stop - first, heads.step)
            yield Call(piece, own, kv_heads, batch)


def merge(
    exact: ExactKernel, q: Tensor, keys: Pair, sums: list[Tensor], own_calls: Iterable[Call]
) -> None:
    """Merge calls into the softmax that sums hold: out (B, Hq, N, D) and lse (B, Hq, N), in place.

    Rows without any key so far are 0 and -inf. Without sums the first call makes them.
    """
    for call in own_calls:
        piece, (own, k, v) = call.piece, call.take([q], keys)
        places = call.places(sums, [])
        if not sums:
            sums += [as_rows(t, piece.sets) for t in exact.forward(own, k, v, piece.causal)]
        elif piece.is_first:
            put_rows(places, exact.forward(own, k, v, piece.causal), piece.index)
        elif piece.index is not None:
            parts = exact.forward(own, k, v, piece.causal)
            merge_part(places[0], places[1], *parts, piece.index)
            del parts
        else:
            exact.merge(own, (k, v), (places[0], places[1]), piece.causal, piece.mask)
            if isinstance(piece.rows, Tensor):
                for total, copy in zip(sums, places, strict=True):
                    rows = as_rows(copy, len(piece.rows))
                    total[call.batch, call.heads].index_copy_(2, piece.rows.flatten(), rows)
                del copy, rows
        del own, k, v, places


def add_gradients(
    exact: ExactKernel, queries: Queries, keys: Pair, sums: list[Tensor], own_calls: Iterable[Call]
) -> None:
    """Add the gradients of calls to sums, those of q, k and v, in place.

    queries: the output and lse belong to the whole softmax. Without sums the first call makes them.
    """
    for call in own_calls:
        piece, (grad_out, q, out, lse, k, v) = call.piece, call.take(queries, keys)
        own = grad_out, q, out, lse
        if isinstance(piece.rows, Tensor) or isinstance(piece.keys, Tensor):
            parts = exact.backward(own, (k, v), piece.causal, piece.mask)
            dq, dk, dv = (total[call.batch] for total in sums)
            _add(dq, call.heads, piece.rows, parts[0])
            _add(dk, call.kv_heads, piece.keys, parts[1])
            _add(dv, call.kv_heads, piece.keys, parts[2])
            del parts
        elif not sums:
            sums += [as_rows(t, piece.sets) for t in exact.backward(own, (k, v), piece.causal)]
        elif piece.index is not None or piece.is_first:
            parts = exact.backward(own, (k, v), piece.causal)
            places = call.places(sums[:1], sums[1:])
            put_rows(places, parts, piece.index, add=not piece.is_first)
            del parts
        else:
            dq, dk, dv = call.places(sums[:1], sums[1:])
            exact.add_gradients(own, (k, v), (dq, dk, dv), piece.causal, piece.mask)
        del grad_out, q, out, lse, k, v, own


def forward_rows(
    exact: ExactKernel, q: Tensor, keys: Pair, block: RowBlock, acc: Tensor | None = None
) -> Pair:
    """Return the output and log-sum-exp of a row block; acc: zeros, by default wide ones."""
    rows = q[:, block.heads, block.rows]
    if acc is None:
        acc = rows.new_zeros(*rows.shape[:3], keys[1].shape[3], dtype=wide(q))
    acc_lse = acc.new_full(acc.shape[:3], -math.inf, dtype=wide(q))
    merge(exact, rows, keys, [acc, acc_lse], calls(block.pieces, q, keys[0], block.heads.start))
    return acc, acc_lse


def add_block_gradients(
    exact: ExactKernel, queries: Queries, keys: Pair, block: RowBlock, sums: list[Tensor]
) -> None:
    """Add the gradients of a row block to sums: those of its rows of q, and those of k and v."""
    grad_out, q, out, lse = (t[:, block.heads, block.rows] for t in queries)
    of_block = calls(block.pieces, queries[1], keys[0], block.heads.start)
    add_gradients(exact, (grad_out, q, out, lse), keys, sums, of_block)


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


def as_rows(value: Tensor, sets: int) -> Tensor:
    """Return a tensor (B S, H, tokens, D) of sets as (B, H, S tokens, D)."""
    return torch.unflatten(value, 0, (-1, sets)).transpose(1, 2).flatten(2, 3)


def _accumulator(target: Tensor, block: RowBlock) -> Tensor:
    """Return zeros for a row block: a view of the target if that is wide enough, or wide ones.

    The sum of two parts is rounded once, wherever it is stored; kernels for CPUs add to wide sums.
    """
    view = target[:, block.heads, block.rows]
    if target.dtype == wide(target):
        return view
    is_exact = len(block.pieces) <= 2 and device_kind(target) == "cuda"
    return view if is_exact else view.new_zeros(view.shape, dtype=wide(target))


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for a float64 tensor."""
    return torch.promote_types(tensor.dtype, torch.float32)


def store(target: Tensor, block: RowBlock, value: Tensor) -> None:
    """Write the results of a row block to their place, unless they are a view of it."""
    view = target[:, block.heads, block.rows]
    if view.data_ptr() != value.data_ptr():
        view.copy_(value)


def _add(total: Tensor, heads: slice, tokens: Index, part: Tensor) -> None:
    if isinstance(tokens, Tensor):
        part = as_rows(part, len(tokens)).to(total.dtype)
        total[:, heads].index_add_(2, tokens.flatten(), part)
    else:
        total[:, heads, tokens].add_(part)


def take(tensor: Tensor, heads: slice, tokens: Index, piece: Piece | None = None) -> Tensor:
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
    taken = tensor[:, heads].index_select(2, tokens.flatten())
    return torch.unflatten(taken, 2, tuple(tokens.shape)).transpose(1, 2).flatten(0, 1)
