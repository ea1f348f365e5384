"""Check every output row with inputs whose result is known in closed form.

    constant values: all values of a head are one vector x. Weights of a softmax add up to 1, so
                     every output row that sees a key is x, whatever the scores and the pattern.
    equal scores:    see equal_scores.py; for exact attention, gradients included. In float32 it
                     shows a single key too many or too few in any output row.

Both cost O(N) next to the pass itself, at any length and over ranks. Sampled rows with random
inputs (check.py) see what these can't: wrong scores.

Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.shard import Positions
from longseq_bench.kernels import host_memory
from longseq_bench.worker.check import GRADIENT_TOLERANCE, TOLERANCE
from longseq_bench.worker.equal_scores import MAX_FLOAT16_TOKENS, EqualScores, to_rows
from longseq_bench.worker.inputs import Pass

OUTPUT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-8}
"""Allowed error of an output row over its largest magnitude: four roundings of the weights and of
the output. Modules, which round more often, have the tolerance of sampled rows."""

_CHUNK = 8192
"""Rows that are compared together, so few that a device whose memory is full has room for them."""
_GRADIENTS = "dq", "dk", "dv"


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
        """Check the forward that is run in the block with constant values; restore v after it."""
        attention, v = self._attention, one.inputs[2]
        is_mapped = attention.on_host and v.device.type == "cpu"
        original = host_memory.copy(v, "cpu") if is_mapped else v.detach().to("cpu", copy=True)
        fill_constant(attention, v)
        yield
        assert one.out is not None
        self._add("constant values", find_unlike_constant(attention, one.out))
        one.out = None
        with torch.no_grad():
            v.copy_(original)

    @property
    def can_have_equal_scores(self) -> bool:
        """True for exact attention, in float16 up to the length that its weights allow."""
        attention = self._attention
        is_coarse = attention.coarsest_dtype == "float16"
        is_short = attention.workload.seq_len <= MAX_FLOAT16_TOKENS
        return attention.is_exact and (is_short or not is_coarse)

    @contextmanager
    def equal_scores(self, one: Pass) -> Iterator[None]:
        """Check the pass that is run in the block with equal scores. All inputs are lost."""
        attention = self._attention
        expected = EqualScores(attention.workload, not attention.projections())
        fill_equal_scores(attention, expected, one)
        one.keep_output = True
        yield
        self._add("equal scores", find_unlike_expected(attention, expected, one))
        one.out = one.grads = None

    def _add(self, inputs: str, reason: str | None) -> None:
        self.done.append(inputs)
        self.reason = self.reason or (reason and f"with {inputs}, {reason}")


def fill_constant(attention: Attention, v: Tensor) -> None:
    """Give all tokens of a head one vector, (B, Hk, N, D) in place; its neighbours have others."""
    shard = attention.shard
    with torch.no_grad():
        for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(shard.kv_heads)):
            v[i, j] = _constant(b, head, v.shape[-1]).to(v)


def find_unlike_constant(attention: Attention, out: Tensor) -> str | None:
    """Return a sentence about rows of `out` (B, Hq, N, D) that are not their head's constant.

    None if all are. Rows of zeros are allowed: their number was checked before.
    """
    w, shard = attention.workload, attention.shard
    tolerance = TOLERANCE if attention.projections() else OUTPUT_TOLERANCE
    wrong = _WrongRows("output", tolerance[attention.coarsest_dtype])
    for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(shard.heads)):
        constant = _constant(b, head * w.kv_heads // w.heads, w.head_dim)
        expected = _project(attention, constant[None]).to(out.device)
        size = expected.abs().amax(-1)
        for start in range(0, out.shape[2], _CHUNK):
            rows = out[i, j, start : start + _CHUNK]
            rows = torch.where((rows == 0).all(-1, keepdim=True), expected.to(rows), rows)
            wrong.add(rows, expected, size, shard.queries[start : start + _CHUNK], head)
    return wrong.describe()


def fill_equal_scores(attention: Attention, expected: EqualScores, one: Pass) -> None:
    """Write the inputs over those of the pass; all heads have the same."""
    shard = attention.shard
    names = ("q", shard.queries), ("k", shard.keys), ("v", shard.keys), ("grad_out", shard.queries)
    tensors = one.inputs if one.grad_out is None else (*one.inputs, one.grad_out)
    with torch.no_grad():
        for (name, positions), tensor in zip(names, tensors, strict=False):
            for start in range(0, len(positions), _CHUNK):
                own = slice(start, start + _CHUNK)
                tensor[:, :, own] = to_rows(expected.inputs(name, positions[own]), tensor)


def find_unlike_expected(attention: Attention, expected: EqualScores, one: Pass) -> str | None:
    """Return a sentence about rows of the output or of a gradient that are wrong; None without.

    For the results of exact attention on the inputs of `fill_equal_scores`.
    """
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
        for name, gradient, (at, heads, count) in zip(_GRADIENTS, one.grads, places, strict=True):
            wrong = _WrongRows(name, GRADIENT_TOLERANCE[dtype])
            values, sizes = map(torch.from_numpy, expected.gradient(name, at, count))
            _compare(wrong, gradient, values, sizes, at, heads)
            found.append(wrong.describe())
    return next(filter(None, found), None)


class _WrongRows:
    """The number of rows that are wrong, and the first of them."""

    def __init__(self, name: str, allowed: float) -> None:
        self._name, self._allowed = name, allowed
        self._count = self._rows = 0
        self._first = ""

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
        """Return a sentence about the wrong rows."""
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
    for start in range(0, got.shape[2], _CHUNK):
        own = slice(start, start + _CHUNK)
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
