"""What some rows must come out as, and their gradients, in float64, over all ranks.

One softmax by its definition from the implementation's own pattern: weight multiplicity times
exp(score), over the sum of the weights. Each rank looks at its own keys, a chunk at a time; what
travels is the rows, and a maximum, a sum and a sum of values for each. No tensor is brought
together on a rank. A part that several ranks hold is counted at the lowest of them.

Letters: B batch, Hq heads, Hk kv_heads of the workload, R rows, K keys of a chunk, D head_dim; all
tensors here are float64 on the CPU. A module multiplies q, k, v and out by a matrix each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.worker.shard_coverage import all_reduce_max, gap, owns, parts_of, rows_held

KEY_CHUNK = 65_536
SLAB_ELEMENTS = 2**22
"""Of the rows that are worked on together, over batch, heads and head_dim."""


@dataclass(frozen=True)
class Sum:
    """A gradient, and the sums of squares of its terms before they cancel, where they do."""

    value: Tensor
    squares: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The checked rows of some rows of the batch, the same on every rank; all (B, Hq, R, D).

    q: projected.  mixed: the attention's output.  out: that, projected.
    lse: (B, Hq, R, 1), -inf where a row sees nothing.
    """

    batch: range
    given: Tensor
    q: Tensor
    lse: Tensor
    mixed: Tensor
    out: Tensor


@dataclass(frozen=True)
class Chunk:
    """Some own keys of one row of the batch and key head (K, D): as given, and projected.

    at: into own keys.  counts: whether this rank is the one at which they count.
    """

    b: int
    head: int
    at: slice
    counts: bool
    raw: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor


class Reference:
    """For an attention's inputs and some query positions, `rows`. All ranks have to make it."""

    def __init__(
        self, attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], rows: Tensor
    ) -> None:
        self.attention, self.rows = attention, rows
        self.workload, self.group, self.shard = (
            attention.workload, attention.group, attention.shard,
        )  # fmt: skip
        self.q, self.k, self.v = (t.detach() for t in inputs)
        self.matrices = {n: m.detach().cpu().double() for n, m in attention.projections().items()}
        self.local, self.which = rows_held(self.shard.queries, rows)
        self.queries, self.keys = parts_of(self.group, self.shard)
        if missing := gap(self.workload, self.queries, self.keys):
            raise ValueError(missing)
        self.scale = 1 / math.sqrt(self.workload.head_dim)

    def slabs(self) -> Iterator[range]:
        """Rows of the batch, so many at a time that the checked rows of all heads stay small."""
        w = self.workload
        each = max(1, SLAB_ELEMENTS // (w.heads * len(self.rows) * w.head_dim))
        for start in range(0, w.batch, each):
            yield range(start, min(start + each, w.batch))

    def rows_of(self, tensor: Tensor, batch: range) -> Tensor:
        """The checked rows of a tensor that is spread as q is, (B, Hq, R, D)."""
        w, rank = self.workload, self.group.rank
        found = torch.zeros(len(batch), w.heads, len(self.rows), w.head_dim, dtype=torch.float64)
        for b, head in self.own_queries(batch):
            if owns(self.queries, rank, b, head):
                found[b - batch.start, head, self.which] = self.own_rows(tensor, b, head)
        return self.group.all_sum(found)

    def own_queries(self, batch: range) -> Iterator[tuple[int, int]]:
        """Rows of the batch and heads that this rank holds queries of."""
        yield from ((b, h) for b, h in product(batch, self.shard.heads) if b in self.shard.batch)

    def own_rows(self, tensor: Tensor, b: int, head: int) -> Tensor:
        """The checked rows that this rank holds of a tensor like its q, (rows, D), as they are."""
        held = tensor[self.shard.batch.index(b), self.shard.heads.index(head)]
        return held.detach()[self.local.to(held.device)].cpu().double()

    def forward(self, batch: range) -> Rows:
        """Output of the checked rows."""
        given = self.rows_of(self.q, batch)
        q = self.projected(given, "q")
        top = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float64)
        total, mixed = torch.zeros_like(top), torch.zeros_like(q)
        for chunk in self._chunks(batch, everywhere=False):
            for head, row in self._heads(chunk, batch):
                scores = self._scores(q[row], chunk, head)
                before = top[row].clone()
                top[row] = before.maximum(scores.amax(-1, keepdim=True))
                kept, weights = _over(before, top[row]), _over(scores, top[row])
                total[row] = total[row] * kept + weights.sum(-1, keepdim=True)
                mixed[row] = mixed[row] * kept + weights @ chunk.values
        joint = all_reduce_max(self.group, top)
        kept = _over(top, joint)
        total, mixed = self.group.all_sum(total * kept), self.group.all_sum(mixed * kept)
        mixed /= total.where(total > 0, 1.0)
        return Rows(batch, given, q, joint + total.log(), mixed, self.projected(mixed, "out"))

    def projected(self, tensor: Tensor, name: str) -> Tensor:
        """Multiplied by the module's matrix of that name, where there is one."""
        return tensor @ self.matrices[name] if name in self.matrices else tensor

    def _chunks(self, batch: range, everywhere: bool) -> Iterator[Chunk]:
        """Own keys and values; everywhere: those too that count at another rank."""
        shard = self.shard
        for b, head in product(batch, shard.kv_heads):
            counts = b in shard.batch and owns(self.keys, self.group.rank, b, head)
            if b not in shard.batch or not (counts or everywhere):
                continue
            i, j = shard.batch.index(b), shard.kv_heads.index(head)
            for start in range(0, len(shard.keys), KEY_CHUNK):
                at = slice(start, min(start + KEY_CHUNK, len(shard.keys)))
                k, v = (t[i, j, at].cpu().double() for t in (self.k, self.v))
                keys, values = self.projected(k, "k"), self.projected(v, "v")
                yield Chunk(b, head, at, counts, (k, v), keys, values)

    def _heads(self, chunk: Chunk, batch: range) -> Iterator[tuple[int, tuple[int, int]]]:
        """The query heads that use a chunk, and where they stand in the rows' tensors."""
        group = self.workload.heads // self.workload.kv_heads
        for head in range(chunk.head * group, (chunk.head + 1) * group):
            yield head, (chunk.b - batch.start, head)

    def _scores(self, q: Tensor, chunk: Chunk, head: int) -> Tensor:
        """(R, K), the logarithm of how often a key is seen added."""
        positions = self.shard.keys[chunk.at]
        count = self.attention.multiplicity(self.rows.numpy(), positions, head)
        seen = torch.from_numpy(np.ascontiguousarray(count))
        return q @ chunk.keys.T * self.scale + seen.double().log()


