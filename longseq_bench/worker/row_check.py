"""Check every output row with inputs whose result is known in closed form, and timed passes.

special_inputs.py and known_scores.py have the inputs, which cost O(N) next to the pass itself, at
any length and over ranks. Sampled rows with random inputs (check.py) see what these can't: scores
that are a little wrong.

Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.shard import RankShard, find_rows, gather_shards, is_owner
from longseq_bench.worker.check import GRADIENT_TOLERANCE, TINY, TOLERANCE, is_finite
from longseq_bench.worker.known_scores import choose_inputs
from longseq_bench.worker.passes import Pass
from longseq_bench.worker.special_inputs import SpecialInputs, chunk_rows


class EveryRowCheck:
    """Gives a pass special inputs, and judges every row of this rank's results.

    remaining: the inputs for passes of their own, after the warm-up; such a pass loses its inputs.
    done: the inputs that were tried.  reason: a sentence about rows that are wrong, or None.
    """

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._first, *self.remaining = choose_inputs(attention)
        self.done: list[str] = []
        self.reason: str | None = None

    @property
    def not_done(self) -> list[str]:
        """The inputs that were not tried."""
        return [i.name for i in (self._first, *self.remaining) if i.name not in self.done]

    @contextmanager
    def warm_up(self, pass_: Pass) -> Iterator[None]:
        """Check the forward that is run in the block, and restore the inputs after it."""
        with self.check(pass_, self._first, forward_only=True):
            yield
        pass_.draw_again()

    @contextmanager
    def check(
        self, pass_: Pass, inputs: SpecialInputs, forward_only: bool = False
    ) -> Iterator[None]:
        """Check the pass that is run in the block. The inputs stay as they are then."""
        inputs.fill(self._attention, pass_, forward_only)
        kept, pass_.keep_output = pass_.keep_output, True
        yield
        pass_.keep_output = kept
        reason = find_wrong_rows(self._attention, inputs, pass_)
        for sums in inputs.sums:
            sums.clear()
        self.done += [inputs.name] if inputs.name not in self.done else []
        self.reason = self.reason or (reason and f"with {inputs.name}, {reason}")
        pass_.out = pass_.grads = None


def find_wrong_rows(attention: Attention, inputs: SpecialInputs, pass_: Pass) -> str | None:
    """Return a sentence about rows of the output or of a gradient that are wrong, or None."""
    covers_all = attention.is_exact or not attention.measures().get("uncovered", 1.0)
    known = inputs.gradients if covers_all and not attention.projections() else ()
    assert pass_.out is not None
    for name, got in {"out": pass_.out, **pass_.gradients}.items():
        if name in ("out", *known) and (
            reason := _describe_wrong_rows(attention, inputs, name, got, covers_all)
        ):
            return reason
    if not all(map(is_finite, pass_.gradients.values())):
        return "a gradient has values that are not finite"
    return None


def _describe_wrong_rows(
    attention: Attention, inputs: SpecialInputs, name: str, got: Tensor, covers_all: bool
) -> str | None:
    """Compare every row of a result; an error is relative to the size of its row."""
    shard, dtype = attention.shard, attention.coarsest_dtype
    group = attention.workload.heads // attention.workload.kv_heads
    positions, heads, times = shard.queries, shard.heads, 1.0
    if name in ("dk", "dv"):
        positions, heads = shard.keys, shard.kv_heads
        # heads have the same inputs, so they round alike, and the errors of their sum add up
        times = max(1.0, group / 8)
    count, first = 0, ""
    chunk = chunk_rows(attention.workload.seq_len)
    for start in range(0, len(positions), chunk):
        own = slice(start, start + chunk)
        at = torch.from_numpy(positions[own]).to(got.device)
        rows, sizes = inputs.expected(name, at)
        of_all = _project(attention, rows, sizes)
        allowed = inputs.allowed(name, dtype, at) * times
        if attention.projections():
            allowed = torch.full_like(allowed, TOLERANCE[dtype])
        for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(heads)):
            factor = inputs.factor(b, head // group) if name == "out" else None
            expected, size = of_all
            if factor is not None:
                factor = factor.to(rows)
                expected, size = _project(attention, rows * factor, sizes * factor.max())
            part = got[i, j, own].detach().float()
            error = (part - expected.float()).abs().amax(-1) / size.clamp_min(TINY)
            wrong = ~(error <= allowed.to(error))
            if not covers_all:
                # a pattern may leave rows uncovered: their number was checked before
                wrong &= (part != 0).any(-1)
            number = int(wrong.sum())
            if number and not count:
                n = int(wrong.nonzero()[0])
                limit = float(allowed.expand(len(error))[n])
                first = f"token {positions[start + n]:,} of head {head} is {float(error[n]):.2g}"
                first += f" off (allowed {limit:.2g})"
            count += number
    if not count:
        return None
    total, what = got.shape[:3].numel(), "output" if name == "out" else name
    return f"{count:,} of {total:,} rows of {what} are wrong: {first}"


def _project(attention: Attention, rows: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply rows (n, D) by a module's matrices of v and out; return them and their sizes."""
    matrices = attention.projections()
    for name in ("v", "out"):
        if name in matrices:
            rows = rows @ matrices[name].detach().to(rows)
            sizes = rows.abs().amax(-1)
    return rows, sizes


