"""The float64 reference: output and gradients of some rows, computed over all ranks.

It is one softmax by definition, from the implementation's own pattern: weights are multiplicity
times exp(score), divided by their sum, to which a sink is added once. Each rank computes with its
own keys, a chunk at a time. The ranks exchange the rows, and for each a maximum, a sum and a sum of
values; no tensor is gathered on one rank. A key that several ranks have is counted on the lowest of
them only. A GPU with free memory checks its own tensors; what ranks exchange goes through the CPU.

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
from longseq_bench.kernels.quantised import rows_of
from longseq_bench.patterns.visible_keys import visible_keys

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
LEAST_SLOPE = 0.1
"""Slope of a capped score in a gradient's magnitude, at least: 1 - (z'/c)² has the error of 1."""

Part = tuple[slice, Tensor | None, dict[int, Tensor] | None]
"""`at`, `kept` and `seen` of a KeyChunk."""


@dataclass(frozen=True)
class Sum:
    """A tensor whose elements are sums of terms, which may cancel.

    size: magnitude of each element that its rounding errors follow, if its own may be smaller.
    plain: the tensor as a plain implementation in half precision computes it, if that counts.
    """

    value: Tensor
    size: Tensor | None = None
    plain: Tensor | None = None

    def at(self, head: tuple[int, int], rows: Tensor) -> "Sum":
        """Return some rows of a head, by its index."""
        others = (None if t is None else t[head][rows] for t in (self.size, self.plain))
        return Sum(self.value[head][rows], *others)


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
        self.q, self.k, self.v = inputs
        self.device = torch.device("cpu")
        if self.q.is_cuda:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(self.q.device)[0] >= MIN_FREE_BYTES:
                self.device = self.q.device
        self.matrices = {n: self.own(m) for n, m in attention.projections().items()}
        sinks = attention.sinks
        self.sinks = None if sinks is None else self.own(sinks)[:, None, None]
        self.own_index, self.row_index = find_rows(self.shard.query_tokens, rows)
        self.queries, self.keys = gather_shards(self.group, self.shard)
        if missing := find_gap(self.workload, self.queries, self.keys):
            raise ValueError(missing)
        self.scale = self.workload.scale
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
                own = (rows_of(t, i, j, at) for t in (self.k, self.v))
                k, v = (self.own(t if kept is None else t[kept.to(t.device)]) for t in own)
                keys, values = self.projected(k, "k"), self.projected(v, "v")
                yield KeyChunk(b, head, at, kept, is_counted, (k, v), keys, values, seen)

    @property
    def _chunk_size(self) -> int:
        """Keys that are computed together, at most."""
        most = KEY_CHUNK * 128 // max(128, self.workload.head_dim)
        return min(most, max(1024, CHUNK_ELEMENTS // max(1, len(self.rows))))

    def _slices(self) -> Iterator[Part]:
        """Yield all own keys of exact attention."""
        size, tokens = self._chunk_size, len(self.shard.keys)
        for start in range(0, tokens, size):
            at, seen = slice(start, min(start + size, tokens)), None
            keys = torch.from_numpy(self.shard.keys[at])
            if not (self._first.max() <= keys.min() and keys.max() < self._stop.min()):
                first, stop, keys = (t.to(self.device) for t in (self._first, self._stop, keys))
                seen = {0: (keys >= first[:, None]) & (keys < stop[:, None])}
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
        return find_rows(self.shard.key_tokens, seen)[0].numpy()

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
        found = torch.from_numpy(may_see[visible]), dict(zip(heads, own, strict=True))
        self._seen_bytes += sum(count.nbytes for count in own)
        if self._seen_bytes <= MAX_KEPT_BYTES:
            self._seen[key] = found
        return found

    def heads_of(self, chunk: KeyChunk, batch: range) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the query heads that use a chunk, with their index into the rows' tensors."""
        group = self.workload.heads // self.workload.kv_heads
        for head in range(chunk.head * group, (chunk.head + 1) * group):
            yield head, (chunk.b - batch.start, head)

    def head_blocks(self, chunk: KeyChunk, batch: range) -> Iterator[tuple[int, tuple[int, slice]]]:
        """Yield the query heads as `heads_of` does, in exact attention many together."""
        heads = [head for head, _ in self.heads_of(chunk, batch)]
        scores = max(1, len(self.rows) * len(chunk.keys))
        size = max(1, CHUNK_ELEMENTS // scores) if self.attention.is_exact else 1
        for head in heads[::size]:
            yield head, (chunk.b - batch.start, slice(head, min(head + size, heads[-1] + 1)))

    def log_multiplicity(self, chunk: KeyChunk, head: int) -> Tensor | None:
        """Return the logarithm of how often each row sees each key, (R, K); None if always once."""
        if chunk.seen is None:
            return None
        count = chunk.seen[self.attention.pattern_of(head)]
        if count.dtype != torch.bool:
            return count.double().log_()
        zeros = torch.zeros(count.shape, dtype=torch.float64, device=count.device)
        return zeros.masked_fill_(~count, -math.inf)


class CheckedRows:
    """Output and gradients of the checked rows of some rows of the batch; all (B, Hq, R, D or Dv).

    exact: None: these are in float64. Else they are as a plain implementation in half precision has
    them, which is what a user would write: scores, softmax and products in torch, each result
    rounded, sums in float32. Its errors are the measure for those of an implementation (check.py).

    Create it on all ranks; for gradients call `set_gradient`, feed every chunk of own keys to
    `add_keys`, and call `close`.

    out: the output in float64, after its projection.
    magnitudes: in float64 the sum over keys of |weight * v|, for each element of out.
    matrices: the sums for the exact gradients of a module's matrices, (2, D, D) each: values and
    squares. Those of k and v cover this rank's keys only. Those of `sink` are (2, Hq, 1).

    dS = P (dO·v - dO·out) cancels: between its terms if a row sees few keys, and within each dot
    product; the terms of dv cancel by chance. So squares of terms are summed too; they bound the
    rounding error. dO·out is called delta, as in FlashAttention-2. With a soft cap c, dS is that of
    the capped score z', times 1 - (z'/c)².
    """

    def __init__(
        self, reference: Reference, batch: range, exact: "CheckedRows | None" = None
    ) -> None:
        """Compute the output by the online softmax over all keys."""
        dtype = getattr(torch, reference.attention.coarsest_dtype) if exact else None
        self._reference, self._batch, self._dtype = reference, batch, dtype
        self._raw_q: Tensor = exact._raw_q if exact else reference.rows_of(reference.q, batch)
        self._q = self._round(reference.projected(self._raw_q, "q"))
        v_head_dim = reference.workload.v_head_dim
        row_max = self._q.new_full((*self._q.shape[:3], 1), -math.inf)
        sinks = reference.sinks
        if sinks is not None:
            row_max = row_max.maximum(sinks.to(row_max))
        if exact:
            # softmax rounds weights that are divided by their sum: in float16 small ones lose bits
            row_max = exact._lse.to(self._q)
        total = torch.zeros_like(row_max)
        attended = self._q.new_zeros(*self._q.shape[:3], v_head_dim * (1 if dtype else 2))
        for chunk in reference.chunks(batch, counted_only=True):
            values = self._round(chunk.values)
            values = values if dtype else torch.cat([values, values.abs()], 1)
            for head, row in reference.head_blocks(chunk, batch):
                scores, _ = self._scores(chunk, head, row)
                old_max = row_max[row].clone()
                row_max[row] = old_max if exact else old_max.maximum(scores.amax(-1, keepdim=True))
                scale, weights = (_exp_inplace(t, row_max[row]) for t in (old_max, scores))
                total[row] = total[row] * scale + weights.sum(-1, keepdim=True)
                attended[row] = attended[row] * scale + self._round(weights) @ values
        global_max = all_reduce_max(reference.group, row_max.cpu()).to(reference.device)
        scale = _exp_inplace(row_max.clone(), global_max)
        total, attended = (reference.all_sum(t * scale) for t in (total, attended))
        if sinks is not None:
            total += (sinks - global_max).exp()
        self._lse: Tensor = global_max + total.log()
        attended = self._round(attended / total.where(total > 0, 1.0))
        self._attended, self.magnitudes = attended[..., :v_head_dim], attended[..., v_head_dim:]
        out, matrix = self._attended, reference.matrices.get("out")
        if matrix is not None:
            out = self._round(out @ matrix.to(out))
            self.magnitudes = self.magnitudes if dtype else self.magnitudes @ matrix.abs()
        self.out = out.double()

    def set_gradient(self, grad_out: Tensor) -> None:
        """Set the output gradient (B, Hq, R, D) in float64, before `add_keys`."""
        matrices = self._reference.matrices
        d_attended = grad_out @ matrices["out"].T if "out" in matrices else grad_out
        self._grad_out, self._d_attended = grad_out, self._round(d_attended)
        terms = self._d_attended * self._attended
        self._delta = terms.sum(-1, keepdim=True)
        self._delta_squares = terms.square().sum(-1, keepdim=True)
        self._dq, self._dq_squares = torch.zeros_like(self._q), torch.zeros_like(self._q)
        exact = {} if self._dtype else matrices
        self.matrices = {n: m.new_zeros(2, *m.shape) for n, m in exact.items()}
        if self._reference.sinks is not None and not self._dtype:
            weights = (self._reference.sinks - self._lse).exp()
            sums = -weights * self._delta, weights.square() * self._delta_squares
            self.matrices["sink"] = torch.stack([t.sum((0, 2)) for t in sums])

    def add_keys(self, chunk: KeyChunk) -> tuple[Sum, Sum]:
        """Add a chunk to dq; return its dk (K, D) and dv (K, Dv), summed over its query heads."""
        reference, scale = self._reference, self._reference.scale
        keys, values = self._round(chunk.keys), self._round(chunk.values)
        dk, dk_squares = keys.new_zeros(2, *keys.shape)
        dv, dv_squares = values.new_zeros(2, *values.shape)
        for head, row in reference.heads_of(chunk, self._batch):
            q, d_attended = self._q[row], self._d_attended[row]
            scores, slopes = self._scores(chunk, head, row)
            weights = _exp_inplace(scores, self._lse[row])
            d_weights = self._round(d_attended @ values.T)
            d_scores = self._round(weights * (d_weights - self._delta[row]))
            if slopes is not None:
                d_scores = self._round(d_scores * slopes)
            dk = self._round(dk + self._round(d_scores.T @ q * scale))
            dv = self._round(dv + self._round(self._round(weights).T @ d_attended))
            if chunk.is_counted:
                self._dq[row] += d_scores @ keys * scale
            if self._dtype:
                continue
            squared = d_attended.square() @ values.square().T + self._delta_squares[row]
            terms = (weights * scale).square() * squared
            if slopes is not None:
                terms *= slopes.clamp_min(LEAST_SLOPE).square()
            dk_squares += terms.T @ q.square()
            dv_squares += weights.square().T @ d_attended.square()
            if chunk.is_counted:
                self._dq_squares[row] += terms @ keys.square()
        if chunk.is_counted:
            self._add_to_matrix("k", chunk.raw[0], dk, dk_squares)
            self._add_to_matrix("v", chunk.raw[1], dv, dv_squares)
        return self._before(dk, dk_squares, "k"), self._before(dv, dv_squares, "v")

    def close(self) -> Sum:
        """Return dq of the rows, (B, Hq, R, D). All ranks must call it."""
        dq, squares = map(self._reference.all_sum, (self._dq, self._dq_squares))
        self._add_to_matrix("q", self._raw_q, dq, squares)
        self._add_to_matrix("out", self._attended, self._grad_out, self._grad_out.square())
        return self._before(self._round(dq), squares, "q")

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor.float().to(self._dtype).float() if self._dtype else tensor

    def _scores(
        self, chunk: KeyChunk, head: int, row: tuple[int, int | slice]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores (..., R, K) plus the logarithm of each multiplicity, and slopes."""
        scale, parts = self._reference.scale, self._reference.workload.scores
        if self._dtype:
            scores = self._round(self._round(self._q[row] @ self._round(chunk.keys).T) * scale)
        else:
            scores = (self._q[row] * scale) @ chunk.keys.T
        scores, slopes = parts.of(scores), None
        if parts.soft_cap:
            scores = self._round(scores)
            slopes = parts.slopes(scores)
        seen = self._reference.log_multiplicity(chunk, head)
        return scores if seen is None else scores.add_(seen.to(scores)), slopes

    def _add_to_matrix(self, name: str, x: Tensor, gradient: Tensor, squares: Tensor) -> None:
        """Add to a matrix's gradient, given its input x and the gradient of the product."""
        if name in self.matrices:
            x, gradient, squares = (t.flatten(0, -2) for t in (x, gradient, squares))
            self.matrices[name][0] += x.T @ gradient
            # the output of attention is a sum, whose rounding error is like its other elements
            size = x.square()
            size = size.maximum(size.mean(-1, keepdim=True)) if name == "out" else size
            self.matrices[name][1] += size.T @ squares

    def _before(self, gradient: Tensor, squares: Tensor, name: str) -> Sum:
        """Return the gradient before a matrix product, from that after it, in float64."""
        if name in self._reference.matrices:
            matrix = self._reference.matrices[name].to(gradient)
            gradient = self._round(gradient @ matrix.T)
            squares = squares @ matrix.square().T
        return Sum(gradient.double(), squares.sqrt())


def _exp_inplace(scores: Tensor, row_max: Tensor) -> Tensor:
    """Turn scores into exp(scores - row_max); 0 for a row that has seen no key."""
    return scores.sub_(row_max.nan_to_num(neginf=0.0)).exp_()
