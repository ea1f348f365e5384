"""Check every output row with inputs whose result is known in closed form, and timed passes.

    constant values: all values of a head are one vector x. Weights of a softmax add up to 1, so
                     every output row that sees a key is x, for any scores and any pattern.
                     Queries are 64 times as large, so scores reach ±200.
    equal scores:    for exact attention, gradients included. In float32 it shows a single key too
                     many or too few in any output row (special_inputs.py).
    matching scores: for attention in which a query sees its own position, with dv. It shows an
                     output row that is another one's in any dtype, and a softmax without its
                     maximum or with a limit on scores (special_inputs.py).

They cost O(N) next to the pass itself, at any length and over ranks. Sampled rows with random
inputs (check.py) see what these can't: scores that are a little wrong.

Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle, product
from typing import TypeVar

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.shard import Positions, RankShard, find_rows, gather_shards, is_owner
from longseq_bench.kernels import host_memory
from longseq_bench.worker.check import GRADIENT_TOLERANCE, TINY, TOLERANCE, is_finite
from longseq_bench.worker.passes import Pass
from longseq_bench.worker.special_inputs import (
    CHUNK,
    MAX_FLOAT16_TOKENS,
    EqualScores,
    MatchingScores,
    SpecialInputs,
)

OUTPUT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-8}
"""Allowed error of an output row over its largest magnitude: four roundings of the weights and of
the output. Modules, which round more often, have the tolerance of sampled rows."""

_HARD_FACTOR = 64.0
"""Factor of normally distributed queries that makes scores as large as 200; exact in any dtype."""

CONSTANT_TOLERANCE: dict[DType, float] = {**OUTPUT_TOLERANCE, "float32": 6e-5}
MATCHING_TOLERANCE: dict[DType, float] = {**OUTPUT_TOLERANCE, "float32": 2e-4}
MATCHING_GRADIENT_TOLERANCE: dict[DType, float] = {**GRADIENT_TOLERANCE, "float32": 2e-4}
"""Of scores near 200, float32 has five digits after the point: weights are off by 2e-5 or more."""

MATCHING = "matching scores"
_MAX_COPIED_BYTES = 2**30
"""Size of inputs up to which a warm-up pass may overwrite all of them."""


Inputs = TypeVar("Inputs", bound=SpecialInputs)


class EveryRowCheck:
    """Gives a pass such inputs, and judges every row of this rank's results.

    done: the inputs that were tried.  reason: a sentence about rows that are wrong, or None.
    """

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.done: list[str] = []
        self.reason: str | None = None

    @contextmanager
    def constant_values(self, one: Pass) -> Iterator[None]:
        """Check the forward that is run in the block with constant values; restore the inputs."""
        attention, (q, _, v) = self._attention, one.inputs
        originals = _copies(attention, one, [v])
        fill_constant(attention, v)
        with torch.no_grad():
            q.mul_(_HARD_FACTOR)
        yield
        assert one.out is not None
        self._add("constant values", find_unlike_constant(attention, one.out))
        one.out = None
        _restore(one, [v], originals)
        if originals and one.original_q is None:
            with torch.no_grad():
                q.div_(_HARD_FACTOR)

    @property
    def can_have_equal_scores(self) -> bool:
        """True for exact attention, in float16 up to the length that its weights allow."""
        attention = self._attention
        is_short = attention.workload.seq_len <= MAX_FLOAT16_TOKENS
        return attention.is_exact and (is_short or attention.coarsest_dtype != "float16")

    def equal_scores(self, one: Pass) -> AbstractContextManager[None]:
        """Check the pass that is run in the block with equal scores. All inputs are lost."""
        attention = self._attention
        inputs = EqualScores(attention.workload, not attention.projections())
        return self._special(one, "equal scores", inputs, find_unlike_equal)

    @property
    def can_have_matching_scores(self) -> bool:
        """True if queries see themselves; not with a module's matrices, which mix a code's bits."""
        return self._attention.sees_itself and not self._attention.projections()

    @contextmanager
    def warm_up(self, one: Pass) -> Iterator[None]:
        """Check the forward that is run in the block, and restore the inputs after it.

        With constant values, unless matching scores are possible, small and checked here only.
        """
        size = sum(t.numel() * t.element_size() for t in one.inputs)
        is_small = size <= _MAX_COPIED_BYTES and not self._attention.on_host
        can_restore = is_small or _can_redraw(one)
        if self._attention.workload.train or not (self.can_have_matching_scores and can_restore):
            with self.constant_values(one):
                yield
            return
        originals = _copies(self._attention, one, one.inputs)
        with self.matching_scores(one):
            yield
        _restore(one, one.inputs, originals)

    def matching_scores(self, one: Pass) -> AbstractContextManager[None]:
        """Check the pass that is run in the block with matching scores. All inputs are lost."""
        inputs = MatchingScores(self._attention.workload)
        return self._special(one, MATCHING, inputs, find_unlike_matching)

    @contextmanager
    def _special(
        self, one: Pass, name: str, inputs: Inputs,
        find: Callable[[Attention, Inputs, Pass], str | None],
    ) -> Iterator[None]:  # fmt: skip
        inputs.fill(self._attention, one)
        kept, one.keep_output = one.keep_output, True
        yield
        one.keep_output = kept
        self._add(name, find(self._attention, inputs, one))
        one.out = one.grads = None

    def _add(self, inputs: str, reason: str | None) -> None:
        self.done.append(inputs)
        self.reason = self.reason or (reason and f"with {inputs}, {reason}")


def _can_redraw(one: Pass) -> bool:
    """Return True on a GPU, which draws inputs faster than it copies them to the host and back."""
    return one.redraw is not None and one.inputs[0].is_cuda


def _copies(attention: Attention, one: Pass, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of inputs on the host; none if they can be drawn again."""
    if _can_redraw(one):
        return []
    if attention.on_host:
        return [host_memory.copy(t, "cpu") for t in tensors]
    return [t.detach().to("cpu", copy=True) for t in tensors]


