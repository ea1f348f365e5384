"""The numerics gate: an output, and its gradients, against a float64 reference.

The reference is one softmax built from the implementation's own pattern, row by row. At short
lengths every row is checked; at long ones the first, the last and some random rows, and on several
ranks the first and last of each. Gradients stay checkable at any length because the checked pass
is fed an output gradient that is zero outside those rows: then the whole dK and dV are sums over
the checked rows alone. Every rank checks what it holds; the verdict is that of all.

The error of a row is its largest difference over the reference's largest magnitude in that row:
late rows of causal attention, a hundred times smaller than the first, count as much as it does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.worker.inputs import Triple
from longseq_bench.worker.reference import Gradients, Reference, Rows
from longseq_bench.worker.shard_coverage import all_gather, all_reduce_max

TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}
GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1.5e-2}
"""Three times or more what correct kernels show on random inputs from 1 to 10k tokens: outputs
1.5e-6, 1.5e-2, 2e-3; gradients 2.1e-6, 2.8e-2, 4.3e-3 (docs/decisions/0004)."""

PARAMETERS = {"q": "dWq", "k": "dWk", "v": "dWv", "out": "dWo"}
NAMES = ("out", "dq", "dk", "dv", *PARAMETERS.values())
_TINY = 1e-30


@dataclass
class Errors:
    """Largest error of each tensor so far, on this rank or, agreed, on any.

    ranks: of agreed errors, where each is largest.
    """

    largest: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        got: Tensor,
        want: Tensor,
        squares: Tensor | None = None,
        magnitude: float | None = None,
    ) -> None:
        """Rows (tokens, D). NaN or infinity in `got` counts as an infinite error; where the
        reference's row is zero, so must the other be, beside the tensor's largest magnitude.

        squares: sums of squares of the terms of each element before they cancel.
        magnitude: the tensor's largest, where `want` is a part of it.
        """
        if not len(got):
            return
        got = got.detach().cpu().double()
        if not torch.isfinite(got).all():
            self.largest[name] = math.inf
            return
        scale = _scale(want, squares)
        whole = float(want.abs().max()) if magnitude is None else magnitude
        scale = scale.where(scale > 0, max(whole, _TINY))
        self.raise_to(name, float(((got - want).abs().amax(-1) / scale).max()))

    def raise_to(self, name: str, error: float) -> None:
        """An error of a tensor as large as this was seen."""
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    def agreed(self, group: Group) -> Errors:
        """The largest of all ranks, the same on each; they have to call it together."""
        own = torch.tensor([self.largest.get(name, -1.0) for name in NAMES], dtype=torch.float64)
        worst, at = all_gather(group, own).max(0)
        seen = [n for n, error in zip(NAMES, worst.tolist(), strict=True) if error >= 0]
        where = dict(zip(NAMES, at.tolist(), strict=True))
        return Errors(
            {name: float(worst[NAMES.index(name)]) for name in seen},
            {name: where[name] for name in seen} if group.size > 1 else {},
        )

    @property
    def worst(self) -> float:
        """The largest error of any tensor."""
        return max(self.largest.values(), default=0.0)

    def beyond(self, dtype: DType) -> str | None:
        """Which tensor is further off than its tolerance, in a sentence; None where none is."""
        for name, error in self.largest.items():
            allowed = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
            if not error <= allowed:
                where = f" on rank {self.ranks[name]}" if name in self.ranks else ""
                off = f"{name}{where} is {error:.2g} off the float64 reference"
                return f"{off} (allowed {allowed:.2g})"
        return None


def check(
    attention: Attention,
    inputs: Triple,
    out: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
    grads: Triple | None = None,
) -> Errors:
    """This rank's errors of out (B, Hq, N, D) at `rows`, of dq (at rows), dk, dv where grads are
    given, and of the matrices' gradients where a module has some.

    rows: ascending global positions, the same on all ranks, which have to call this together.
    grad_out must be zero outside them. Ranks that hold the same part have equal numbers in it.
    """
    errors = Errors()
    with torch.no_grad():
        reference = Reference(attention, inputs, rows)
        backward = None
        if grads is not None:
            backward = _Backward(reference, grads, errors)
        for batch in reference.slabs():
            wanted = reference.forward(batch)
            _at_rows(errors, "out", reference, out, wanted, wanted.out)
            if backward and grad_out is not None:
                backward.add(wanted, grad_out)
        if backward:
            backward.close()
    return errors


def zero_rows(out: Tensor, group: Group) -> float:
    """Share of (batch, head, token) rows whose output is exactly zero, over all ranks."""
    zero = (out == 0).all(-1)
    found = group.all_sum(torch.tensor([int(zero.sum()), zero.numel()])).tolist()
    return float(found[0] / found[1])


def finite(tensors: list[Tensor], group: Group) -> bool:
    """Whether every number of every rank is."""
    return not group.all_max(float(not all(bool(torch.isfinite(t).all()) for t in tensors)))[0]


class _Backward:
    """Compares gradients, some rows of the batch after the other."""

    def __init__(self, reference: Reference, grads: Triple, errors: Errors) -> None:
        self._reference, self._grads, self._errors = reference, grads, errors
        w = reference.workload
        # of keys that no checked row sees; what is large beside them another rank may hold
        self._strays = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
        self._largest = torch.zeros_like(self._strays)
        self._matrices: dict[str, Tensor] = {}

    def add(self, rows: Rows, grad_out: Tensor) -> None:
        reference, shard = self._reference, self._reference.shard
        gradients = Gradients(reference, rows, grad_out)
        for chunk, *wanted in gradients.of_keys():
            i, j = shard.batch.index(chunk.b), shard.kv_heads.index(chunk.head)
            for n, (name, want) in enumerate(zip(("dk", "dv"), wanted, strict=True)):
                got = self._grads[n + 1][i, j, chunk.at].cpu().double()
                place = n, chunk.b, chunk.head
                self._errors.add(name, got, want.value, want.squares, math.inf)
                stray = got[_scale(want.value, want.squares) == 0].abs()
                if stray.numel():
                    self._strays[place] = self._strays[place].maximum(stray.max())
                self._largest[place] = self._largest[place].maximum(want.value.abs().max())
        dq = gradients.close()
        _at_rows(self._errors, "dq", reference, self._grads[0], rows, dq.value, dq.squares)
        for name, sums in gradients.parameters().items():
            self._matrices[name] = self._matrices.get(name, 0) + sums

    def close(self) -> None:
        group = self._reference.group
        joint = all_reduce_max(group, self._largest).clamp_min(_TINY)
        beside = (self._strays / joint).nan_to_num(nan=math.inf).amax((1, 2))
        for name, error in zip(("dk", "dv"), beside.tolist(), strict=True):
            self._errors.raise_to(name, error)
        parameters = self._reference.attention.parameter_gradients()
        for name, sums in self._matrices.items():
            value, squares = group.all_sum(sums) if name in ("k", "v") else sums
            got = parameters.get(name, torch.full_like(value, math.nan))
            self._errors.add(PARAMETERS[name], got, value, squares)


def _at_rows(
    errors: Errors,
    name: str,
    reference: Reference,
    got: Tensor,
    rows: Rows,
    want: Tensor,
    squares: Tensor | None = None,
) -> None:
    """Of a tensor that is spread as q is, the checked rows that this rank holds."""
    for b, head in reference.own_queries(rows.batch):
        at = b - rows.batch.start, head
        magnitude = float(want[at].abs().max())
        own = None if squares is None else squares[at][reference.which]
        found = reference.own_rows(got, b, head)
        errors.add(name, found, want[at][reference.which], own, magnitude)


def _scale(want: Tensor, squares: Tensor | None) -> Tensor:
    """Of each row, what an error is measured by."""
    scale = want.abs().amax(-1)
    return scale if squares is None else scale.maximum(squares.sqrt().amax(-1))
