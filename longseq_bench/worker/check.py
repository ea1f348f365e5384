"""The numerics check: an output and its gradients against a float64 reference.

The reference is one softmax built from the implementation's own pattern, row by row. Every row of a
short sequence is checked; of a long one the first, the last and random rows, and the first and last
row of each rank. Gradients can be checked at any length, because the output gradient is zero
outside the checked rows: then dK and dV are sums over the checked rows. Every rank checks its part,
and all agree on the result.

The error of a row is its largest difference over the reference's largest magnitude in that row.
So a late row of causal attention, a hundred times smaller than the first, counts as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.worker.inputs import Pass, Triple
from longseq_bench.worker.reference import CheckedRows, Gradients, Reference, Sum
from longseq_bench.worker.shard_coverage import all_gather, all_reduce_max

TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}
GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1.5e-2}
"""Three or more times the error of correct kernels on random inputs from 1 to 10k tokens: outputs
1.5e-6, 1.5e-2, 2e-3; gradients 2.1e-6, 2.8e-2, 4.3e-3 (docs/decisions/0004)."""

PARAMETERS = {"q": "dWq", "k": "dWk", "v": "dWv", "out": "dWo"}
NAMES = ("out", "dq", "dk", "dv", *PARAMETERS.values())
_TINY = 1e-30
_MAX_SENTENCE = 300
"""Bytes of a sentence that ranks exchange."""


@dataclass
class Errors:
    """The largest error of each tensor so far, on this rank or over all ranks.

    ranks: the rank on which each error is largest, if these are the errors of all ranks.
    """

    largest: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, got: Tensor, expected: Sum, magnitude: float | None = None) -> None:
        """Compare rows (tokens, D) with the reference.

        NaN or infinity in `got` is an infinite error. A row that is zero in the reference is
        compared with the largest magnitude of the tensor.

        Args:
            name: of the tensor, one of NAMES.
            got: the implementation's rows.
            expected: the reference's rows.
            magnitude: largest magnitude of the tensor, if `expected` is only a part of it.
        """
        if not len(got):
            return
        got = got.detach().cpu().double()
        if not torch.isfinite(got).all():
            self.largest[name] = math.inf
            return
        scale = _scale(expected)
        largest = float(expected.value.abs().max()) if magnitude is None else magnitude
        scale = scale.where(scale > 0, max(largest, _TINY))
        self.raise_to(name, float(((got - expected.value).abs().amax(-1) / scale).max()))

    def raise_to(self, name: str, error: float) -> None:
        """Record an error of a tensor."""
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    def largest_over_ranks(self, group: Group) -> Errors:
        """Return the largest errors of all ranks. All ranks must call it."""
        own = torch.tensor([self.largest.get(name, -1.0) for name in NAMES], dtype=torch.float64)
        worst, at = all_gather(group, own).max(0)
        checked = [n for n, error in zip(NAMES, worst.tolist(), strict=True) if error >= 0]
        ranks = dict(zip(NAMES, at.tolist(), strict=True))
        return Errors(
            {name: float(worst[NAMES.index(name)]) for name in checked},
            {name: ranks[name] for name in checked} if group.size > 1 else {},
        )

    @property
    def worst(self) -> float:
        """Return the largest error of any tensor."""
        return max(self.largest.values(), default=0.0)

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about the first tensor whose error is over its tolerance, or None."""
        for name, error in self.largest.items():
            allowed = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
            if not error <= allowed:
                where = f" on rank {self.ranks[name]}" if name in self.ranks else ""
                return (
                    f"{name}{where} is {error:.2g} off the float64 reference "
                    f"(allowed {allowed:.2g})"
                )
        return None


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
        inputs: q (B, Hq, N, D), k and v (B, Hk, M, D) of this rank.
        out: (B, Hq, N, D), compared at `rows`.
        rows: ascending global positions, the same on all ranks.
        grad_out: like out; it must be zero outside `rows`.
        grads: dq (compared at `rows`), dk and dv, or None for a forward alone.
    """
    errors = Errors()
    with torch.no_grad():
        reference = Reference(attention, inputs, rows)
        backward = None
        if grads is not None:
            backward = _Backward(reference, grads, errors)
        for batch in reference.slabs():
            checked = reference.forward(batch)
            _compare_rows(errors, "out", reference, out, checked, Sum(checked.out))
            if backward and grad_out is not None:
                backward.add(checked, grad_out)
        if backward:
            backward.close()
    return errors


def count_zero_rows(out: Tensor, group: Group) -> tuple[int, int]:
    """Return how many (batch, head, token) rows of the output are zero, and all, over all ranks."""
    zero = (out == 0).all(-1)
    zeros, rows = group.all_sum(torch.tensor([int(zero.sum()), zero.numel()])).tolist()
    return int(zeros), int(rows)


def all_finite(tensors: list[Tensor], group: Group) -> bool:
    """Return whether every number on every rank is finite."""
    return not group.all_max(float(not all(bool(torch.isfinite(t).all()) for t in tensors)))[0]


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
    q = one.inputs[0]
    assert one.out is not None
    results = [("the output", one.out, q)]
    for name, gradient, like in zip(("dq", "dk", "dv"), one.grads or (), one.inputs, strict=False):
        results.append((name, gradient, like))
    for name, got, like in results:
        found, expected = ((tuple(t.shape), str(t.dtype)[6:]) for t in (got, like))
        if found != expected:
            return f"{name} is {found[1]} {found[0]}; expected {expected[1]} {expected[0]}"
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

    def add(self, rows: CheckedRows, grad_out: Tensor) -> None:
        reference, shard = self._reference, self._reference.shard
        gradients = Gradients(reference, rows, grad_out)
        for chunk, *sums in gradients.of_keys():
            i, j = shard.batch.index(chunk.b), shard.kv_heads.index(chunk.head)
            for n, (name, expected) in enumerate(zip(("dk", "dv"), sums, strict=True)):
                got = self._grads[n + 1][i, j, chunk.at].cpu().double()
                index = n, chunk.b, chunk.head
                self._errors.add(name, got, expected, math.inf)
                unseen = got[_scale(expected) == 0].abs()
                if unseen.numel():
                    self._unseen[index] = self._unseen[index].maximum(unseen.max())
                self._largest[index] = self._largest[index].maximum(expected.value.abs().max())
        dq = gradients.close()
        _compare_rows(self._errors, "dq", reference, self._grads[0], rows, dq)
        for name, matrix_sums in gradients.matrices.items():
            self._matrices[name] = self._matrices.get(name, 0) + matrix_sums

    def close(self) -> None:
        group = self._reference.group
        largest = all_reduce_max(group, self._largest).clamp_min(_TINY)
        errors = (self._unseen / largest).nan_to_num(nan=math.inf).amax((1, 2))
        for name, error in zip(("dk", "dv"), errors.tolist(), strict=True):
            self._errors.raise_to(name, error)
        parameters = self._reference.attention.parameter_gradients()
        for name, sums in self._matrices.items():
            value, squares = group.all_sum(sums) if name in ("k", "v") else sums
            got = parameters.get(name, torch.full_like(value, math.nan))
            self._errors.add(PARAMETERS[name], got, Sum(value, squares))


def _compare_rows(
    errors: Errors, name: str, reference: Reference, got: Tensor, rows: CheckedRows, expected: Sum
) -> None:
    """Compare this rank's checked rows of a tensor that is sharded like q."""
    for b, head in reference.own_queries(rows.batch):
        index = b - rows.batch.start, head
        magnitude = float(expected.value[index].abs().max())
        squares = None if expected.squares is None else expected.squares[index][reference.row_index]
        own = Sum(expected.value[index][reference.row_index], squares)
        errors.add(name, reference.own_rows(got, b, head), own, magnitude)


def _scale(expected: Sum) -> Tensor:
    """Return the magnitude by which the error of each row is divided."""
    scale = expected.value.abs().amax(-1)
    return scale if expected.squares is None else scale.maximum(expected.squares.sqrt().amax(-1))