# ---- timed passes: each must give the result of the checked pass, for its own inputs -------------
# A result that is remembered from an earlier pass must not count. So one thing changes sign before
# every pass, outside the clock: v; q and k together; the gradient of the output. The work and the
# scores stay as they are, and the results change sign exactly:
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

    The output is compared with that of `pass_`, which the reference confirmed. Its gradients are 0
    in most rows, so those of the next pass are compared with later ones.

    every_row: the check of the warm-up pass.  sums: errors of the sums over all rows.
    passes: the number of passes of which every result was compared.
    """

    def __init__(self, attention: Attention, pass_: Pass, rows: Tensor) -> None:
        assert pass_.out is not None
        shard, self._attention = attention.shard, attention
        own = find_rows(shard.queries, rows)[0]
        keys = torch.arange(0, len(shard.keys), -(-len(shard.keys) // _KEY_ROWS))
        self._rows = {"out": own, "dq": own, "dk": keys, "dv": keys}
        self._changes = cycle("vs" if pass_.grad_out is None else "vsg")
        self._expected = {"out": _sample(pass_.out, own)}
        self.every_row = EveryRowCheck(attention)
        self.sums: dict[str, float] = {}
        self.passes = 0
        self.largest: dict[str, float] = {}

    def change_inputs(self, pass_: Pass) -> None:
        """Change the sign of one thing, and restore a q that the last pass has overwritten."""
        change = next(self._changes)
        pass_.signs[change] *= -1
        q, k, v = pass_.inputs
        with torch.no_grad():
            if pass_.original_q is not None:
                q.copy_(pass_.original_q).mul_(pass_.signs["s"])
            elif change == "s":
                q.neg_()
            if change == "s":
                k.neg_()
            elif change == "v":
                v.neg_()
            elif pass_.grad_out is not None:
                pass_.grad_out.neg_()

    def add(self, pass_: Pass) -> None:
        """Compare the results of a pass, and drop them."""
        results = pass_.gradients if pass_.out is None else {"out": pass_.out, **pass_.gradients}
        if pass_.grads is not None and not self.sums:
            self.sums = sum_errors(self._attention, pass_)
        self.passes += set() < results.keys() <= self._expected.keys()
        for name, result in results.items():
            sign = math.prod(pass_.signs[part] for part in _SIGNS_OF[name])
            sample = _sample(result, self._rows[name]) * sign
            expected = self._expected.setdefault(name, sample)
            error = _difference(sample, expected, result.shape[2])
            self.largest[name] = max(self.largest.get(name, 0.0), error)
        pass_.out = pass_.grads = None

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


def sum_errors(attention: Attention, pass_: Pass) -> dict[str, float]:
    """Return the largest difference of the two sums of each equation. All ranks must call it.

    An equation is left out if a pass has overwritten or dropped one of its tensors. Sequences below
    MIN_TOKENS have no sums: each of their rows is compared, and q·dq of a row that sees one key is
    only a rounding error.
    """
    if pass_.grads is None or pass_.keep == "nothing" or attention.workload.seq_len < MIN_TOKENS:
        return {}
    (q, k, v), (dq, dk, dv) = pass_.inputs, pass_.grads
    pairs = {"Σ q·dq and Σ k·dk": ((q, dq), (k, dk))}
    if pass_.out is not None and pass_.grad_out is not None:
        pairs["Σ v·dv and Σ out·dO"] = (pass_.out, pass_.grad_out), (v, dv)
    shard, w = attention.shard, attention.workload
    of_queries, of_keys = gather_shards(attention.group, shard)
    found = {}
    for name, (queries, keys) in pairs.items():
        a = _sum_products(attention, of_queries, shard.heads, w.heads // w.kv_heads, *queries)
        b = _sum_products(attention, of_keys, shard.kv_heads, 1, *keys)
        size = (a[1] + b[1]).sqrt().clamp_min(TINY)
        found[name] = float(((a[0] - b[0]).abs() / size).nan_to_num(nan=torch.inf).max())
    return found


def _sum_products(
    attention: Attention, shards: list[RankShard], heads: range, group: int, *pair: Tensor
) -> Tensor:
    """Return the sums over all ranks' rows of their products, and of the squares, (2, B, Hk).

    Each row counts on the lowest rank that has it. group: heads of the tensors for each key head.
    """
    w, rank = attention.workload, attention.group.rank
    total = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
    for i, row in enumerate(attention.shard.batch):
        for j, head in enumerate(heads):
            if is_owner(shards, rank, row, head):
                parts = (torch.split(tensor[i, j].detach(), _CHUNK) for tensor in pair)
                for a, b in zip(*parts, strict=True):
                    rows = (a.double() * b).sum(-1)
                    sums = torch.stack([rows.sum(), rows.square().sum()])
                    total[:, row, head // group] += sums.cpu()
    return attention.group.all_sum(total)


def _sample(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor (B, H, N, D), and the sum of all rows, (B, H, R + 1, D)."""
    tensor = tensor.detach()
    total = torch.zeros_like(tensor[:, :, 0], dtype=torch.float64)
    for part in torch.split(tensor, _CHUNK, 2):
        total += part.sum(2, dtype=torch.float64)
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