class Gradients:
    """Gradients of the rows' share, given the output gradient at the rows.

    `of_keys` has to be walked through; then `close` gives those of q, and `parameters` those of a
    module's matrices.

    dS = P (dO·v - dO·out) cancels, between its terms where a row sees few keys and within each dot
    product, so the squares of what is added tell how large a rounding may be.
    """

    def __init__(self, reference: Reference, rows: Rows, grad_out: Tensor) -> None:
        self._reference, self._rows = reference, rows
        self._out = reference.rows_of(grad_out, rows.batch)
        out = reference.matrices.get("out")
        self._d_mixed = self._out if out is None else self._out @ out.T
        terms = self._d_mixed * rows.mixed
        self._inner = terms.sum(-1, keepdim=True)
        self._inner_squares = terms.square().sum(-1, keepdim=True)
        self._dq, self._dq_squares = torch.zeros_like(rows.q), torch.zeros_like(rows.q)
        self._matrices = {n: torch.zeros(2, *m.shape).double() for n, m in
                          reference.matrices.items()}  # fmt: skip

    def of_keys(self) -> Iterator[tuple[Chunk, Sum, Sum]]:
        """dk and dv (K, D) of every chunk of own keys, summed over the query heads that use it."""
        reference = self._reference
        for chunk in reference._chunks(self._rows.batch, everywhere=True):
            dk, squares, dv = (torch.zeros_like(chunk.keys) for _ in range(3))
            for head, row in reference._heads(chunk, self._rows.batch):
                self._add(chunk, head, row, dk, squares, dv)
            if chunk.counts:
                self._count("k", chunk.raw[0], dk, squares)
                self._count("v", chunk.raw[1], dv, dv.square())
            value = self._unprojected(Sum(dv), "v")
            yield chunk, self._unprojected(Sum(dk, squares), "k"), value

    def close(self) -> Sum:
        """dq of the rows, (B, Hq, R, D). All ranks have to call it."""
        total, rows = self._reference.group.all_sum, self._rows
        found = Sum(total(self._dq), total(self._dq_squares))
        assert found.squares is not None
        self._count("q", rows.given, found.value, found.squares)
        self._count("out", rows.mixed, self._out, self._out.square())
        return self._unprojected(found, "q")

    def parameters(self) -> dict[str, Tensor]:
        """Sums for the matrices' gradients, (2, D, D) each: values and squares. Those of k and v
        are of this rank's keys alone."""
        return self._matrices

    def _add(
        self, chunk: Chunk, head: int, row: tuple[int, int], dk: Tensor, squares: Tensor, dv: Tensor
    ) -> None:
        """One query head's share."""
        q, d_mixed, reference = self._rows.q[row], self._d_mixed[row], self._reference
        weights = _over(reference._scores(q, chunk, head), self._rows.lse[row])
        scaled = weights * reference.scale
        d_scores = scaled * (d_mixed @ chunk.values.T - self._inner[row])
        spread = d_mixed.square() @ chunk.values.square().T + self._inner_squares[row]
        terms = scaled.square() * spread
        dk += d_scores.T @ q
        squares += terms.T @ q.square()
        dv += weights.T @ d_mixed
        if chunk.counts:
            self._dq[row] += d_scores @ chunk.keys
            self._dq_squares[row] += terms @ chunk.keys.square()

    def _count(self, name: str, given: Tensor, gradient: Tensor, squares: Tensor) -> None:
        """Of a matrix: what it was multiplied with, and the gradient of the product."""
        if name in self._matrices:
            given, gradient, squares = (t.flatten(0, -2) for t in (given, gradient, squares))
            self._matrices[name][0] += given.T @ gradient
            self._matrices[name][1] += given.square().T @ squares

    def _unprojected(self, given: Sum, name: str) -> Sum:
        """The gradient of what a matrix multiplied, from that of the product."""
        matrix = self._reference.matrices.get(name)
        if matrix is None:
            return given
        squares = None if given.squares is None else given.squares @ matrix.square().T
        return Sum(given.value @ matrix.T, squares)


def _over(scores: Tensor, top: Tensor) -> Tensor:
    """exp(scores - top); 0 where nothing was seen at all."""
    return (scores - top.nan_to_num(neginf=0.0)).exp_()
