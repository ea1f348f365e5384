"""Inputs whose scores differ by row, with the output and the gradients of every row in closed form.

A position has a code: its class, 1 for one key of 16, drawn by position, and the bits of its number
times an odd one, as many as head_dim has room for. The columns of a key are its class, those bits
as signs, a 1, and 0 in all that are left. A value is random signs that depend on the code, times a
factor of the head.

Matching rows are for any pattern in which a token sees itself. The query has the bits of one key as
signs, the row's own or, in exact attention, a visible one drawn by position, times a large factor,
and a negative number in the column of ones. Scores of other codes are lower by 13 or more, so the
output is the key's value. The negative number moves all scores of a row together: maxima spread
over 200, and lie far below |q||k|. So a softmax that subtracts something else than the maximum of
the row overflows or underflows float32. With unique codes, and own keys, dv_j = dO_j.

Two-level rows are for exact attention. The query is t u, with u 1 in the column of the class and 0
in all others in which keys are not. Scores are t c/√D, with the key's class c = 1 or 0:

    p_ij = e_i^c_j / Σ_j e_i^c_j     e_i = exp(t_i/√D), from 2 to 200
    out_i = Σ_j p_ij v_j             dO_i = w_i x
    dS_ij = w_i p_ij (a_j - A_i)     a_j = x·v_j, A_i = Σ_j p_ij a_j
    dq_i = Σ_j dS_ij k_j / √D        dk_j = u Σ_i dS_ij t_i / √D        dv_j = x Σ_i w_i p_ij

The keys that a query sees, and the queries that see a key, are intervals, so that everything is a
difference of prefix sums. A few keys have large equal weights, all others are a long tail. A key
too many or too few changes a row of out or dq by 1/√n of its size or more: float32 shows it up to
millions of keys, bfloat16 up to about 600. Another factor of a row's scores shows in every dtype.

t is 1 to 3.75 times a power of 2 near √D, w is ±1 or ±2, both by position. All inputs have few
bits, so that every dtype has them exactly. No column keeps one sign over many keys, because float32
rounds long sums of few different numbers to one side.
"""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType, Workload
from longseq_bench.patterns.visible_keys import visible_keys
from longseq_bench.worker.special_inputs import ConstantValues, SpecialInputs

MATCHING, TWO_LEVEL, EQUAL = "matching scores", "two-level scores", "equal scores"
MIXED, EXCHANGED = "matching and two-level scores", "two-level and matching scores"
"""Rows of inputs, as the record names them. MIXED has both kinds, drawn by position, EXCHANGED the
other kind in each row; both are for a forward. EQUAL has two-level rows with t = 0, as a module
needs whose matrices mix columns."""

MAX_FLOAT16_TOKENS = 2**14
"""Of two-level scores: weights of 1/n below 2^-14 are rounded to a few bits."""

MAX_BITS = 21
"""Codes are unique up to a million tokens; more bits would leave other codes too much weight."""

MATCHING_TOLERANCE = 2e-4
"""In float32: its scores near 200 have five digits after the point, so weights are off by 2e-5."""

LEAST_SPREAD = 2**-7
"""Smallest magnitude of a sum over that of its terms. Values that cancel leave rounding errors
of all terms: together about 2^-23 of their sum without signs in float32."""

_STREAMS = 32
"""Columns of values that differ; more would lengthen sums over all positions."""

_LARGEST_SCORE, _OFFSET = 200.0, 20.0
_KEYS_AT_ONCE = 65_536
_VALUES, _GRADIENTS, _NUMBERS, _PLACES = range(4)
_ODD = 0x27D4EB2F
_GOLDEN = -0x61C8864680B583EB
_MIXERS = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)


