"""Inputs with which attention has a known result at every position.

Constant values: all values of a head are one vector, its neighbours have others. Weights of a
softmax add up to 1, so every output row that sees a key is that vector, for any scores and any
pattern. Queries are 64 times as large as normally distributed ones, so scores reach ±200.

Equal scores, for exact attention. Every score is 0, because q and k use different halves of
head_dim. So a query i weighs the n keys that it sees equally (n = i + 1 with a causal mask, N
without one). The keys that a query sees, and the queries that see a key, are intervals, so that
everything is a difference of prefix sums. With Dv signs f, and numbers s, t, w of magnitude 1 to
1.875, all of which look random but depend on the position only:

    q_i = t_i u    k_j = s_j y    v_j = f_j    dO_i = w_i x
    out_i = mean_j f_j
    dS_ij = w_i (a_j - A_i) / n     a_j = x·f_j, A_i = mean_j a_j
    dq_i = y w_i (mean_j a_j s_j - A_i mean_j s_j) / √D
    dk_j = u Σ_i w_i t_i (a_j - A_i) / n / √D
    dv_j = x Σ_i w_i / n

Means are over the keys that i sees, sums over the queries that see j. A single key too many or too
few changes an output row by about 1/√n of its size, and dq alike; float32 shows it at any practical
length, bfloat16 up to about 600 keys. dk and dv of early causal keys change less: by √(j + 1)/i.

Matching scores, for any pattern in which a token sees itself. A position has a code: the bits of
its number, as many as head_dim has room for, at most 16. Keys are codes as signs, queries are the
same codes times a large factor. So a query's largest score is that of the keys with its own code;
those of other codes are lower by 16 or more, and their weights vanish. All keys of a code have the
same value, hence out_i = value(code(i)). With unique codes also dv_j = dO_j, summed over query
heads. Neighbours have different values, so a row that is another one's shows in every dtype, at any
length. Scores reach ±200 where head_dim is 16 or more: exp() of them overflows float32 unless the
softmax subtracts its maximum, and a limit on scores below that changes the result. Values of
another head are 8 times as large.
"""

import math
from abc import ABC, abstractmethod
from functools import cached_property
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType, Workload
from longseq_bench.distributed.token_order import Positions
from longseq_bench.patterns import Ints
from longseq_bench.patterns.visible_keys import visible_keys
from longseq_bench.worker.check import GRADIENT_TOLERANCE
from longseq_bench.worker.passes import Pass

Array = NDArray[np.float64]

CHUNK = 8192
"""Rows written or compared together, so few that a device whose memory is full has room."""

MAX_FLOAT16_TOKENS = 2**14
"""Of equal scores: weights of 1/n below 2^-14 are rounded to a few bits."""

OUTPUT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-8}
"""Allowed error of an output row over its largest magnitude: four roundings of the weights and of
the output."""

_HARD_FACTOR = 64.0
"""Factor of normally distributed queries that makes scores as large as 200; exact in any dtype."""

MAX_BITS = 16
_LARGEST_SCORE = 200.0
_HEAD_SCALES = 1.0, 8.0
_EIGHTHS = np.array([1 / 16, 2 / 16, 4 / 16])
_KEYS_AT_ONCE = 65_536
_MULTIPLIERS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F


class SpecialInputs(ABC):
    """Inputs of a workload by position, and what attention must return for them.

    written: the inputs that `fill` replaces.
    float32_tolerance: of scores near 200, float32 has five digits after the point, so weights are
    off by 2e-5 or more.
    """

    name: ClassVar[str]
    written: ClassVar[tuple[str, ...]] = ("q", "k", "v", "grad_out")
    float32_tolerance: ClassVar[float]

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients that are known, of dq, dk and dv; without a module's matrices."""
        return ()

    @abstractmethod
    def inputs(self, name: str, positions: Positions) -> Array:
        """Return rows (n, D) of q and k, (n, Dv) of v and grad_out; v is multiplied by `factor`."""

    @abstractmethod
    def expected(self, name: str, positions: Positions) -> tuple[Array, Array]:
        """Return rows (n or 1, D) of `out` or of a gradient, and their magnitudes (n or 1).

        `out` is multiplied by `factor`; dk and dv are summed over query heads.
        """

    def factor(self, b: int, kv_head: int) -> Tensor | None:
        """Return the factor (Dv) or () of a head's values; None: 1 for all heads."""
        return None

    def allowed(self, name: str, dtype: DType) -> float:
        """Return the allowed error of a row over its magnitude, without a module's matrices."""
        if dtype == "float32":
            return self.float32_tolerance
        return (OUTPUT_TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]

    def fill(self, attention: Attention, pass_: Pass) -> None:
        """Write the inputs over those of a pass."""
        at = attention.shard
        names = ("q", at.queries), ("k", at.keys), ("v", at.keys), ("grad_out", at.queries)
        tensors = pass_.inputs if pass_.grad_out is None else (*pass_.inputs, pass_.grad_out)
        with torch.no_grad():
            for (name, positions), tensor in zip(names, tensors, strict=False):
                if name not in self.written:
                    continue
                for start in range(0, len(positions), CHUNK):
                    own = slice(start, start + CHUNK)
                    rows = np.ascontiguousarray(self.inputs(name, positions[own]))
                    tensor[:, :, own] = torch.from_numpy(rows).to(tensor)
            for (i, b), (j, head) in product(enumerate(at.batch), enumerate(at.kv_heads)):
                if (factor := self.factor(b, head)) is not None:
                    pass_.inputs[2][i, j] *= factor.to(pass_.inputs[2])


