"""Errors of an output and its gradients, and the bounds that they must keep.

float32: the error of a row, its largest difference over the largest magnitude of the reference in
that row, is at most 2e-5. Late rows of causal attention, a hundred times smaller than the first,
count as much.

bfloat16, float16: errors are compared with those of a plain implementation in the same dtype on the
same rows (`PlainRows`): the root mean square with twice the plain one, the largest with four times.
FlashAttention's tests have this rule for the largest error; but the largest of thousands varies by
more than two from one right implementation to another. Every further rank rounds its part once
more, so both bounds grow with the root of the number of ranks.

Every dtype: no bias. The least-squares slope of a tensor on its reference is 1 within 0.3 %, over
all rows and for each head. Rounding changes a slope by chance only, by as much as the scatter of
the rows tells; six standard errors of it are allowed on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import all_gather, all_reduce_max
from longseq_bench.worker.reference import Sum

Array = NDArray[np.float64]

TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}
GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1.5e-2}
"""Allowed errors where there is no plain implementation to compare with: three or more times those
of correct kernels on random inputs from 1 to 10k tokens (docs/decisions/0004)."""

UNIT: dict[DType, float] = {"float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11}
"""Relative distance between neighbouring numbers, at most."""

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

PARAMETERS = {"q": "dWq", "k": "dWk", "v": "dWv", "out": "dWo"}
NAMES = ("out", "dq", "dk", "dv", *PARAMETERS.values())
TINY = 1e-30
_SUMS = 6  # of a slope over rows: their number, x, e, e², x², e x; see _slope_sums
_PLAIN = 3  # sum of squares of the errors, and of the plain errors; elements


@dataclass
class Errors:
    """The errors of each tensor so far, on this rank or over all ranks.

    largest, plain: the largest error of each tensor; of the plain implementation, if there is one.
    ranks: the rank on which each error is largest, if these are the errors of all ranks.
    group: query heads of a key head.
    squares: of each tensor, see _PLAIN.  sums: of each tensor and head, see _SUMS.
    """

    heads: int = 1
    largest: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    group: int = 1
    squares: Array = field(default_factory=lambda: np.zeros((len(NAMES), _PLAIN)))
    sums: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.sums.size:
            self.sums = np.zeros((len(NAMES), self.heads, _SUMS))

    def add(
        self, name: str, got: Tensor, expected: Sum, magnitude: float | None = None, head: int = 0,
        plain: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compare rows (tokens, D) of the tensor `name` with the reference.

        NaN or infinity in `got` is an infinite error. A row that is zero in the reference is
        compared with the largest magnitude of the tensor.

        magnitude: that one, if `expected` is only a part of the tensor.
        head: of the rows; its slope has its own bound.
        plain: the rows of the plain implementation.
        """
        if not len(got):
            return
        got = got.detach().to(expected.value.device).double()
        if not torch.isfinite(got).all():
            self.largest[name] = math.inf
            return
        scale = row_scale(expected)
        largest = float(expected.value.abs().max()) if magnitude is None else magnitude
        scale = scale.where(scale > 0, max(largest, TINY))[:, None]
        error = (got - expected.value) / scale
        self.raise_to(name, float(error.abs().max()))
        at = NAMES.index(name)
        self.sums[at, head] += _slope_sums(error, expected.value / scale).cpu().numpy()
        if plain is not None:
            usual = (plain - expected.value) / scale
            self.plain[name] = max(self.plain.get(name, 0.0), float(usual.abs().max()))
            squares = float(error.square().sum()), float(usual.square().sum())
            self.squares[at] += [*squares, got.numel()]

    def raise_to(self, name: str, error: float) -> None:
        """Record an error of a tensor."""
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    def largest_over_ranks(self, group: Group) -> Errors:
        """Return the errors of all ranks. All ranks must call it."""
        own = [self.largest.get(name, -1.0) for name in NAMES]
        every = torch.tensor(all_gather(group, own), dtype=torch.float64)
        worst, at = (found.tolist() for found in every.max(0))
        plain = torch.tensor([self.plain.get(name, -1.0) for name in NAMES], dtype=torch.float64)
        usual = all_reduce_max(group, plain).tolist()
        checked = [i for i, error in enumerate(worst) if error >= 0]
        return replace(
            self,
            largest={NAMES[i]: worst[i] for i in checked},
            ranks={NAMES[i]: at[i] for i in checked} if group.size > 1 else {},
            plain={name: error for name, error in zip(NAMES, usual, strict=True) if error >= 0},
            world_size=group.size,
            squares=group.all_sum(torch.from_numpy(self.squares)).numpy(),
            sums=group.all_sum(torch.from_numpy(self.sums)).numpy(),
        )

    @property
    def worst(self) -> float:
        """The largest error of any tensor."""
        return max(self.largest.values(), default=0.0)

    def allowed(self, name: str, dtype: DType) -> float:
        """Return the largest error that a tensor may have."""
        if name not in self.plain or dtype == "float32":
            return (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
        usual = max(self.plain[name], 2 * UNIT[dtype])
        return PLAIN_LARGEST * usual * math.sqrt(self.world_size)

    def root_mean_square(self, name: str, dtype: DType) -> tuple[float, float] | None:
        """Return that of a tensor's errors, and what it may be; None without a plain one."""
        own, usual, count = self.squares[NAMES.index(name)].tolist()
        if not count or dtype == "float32":
            return None
        least = max(math.sqrt(usual / count), UNIT[dtype] / 2)
        rows = max(1.0, float(self.sums[NAMES.index(name), :, 0].sum()))
        few = 1 + 2 / math.sqrt(rows)
        allowed = PLAIN_RMS * least * few * math.sqrt(self.world_size)
        if name in ("dk", "dv"):
            allowed *= self.group**_GROUP_POWER
        return math.sqrt(own / count), allowed

    def bias(self, name: str) -> tuple[float, float]:
        """Return how far the slope is from 1 and how far it may be, of the worst head or of all."""
        heads = [self.sums[NAMES.index(name)].sum(0), *self.sums[NAMES.index(name)]]
        slopes = [_slope(sums) for sums in heads if sums[0] >= _MIN_ROWS]
        return max(slopes, key=lambda one: abs(one[0]) - one[1], default=(0.0, MAX_BIAS))

    @property
    def worst_bias(self) -> float:
        """The largest distance from 1 of a tensor's slope, over all heads; 0 if none is known."""
        known = [self.sums[NAMES.index(name)].sum(0) for name in self.largest]
        slopes = [abs(_slope(sums)[0]) for sums in known if sums[0] >= _MIN_ROWS]
        return max(slopes, default=0.0)

    def share_of_allowed(self, dtype: DType) -> float:
        """Return the largest error of any tensor over what it may be."""
        shares = [error / self.allowed(name, dtype) for name, error in self.largest.items()]
        pairs = (self.root_mean_square(name, dtype) for name in self.largest)
        shares += [own / allowed for own, allowed in filter(None, pairs)]
        return max(shares, default=0.0)

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about the first tensor that breaks a bound, or None."""
        for name, error in self.largest.items():
            where = f" on rank {self.ranks[name]}" if name in self.ranks else ""
            allowed = self.allowed(name, dtype)
            if not error <= allowed:
                return (
                    f"{name}{where} is {error:.2g} off the float64 reference "
                    f"(allowed {allowed:.2g})"
                )
            pair = self.root_mean_square(name, dtype)
            if pair and not pair[0] <= pair[1]:
                return (
                    f"{name} is {pair[0]:.2g} off the float64 reference in root mean square "
                    f"(allowed {pair[1]:.2g})"
                )
            bias, allowed = self.bias(name)
            if not abs(bias) <= allowed:
                return (
                    f"{name} is {1 + bias:.4f} times the float64 reference on average "
                    f"(allowed {1 - allowed:.4f} to {1 + allowed:.4f})"
                )
        return None


def row_scale(expected: Sum) -> Tensor:
    """Return the magnitude by which the error of each row is divided, (tokens,)."""
    scale = expected.value.abs().amax(-1)
    return scale if expected.squares is None else scale.maximum(expected.squares.sqrt().amax(-1))


def _slope_sums(error: Tensor, expected: Tensor) -> Tensor:
    """Return the sums over rows (tokens, D) that `_slope` needs."""
    # without rows whose terms cancel: their values are rounding errors
    kept = expected.abs().amax(-1) > _MIN_MAGNITUDE
    expected, error = expected[kept], error[kept]
    x, e = expected.square().sum(-1), (error * expected).sum(-1)
    return torch.stack([torch.ones_like(x), x, e, e * e, x * x, e * x]).sum(-1)


def _slope(sums: Array) -> tuple[float, float]:
    """Return slope - 1 of rows on their reference, and its bound, by clustered standard errors."""
    _, xx, ex, ex2, xx2, exxx = sums.tolist()
    if xx == 0:
        return 0.0, MAX_BIAS
    slope = ex / xx
    scatter = max(0.0, ex2 - 2 * slope * exxx + slope**2 * xx2)
    return slope, MAX_BIAS + _STANDARD_ERRORS * math.sqrt(scatter) / xx
