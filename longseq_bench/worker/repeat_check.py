"""Check timed passes: each must give the right result for its own inputs.

These are the inputs of the first pass, which the float64 reference confirmed, with changes whose
effect on every result is known (input_changes.py). Two passes, one at random and the last, also
have new scores, so that float64 judges a few rows of theirs.

The first gradients, and those of new scores, must also keep two sums over all rows, at the cost of
reading them. Scaling q and k the other way leaves the scores, and v enters the output linearly. So
for each key head, summed over its query heads and all tokens, with any mask and pattern:

    Σ q·dq = Σ k·dk        Σ v·dv = Σ out·dO

A row that has no gradient, or a wrong one, breaks this, whether it was sampled or not.
"""

import math

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.shard import RankShard, find_rows, gather_shards, is_owner
from longseq_bench.worker.check import GRADIENT_TOLERANCE, TINY, TOLERANCE, check
from longseq_bench.worker.checked_rows import select_checked_rows
from longseq_bench.worker.passes import Pass, TrialRun
from longseq_bench.worker.row_check import EveryRowCheck

SUM_TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}
"""Allowed difference of two sums over the root of the sum of squares of all terms."""

MIN_TOKENS, _CHUNK, _KEY_ROWS = 128, 4096, 16
_JUDGED_PLACES, _JUDGED_RUN = 4, 4
"""Judged rows of new scores: some successive ones, which see much the same keys, at each place."""


class RepeatCheck:
    """Compares the results of later passes with those of a first one.

    The output is compared with that of `pass_`, which the reference confirmed. Its gradients are 0
    in most rows, so those of the next pass are compared with later ones.

    every_row: the check of the warm-up pass.  sums: errors of the sums over all rows.
    passes: the number of passes of which every result was compared; judged: of those with new
    scores, whose output float64 judged.
    """

    def __init__(self, run: TrialRun, pass_: Pass) -> None:
        assert pass_.out is not None
        self._run, self._attention, shard = run, run.attention, run.attention.shard
        own = find_rows(shard.query_tokens, run.rows)[0]
        keys = torch.arange(0, len(shard.keys), -(-len(shard.keys) // _KEY_ROWS))
        self._rows = {"out": own, "dq": own, "dk": keys, "dv": keys}
        self._expected = {"out": _sample(pass_.out, own)}
        self.every_row = EveryRowCheck(run.attention)
        self.sums: dict[str, float] = {}
        self.passes = self.judged = 0
        self.largest: dict[str, float] = {}
        self.reason: str | None = None
        self._others = [RepeatCheck(*layer) for layer in [*run.layers(pass_)][1:]]

    def add(self, pass_: Pass, new_scores: bool = False) -> None:
        """Check the results of a pass, and drop them. All ranks must call it."""
        for of_layer, (_, other) in zip(self._others, pass_.others, strict=True):
            of_layer.add(other, new_scores)
        self.reason = self.reason or find_invalid(pass_)
        if not self._attention.group.all_max(float(self.reason is not None))[0]:
            if pass_.grads is not None and (new_scores or not self.sums):
                for name, error in sum_errors(self._attention, pass_).items():
                    self.sums[name] = max(self.sums.get(name, 0.0), error)
            if new_scores:
                self.judge(pass_)
            else:
                self._compare(pass_)
        pass_.out = pass_.grads = None

    def _compare(self, pass_: Pass) -> None:
        assert pass_.changes
        results = pass_.gradients if pass_.out is None else {"out": pass_.out, **pass_.gradients}
        self.passes += set() < results.keys() <= self._expected.keys()
        for name, result in results.items():
            sample = _sample(result, self._rows[name]) / pass_.changes.factor(name)
            expected = self._expected.setdefault(name, sample)
            error = _difference(sample, expected, result.shape[2])
            self.largest[name] = max(self.largest.get(name, 0.0), error)

    def judge(self, pass_: Pass) -> None:
        """Compare some rows of the output with float64. All ranks must call it."""
        assert pass_.out is not None
        attention, trial = self._attention, self._run.trial
        seed = self._run.seed + self.judged
        rows = select_checked_rows(attention, seed, options=trial.options)
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(len(rows), (_JUDGED_PLACES, 1), generator=generator)
        rows = rows[torch.unique((places + torch.arange(_JUDGED_RUN)) % len(rows))]
        if attention.chooses_layout:
            # the layout must be the one that a new instance chooses from these inputs
            attention = type(attention)(attention.workload, attention.group, **trial.options)
            attention.prepare(trial.device)
            with torch.no_grad():
                attention(*pass_.inputs)
        errors = check(attention, pass_.inputs, pass_.out, rows).largest_over_ranks(attention.group)
        self.passes, self.judged = self.passes + 1, self.judged + 1
        if reason := errors.over_tolerance(attention.coarsest_dtype):
            chosen = ", with the layout that a new instance chooses"
            more = chosen if attention.chooses_layout else ""
            self.reason = self.reason or f"in a timed pass with new scores {reason}{more}"

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about a result that is wrong, or not the checked one, or None."""
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
        others = (other.over_tolerance(dtype) for other in self._others)
        return self.reason or next(filter(None, others), None)


def find_invalid(pass_: Pass) -> str | None:
    """Return which result is no plain tensor, or has another shape, dtype or device, or None."""
    (q, _, v), dtype = pass_.inputs, str(pass_.inputs[0].dtype)[6:]
    shapes = (*q.shape[:3], v.shape[3]), *(tuple(t.shape) for t in pass_.inputs)
    results = pass_.out, *(pass_.grads or ())
    for name, got, shape in zip(("the output", "dq", "dk", "dv"), results, shapes, strict=False):
        if got is None:
            continue
        if type(got) is not Tensor:
            return f"{name} is a {type(got).__name__}; return a plain torch.Tensor"
        found = str(got.dtype)[6:], tuple(got.shape)
        if found != (dtype, shape):
            return f"{name} is {found[0]} {found[1]}; expected {dtype} {shape}"
        is_repeated = any(n > 1 and not step for n, step in zip(shape, got.stride(), strict=True))
        missing_bytes = got.nbytes - got.untyped_storage().nbytes()
        # an output that is not kept was copied to the host
        is_copied = got is pass_.out and pass_.keep != "all" and got.device.type == "cpu"
        is_elsewhere = got.device != q.device and not is_copied
        if is_elsewhere or is_repeated or missing_bytes > 0:
            return f"{name} has no memory of its own on {q.device} for each of its numbers"
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
    numbers = torch.finfo(pair[0].dtype)
    # a gradient below the smallest numbers of its dtype is rounding alone
    least = numbers.smallest_normal * numbers.eps / SUM_TOLERANCE[w.dtype]
    total = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
    for i, row in enumerate(attention.shard.batch):
        for j, head in enumerate(heads):
            if is_owner(shards, rank, row, head):
                parts = (torch.split(tensor[i, j].detach(), _CHUNK) for tensor in pair)
                for a, b in zip(*parts, strict=True):
                    rows = (a.double() * b).sum(-1)
                    squares = rows.square() + least**2 * a.double().square().sum(-1)
                    sums = torch.stack([rows.sum(), squares.sum()])
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
