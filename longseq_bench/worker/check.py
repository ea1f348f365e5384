"""The numerics check: an output and its gradients against a float64 reference (see errors.py).

The reference is one softmax built from the implementation's own pattern, row by row. Every row of a
short sequence is checked; of a long one those of `inputs.checked_rows`. Gradients can be checked at
any length, because the output gradient is zero outside the checked rows: then dK and dV are sums
over the checked rows. Every rank checks its part, and all agree on the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.distributed.group import Group
from longseq_bench.worker.errors import PARAMETERS, TINY, Errors, row_scale
from longseq_bench.worker.inputs import Pass, Triple
from longseq_bench.worker.plain import PlainRows
from longseq_bench.worker.reference import CheckedRows, Gradients, Reference, Sum
from longseq_bench.worker.row_slices import is_finite, row_slices
from longseq_bench.worker.shard_coverage import all_gather, all_reduce_max

_MAX_SENTENCE = 300
"""Bytes of a sentence that ranks exchange."""


def check(
    attention: Attention,
    inputs: Triple,
    out: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
    grads: Triple | None = None,
) -> Errors:
    """Return this rank's errors. All ranks must call it.

    Args:
        attention: the implementation; gradients of a module's matrices are checked too.
        inputs: q (B, Hq, N, D), k (B, Hk, M, D) and v (B, Hk, M, Dv) of this rank.
        out: (B, Hq, N, Dv), compared at `rows`.
        rows: ascending global positions, the same on all ranks.
        grad_out: like out; it must be zero outside `rows`.
        grads: dq (compared at `rows`), dk and dv, or None for a forward alone.
    """
    errors, dtype = _errors_for(attention), attention.coarsest_dtype
    with torch.no_grad():
        reference = Reference(attention, inputs, rows)
        backward = None
        if grads is not None:
            backward = _Backward(reference, grads, errors)
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


def _errors_for(attention: Attention) -> Errors:
    w = attention.workload
    return Errors(w.heads, group=w.heads // w.kv_heads)


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


def find_invalid(one: Pass, group: Group) -> str | None:
    """Return what makes a pass wrong before its numbers are compared, or None.

    Its inputs were changed, or a result has another shape or dtype. All ranks must call it.
    """
    return agree(_own_fault(one), group)


def agree(own: str | None, group: Group) -> str | None:
    """Return the sentence of the lowest rank that has one, the same on all ranks, or None.

    All ranks must call it.
    """
    if group.size == 1:
        return own
    text = torch.zeros(_MAX_SENTENCE, dtype=torch.int64)
    encoded = (own or "").encode()[:_MAX_SENTENCE]
    text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int64)
    for rank, row in enumerate(all_gather(group, text)):
        if sentence := bytes(row[row > 0].tolist()).decode(errors="replace"):
            return f"{sentence} (on rank {rank})"
    return None


def _own_fault(one: Pass) -> str | None:
    if changed := one.changed_inputs():
        return f"a pass changed its input {' and '.join(changed)}"
    (q, _, v), dtype = one.inputs, str(one.inputs[0].dtype)[6:]
    assert one.out is not None
    results = [("the output", one.out, (*q.shape[:3], v.shape[3]))]
    for name, gradient, like in zip(("dq", "dk", "dv"), one.grads or (), one.inputs, strict=False):
        results.append((name, gradient, tuple(like.shape)))
    for name, got, shape in results:
        found = str(got.dtype)[6:], tuple(got.shape)
        if found != (dtype, shape):
            return f"{name} is {found[0]} {found[1]}; expected {dtype} {shape}"
    return None


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
                for found, values in (
                    (self._unseen, got[~is_seen]),
                    (self._largest, expected.value),
                ):
                    if values.numel():
                        found[index] = found[index].maximum(values.abs().max().cpu())
        dq = gradients.close()
        _compare_rows(
            self._errors,
            "dq",
            reference,
            self._grads[0],
            rows,
            dq,
            plain.close() if plain else None,
        )
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