class ConstantValues(SpecialInputs):
    """One vector for all values of a head; queries and keys stay, but for a factor of queries."""

    name = "constant values"
    written = ("v",)
    float32_tolerance = 6e-5

    @override
    def inputs(self, name: str, positions: Positions) -> Array:
        return np.ones((len(positions), self.workload.v_head_dim))

    @override
    def expected(self, name: str, positions: Positions) -> tuple[Array, Array]:
        return np.ones((1, self.workload.v_head_dim)), np.ones(1)

    @override
    def factor(self, b: int, kv_head: int) -> Tensor:
        # eighths from 1 to 1.875, which every dtype represents exactly
        dims = torch.arange(self.workload.v_head_dim, dtype=torch.float64)
        return 1 + (dims + 3 * kv_head + 5 * b) % 8 / 8

    @override
    def fill(self, attention: Attention, pass_: Pass) -> None:
        super().fill(attention, pass_)
        with torch.no_grad():
            pass_.inputs[0].mul_(_HARD_FACTOR)


class EqualScores(SpecialInputs):
    """Inputs and expected results, equal for all heads.

    with_gradients: else q is 0, as a module needs whose matrices mix the two halves.
    """

    name = "equal scores"
    float32_tolerance = 2e-5

    def __init__(self, workload: Workload, with_gradients: bool = True) -> None:
        super().__init__(workload)
        w = workload
        # eighths: exact in every dtype
        dims = w.v_head_dim, w.head_dim
        self._x, self._of_scores = (1 + np.arange(d) % 8 / 8 for d in dims)
        is_upper = np.arange(w.head_dim) >= w.head_dim // 2
        self._u, self._y = (np.where(half, self._of_scores, 0.0) for half in (~is_upper, is_upper))
        if not with_gradients:
            self._u = np.zeros(w.head_dim)
        self._visible = visible_keys(w)

    @override
    def inputs(self, name: str, positions: Positions) -> Array:
        if name == "v":
            return signs(positions, self.workload.v_head_dim)
        numbers = dict(zip(("k", "q", "grad_out"), self._numbers(positions), strict=True))
        vector = {"q": self._u, "k": self._y, "grad_out": self._x}[name]
        rows: Array = numbers[name][:, None] * vector
        return rows

    def _numbers(self, positions: Positions) -> Array:
        """Return s, t and w of positions, (3, n)."""
        drawn = signs(positions, 3 * 4, first=self.workload.v_head_dim).reshape(-1, 3, 4)
        numbers: Array = (drawn[..., 0] * (drawn[..., 1:] @ _EIGHTHS + 23 / 16)).T
        return numbers

    @cached_property
    def _positions(self) -> Ints:
        return np.arange(self.workload.seq_len)

    @cached_property
    def _sums_of_values(self) -> Array:
        return self._over_keys(signs(self._positions, self.workload.v_head_dim))

    @property
    @override
    def gradients(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

    @override
    def expected(self, name: str, positions: Positions) -> tuple[Array, Array]:
        if name != "out":
            return self._gradient(name, positions)
        seen = self._seen_by(positions)
        sums = self._sum_few if self.workload.decode else self._sums_of_values.__getitem__
        means = sums(positions) / seen[:, None]
        # a mean of n signs is about 1/√n, but may be 0: a smaller magnitude would be no scale
        return means, np.maximum(np.abs(means).max(1), seen**-0.5)

    def _seen_by(self, queries: Positions) -> Array:
        return (self._visible.stop(queries) - self._visible.first(queries)).astype(np.float64)

    def _sum_few(self, queries: Positions) -> Array:
        """Return the sums of values that a few queries see, without long prefix sums."""
        first, stop = self._visible.first(queries), self._visible.stop(queries)
        total = np.zeros((len(queries), self.workload.v_head_dim))
        for start in range(0, self.workload.seq_len, _KEYS_AT_ONCE):
            keys = np.arange(start, min(start + _KEYS_AT_ONCE, self.workload.seq_len))
            sees = (keys >= first[:, None]) & (keys < stop[:, None])
            total += sees.astype(np.float64) @ signs(keys, total.shape[1])
        return total

    def _gradient(self, name: str, positions: Positions) -> tuple[Array, Array]:
        """Return rows of a gradient, and their magnitudes.

        A magnitude is about the root of the sum of squares of the terms; rounding errors follow it.
        """
        w = self.workload
        heads = 1 if name == "dq" else w.heads // w.kv_heads
        (values, vector), size = self._gradients[name]
        scale = float(heads) if name == "dv" else heads / math.sqrt(self.workload.head_dim)
        largest = (self._x if name == "dv" else self._of_scores).max()
        size = scale * float(largest) * size[positions]
        return scale * values[positions, None] * vector, size

    @cached_property
    def _gradients(self) -> dict[str, tuple[tuple[Array, Array], Array]]:
        """By name: values by position, the vector that they multiply; magnitudes of the values."""
        a = signs(self._positions, self.workload.v_head_dim) @ self._x
        seen = self._seen_by(self._positions)
        s, t, w = self._numbers(self._positions)
        mean_a, mean_s = self._over_keys(a) / seen, self._over_keys(s) / seen
        covariance = self._over_keys(a * s) / seen - mean_a * mean_s
        weights = w * t / seen
        d_keys = a * self._over_queries(weights) - self._over_queries(weights * mean_a)
        length = math.sqrt(float(self._x @ self._x))  # that of a single a may be 0
        size_q = length * np.abs(w) * np.sqrt(self._over_keys(s**2)) / seen
        size_k = np.maximum(np.abs(a), length) * np.sqrt(self._over_queries(weights**2))
        size_v = np.sqrt(self._over_queries((w / seen) ** 2))
        return {
            "dq": ((w * covariance, self._y), size_q),
            "dk": ((d_keys, self._u), size_k),
            "dv": ((self._over_queries(w / seen), self._x), size_v),
        }

    def _over_keys(self, values: Array) -> Array:
        if self.workload.mask is not None:
            positions = self._positions
            return _sums(values, self._visible.first(positions), self._visible.stop(positions))
        sums: Array = values.cumsum(0)
        return sums if self.workload.causal else np.broadcast_to(sums[-1], sums.shape)

    def _over_queries(self, values: Array) -> Array:
        positions = self._positions
        first, stop = self._visible.first_query(positions), self._visible.stop_query(positions)
        return _sums(values, first, stop)


def _sums(values: Array, first: Ints, stop: Ints) -> Array:
    """Return the sums of values (n, ...) over first ... stop - 1.

    Intervals from the start or to the end are summed from there: differences of sums lose digits.
    """
    zero = np.zeros_like(values[:1])
    before = np.concatenate([zero, values.cumsum(0)])
    after = np.concatenate([values[::-1].cumsum(0)[::-1], zero])
    ends = (len(values), *[1] * (values.ndim - 1))
    is_head, is_tail = (x.reshape(ends) for x in (first == 0, stop == len(values)))
    inner = before[stop] - before[first]
    if (values >= 0).all():
        inner = np.maximum(inner, 0.0)
    return np.where(is_head, before[stop], np.where(is_tail, after[first], inner))


class MatchingScores(SpecialInputs):
    """The expected output is v, and the expected dv is grad_out."""

    name = "matching scores"
    float32_tolerance = 2e-4

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        d = workload.head_dim
        self._bits = min(d, MAX_BITS)
        self.has_unique_codes = workload.seq_len <= 2**self._bits
        # a power of two: exact in every dtype
        self._factor = 2.0 ** round(math.log2(_LARGEST_SCORE * math.sqrt(d) / self._bits))

    @property
    @override
    def gradients(self) -> tuple[str, ...]:
        return ("dv",) if self.has_unique_codes else ()

    @override
    def inputs(self, name: str, positions: Positions) -> Array:
        if name in ("v", "grad_out"):
            codes = positions % 2**self._bits
            return signs(
                codes,
                self.workload.v_head_dim,
                first=self.workload.v_head_dim * (name == "grad_out"),
            )
        rows = np.zeros((len(positions), self.workload.head_dim))
        rows[:, : self._bits] = 1.0 - 2.0 * (positions[:, None] >> np.arange(self._bits) & 1)
        return rows * self._factor if name == "q" else rows

    @override
    def expected(self, name: str, positions: Positions) -> tuple[Array, Array]:
        w = self.workload
        heads = w.heads // w.kv_heads if name == "dv" else 1
        rows = self.inputs("grad_out" if name == "dv" else "v", positions) * heads
        return rows, np.full(len(positions), float(heads))

    @override
    def factor(self, b: int, kv_head: int) -> Tensor:
        return torch.tensor(_HEAD_SCALES[kv_head % len(_HEAD_SCALES)], dtype=torch.float64)


def signs(positions: Positions, count: int, first: int = 0) -> Array:
    """Return 1 or -1 for each position, (n, count): the top bits of a hash.

    first: number of the first column; other numbers give other signs.
    """
    one, other = map(np.uint64, _MULTIPLIERS)
    columns = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    hashed = (positions.astype(np.uint64)[:, None] + np.uint64(1)) * one
    hashed = (hashed ^ (hashed >> np.uint64(32)) ^ columns * other) * other
    hashed = (hashed ^ (hashed >> np.uint64(29))) * one
    found: Array = 1.0 - 2.0 * (hashed >> np.uint64(63)).astype(np.float64)
    return found