def _restore(one: Pass, tensors: Sequence[Tensor], originals: Sequence[Tensor]) -> None:
    """Give inputs their values again; without copies draw all of them."""
    with torch.no_grad():
        if not originals:
            one.draw_again()
        for tensor, original in zip(tensors, originals, strict=False):
            tensor.copy_(original)


def fill_constant(attention: Attention, v: Tensor) -> None:
    """Give all tokens of a head one vector; its neighbours have others."""
    shard = attention.shard
    with torch.no_grad():
        for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(shard.kv_heads)):
            v[i, j] = _constant(b, head, v.shape[-1]).to(v)


def find_unlike_constant(attention: Attention, out: Tensor) -> str | None:
    """Return a sentence about rows of `out` that are not their head's constant, or None."""
    w, shard = attention.workload, attention.shard
    tolerance = TOLERANCE if attention.projections() else CONSTANT_TOLERANCE
    wrong = _WrongRows("output", tolerance[attention.coarsest_dtype])
    covers_all = _covers_all(attention)
    for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(shard.heads)):
        constant = _constant(b, head * w.kv_heads // w.heads, w.v_head_dim)
        expected = _project(attention, constant[None]).to(out.device)
        size = expected.abs().amax(-1)
        for start in range(0, out.shape[2], CHUNK):
            rows = out[i, j, start : start + CHUNK]
            if not covers_all:
                rows = _without_zeros(rows, expected)
            wrong.add(rows, expected, size, shard.queries[start : start + CHUNK], head)
    return wrong.describe()


def find_unlike_equal(attention: Attention, expected: EqualScores, one: Pass) -> str | None:
    """Return a sentence about rows of the output or of a gradient that are wrong, or None."""
    assert one.out is not None
    shard, dtype = attention.shard, attention.coarsest_dtype
    projected = bool(attention.projections())
    wrong = _WrongRows("output", (TOLERANCE if projected else OUTPUT_TOLERANCE)[dtype])
    means, sizes = map(torch.from_numpy, expected.out(shard.queries))
    rows = _project(attention, means)
    sizes = rows.abs().amax(-1) if projected else sizes
    _compare(wrong, one.out, rows, sizes, shard.queries, shard.heads)
    found = [wrong.describe()]
    if one.grads is not None and not projected:
        group = attention.workload.heads // attention.workload.kv_heads
        of_keys = shard.keys, shard.kv_heads, group
        places = (shard.queries, shard.heads, 1), of_keys, of_keys
        names = "dq", "dk", "dv"
        for name, gradient, (at, heads, count) in zip(names, one.grads, places, strict=True):
            wrong = _WrongRows(name, GRADIENT_TOLERANCE[dtype] * _growth(count))
            values, sizes = map(torch.from_numpy, expected.gradient(name, at, count))
            _compare(wrong, gradient, values, sizes, at, heads)
            found.append(wrong.describe())
    return next(filter(None, found), None)


def find_unlike_matching(attention: Attention, expected: MatchingScores, one: Pass) -> str | None:
    """Return a sentence about rows of the output or of dv that are wrong, or None."""
    assert one.out is not None
    w, shard, dtype = attention.workload, attention.shard, attention.coarsest_dtype
    group, covers_all = w.heads // w.kv_heads, _covers_all(attention)
    wrong = _WrongRows("output", MATCHING_TOLERANCE[dtype])
    for j, head in enumerate(shard.heads):
        scale = expected.head_scale(head // group)
        for start in range(0, len(shard.queries), CHUNK):
            own = shard.queries[start : start + CHUNK]
            rows = torch.from_numpy(expected.inputs("v", own) * scale).to(one.out.device)
            sizes = rows.new_full((len(own),), scale)
            for part in one.out[:, j, start : start + CHUNK]:
                if not covers_all:
                    part = _without_zeros(part, rows)
                wrong.add(part, rows, sizes, own, head)
    found = [wrong.describe()]
    if one.grads is not None and not all(map(is_finite, one.grads)):
        found.append("a gradient has values that are not finite")
    if one.grads is not None and expected.has_unique_codes and covers_all:
        wrong = _WrongRows("dv", MATCHING_GRADIENT_TOLERANCE[dtype] * _growth(group))
        values = torch.from_numpy(expected.inputs("grad_out", shard.keys) * group)
        sizes = values.new_full((len(shard.keys),), float(group))
        _compare(wrong, one.grads[2], values, sizes, shard.keys, shard.kv_heads)
        found.append(wrong.describe())
    return next(filter(None, found), None)


def _covers_all(attention: Attention) -> bool:
    """Return True if every query sees a key, so that no row of the output is zero."""
    return attention.is_exact or not attention.measures().get("uncovered", 1.0)


def _without_zeros(rows: Tensor, expected: Tensor) -> Tensor:
    """Return rows (n, D) with expected ones in place of those that are zero.

    A pattern may leave rows uncovered: their number was checked before.
    """
    return torch.where((rows == 0).all(-1, keepdim=True), expected.to(rows), rows)


def _growth(heads: int) -> float:
    # heads have the same inputs, so they round alike, and the errors of their sum add up
    return max(1.0, heads / 8)


class _WrongRows:
    """The number of rows that are wrong, and the first of them."""

    def __init__(self, name: str, allowed: float) -> None:
        self._name, self._allowed, self._first = name, allowed, ""
        self._count = self._rows = 0

    def add(
        self, rows: Tensor, expected: Tensor, sizes: Tensor, positions: Positions, head: int
    ) -> None:
        """Compare rows (n, D) with expected rows (n or 1, D); errors are relative to the sizes."""
        error = (rows.detach().double() - expected).abs().amax(-1) / sizes.clamp_min(1e-30)
        wrong = ~(error <= self._allowed)
        self._rows += len(rows)
        count = int(wrong.sum())
        if count and not self._count:
            at = int(wrong.nonzero()[0])
            self._first = f"token {positions[at]:,} of head {head} is {float(error[at]):.2g} off"
        self._count += count

    def describe(self) -> str | None:
        if not self._count:
            return None
        return (
            f"{self._count:,} of {self._rows:,} rows of {self._name} are wrong: {self._first} "
            f"(allowed {self._allowed:.2g})"
        )


def _compare(
    wrong: _WrongRows, got: Tensor, expected: Tensor, sizes: Tensor, positions: Positions,
    heads: range,
) -> None:  # fmt: skip
    """Compare a tensor (B, H, N, D) with rows (N, D) that are equal for all heads."""
    for start in range(0, got.shape[2], CHUNK):
        own = slice(start, start + CHUNK)
        rows, size = expected[own].to(got.device), sizes[own].to(got.device)
        for i, j in product(range(got.shape[0]), range(got.shape[1])):
            wrong.add(got[i, j, own], rows, size, positions[own], heads[j])


def _constant(b: int, head: int, head_dim: int) -> Tensor:
    """Return a vector (D,) of eighths from 1 to 1.875, which every dtype represents exactly."""
    return 1 + (torch.arange(head_dim, dtype=torch.float64) + 3 * head + 5 * b) % 8 / 8


def _project(attention: Attention, rows: Tensor) -> Tensor:
    """Multiply rows (n, D) by a module's matrices of v and out."""
    matrices = attention.projections()
    for name in ("v", "out"):
        if name in matrices:
            rows = rows @ matrices[name].detach().cpu().double()
    return rows


# ---- timed passes: each must give the result of the checked pass, for its own inputs -------------
# Timing needs equal work, and a result that is remembered from an earlier pass must not count. So
# one thing changes sign before every pass, outside the clock: v; q and k together; the gradient of
# the output. The work is the same, scores stay as they are, and the results change sign exactly:
#
#     out: with v    dv: with grad_out    dq, dk: with v, with q and k, and with grad_out
#
# The first gradients must also keep two sums over all rows, at the cost of reading them. Scaling q
# and k the other way leaves the scores, and v enters the output linearly. So for each key head,
# summed over its query heads and all tokens, with any mask and pattern:
#
#     Σ q·dq = Σ k·dk        Σ v·dv = Σ out·dO
#
# A row that has no gradient, or a wrong one, breaks this, whether it was sampled or not.

SUM_TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}
"""Allowed difference of two sums over the root of the sum of squares of all terms."""

MIN_TOKENS, _CHUNK, _KEY_ROWS = 128, 4096, 16
_SIGNS_OF = {"out": "v", "dq": "vsg", "dk": "vsg", "dv": "g"}
"""What the sign of a result depends on. v: v; s: q and k; g: grad_out."""


class RepeatCheck:
    """Compares the results of later passes with those of a first one.

    The output is compared with that of `one`, which the reference confirmed. Its gradients are zero
    in most rows, so those of the next pass are compared with later ones.

    every_row: the check of the warm-up pass.  sums: errors of the sums over all rows.
    passes: the number of passes of which every result was compared.
    """

    def __init__(self, attention: Attention, one: Pass, rows: Tensor) -> None:
        assert one.out is not None
        shard, self._attention = attention.shard, attention
        own = find_rows(shard.queries, rows)[0]
        keys = torch.arange(0, len(shard.keys), -(-len(shard.keys) // _KEY_ROWS))
        self._rows = {"out": own, "dq": own, "dk": keys, "dv": keys}
        self._changes = cycle("vs" if one.grad_out is None else "vsg")
        self._expected = {"out": _sample(one.out, own)}
        self.every_row = EveryRowCheck(attention)
        self.sums: dict[str, float] = {}
        self.passes = 0
        self.largest: dict[str, float] = {}

    def change_inputs(self, one: Pass) -> None:
        """Change the sign of one thing, and restore a q that the last pass has overwritten."""
        change = next(self._changes)
        one.signs[change] *= -1
        q, k, v = one.inputs
        with torch.no_grad():
            if one.original_q is not None:
                q.copy_(one.original_q).mul_(one.signs["s"])
            elif change == "s":
                q.neg_()
            if change == "s":
                k.neg_()
            elif change == "v":
                v.neg_()
            elif one.grad_out is not None:
                one.grad_out.neg_()

    def add(self, one: Pass) -> None:
        """Compare the results of a pass, and drop them."""
        results = dict(zip(("dq", "dk", "dv"), one.grads or (), strict=False))
        if one.out is not None:
            results["out"] = one.out
        if one.grads is not None and not self.sums:
            self.sums = sum_errors(self._attention, one)
        self.passes += results.keys() <= self._expected.keys()
        for name, result in results.items():
            sign = math.prod(one.signs[part] for part in _SIGNS_OF[name])
            sample = _sample(result, self._rows[name]) * sign
            expected = self._expected.setdefault(name, sample)
            error = _difference(sample, expected, result.shape[2])
            self.largest[name] = max(self.largest.get(name, 0.0), error)
        one.out = one.grads = None

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about a result that is not the checked one, or None."""
        for name, error in self.largest.items():
            allowed = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
            if not error <= allowed:
                return (
                    f"{name} of a timed pass is {error:.2g} off that of the checked pass "
                    f"(allowed {allowed:.2g})"
                )
        for name, error in self.sums.items():
            if not error <= SUM_TOLERANCE[dtype]:
                return f"{name} differ by {error:.2g} (allowed {SUM_TOLERANCE[dtype]:.2g})"
        return None


def sum_errors(attention: Attention, one: Pass) -> dict[str, float]:
    """Return the largest difference of the two sums of each equation. All ranks must call it.

    An equation is left out if a pass has overwritten or dropped one of its tensors. Sequences below
    MIN_TOKENS have no sums: each of their rows is compared, and q·dq of a row that sees one key is
    only a rounding error.
    """
    if one.grads is None or one.keep == "nothing" or attention.workload.seq_len < MIN_TOKENS:
        return {}
    (q, k, v), (dq, dk, dv) = one.inputs, one.grads
    pairs = {"Σ q·dq and Σ k·dk": ((q, dq), (k, dk))}
    if one.out is not None and one.grad_out is not None:
        pairs["Σ v·dv and Σ out·dO"] = (one.out, one.grad_out), (v, dv)
    shard, group, w = attention.shard, attention.group, attention.workload
    of_queries, of_keys = gather_shards(group, shard)
    found = {}
    for name, (queries, keys) in pairs.items():
        a = _sum_products(attention, of_queries, shard.heads, w.heads // w.kv_heads, *queries)
        b = _sum_products(attention, of_keys, shard.kv_heads, 1, *keys)
        size = (a[1] + b[1]).sqrt().clamp_min(TINY)
        found[name] = float(((a[0] - b[0]).abs() / size).nan_to_num(nan=torch.inf).max())
    return found


def _sum_products(
    attention: Attention, shards: list[RankShard], heads: range, group: int, one: Tensor,
    other: Tensor,
) -> Tensor:  # fmt: skip
    """Return the sums over all ranks' rows of their products, and of the squares, (2, B, Hk).

    Each row counts on the lowest rank that has it. group: heads of the tensors for each key head.
    """
    w, rank = attention.workload, attention.group.rank
    total = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
    for i, b in enumerate(attention.shard.batch):
        for j, head in enumerate(heads):
            if is_owner(shards, rank, b, head):
                for own in _chunks(one.shape[2]):
                    rows = (one[i, j, own].detach().double() * other[i, j, own].detach()).sum(-1)
                    sums = torch.stack([rows.sum(), rows.square().sum()])
                    total[:, b, head // group] += sums.cpu()
    return attention.group.all_sum(total)


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, tokens, _CHUNK))


def _sample(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor (B, H, N, D), and the sum of all rows, (B, H, R + 1, D)."""
    tensor = tensor.detach()
    total = torch.zeros_like(tensor[:, :, 0], dtype=torch.float64)
    for own in _chunks(tensor.shape[2]):
        total += tensor[:, :, own].sum(2, dtype=torch.float64)
    chosen = tensor[:, :, rows.to(tensor.device)].double()
    return torch.cat([chosen, total[:, :, None]], 2).cpu()


def _difference(got: Tensor, expected: Tensor, tokens: int) -> float:
    """Return the largest difference over the largest magnitude of a head's rows.

    Rounding errors of N rows add up to about √N times that of one, so their sum is divided by that.
    """
    if not torch.isfinite(got).all():
        return math.inf
    largest = expected[:, :, :-1].abs().amax((2, 3)).clamp_min(TINY)
    difference = (got - expected).abs().amax(3) / largest[..., None]
    difference[:, :, -1] /= math.sqrt(tokens)
    return float(difference.max())