class KnownScores(SpecialInputs):
    """Inputs of matching rows, of two-level rows, or of both: `name` is one of the names above."""

    float32_tolerance = 2e-5

    def __init__(self, workload: Workload, name: str) -> None:
        super().__init__(workload)
        self.name, d = name, workload.head_dim
        self._bits = max(1, min(d - 1, MAX_BITS))
        # powers of two: exact in every dtype
        self._factor = 2.0 ** round(math.log2(_LARGEST_SCORE * math.sqrt(d) / (self._bits + 1)))
        self._offset = 2.0 ** round(math.log2(_OFFSET * math.sqrt(d)))
        self._largest_t = 0.0 if name == EQUAL else 2.0 ** round(math.log2(math.sqrt(d)))
        # 8 bits for x: sums of few different numbers would all be rounded to the same side
        self._x = 1 + 37 * torch.arange(workload.v_head_dim).double() % 128 / 128
        self._u = 1 + torch.arange(d).double() % 8 / 8
        self._u[1 : self._bits + 1] = 0
        self._visible = visible_keys(workload)

    @property
    @override
    def gradients(self) -> tuple[str, ...]:
        if self.name == TWO_LEVEL:
            return "dq", "dk", "dv"
        has_unique_codes = self.workload.seq_len <= 2 ** (self._bits - 1)
        return ("dv",) if self.name == MATCHING and has_unique_codes else ()

    @override
    def factor(self, b: int, kv_head: int) -> Tensor | None:
        return None if self.name in (TWO_LEVEL, EQUAL) else super().factor(b, kv_head)

    @override
    def allowed(self, name: str, dtype: DType, positions: Tensor) -> Tensor:
        is_hard = self._is_matching(positions) & (dtype == "float32")
        return torch.where(is_hard, MATCHING_TOLERANCE, super().allowed(name, dtype, positions))

    def _is_matching(self, positions: Tensor) -> Tensor:
        if self.name in (MIXED, EXCHANGED):
            return _bits(positions, 0, 1) == int(self.name == EXCHANGED)
        return torch.full_like(positions, self.name == MATCHING, dtype=torch.bool)

    def _class(self, positions: Tensor) -> Tensor:
        """Return 1 for a key of the class with the larger score, else 0."""
        if self._bits == 1:
            return positions & 1
        return (_bits(positions, 1, 4) == 0).long()

    def _codes(self, positions: Tensor) -> Tensor:
        codes = self._class(positions)
        return codes if self._bits == 1 else (2 * _ODD * positions + codes) % 2**self._bits

    def _temperatures(self, positions: Tensor) -> Tensor:
        eighths = (8 + _bits(positions, 5, 3)) * (1 + _bits(positions, 8, 1))
        return eighths.double() * (self._largest_t / 8)

    def _weights(self, positions: Tensor) -> Tensor:
        return ((1 - 2 * _bits(positions, 9, 1)) * (1 + _bits(positions, 10, 1))).double()

    def _targets(self, positions: Tensor) -> Tensor:
        """Return the position of the key that each matching row finds."""
        if self.name == MATCHING:
            return positions
        first, stop = self._seen_by(positions)
        share = _bits(positions, 0, 53, _PLACES).double() / 2**53
        return first + (share * (stop - first)).long()

    def _seen_by(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        host = queries.cpu().numpy()
        ends = self._visible.first(host), self._visible.stop(host)
        first, stop = (torch.from_numpy(end).to(queries.device) for end in ends)
        return first, stop

    @override
    def inputs(self, name: str, positions: Tensor) -> Tensor:
        if name == "v":
            return _signs(self._codes(positions), self.workload.v_head_dim, _VALUES)
        if name == "k":
            return self._keys(positions)
        if name == "grad_out":
            matching = _signs(self._codes(positions), self.workload.v_head_dim, _GRADIENTS)
            levels = self._weights(positions)[:, None] * self._x.to(positions.device)
        else:
            matching = self._keys(self._targets(positions)) * self._factor
            matching[:, 0] = 4 * matching[:, 0] - 2 * self._factor
            offsets = _bits(positions, 13, 4)[:, None] * self._offset
            matching[:, self._bits : self._bits + 1] = -offsets
            levels = self._temperatures(positions)[:, None] * self._u.to(positions.device)
        return torch.where(self._is_matching(positions)[:, None], matching, levels.float())

    def _keys(self, positions: Tensor) -> Tensor:
        rows = torch.zeros(len(positions), self.workload.head_dim, device=positions.device)
        bits = self._codes(positions)[:, None] >> torch.arange(self._bits, device=rows.device)
        rows[:, : self._bits] = 2.0 * (bits & 1) - 1
        rows[:, 0] = bits[:, 0] & 1
        rows[:, self._bits : self._bits + 1] = self.name != TWO_LEVEL
        return rows

    @override
    def expected(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        w = self.workload
        if name != "out" and self.name == TWO_LEVEL:
            return self._gradient(name, positions)
        if name == "dv":
            rows, heads = self.inputs("grad_out", positions), w.heads // w.kv_heads
            return rows * heads, torch.full_like(rows[:, 0], heads)
        rows = _signs(self._codes(self._targets(positions)), w.v_head_dim, _VALUES).double()
        sizes, is_matching = torch.ones_like(rows[:, 0]), self._is_matching(positions)
        if not is_matching.all():
            means, spread = self._means(positions[~is_matching].cpu())
            rows[~is_matching] = means.to(rows)
            # values of a row may cancel: a smaller magnitude would be no scale
            sizes[~is_matching] = means.abs().amax(1).maximum(spread).to(rows)
        return rows, sizes

    def _means(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return two-level rows of the output, and the root of the sum of their squared weights."""
        ends = torch.cat(self._seen_by(queries))
        # few queries of a long cache need no sums before every position
        sums = self._sum_before(ends) if self.workload.decode else self._prefix_sums[:, ends]
        before_first, before_stop = sums.double().chunk(2, 1)
        plain, rare = before_stop - before_first
        e = self._ratio(queries)[:, None]
        total = plain[:, :1] + e * rare[:, :1]
        means = (plain + e * rare)[:, 1:] / total
        spread = (plain[:, :1] + e**2 * rare[:, :1]).sqrt() / total
        return _tile(means, self.workload.v_head_dim), spread[:, 0].clamp_min(LEAST_SPREAD)

    def _ratio(self, queries: Tensor) -> Tensor:
        """Return the weight of a key of class 1 over that of one of class 0."""
        return (self._temperatures(queries) / math.sqrt(self.workload.head_dim)).exp()

    @cached_property
    def _prefix_sums(self) -> Tensor:
        return self._sum_before(torch.arange(self.workload.seq_len + 1))

    def _sum_before(self, ends: Tensor) -> Tensor:
        """Return ones and values, (2, n, 1 + Dv), summed over the keys of a class before an end."""
        count, start = min(_STREAMS, self.workload.v_head_dim), 0
        found = torch.zeros(2, len(ends), 1 + count, dtype=torch.int32)
        total = found.new_zeros(2, 1, 1 + count)
        for keys in torch.split(torch.arange(self.workload.seq_len), _KEYS_AT_ONCE):
            values = pad(_signs(self._codes(keys), count, _VALUES), (1, 0), value=1)
            is_rare = self._class(keys)[:, None]
            by_class = torch.stack([values * (1 - is_rare), values * is_rare])
            sums = total + pad(by_class, (0, 0, 1, 0)).cumsum(1, dtype=torch.int32)
            is_here = (ends >= start) & (ends <= start + len(keys))
            found[:, is_here] = sums[:, ends[is_here] - start]
            total, start = sums[:, -1:], start + len(keys)
        return found

    def _gradient(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of a gradient, and their magnitudes.

        A magnitude is about the root of the sum of squares of the terms; rounding errors follow it.
        """
        w, at = self.workload, positions.cpu()
        rows, sizes = (found[at] for found in self._gradients[name])
        if name != "dq":
            vector = self._x if name == "dv" else self._u
            heads = w.heads // w.kv_heads
            rows, sizes = heads * rows * vector, heads * float(vector.max()) * sizes
        if name != "dv":
            rows, sizes = (found / math.sqrt(w.head_dim) for found in (rows, sizes))
        return rows.to(positions.device), sizes.to(positions.device)

    @cached_property
    def _gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name: dq (N, D), or (N, 1) that multiplies a vector; magnitudes (N)."""
        every = torch.arange(self.workload.seq_len)
        is_rare, e = self._class(every).bool(), self._ratio(every)
        first, stop = self._seen_by(every)
        first_query = torch.from_numpy(self._visible.first_query(every.numpy()))
        stop_query = torch.from_numpy(self._visible.stop_query(every.numpy()))
        t, w = self._temperatures(every), self._weights(every)
        parts = torch.split(every, _KEYS_AT_ONCE)
        a = torch.cat([self.inputs("v", part).double() @ self._x for part in parts])
        length = float(self._x.norm())  # that of a single a may be 0

        def sum_keys(terms: Tensor) -> Tensor:
            of_class = terms.where(~is_rare, 0.0), terms.where(is_rare, 0.0)
            plain, rare = (pad(part.cumsum(0), (1, 0)) for part in of_class)
            return plain[stop] - plain[first] + e * (rare[stop] - rare[first])

        def sum_queries(terms: Tensor, ratio: Tensor) -> Tensor:
            # from the end: of a causal mask the last sums are small, and keep their digits
            of_class = terms, terms * ratio
            plain, rare = (pad(part.flip(0).cumsum(0).flip(0), (0, 1)) for part in of_class)
            plain, rare = (sums[first_query] - sums[stop_query] for sums in (plain, rare))
            return rare.where(is_rare, plain)

        def size(terms: Tensor) -> Tensor:
            squares, total = sum_queries(terms**2, e**2), sum_queries(terms.abs(), e)
            return squares.clamp_min(0).sqrt().maximum(LEAST_SPREAD * total)

        keys, total = self._keys(every).double(), sum_keys(torch.ones_like(a))
        mean_a, dq = sum_keys(a) / total, torch.zeros_like(keys)
        # errors of the output are a part of those of dq
        of_out = torch.cat([self.expected("out", part)[1] for part in parts])
        for column in range(self._bits):
            k = keys[:, column]
            dq[:, column] = w / total * (sum_keys(a * k) - mean_a * sum_keys(k))
        of_t, of_w = w * t / total, w / total
        dk = a * sum_queries(of_t, e) - sum_queries(of_t * mean_a, e)
        return {
            "dq": (dq, (length * w.abs() * of_out).maximum(dq.abs().amax(1))),
            "dk": (dk[:, None], a.abs().clamp_min(length) * size(of_t)),
            "dv": (sum_queries(of_w, e)[:, None], size(of_w)),
        }


def choose_inputs(attention: Attention) -> list[SpecialInputs]:
    """Return the inputs of a forward before all timed passes, and of passes after them."""
    w = attention.workload
    # a module's matrices mix a code's bits
    has_matrices = bool(attention.projections())
    is_short = w.seq_len <= MAX_FLOAT16_TOKENS or attention.coarsest_dtype != "float16"
    has_levels = attention.is_exact and is_short
    rest = [EQUAL if has_matrices else TWO_LEVEL] if has_levels else []
    if has_matrices or not (attention.is_exact or attention.sees_itself):
        return [ConstantValues(w), *(KnownScores(w, name) for name in rest)]
    if w.train:
        rest.append(MATCHING)
    elif has_levels:
        rest = [EXCHANGED]
    if has_levels and attention.coarsest_dtype != "float32":
        # half precision loses a single key in the long tail of other rows
        rest.append(EQUAL)
    return [KnownScores(w, name) for name in (MIXED if has_levels else MATCHING, *rest)]


def _bits(positions: Tensor, first: int, count: int, number: int = _NUMBERS) -> Tensor:
    """Return a number below 2^count for each position, by `count` bits that are drawn."""
    return (_draw(positions, number) >> first) & ((1 << count) - 1)


def _draw(positions: Tensor, number: int) -> Tensor:
    """Return 64 bits of each position, others for each number < 64; as in splitmix64 (2014)."""
    mixed = (64 * positions + number + 1) * _GOLDEN
    for shift, factor in _MIXERS:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> 31)


def _signs(positions: Tensor, count: int, number: int) -> Tensor:
    """Return 1 or -1 for each position, int8 (n, count); columns repeat after _STREAMS."""
    masks = 1 << torch.arange(_STREAMS, device=positions.device)
    found = 1 - 2 * ((_draw(positions, number)[:, None] & masks) != 0).to(torch.int8)
    return _tile(found, count)


def _tile(columns: Tensor, count: int) -> Tensor:
    """Return `count` columns: those of (n, columns), repeated or the first ones."""
    return columns.repeat(1, -(-count // columns.shape[1]))[:, :count]
