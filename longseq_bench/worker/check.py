"""The numerics check: an output and its gradients against a float64 reference (see errors.py).

The reference is one softmax built from the implementation's own pattern, row by row. Every row of a
short sequence is checked; of a long one those of `inputs.checked_rows`. Gradients can be checked at
any length, because the output gradient is zero outside the checked rows: then dK and dV are sums
over the checked rows. Every rank checks its part, and all agree on the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import all_reduce_max
from longseq_bench.worker.errors import PARAMETERS, TINY, Errors, row_scale
from longseq_bench.worker.inputs import Triple
from longseq_bench.worker.reference import CheckedRows, Gradients, KeyChunk, Reference, Sum


def check(
    attention: Attention,
    inputs: Triple,
    out: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
    grads: Triple | None = None,
) -> Errors:
    """Return this rank's errors. All ranks must call it.

    Gradients of a module's matrices are checked too.

    inputs: q (B, Hq, N, D), k (B, Hk, M, D) and v (B, Hk, M, Dv) of this rank.
    out: (B, Hq, N, Dv), compared at `rows`.
    rows: ascending global positions, the same on all ranks.
    grad_out: like out; it must be zero outside `rows`.
    grads: dq (compared at `rows`), dk and dv, or None for a forward alone.
    """
    w, dtype = attention.workload, attention.coarsest_dtype
    errors = Errors(w.heads, group=w.heads // w.kv_heads)
    with torch.no_grad():
        reference = Reference(attention, inputs, rows)
        backward = None if grads is None else _Backward(reference, grads, errors)
        for batch in reference.slabs():
            checked = reference.forward(batch)
            plain = None if dtype == "float32" else PlainRows(reference, checked, dtype)
            usual = plain.out if plain else None
            _compare_rows(errors, "out", reference, out, checked, Sum(checked.out), usual)
            if backward and grad_out is not None:
                backward.add(checked, grad_out, plain)
        if backward:
            backward.close()
    return errors


MAX_ROWS, MAX_BYTES = 32_768, 2**24
"""Size of a slice, so small that it stays in a CPU's cache. A pass may leave almost no free memory,
and temporaries of a check take up to four times that, 64 MiB."""


def row_slices(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows (n, D) of each head of a tensor (B, H, N, D), as views."""
    tensor = tensor.detach()
    row_bytes = max(1, tensor.shape[-1] * tensor.element_size())
    rows = max(1, min(MAX_ROWS, MAX_BYTES // row_bytes))
    # not flatten(0, 1): it copies a tensor whose heads are next to its tokens
    for heads in tensor:
        for head in heads:
            yield from head.split(rows)


def is_finite(tensor: Tensor) -> bool:
    """Return True if every number of a tensor (B, H, N, D) is finite."""
    # a sum is not finite if a term is not, and is much cheaper; it may overflow, though
    return all(
        bool(torch.isfinite(part.sum()) or torch.isfinite(part).all())
        for part in row_slices(tensor)
    )


def count_zero_rows(out: Tensor, group: Group) -> tuple[int, int]:
    """Return how many (batch, head, token) rows of the output are zero, and all, over all ranks."""
    zeros = rows = 0
    for part in row_slices(out):
        zeros += int((part.abs().amax(-1) == 0).sum())
        rows += len(part)
    zeros, rows = group.all_sum(torch.tensor([zeros, rows])).tolist()
    return int(zeros), int(rows)


def all_finite(tensors: list[Tensor], group: Group) -> bool:
    """Return whether every number on every rank is finite."""
    found = all(is_finite(tensor) for tensor in tensors)
    return not group.all_max(float(not found))[0]


class _Backward:
    """Comparison of gradients, a few rows of the batch at a time."""

    def __init__(self, reference: Reference, grads: Triple, errors: Errors) -> None:
        self._reference, self._grads, self._errors = reference, grads, errors
        w = reference.workload
        # the largest dk and dv of keys that no checked row sees: their reference is 0, so they are
        # compared with the largest reference of their head, perhaps on another rank
        self._unseen = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
        self._largest = torch.zeros_like(self._unseen)
        self._matrices: dict[str, Tensor] = {}

    def add(self, rows: CheckedRows, grad_out: Tensor, plain: PlainRows | None) -> None:
        reference, shard = self._reference, self._reference.shard
        gradients = Gradients(reference, rows, grad_out)
        if plain:
            plain.set_gradient(gradients.grad_out)
        for chunk, *sums in gradients.of_keys():
            i, j = shard.batch.index(chunk.b), shard.kv_heads.index(chunk.head)
            usual = plain.add_keys(chunk) if plain else (None, None)
            for n, (name, expected) in enumerate(zip(("dk", "dv"), sums, strict=True)):
                got = reference.own(self._grads[n + 1][i, j, chunk.at])
                index = n, chunk.b, chunk.head
                kept = torch.arange(len(got)) if chunk.kept is None else chunk.kept
                self._errors.add(name, got[kept], expected, math.inf, chunk.head, usual[n])
                is_seen = torch.zeros(len(got), dtype=torch.bool, device=got.device)
                is_seen[kept] = row_scale(expected) > 0
                values_of = (self._unseen, got[~is_seen]), (self._largest, expected.value)
                for found, values in values_of:
                    if values.numel():
                        found[index] = found[index].maximum(values.abs().max().cpu())
        dq, usual_dq = gradients.close(), plain.close() if plain else None
        _compare_rows(self._errors, "dq", reference, self._grads[0], rows, dq, usual_dq)
        for name, matrix_sums in gradients.matrices.items():
            self._matrices[name] = self._matrices.get(name, 0) + matrix_sums

    def close(self) -> None:
        group = self._reference.group
        largest = all_reduce_max(group, self._largest).clamp_min(TINY)
        errors = (self._unseen / largest).nan_to_num(nan=math.inf).amax((1, 2))
        for name, error in zip(("dk", "dv"), errors.tolist(), strict=True):
            self._errors.raise_to(name, error)
        parameters = self._reference.attention.parameter_gradients()
        for name, sums in self._matrices.items():
            value, squares = self._reference.all_sum(sums) if name in ("k", "v") else sums
            got = parameters.get(name, torch.full_like(value, math.nan))
            self._errors.add(PARAMETERS[name], got, Sum(value, squares))


def _compare_rows(
    errors: Errors, name: str, reference: Reference, got: Tensor, rows: CheckedRows, expected: Sum,
    plain: Tensor | None,
) -> None:  # fmt: skip
    """Compare this rank's checked rows of a tensor that is sharded like q."""
    for b, head in reference.own_queries(rows.batch):
        index = b - rows.batch.start, head
        magnitude = float(expected.value[index].abs().max())
        squares = None if expected.squares is None else expected.squares[index][reference.row_index]
        own = Sum(expected.value[index][reference.row_index], squares)
        usual = None if plain is None else plain[index][reference.row_index]
        errors.add(name, reference.own_rows(got, b, head), own, magnitude, head, usual)


class PlainRows:
    """A plain implementation in half precision, on the rows of the float64 reference.

    It is what a user would write: scores, softmax and products in torch, each result rounded to the
    dtype, sums in float32. Its errors are the measure for those of an implementation (errors.py).
    The log-sum-exp comes from the reference, so that a chunk of keys is visited once.

    Create it on all ranks. Feed each chunk of `Gradients.of_keys` to `add_keys`. Its `out` is
    (B, Hq, R, Dv).
    """

    def __init__(self, reference: Reference, rows: CheckedRows, dtype: DType) -> None:
        self._reference, self._rows = reference, rows
        self._dtype = getattr(torch, dtype)
        self._q = self._round(rows.q.float())
        total, attended = torch.zeros_like(rows.lse), torch.zeros_like(rows.attended)
        for chunk in reference.seen_chunks(rows.batch):
            values = self._round(chunk.values.float())
            for head, row in reference.heads_of(chunk, rows.batch):
                weights = self._weights(chunk, head, row)
                total[row] += weights.sum(-1, keepdim=True)
                attended[row] += (self._round(weights) @ values).double()
        total, attended = reference.all_sum(total), reference.all_sum(attended)
        total = total.where(total > 0, 1.0)
        self._log_total = total.log().float()
        self._attended = self._round((attended / total).float())
        out, matrix = self._attended, reference.matrices.get("out")
        self.out = (out if matrix is None else self._round(out @ matrix.float())).double()
        self._dq = torch.zeros_like(rows.q)

    def set_gradient(self, grad_out: Tensor) -> None:
        """Set the output gradient (B, Hq, R, D) in float64, before `add_keys`."""
        matrix = self._reference.matrices.get("out")
        if matrix is not None:
            grad_out = grad_out @ matrix.T
        self._d_attended = self._round(grad_out.float())
        self._delta = (self._d_attended * self._attended).sum(-1, keepdim=True)

    def add_keys(self, chunk: KeyChunk) -> tuple[Tensor, Tensor]:
        """Add a chunk to dq; return its dk and dv (K, D), rounded after each query head."""
        scale, reference = self._reference.scale, self._reference
        keys, values = (self._round(t.float()) for t in (chunk.keys, chunk.values))
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for head, row in reference.heads_of(chunk, self._rows.batch):
            weights = self._weights(chunk, head, row) * (-self._log_total[row]).exp()
            d_attended = self._d_attended[row]
            d_weights = self._round(d_attended @ values.T)
            d_scores = self._round(weights * (d_weights - self._delta[row]))
            dk = self._round(dk + self._round(d_scores.T @ self._q[row] * scale))
            dv = self._round(dv + self._round(self._round(weights).T @ d_attended))
            if chunk.is_counted:
                self._dq[row] += (d_scores @ keys * scale).double()
        return self._before(dk, "k"), self._before(dv, "v")

    def close(self) -> Tensor:
        """Return dq, (B, Hq, R, D). All ranks must call it."""
        dq = self._reference.all_sum(self._dq).float()
        return self._before(self._round(dq), "q")

    def _weights(self, chunk: KeyChunk, head: int, row: tuple[int, int]) -> Tensor:
        """Return exp(score - the reference's log-sum-exp), (R, K)."""
        keys = self._round(chunk.keys.float())
        scores = self._round(self._round(self._q[row] @ keys.T) * self._reference.scale)
        seen = self._reference.log_multiplicity(chunk, head)
        if seen is not None:
            scores += seen.float()
        return scores.sub_(self._rows.lse[row].float().nan_to_num(neginf=0.0)).exp_()

    def _before(self, gradient: Tensor, name: str) -> Tensor:
        """Return the gradient before a matrix product, from that after it."""
        matrix = self._reference.matrices.get(name)
        found = gradient if matrix is None else self._round(gradient @ matrix.float().T)
        return found.double()

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype).float()
