"""Inputs whose scores differ by row, with the output and the gradients of every row in closed form.

A position has a code: its class, 1 for one key of 16, drawn by position, and the bits of its number
times an odd one, as many as head_dim has room for. The columns of a key are its class, those bits
as signs, a 1, and 0 in all that are left. A value is random signs that depend on the code, times a
factor of the head. Where rows match, the last of four columns or more that are left is ±OUTLIER,
and 0 in all queries: the scores stay, but eight bits for the whole row have no room for the others.

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

A workload with sinks has the same one in all heads. It adds to the weights of two-level rows, up to
half as much again. Scores of matching keys are two offsets or more above it, so that it has no
weight, or below it, so that the output is 0.

t is 1 to 3.75 times a power of 2 near √D, w is ±1 or ±2, both by position. All inputs have few
bits, so that every dtype has them exactly. No column keeps one sign over many keys, because float32
rounds long sums of few different numbers to one side.

Scores of the columns of a latent that are its value are seen by random inputs alone, of which
decode has all rows in float64.

With a soft cap two-level rows have a negative number, a multiple of t, in the column of ones too:
it would move both scores alike without the cap, and brings them to its curve and near -cap, where a
masked key would be if it were capped. Then e_i is of the capped scores, and dS has their slopes.
The largest score of a matching row is 0 there, others are -16 or less before the cap. A cap below
LEAST_CAP has no matching rows, and none has one beside a sink.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from longseq_bench.attention.base import Attention
from longseq_bench.core.cost import mask_pairs
from longseq_bench.core.model import DType, Workload
from longseq_bench.patterns import Ints
from longseq_bench.patterns.visible_keys import visible_keys
from longseq_bench.worker.check import UNIT
from longseq_bench.worker.prefix_sums import PrefixSums
from longseq_bench.worker.reference import LEAST_SLOPE
from longseq_bench.worker.special_inputs import SpecialInputs, chunk_rows

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

OUTLIER = 512.0
"""Size of a number in a row of keys beside others of 1: those are less than half of its 127th."""

_STREAMS = 32
"""Columns of values that differ; more would lengthen sums over all positions."""

LEAST_CAP, _LARGEST_CAPPED = 20.0, 128.0
"""Soft cap below which no rows match; scores before a cap that two-level rows have, at most."""

_LARGEST_SCORE, _OFFSET, _CAPPED_FACTOR = 200.0, 20.0, 8.0
_VALUES, _GRADIENTS, _NUMBERS, _PLACES = range(4)
_ODD = 0x27D4EB2F
_GOLDEN = -0x61C8864680B583EB
_MIXERS = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)


class KnownScores(SpecialInputs):
    """Inputs of matching rows, of two-level rows, or of both: `name` is one of the names above."""

    float32_tolerance = 2e-5
    written = "q", "k", "v", "grad_out"

    def __init__(self, workload: Workload, name: str) -> None:
        super().__init__(workload)
        # columns of q and k that are the value of a latent: q is 0 there, and k has v
        self._first = workload.v_head_dim if workload.latent else 0
        self.name, d, root = name, workload.head_dim - self._first, 1 / workload.scale
        # a single value may cancel, and no other shows the size of its row
        self.float32_tolerance *= 2 if workload.v_head_dim == 1 else 1
        # of half the weight that the keys of a usual row have without e
        self.sink = round(8 * math.log(mask_pairs(workload) / len(workload.queries) / 2)) / 8
        self._sink_weight = math.exp(self.sink) if workload.sink else 0.0
        self._bits = max(1, min(d - 1, MAX_BITS))
        # powers of two: exact in every dtype
        self._factor = 2.0 ** round(math.log2(_LARGEST_SCORE * root / (self._bits + 1)))
        self._offset = 2.0 ** round(math.log2(_OFFSET * root))
        self._largest_t = 0.0 if name == EQUAL else 2.0 ** round(math.log2(root))
        # 8 bits for x: sums of few different numbers would all be rounded to the same side
        self._x = 1 + 37 * torch.arange(workload.v_head_dim).double() % 128 / 128
        self._u = 1 + torch.arange(d).double() % 8 / 8
        self._u[1 : self._bits + 1] = 0
        self._has_outliers = name not in (TWO_LEVEL, EQUAL) and d >= self._bits + 5
        self._has_outliers &= not workload.kv_dtype  # eight bits have no room for them
        if self._has_outliers:
            self._u[-1] = 0
        # sinks are far from scores that are near a cap
        self._is_capped = bool(workload.soft_cap) and not workload.sink
        if self._is_capped and (cap := workload.soft_cap):
            self._factor = 2.0 ** math.ceil(math.log2(_CAPPED_FACTOR * root))
            # up to where a masked key would have a weight, if its score were the cap
            reach = min(cap * math.atanh(max(0.75, 1 - 2 / cap)), _LARGEST_CAPPED)
            reach /= 1 if name == MIXED or cap < LEAST_CAP else 2
            self._u[self._bits : self._bits + 1] = -(2.0 ** round(math.log2(reach / 3.75)))
        has_unique_codes = workload.seq_len <= 2 ** (self._bits - 1)
        if name == TWO_LEVEL:
            self.gradients = "dq", "dk", "dv"
        elif name == MATCHING and has_unique_codes:
            self.gradients = ("dv",)
        self._visible = visible_keys(workload)
        tokens, block = workload.seq_len, chunk_rows(workload.seq_len)
        self._values_before = PrefixSums(self._value_terms, tokens, block)
        self._keys_before = PrefixSums(self._key_terms, tokens, block)
        # of a causal mask the sums over the last queries are small: they keep their digits
        self._queries_from = PrefixSums(self._query_terms, tokens, block, from_end=True)
        self.sums = self._values_before, self._keys_before, self._queries_from

    @cached_property
    @override
    def other(self) -> SpecialInputs | None:  # type: ignore[override]
        exchanged = {MIXED: EXCHANGED, EXCHANGED: MIXED}.get(self.name)
        if exchanged is None:
            return None
        other = KnownScores(self.workload, exchanged)
        other._values_before = self._values_before
        return other

    @override
    def factor(self, b: int, kv_head: int) -> Tensor | None:
        return None if self.name in (TWO_LEVEL, EQUAL) else super().factor(b, kv_head)

    @override
    def allowed(self, name: str, dtype: DType, positions: Tensor) -> Tensor:
        is_matching, allowed = self._is_matching(positions), super().allowed(name, dtype, positions)
        if self.name != EQUAL and (cap := self.workload.soft_cap):
            rounded = (2.5 if name == "out" else 1.0) * UNIT[dtype] * min(cap, _LARGEST_CAPPED)
            allowed = torch.where(is_matching, allowed, allowed + rounded)
        return torch.where(is_matching & (dtype == "float32"), MATCHING_TOLERANCE, allowed)

    def _is_matching(self, positions: Tensor) -> Tensor:
        if self.name in (MIXED, EXCHANGED):
            return _bits(positions, 0, 1) == int(self.name == EXCHANGED)
        return torch.full_like(positions, self.name == MATCHING, dtype=torch.bool)

    def _class(self, positions: Tensor) -> Tensor:
        """Return 1 for a key of the class with the larger score, else 0."""
        return (_bits(positions, 1, 4) == 0).long()

    def _codes(self, positions: Tensor) -> Tensor:
        codes: Tensor = (2 * _ODD * positions + self._class(positions)) % 2**self._bits
        return codes

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
        first, stop = self._on_host(queries, self._visible.first, self._visible.stop)
        return first, stop

    def _on_host(self, positions: Tensor, *ends: Callable[[Ints], Ints]) -> tuple[Tensor, ...]:
        host = positions.cpu().numpy()
        return tuple(torch.from_numpy(end(host)).to(positions.device) for end in ends)

    @override
    def inputs(self, name: str, positions: Tensor) -> Tensor:
        if name == "v":
            return _signs(self._codes(positions), self.workload.v_head_dim, _VALUES)
        if name == "k":
            rows = self._keys(positions)
            return pad(rows, (self._first, 0)) if self._first else rows
        if name == "grad_out":
            matching = _signs(self._codes(positions), self.workload.v_head_dim, _GRADIENTS)
            levels = self._weights(positions)[:, None] * self._x.to(positions.device)
        else:
            matching = self._keys(self._targets(positions)) * self._factor
            if self._has_outliers:
                matching[:, -1] = 0
            matching[:, 0] = 4 * matching[:, 0] - 2 * self._factor
            steps = _bits(positions, 13, 4)[:, None]
            offsets = steps * self._offset
            if self.workload.sink:
                of_bits = self._bits - 1 + 2 * self._class(self._targets(positions))[:, None]
                steps = steps - 9 + 3 * self._is_above_sink(positions)[:, None]
                offsets = of_bits * self._factor - steps * self._offset
            if self._is_capped:  # the largest score is 0
                offsets = self._bits * self._factor + matching[:, :1] / 2
            matching[:, self._bits : self._bits + 1] = -offsets
            levels = self._temperatures(positions)[:, None] * self._u.to(positions.device)
        rows = torch.where(self._is_matching(positions)[:, None], matching, levels.float())
        return pad(rows, (self._first, 0)) if self._first else rows

    def _is_above_sink(self, positions: Tensor) -> Tensor:
        """Return 1 for matching rows whose score is above the sink, which has no weight; else 0."""
        return _bits(positions, 16, 1) if self.workload.sink else torch.ones_like(positions)

    def _keys(self, positions: Tensor) -> Tensor:
        rows = torch.zeros(len(positions), len(self._u), device=positions.device)
        bits = self._codes(positions)[:, None] >> torch.arange(self._bits, device=rows.device)
        rows[:, : self._bits] = 2.0 * (bits & 1) - 1
        rows[:, 0] = bits[:, 0] & 1
        rows[:, self._bits : self._bits + 1] = self.name != TWO_LEVEL or self._is_capped
        if self._has_outliers:
            rows[:, -1] = OUTLIER * (1 - 2 * _bits(positions, 17, 1))
        return rows

    @override
    def expected(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        w, weights = self.workload, self._is_above_sink(positions)[:, None]
        if name != "out" and self.name == TWO_LEVEL:
            return self._gradient(name, positions)
        if name == "dv":
            rows, heads = self.inputs("grad_out", positions), w.heads // w.kv_heads
            return rows * heads * weights, torch.full_like(rows[:, 0], heads)
        values = _signs(self._codes(self._targets(positions)), w.v_head_dim, _VALUES)
        rows = values.double() * weights
        sizes, is_matching = torch.ones_like(rows[:, 0]), self._is_matching(positions)
        if not is_matching.all():
            means, spread = self._means(positions[~is_matching])
            rows[~is_matching] = means
            # values of a row may cancel: a smaller magnitude would be no scale
            sizes[~is_matching] = means.abs().amax(1).maximum(spread)
        return rows, sizes

    def _means(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return two-level rows of the output, and the root of the sum of their squared weights."""
        plain, rare = self._seen_sums(self._values_before, queries)
        e = self._ratio(queries)[:, None]
        total = plain[:, :1] + e * rare[:, :1]
        means = (plain + e * rare)[:, 1:] / total
        spread = (plain[:, :1] - self._sink_weight + e**2 * rare[:, :1]).sqrt() / total
        return _tile(means, self.workload.v_head_dim), spread[:, 0].clamp_min(LEAST_SPREAD)

    def _ratio(self, queries: Tensor) -> Tensor:
        """Return the weight of a key of class 1 over that of one of class 0."""
        low, high = self._levels(queries).unbind(1)
        return (high - low).exp()

    def _levels(self, queries: Tensor) -> Tensor:
        """Return the scores of keys of class 0 and of class 1, (n, 2)."""
        shared = self._u[self._bits : self._bits + 1].sum().to(queries.device)
        products = self._temperatures(queries)[:, None] * torch.stack([shared, shared + 1])
        scores: Tensor = self.workload.scores.of(products * self.workload.scale)
        return scores

    def _seen_sums(self, sums: PrefixSums, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over the keys of each class that a query sees, two of (n, C)."""
        first, stop = self._seen_by(queries)
        plain, rare = (sums(stop) - sums(first)).double().chunk(2, 1)
        plain[:, 0] += self._sink_weight  # like keys of class 0 whose values and keys are 0
        return plain, rare

    def _value_terms(self, keys: Tensor) -> Tensor:
        """Return 1 and the columns of the value, by class, (n, 2 + 2 Dv)."""
        values = _signs(self._codes(keys), min(_STREAMS, self.workload.v_head_dim), _VALUES)
        return self._by_class(torch.cat([torch.ones_like(values[:, :1]), values], 1).int(), keys)

    def _key_terms(self, keys: Tensor) -> Tensor:
        """Return 1, a, the columns c of the key that differ, and a c, by class, (n, 4 + 4 bits)."""
        a, columns = self._a(keys), self._keys(keys)[:, : self._bits].double()
        return self._by_class(torch.cat([torch.ones_like(a), a, columns, a * columns], 1), keys)

    def _by_class(self, terms: Tensor, keys: Tensor) -> Tensor:
        is_rare = self._class(keys)[:, None]
        return torch.cat([terms * (1 - is_rare), terms * is_rare], 1)

    def _a(self, keys: Tensor) -> Tensor:
        values = self.inputs("v", keys).double()
        return values @ self._x[:, None].to(keys.device)

    def _query_terms(self, queries: Tensor) -> Tensor:
        """Return the terms of dk and dv, then their magnitudes and squares, (n, 14).

        Each is there without e and with it: a key has the score of one class in all rows.
        """
        plain, rare = self._seen_sums(self._keys_before, queries)
        e = self._ratio(queries)[:, None]
        total, sum_a = (plain + e * rare)[:, :2].chunk(2, 1)
        slopes = self.workload.scores.slopes(self._levels(queries)).split(1, 1)
        of_w, found = self._weights(queries)[:, None] / total, []
        for weight, slope in zip((torch.ones_like(e), e), slopes, strict=True):
            of_t = of_w * self._temperatures(queries)[:, None]
            size, of_t = of_t * slope.clamp_min(LEAST_SLOPE), of_t * slope
            terms = torch.cat([of_t, of_t * sum_a / total, of_w, size.abs(), of_w.abs()], 1)
            found += [weight * terms, (weight * torch.cat([size, of_w], 1)) ** 2]
        return torch.cat(found, 1)

    def _gradient(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of a gradient, and their magnitudes.

        A magnitude is about the root of the sum of squares of the terms; rounding errors follow it.
        """
        if name == "dq":
            return self._dq(positions)
        ends = self._visible.first_query, self._visible.stop_query
        first, stop = self._on_host(positions, *ends)
        plain, rare = (self._queries_from(first) - self._queries_from(stop)).chunk(2, 1)
        sums = torch.where(self._class(positions)[:, None] == 1, rare, plain)
        t, t_mean, w, of_t, of_w, square_t, square_w = sums.unbind(1)
        heads = self.workload.heads // self.workload.kv_heads
        if name == "dv":
            x = heads * self._x.to(w)
            return w[:, None] * x, x.max() * _size(square_w, of_w)
        u = heads * self.workload.scale * self._u.to(t)
        a, length = self._a(positions)[:, 0], float(self._x.norm())
        # a single a may be 0
        size = a.abs().clamp_min(length) * _size(square_t, of_t)
        return (a * t - t_mean)[:, None] * u, u.abs().max() * size

    def _dq(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        plain, rare = self._seen_sums(self._keys_before, queries)
        rare *= self._ratio(queries)[:, None]
        low, high = self.workload.scores.slopes(self._levels(queries)).split(1, 1)
        total, sum_a = (plain + rare)[:, :2].chunk(2, 1)
        of_one, (c, a_c) = (sums := low * plain + high * rare)[:, :2], sums[:, 2:].chunk(2, 1)
        if self._is_capped:  # the column of ones
            c, a_c = torch.cat([c, of_one[:, :1]], 1), torch.cat([a_c, of_one[:, 1:]], 1)
        w = self._weights(queries) * self.workload.scale
        rows = (w[:, None] / total) * (a_c - sum_a / total * c)
        # errors of the output are a part of those of dq
        of_out = float(self._x.norm()) * w.abs() * self.expected("out", queries)[1]
        rows = pad(rows, (0, self.workload.head_dim - rows.shape[1]))
        return rows, of_out.maximum(rows.abs().amax(1))


def choose_inputs(attention: Attention) -> list[SpecialInputs]:
    """Return the inputs of a forward before all timed passes, and of passes after them."""
    w = attention.workload
    # a module's matrices mix a code's bits
    has_matrices = bool(attention.projections())
    # a single column has no room for one that moves the scores of a row away from the sink
    columns = w.head_dim - (w.v_head_dim if w.latent else 0)
    has_matching = not has_matrices and not (w.sink and columns == 1)
    is_short = w.seq_len <= MAX_FLOAT16_TOKENS or attention.coarsest_dtype != "float16"
    has_levels = attention.is_exact and is_short
    rest = [EQUAL if has_matrices else TWO_LEVEL] if has_levels else []
    can_match = (w.soft_cap or math.inf) >= LEAST_CAP and not (w.soft_cap and w.sink)
    has_matching = has_matching and can_match
    if not has_matching or not (attention.is_exact or attention.sees_itself):
        return [SpecialInputs(w), *(KnownScores(w, name) for name in rest)]
    if w.train:
        rest.append(MATCHING)
    elif has_levels:
        # each row has both kinds already: one in every second head, the other in the rest
        rest = [EXCHANGED] if w.batch * w.heads == 1 else []
    if has_levels and attention.coarsest_dtype != "float32":
        # half precision loses a single key in the long tail of other rows
        rest.append(EQUAL)
    return [KnownScores(w, name) for name in (MIXED if has_levels else MATCHING, *rest)]


def _size(squares: Tensor, total: Tensor) -> Tensor:
    """Return the magnitude of sums, from those of their terms' squares and magnitudes."""
    return squares.clamp_min(0).sqrt().maximum(LEAST_SPREAD * total)


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
