"""The float64 reference: output and gradients of some rows, computed over all ranks.

It is one softmax by definition, from the implementation's own pattern: weights are multiplicity
times exp(score), divided by their sum. Each rank computes with its own keys, a chunk at a time. The
ranks exchange the rows, and for each a maximum, a sum and a sum of values; no tensor is gathered on
one rank. A key that several ranks have is counted on the lowest of them only. A GPU with free
memory checks its own tensors; what ranks exchange goes through the CPU.

Letters: B batch, Hq heads, Hk kv_heads, R rows, K keys of a chunk, D head_dim, Dv
v_head_dim. All tensors here are float64. A module multiplies q, k, v and out by one matrix each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.distributed.shard import (
    all_reduce_max,
    find_gap,
    find_rows,
    gather_shards,
    is_owner,
)
from longseq_bench.kernels.base import Triple
from longseq_bench.patterns.visible_keys import as_run, visible_keys

KEY_CHUNK = 65_536
"""Keys that are computed together, at most."""
MAX_KEPT_BYTES = 2**28
"""Bytes of multiplicities (rows, keys) that are kept for other heads and passes, at most."""
CHUNK_ELEMENTS = 2**22
"""Elements (rows, keys) of scores that are computed together, unless a chunk has 1,024 keys."""
MIN_FREE_BYTES = 2**30
"""Free memory with which a GPU checks by itself: it takes some 700 MB at the limits above."""
SLAB_ELEMENTS = 2**22
"""Elements (batch, heads, rows, head_dim) of the rows that are computed together."""

Part = tuple[slice, Tensor | None, dict[int, Tensor] | None]
"""`at`, `kept` and `seen` of a KeyChunk."""


@dataclass(frozen=True)
class Sum:
    """A tensor, and the sums of squares or of magnitudes of each element's terms, which may cancel.

    plain: the tensor as a plain implementation in half precision computes it, if that counts.
    """

    value: Tensor
    squares: Tensor | None = None
    plain: Tensor | None = None
    magnitudes: Tensor | None = None

    def at(self, head: tuple[int, int], rows: Tensor) -> "Sum":
        """Return some rows of a head, by its index."""
        sizes = self.squares, self.plain, self.magnitudes
        return Sum(self.value[head][rows], *(t if t is None else t[head][rows] for t in sizes))


@dataclass(frozen=True)
class CheckedRows:
    """The checked rows of some rows of the batch, the same on every rank; all (B, Hq, R, D or Dv).

    raw_q: q as given; q: after its projection.
    attended: the attention's output; out: after its projection.
    magnitudes: of the terms of each element of out, added up: the sum over keys of |weight * v|.
    lse: (B, Hq, R, 1), -inf if a row sees no key.
    """

    batch: range
    raw_q: Tensor
    q: Tensor
    lse: Tensor
    attended: Tensor
    out: Tensor
    magnitudes: Tensor


@dataclass(frozen=True)
class KeyChunk:
    """Some of this rank's keys of one batch row and key head (K, D), with their values (K, Dv).

    at: the slice of this rank's keys that they are from.
    kept: their indices in the slice; None if they are all of it.
    is_counted: if this is the lowest rank that has them (see the module).
    raw: k and v as given; keys, values: after their projections.
    seen: how often each row sees each key, (R, K), by `Attention.pattern_of`; None if once.
    Of a sparse pattern keys that no row sees are left out.
    """

    b: int
    head: int
    at: slice
    kept: Tensor | None
    is_counted: bool
    raw: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor
    seen: dict[int, Tensor] | None = None


class Reference:
    """The reference at the query positions `rows`. All ranks call its methods together."""

    def __init__(self, attention: Attention, inputs: Triple, rows: Tensor) -> None:
        self.attention, self.rows = attention, rows
        self.workload, self.group = attention.workload, attention.group
        self.shard = attention.shard
        self.q, self.k, self.v = (t.detach() for t in inputs)
        self.device = torch.device("cpu")
        if self.q.is_cuda:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(self.q.device)[0] >= MIN_FREE_BYTES:
                self.device = self.q.device
        self.matrices = {n: self.own(m) for n, m in attention.projections().items()}
        self.own_index, self.row_index = find_rows(self.shard.queries, rows)
        self.queries, self.keys = gather_shards(self.group, self.shard)
        if missing := find_gap(self.workload, self.queries, self.keys):
            raise ValueError(missing)
        self.scale = 1 / math.sqrt(self.workload.head_dim)
        self._seen: dict[tuple[int, ...], tuple[Tensor, dict[int, Tensor]]] = {}
        self._seen_bytes = 0
        visible, positions = visible_keys(self.workload), rows.numpy()
        ends = (torch.from_numpy(find(positions)) for find in (visible.first, visible.stop))
        self._first, self._stop = ends

    def own(self, tensor: Tensor) -> Tensor:
        """Return a tensor in float64 where the reference is computed."""
        return tensor.detach().to(self.device).double()

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self.group.all_sum(tensor.cpu()).to(self.device)

    def slabs(self) -> Iterator[range]:
        """Yield rows of the batch, so few at a time that their checked rows stay small."""
        w = self.workload
        widest = max(w.head_dim, w.v_head_dim)
        each = max(1, SLAB_ELEMENTS // (w.heads * len(self.rows) * widest))
        for start in range(0, w.batch, each):
            yield range(start, min(start + each, w.batch))

    def rows_of(self, tensor: Tensor, batch: range) -> Tensor:
        """Return the checked rows of a tensor that is sharded like q, (B, Hq, R, D or Dv)."""
        w, rank = self.workload, self.group.rank
        shape = len(batch), w.heads, len(self.rows), tensor.shape[-1]
        found = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for b, head in self.own_queries(batch):
            if is_owner(self.queries, rank, b, head):
                found[b - batch.start, head, self.row_index] = self.own_rows(tensor, b, head)
        return self.all_sum(found)

    def own_queries(self, batch: range) -> list[tuple[int, int]]:
        """Return the (batch row, head) pairs whose queries this rank has."""
        return [(b, h) for b, h in product(batch, self.shard.heads) if b in self.shard.batch]

    def own_rows(self, tensor: Tensor, b: int, head: int) -> Tensor:
        """Return this rank's checked rows of a tensor like its q, (rows, D)."""
        tokens = tensor[self.shard.batch.index(b), self.shard.heads.index(head)]
        return self.own(tokens[self.own_index.to(tokens.device)])

    def forward(self, batch: range) -> CheckedRows:
        """Compute the output of the checked rows by the online softmax over all keys."""
        raw_q = self.rows_of(self.q, batch)
        q = self.projected(raw_q, "q")
        row_max = q.new_full((*q.shape[:3], 1), -math.inf)
        total = torch.zeros_like(row_max)
        attended = q.new_zeros(*q.shape[:3], 2 * self.v.shape[-1])
        for chunk in self.chunks(batch, counted_only=True):
            values = torch.cat([chunk.values, chunk.values.abs()], 1)
            for head, row in self.heads_of(chunk, batch):
                scores = self.scores(q[row], chunk, head)
                old_max = row_max[row].clone()
                row_max[row] = old_max.maximum(scores.amax(-1, keepdim=True))
                scale, weights = (_exp_inplace(t, row_max[row]) for t in (old_max, scores))
                total[row] = total[row] * scale + weights.sum(-1, keepdim=True)
                attended[row] = attended[row] * scale + weights @ values
        global_max = all_reduce_max(self.group, row_max.cpu()).to(self.device)
        scale = _exp_inplace(row_max.clone(), global_max)
        total, attended = self.all_sum(total * scale), self.all_sum(attended * scale)
        attended, magnitudes = (attended / total.where(total > 0, 1.0)).chunk(2, -1)
        out = self.projected(attended, "out")
        if (matrix := self.matrices.get("out")) is not None:
            magnitudes = magnitudes @ matrix.abs()
        return CheckedRows(batch, raw_q, q, global_max + total.log(), attended, out, magnitudes)

    def projected(self, tensor: Tensor, name: str) -> Tensor:
        """Multiply by the module's matrix of that name, if there is one."""
        return tensor @ self.matrices[name] if name in self.matrices else tensor

    def chunks(self, batch: range, counted_only: bool) -> Iterator[KeyChunk]:
        """Yield own keys and values, of a sparse pattern only those that a row may see.

        counted_only: without those that another rank counts, and without chunks of no key.
        """
        shard = self.shard
        for b, head in product(batch, shard.kv_heads):
            is_counted = b in shard.batch and is_owner(self.keys, self.group.rank, b, head)
            if b not in shard.batch or (counted_only and not is_counted):
                continue
            exact = self.attention.is_exact
            for at, kept, seen in self._slices() if exact else self._sparse_slices(head):
                if counted_only and kept is not None and not len(kept):
                    continue
                i, j = shard.batch.index(b), shard.kv_heads.index(head)
                own = (t[i, j, at] for t in (self.k, self.v))
                k, v = (self.own(t if kept is None else t[kept.to(t.device)]) for t in own)
                keys, values = self.projected(k, "k"), self.projected(v, "v")
                yield KeyChunk(b, head, at, kept, is_counted, (k, v), keys, values, seen)

    @property
    def _chunk_size(self) -> int:
        """Keys that are computed together, at most."""
        return min(KEY_CHUNK, max(1024, CHUNK_ELEMENTS // max(1, len(self.rows))))

    def _slices(self) -> Iterator[Part]:
        """Yield all own keys of exact attention."""
        size, tokens = self._chunk_size, len(self.shard.keys)
        for start in range(0, tokens, size):
            at, seen = slice(start, min(start + size, tokens)), None
            keys = self.shard.keys[at]
            run = as_run(keys)
            low, high = (run[0], run[-1]) if run else (keys.min(), keys.max())
            if not (self._first.max() <= low and high < self._stop.min()):
                own = torch.arange(low, high + 1) if run else torch.from_numpy(keys)
                first, stop, own = (t.to(self.device) for t in (self._first, self._stop, own))
                seen = {0: (own >= first[:, None]) & (own < stop[:, None])}
            yield at, None, seen

    def _sparse_slices(self, kv_head: int) -> Iterator[Part]:
        """Yield all own keys of a sparse pattern, cut so that few of a slice may be seen."""
        attention, group = self.attention, self.workload.heads // self.workload.kv_heads
        heads = {attention.pattern_of(h): h for h in range(kv_head * group, (kv_head + 1) * group)}
        may_see = self._may_see(tuple(heads.values()))
        tokens, cuts = len(self.shard.keys), may_see[:: self._chunk_size]
        for start, stop in pairwise(np.unique([*range(0, tokens, KEY_CHUNK), *cuts, tokens])):
            first, last = np.searchsorted(may_see, (start, stop))
            found = self._find_seen(may_see[first:last], heads)
            yield slice(start, stop), found[0] - start, found[1]

    def _may_see(self, heads: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the indices of own keys that rows may see by one of some heads, ascending."""
        each = []
        for head in heads:
            keys = self.attention.keys_seen(self.rows.numpy(), head)
            if keys is None:
                return np.arange(len(self.shard.keys))
            each.append(keys)
        seen = torch.from_numpy(np.unique(np.concatenate(each)))
        return find_rows(self.shard.keys, seen)[0].numpy()

    def _find_seen(
        self, may_see: NDArray[np.int64], heads: dict[int, int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return those of some own keys that rows see, by index, and `KeyChunk.seen` of them."""
        if (key := (*may_see[:1].tolist(), *heads)) in self._seen:
            return self._seen[key]
        rows, positions = self.rows.numpy(), self.shard.keys[may_see]
        counts = [self.attention.multiplicity(rows, positions, h) for h in heads.values()]
        visible = np.any([count.any(0) for count in counts], 0)
        own = [torch.from_numpy(count[:, visible]).to(self.device) for count in counts]
        self._seen_bytes += sum(count.nbytes for count in own)
        if self._seen_bytes > MAX_KEPT_BYTES:
            self._seen.clear()
            self._seen_bytes = sum(count.nbytes for count in own)
        self._seen[key] = torch.from_numpy(may_see[visible]), dict(zip(heads, own, strict=True))
        return self._seen[key]

    def heads_of(self, chunk: KeyChunk, batch: range) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the query heads that use a chunk, with their index into the rows' tensors."""
        group = self.workload.heads // self.workload.kv_heads
        for head in range(chunk.head * group, (chunk.head + 1) * group):
            yield head, (chunk.b - batch.start, head)

    def scores(self, q: Tensor, chunk: KeyChunk, head: int) -> Tensor:
        """Return the scores (R, K) plus the logarithm of each key's multiplicity."""
        scores = (q * self.scale) @ chunk.keys.T
        seen = self.log_multiplicity(chunk, head)
        return scores if seen is None else scores.add_(seen)

    def log_multiplicity(self, chunk: KeyChunk, head: int) -> Tensor | None:
        """Return the logarithm of how often each row sees each key, (R, K); None if always once."""
        if chunk.seen is None:
            return None
        return _log_multiplicity(chunk.seen[self.attention.pattern_of(head)])


class Gradients:
    """Gradients from the checked rows, given the output gradient at these rows.

    Iterate over `of_keys` to its end. Then `close` returns the gradient of q, and `matrices` has
    the sums for the gradients of a module's matrices, (2, D, D) each: values and squares. Those of
    k and v cover this rank's keys only.

    dS = P (dO·v - dO·out) cancels: between its terms if a row sees few keys, and within each dot
    product; the terms of dv cancel by chance. So squares of terms are summed too; they bound the
    rounding error. dO·out is called delta, as in FlashAttention-2.
    """

    def __init__(self, reference: Reference, rows: CheckedRows, grad_out: Tensor) -> None:
        self._reference, self._rows = reference, rows
        self.grad_out = reference.rows_of(grad_out, rows.batch)
        out = reference.matrices.get("out")
        self._d_attended = self.grad_out if out is None else self.grad_out @ out.T
        terms = self._d_attended * rows.attended
        self._delta = terms.sum(-1, keepdim=True)
        self._delta_squares = terms.square().sum(-1, keepdim=True)
        self._dq, self._dq_squares = torch.zeros_like(rows.q), torch.zeros_like(rows.q)
        self.matrices = {n: m.new_zeros(2, *m.shape) for n, m in reference.matrices.items()}

    def of_keys(self) -> Iterator[tuple[KeyChunk, Sum, Sum]]:
        """Yield dk (K, D), dv (K, Dv) of every chunk of own keys, summed over its query heads."""
        reference = self._reference
        for chunk in reference.chunks(self._rows.batch, counted_only=False):
            dk, dk_squares = (torch.zeros_like(chunk.keys) for _ in range(2))
            dv, dv_squares = (torch.zeros_like(chunk.values) for _ in range(2))
            for head, row in reference.heads_of(chunk, self._rows.batch):
                q, d_attended = self._rows.q[row], self._d_attended[row]
                weights = _exp_inplace(reference.scores(q, chunk, head), self._rows.lse[row])
                scaled = weights * reference.scale
                d_scores = scaled * (d_attended @ chunk.values.T - self._delta[row])
                squared = d_attended.square() @ chunk.values.square().T + self._delta_squares[row]
                terms = scaled.square() * squared
                dk += d_scores.T @ q
                dk_squares += terms.T @ q.square()
                dv += weights.T @ d_attended
                dv_squares += weights.square().T @ d_attended.square()
                if chunk.is_counted:
                    self._dq[row] += d_scores @ chunk.keys
                    self._dq_squares[row] += terms @ chunk.keys.square()
            if chunk.is_counted:
                self._add_to_matrix("k", chunk.raw[0], dk, dk_squares)
                self._add_to_matrix("v", chunk.raw[1], dv, dv_squares)
            value = self._before_projection(Sum(dv, dv_squares), "v")
            yield chunk, self._before_projection(Sum(dk, dk_squares), "k"), value

    def close(self) -> Sum:
        """Return dq of the rows, (B, Hq, R, D). All ranks must call it."""
        total, rows = self._reference.all_sum, self._rows
        found = Sum(total(self._dq), total(self._dq_squares))
        assert found.squares is not None
        self._add_to_matrix("q", rows.raw_q, found.value, found.squares)
        self._add_to_matrix("out", rows.attended, self.grad_out, self.grad_out.square())
        return self._before_projection(found, "q")

    def _add_to_matrix(self, name: str, x: Tensor, gradient: Tensor, squares: Tensor) -> None:
        """Add to a matrix's gradient, given its input x and the gradient of the product."""
        if name in self.matrices:
            x, gradient, squares = (t.flatten(0, -2) for t in (x, gradient, squares))
            self.matrices[name][0] += x.T @ gradient
            # the output of attention is a sum, whose rounding error is like its other elements
            size = x.square()
            size = size.maximum(size.mean(-1, keepdim=True)) if name == "out" else size
            self.matrices[name][1] += size.T @ squares

    def _before_projection(self, gradient: Sum, name: str) -> Sum:
        """Return the gradient before a matrix product, from that after it."""
        matrix = self._reference.matrices.get(name)
        if matrix is None:
            return gradient
        squares = None if gradient.squares is None else gradient.squares @ matrix.square().T
        return Sum(gradient.value @ matrix.T, squares)


def _log_multiplicity(count: Tensor) -> Tensor:
    if count.dtype != torch.bool:
        return count.double().log_()
    zeros = torch.zeros(count.shape, dtype=torch.float64, device=count.device)
    return zeros.masked_fill_(~count, -math.inf)


def _exp_inplace(scores: Tensor, row_max: Tensor) -> Tensor:
    """Turn scores into exp(scores - row_max); 0 for a row that has seen no key."""
    return scores.sub_(row_max.nan_to_num(neginf=0.0)).exp_()
