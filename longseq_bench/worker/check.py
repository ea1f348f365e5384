"""Compare an output and its gradients with a float64 reference.

The reference is one softmax built from the implementation's own pattern. Every row of a short
sequence is checked; of a long one those of `checked_rows`. The output gradient is zero
outside the checked rows, so dK and dV are sums over them at any length. Every rank checks its part,
and all agree on the result. docs/decisions/0004 has the reasons of the three bounds:

float32: the error of a row is at most 2e-5 of the largest magnitude of the reference in that row,
plus four roundings of the sum of the magnitudes of what is averaged, for each rank's part once more
(by the root of their number). Late rows of causal attention count as much as the first, which are a
hundred times larger. A single key that is dropped shows up to about a million visible keys.

bfloat16, float16: the root mean square may be twice that of a plain implementation in the same
dtype on the same rows (`CheckedRows`), the largest error four times. Every further rank rounds its
part once more, so both bounds grow with the root of the number of ranks.

Every dtype: no bias. The least-squares slope of a tensor on its reference is 1 within 0.3 %, over
all rows and for each head, and six standard errors of the slope, by the scatter of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import all_gather
from longseq_bench.kernels.base import Triple
from longseq_bench.worker.reference import CheckedRows, Reference, Sum

Array = NDArray[np.float64]

TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}
GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1.5e-2}
"""Allowed errors where there is no plain implementation to compare with: three or more times those
of correct kernels on random inputs from 1 to 10k tokens (docs/decisions/0004)."""

UNIT: dict[DType, float] = {"float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11}
"""Relative distance between neighbouring numbers, at most."""

ROUNDED_SHARE = 4 * UNIT["float32"] / TOLERANCE["float32"]
"""Share of Σ |weight * v| in the scale of a row: the average of half a million values is so small
that four roundings of their sum are all of the error that 2e-5 of it allows."""

_FEW_VALUES = 3
"""Of a row with one value that share is larger by this factor: the value cancels alone, and scores
of such a head reach 12, so that each weight has the error of 12 roundings."""

PLAIN_RMS, PLAIN_LARGEST = 2.0, 4.0
"""Allowed errors over those of the plain implementation."""

_GROUP_POWER = 0.1
"""dk and dv are sums over the query heads of a key head, which some round in more pieces than
others: 32 heads may have 1.4 times the error."""

MAX_BIAS = 0.003
_STANDARD_ERRORS = 6.0
_MIN_ROWS = 32
"""Fewer rows of a head have no slope: their scatter would not tell how sure it is."""

_MIN_MAGNITUDE = 0.01
"""Smallest value of a row over its scale with which it counts for a slope."""

PARAMETERS = {"q": "dWq", "k": "dWk", "v": "dWv", "out": "dWo", "sink": "dsink"}
NAMES = ("out", "dq", "dk", "dv", *PARAMETERS.values())
TINY = 1e-30
_SUMS = 9
"""Of rows: their number, x, e, e², x², e x (_slope_sums); and with a plain implementation
the squares of errors and of its errors, and the number of elements."""


@dataclass
class Errors:
    """The errors of each tensor so far, on this rank or over all ranks.

    largest, plain: the largest error of each tensor; of the plain implementation, if there is one.
    ranks: the rank on which each error is largest, if these are the errors of all ranks.
    group: query heads of a key head.
    sums: of each tensor and head, see _SUMS.
    """

    heads: int = 1
    largest: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    group: int = 1
    sums: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.sums.size:
            self.sums = np.zeros((len(NAMES), self.heads, _SUMS))

    def add(self, name: str, got: Tensor, expected: Sum, head: int = 0) -> None:
        """Compare rows (tokens, D) of the tensor `name` with the reference.

        NaN or infinity in `got` is an infinite error. A row that is zero in the reference is
        compared with the largest magnitude of these rows.

        head: of the rows; its slope has its own bound.
        """
        if not len(got):
            return
        got = got.detach().to(expected.value.device).double()
        if not torch.isfinite(got).all():
            self.largest[name] = math.inf
            return
        scale = expected.value.abs()
        largest = float(scale.max())
        scale = (scale if expected.size is None else scale.maximum(expected.size)).amax(-1)
        scale = scale.where(scale > 0, max(largest, TINY))[:, None]
        error = (got - expected.value) / scale
        self.raise_to(name, float(error.abs().max()))
        sums = self.sums[NAMES.index(name), head]
        sums[:-3] += _slope_sums(error, expected.value / scale).cpu().numpy()
        if expected.plain is not None:
            usual = (expected.plain - expected.value) / scale
            self.plain[name] = max(self.plain.get(name, 0.0), float(usual.abs().max()))
            squares = float(error.square().sum()), float(usual.square().sum())
            sums[-3:] += [*squares, got.numel()]

    def raise_to(self, name: str, error: float) -> None:
        """Record an error of a tensor."""
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    def largest_over_ranks(self, group: Group) -> Errors:
        """Return the errors of all ranks. All ranks must call it."""
        every = all_gather(group, self)
        checked = [name for name in NAMES if any(name in one.largest for one in every)]
        errors = {name: [one.largest.get(name, -1.0) for one in every] for name in checked}
        ranks = {name: found.index(max(found)) for name, found in errors.items()}
        return replace(
            self,
            largest={name: max(found) for name, found in errors.items()},
            ranks=ranks if group.size > 1 else {},
            plain={name: max(one.plain.get(name, 0.0) for one in every) for name in checked},
            world_size=group.size,
            sums=np.sum([one.sums for one in every], 0),
        )

    @property
    def worst(self) -> float:
        """The largest error of any tensor."""
        return max(self.largest.values(), default=0.0)

    def bounds(self, name: str, dtype: DType) -> Iterator[tuple[float, float, str]]:
        """Yield the largest error of a tensor and its bound; with a plain one the same in RMS.

        Each has a sentence about it.
        """
        where = f" on rank {self.ranks[name]}" if name in self.ranks else ""
        rows, *_, own, usual, count = self.sums[NAMES.index(name)].sum(0).tolist()
        tolerance = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
        more = math.sqrt(self.world_size)
        if has_plain := bool(count) and dtype != "float32":
            tolerance = PLAIN_LARGEST * more * max(self.plain[name], 2 * UNIT[dtype])
        sentence = f"{name}{where} is {self.largest[name]:.2g} off the float64 reference"
        yield self.largest[name], tolerance, sentence
        if has_plain:
            few = 1 + 2 / math.sqrt(max(1.0, rows))
            allowed = PLAIN_RMS * more * few * max(math.sqrt(usual / count), UNIT[dtype] / 2)
            if name in ("dk", "dv"):
                allowed *= self.group**_GROUP_POWER
            error = math.sqrt(own / count)
            off = f"{error:.2g} off the float64 reference in root mean square"
            yield error, allowed, f"{name} is {off}"

    def bias(self, name: str) -> tuple[float, float]:
        """Return how far the slope is from 1 and how far it may be, of the worst head or of all."""
        heads = self.sums[NAMES.index(name)]
        slopes = [_slope(sums) for sums in (heads.sum(0), *heads) if sums[0] >= _MIN_ROWS]
        return max(slopes, key=lambda one: abs(one[0]) - one[1], default=(0.0, MAX_BIAS))

    @property
    def worst_bias(self) -> float:
        """The largest distance from 1 of a tensor's slope, over all heads; 0 if none is known."""
        known = [self.sums[NAMES.index(name)].sum(0) for name in self.largest]
        slopes = [abs(_slope(sums)[0]) for sums in known if sums[0] >= _MIN_ROWS]
        return max(slopes, default=0.0)

    def share_of_allowed(self, dtype: DType) -> float:
        """Return the largest error of any tensor over what it may be."""
        bounds = (bound for name in self.largest for bound in self.bounds(name, dtype))
        return max((error / allowed for error, allowed, _ in bounds), default=0.0)

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about the first tensor that breaks a bound, or None."""
        for name in self.largest:
            for error, allowed, sentence in self.bounds(name, dtype):
                if not error <= allowed:
                    return f"{sentence} (allowed {allowed:.2g})"
            bias, allowed = self.bias(name)
            if not abs(bias) <= allowed:
                return (
                    f"{name} is {1 + bias:.4f} times the float64 reference on average "
                    f"(allowed {1 - allowed:.4f} to {1 + allowed:.4f})"
                )
        return None


def _slope_sums(error: Tensor, expected: Tensor) -> Tensor:
    """Return the sums over rows (tokens, D) that `_slope` needs."""
    # without rows whose terms cancel: their values are rounding errors
    kept = expected.abs().amax(-1) > _MIN_MAGNITUDE
    expected, error = expected[kept], error[kept]
    x, e = expected.square().sum(-1), (error * expected).sum(-1)
    return torch.stack([torch.ones_like(x), x, e, e * e, x * x, e * x]).sum(-1)


def _slope(sums: Array) -> tuple[float, float]:
    """Return slope - 1 of rows on their reference, and its bound, by clustered standard errors."""
    _, xx, ex, ex2, xx2, exxx, *_ = sums.tolist()
    if xx == 0:
        return 0.0, MAX_BIAS
    slope = ex / xx
    scatter = max(0.0, ex2 - 2 * slope * exxx + slope**2 * xx2)
    return slope, MAX_BIAS + _STANDARD_ERRORS * math.sqrt(scatter) / xx


def check(
    attention: Attention,
    inputs: Triple,
    out: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
    grads: Triple | None = None,
) -> Errors:
    """Return this rank's errors. All ranks must call it.

    Gradients of a module's matrices and of sinks are checked too.

    inputs: q (B, Hq, N, D), k (B, Hk, M, D) and v (B, Hk, M, Dv) of this rank.
    out: (B, Hq, N, Dv), compared at `rows`.
    rows: ascending global positions, the same on all ranks.
    grad_out: like out; it must be zero outside `rows`.
    grads: dq (compared at `rows`), dk and dv, or None for a forward alone.
    """
    w = attention.workload
    errors = Errors(w.heads, group=w.heads // w.kv_heads)
    share = ROUNDED_SHARE * (1 + _FEW_VALUES / w.v_head_dim) * math.sqrt(attention.group.size)
    matrices: dict[str, Tensor] = {}
    with torch.no_grad():
        if (own := attention.reference_rows(inputs, rows)) is not None:
            for b, head in product(range(w.batch), range(w.heads)):
                errors.add("out", out[b, head][rows.to(out.device)], Sum(own[b, head]), head)
            return errors
        reference = Reference(attention, inputs, rows)
        for batch in reference.slabs():
            checked = [exact := CheckedRows(reference, batch)]
            if attention.coarsest_dtype != "float32":
                checked.append(CheckedRows(reference, batch, exact))
            size = exact.out.abs() + share * exact.magnitudes
            expected = _with_plain(Sum(exact.out, size), *(Sum(one.out) for one in checked[1:]))
            _compare_rows(errors, "out", reference, out, batch, expected)
            if grads is not None and grad_out is not None:
                gradient = reference.rows_of(grad_out, batch)
                for of_rows in checked:
                    of_rows.set_gradient(gradient)
                _compare_gradients(errors, reference, checked, grads, batch)
                for name, sums in exact.matrices.items():
                    matrices[name] = matrices.get(name, 0) + sums
        parameters = attention.parameter_gradients() if matrices else {}
        if "sink" in matrices:
            parameters["sink"] = attention.sink_gradient()[:, None]
        for name, sums in matrices.items():
            value, squares = reference.all_sum(sums) if name in ("k", "v") else sums
            got = parameters.get(name, torch.full_like(value, math.nan))
            errors.add(PARAMETERS[name], reference.own(got), Sum(value, squares.sqrt()))
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
    # a sum is not finite if a term is not, and 20 times as fast; it may overflow, though
    return all(
        bool(torch.isfinite(part.sum()) or torch.isfinite(part).all())
        for part in row_slices(tensor)
    )


def count_zero_rows(out: Tensor, group: Group) -> tuple[int, int]:
    """Return how many (batch, head, token) rows of the output are zero, and all, over all ranks."""
    zeros = sum(int((part.abs().amax(-1) == 0).sum()) for part in row_slices(out))
    of_all = group.all_sum(torch.tensor([zeros, out.shape[:3].numel()]))
    return int(of_all[0]), int(of_all[1])


def _compare_gradients(
    errors: Errors, reference: Reference, checked: list[CheckedRows], grads: Triple, batch: range
) -> None:
    """Compare this rank's dq at the rows, and all of its dk and dv.

    checked: the exact rows, and in half precision the plain ones.
    """
    for chunk in reference.chunks(batch, counted_only=False):
        i, j = reference.shard.batch.index(chunk.b), reference.shard.kv_heads.index(chunk.head)
        kept = slice(None) if chunk.kept is None else chunk.kept
        found = zip(*(rows.add_keys(chunk) for rows in checked), strict=True)
        for name, gradient, sums in zip(("dk", "dv"), grads[1:], found, strict=True):
            got = reference.own(gradient[i, j, chunk.at])
            errors.add(name, got[kept], _with_plain(*sums), chunk.head)
            if chunk.kept is not None:
                # no checked row sees the others: they have no gradient
                got[kept] = 0
                largest = sums[0].value.abs().max() if len(chunk.kept) else 0.0
                rest = float(got.abs().max().nan_to_num(math.inf))
                errors.raise_to(name, rest / max(float(largest), TINY))
    dq = _with_plain(*(rows.close() for rows in checked))
    _compare_rows(errors, "dq", reference, grads[0], batch, dq)


def _with_plain(exact: Sum, plain: Sum | None = None) -> Sum:
    return exact if plain is None else replace(exact, plain=plain.value)


def _compare_rows(
    errors: Errors, name: str, reference: Reference, got: Tensor, batch: range, expected: Sum
) -> None:
    """Compare this rank's checked rows of a tensor that is sharded like q."""
    for b, head in reference.own_queries(batch):
        own = expected.at((b - batch.start, head), reference.row_index)
        errors.add(name, reference.own_rows(got, b, head), own, head)
