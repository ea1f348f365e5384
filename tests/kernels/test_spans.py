"""Kernels of spans against the definition: the compiled one on random spans, indices and heads."""

import math
import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.core.workload import Scores
from longseq_bench.kernels import native, torch_spans
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout
from longseq_bench.patterns.spans import Spans, spans_of
from tests.kernels import plain_attention
from tests.spans import tiles_of, visible_pairs

needs_native = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)
KERNELS = [
    pytest.param(torch_spans, id="plain"),
    pytest.param(native, id="native", marks=needs_native),
]
kernels = pytest.mark.parametrize("kernel", KERNELS)


@dataclass
class RandomCase:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    task: SpanTask


def random_case(seed: int, dtype: torch.dtype = torch.float32) -> RandomCase:
    """Return strided tiles that cover every query once, strided runs (some tiles have none),
    permuting indices or none, and positions that differ from rows."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    n, m = (int(x) for x in rng.integers(20, 420, 2))
    heads, kv = ((4, 2), (3, 3), (4, 1))[rng.integers(3)]
    dim, batch = int(rng.choice((8, 24, 50, 64, 72, 130))), int(rng.integers(1, 3))
    q, grad = (torch.randn(batch, heads, n, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv, m, dim).to(dtype) for _ in range(2))
    step = int(rng.integers(1, 4))
    starts = np.array([s for o in range(step) for s in range(o, n, step * 150)], dtype=np.int32)
    counts = np.minimum(150, -(-(n - starts) // step)).astype(np.int32)
    runs = np.concatenate(([0], np.cumsum(rng.integers(0, 5, len(starts))))).astype(np.int64)
    start = rng.integers(0, m, runs[-1]).astype(np.int32)
    steps = rng.integers(1, 4, runs[-1]).astype(np.int32)
    count = np.minimum(rng.integers(1, 200, runs[-1]), -(-(m - start) // steps)).astype(np.int32)
    spans = Spans(starts, counts, runs, start, count, steps, step)
    used = sorted(rng.choice(heads, rng.integers(1, heads + 1), replace=False).tolist())
    q_row, k_row = (
        rng.permutation(x).astype(np.int32) if rng.random() < 0.5 else None for x in (n, m)
    )
    q_at, k_at = (
        rng.integers(0, 500, x).astype(np.int32) if rng.random() < 0.5 else None for x in (n, m)
    )
    if k_row is not None or k_at is not None:  # positions of a run ascend
        k_at = np.sort(rng.integers(0, 500, m)).astype(np.int32)
    q_first = rng.integers(0, 300, n).astype(np.int32) if rng.random() < 0.5 else None
    steps = StepMap(q_row, k_row, q_at, k_at, q_first)
    scores = Scores(soft_cap=0.7) if seed % 3 == 1 else Scores()
    task = SpanTask([HeadSpans(spans, used)], bool(rng.random() < 0.6), steps, scores)
    return RandomCase(q, k, v, grad, task)


def count_pairs(d: RandomCase) -> Tensor:
    """Return how often each query sees each key in each run, (runs, N, M)."""
    (part,), index = d.task.parts, d.task.steps
    shape = len(part.spans.start), d.q.shape[2], d.k.shape[2]
    pairs = np.zeros(shape)
    for queries, keys, runs in tiles_of(part.spans):
        rows = queries if index.q_row is None else index.q_row[queries]
        columns = keys if index.k_row is None else index.k_row[keys]
        visible = visible_pairs(d.task, queries, keys)
        np.add.at(pairs, (runs[None, :], rows[:, None], columns[None, :]), visible)
    return torch.from_numpy(pairs)


def define(d: RandomCase, merge: bool, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return what `run` should, in float64: the softmax of the pairs of all runs, and gradients.

    With `merge` it is added to that of `run`.
    """
    of_runs, group = count_pairs(d), d.q.shape[1] // d.k.shape[1]
    counts = of_runs.sum(0)
    q, k, v, grad = (t.double() for t in (d.q, d.k, d.v, d.grad))
    cap = d.task.scores.soft_cap
    out, lse = plain_attention.forward(q, k, v, counts=counts, soft_cap=cap)
    if merge:
        old, old_lse = (t.double() for t in earlier_softmax(d))
        joint = torch.logaddexp(lse, old_lse)
        shares = (torch.exp(x - joint).nan_to_num()[..., None] for x in (lse, old_lse))
        out, lse = sum(s * o for s, o in zip(shares, (out, old), strict=True)), joint
    of_softmax = {"out": out, "lse": lse} if given is None else given
    total = of_softmax["lse"].double().nan_to_num(0.0, math.inf, math.inf)[..., None]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ keys.mT / math.sqrt(q.shape[3])
    scores = cap * torch.tanh(scores / cap) if cap else scores
    weights = torch.exp(scores - total)
    delta = (grad * of_softmax["out"].double().nan_to_num(0.0)).sum(-1, keepdim=True)
    d_scores = weights * (grad @ values.mT - delta)
    d_scores = d_scores * (1 - (scores / cap) ** 2) if cap else d_scores
    heads, scaled = list(d.task.parts[0].heads), d_scores * counts / math.sqrt(q.shape[3])
    of_heads = torch.zeros(q.shape[1], dtype=torch.float64)
    of_heads[heads] = 1
    of_heads = of_heads[:, None, None]
    dk = ((scaled * of_heads).mT @ q).unflatten(1, (-1, group)).sum(2)
    dv = ((weights * counts * of_heads).mT @ grad).unflatten(1, (-1, group)).sum(2)
    bias = torch.einsum("bhnm,rnm->bhr", d_scores[:, heads], of_runs)
    return {"out": out, "lse": lse, "dq": scaled @ keys, "dk": dk, "dv": dv, "bias": bias}


def earlier_softmax(d: RandomCase) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of an earlier softmax; some rows have seen nothing."""
    torch.manual_seed(7)
    out, lse = torch.randn(d.q.shape), torch.randn(d.q.shape[:3])
    lse[:, :, ::7], out[:, :, ::7] = -math.inf, 0
    return out, lse


def run(
    kernel: Any, d: RandomCase, merge: bool = False, given: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return all outputs of a kernel, forward and backward; untouched elements are NaN.

    given: the results of the whole softmax; the backward starts from them.
    """
    out = torch.full_like(d.q, math.nan, dtype=torch.float32)
    lse = torch.full(d.q.shape[:3], math.nan)
    dq = torch.full_like(out, math.nan)
    if merge:
        out, lse = earlier_softmax(d)
    (part,) = d.task.parts
    bias = np.zeros((d.q.shape[0], len(part.heads), len(part.spans.start)), dtype=np.float32)
    task = replace(d.task, merge=merge, bias=[bias])
    kernel.forward(d.q, d.k, d.v, out, lse, task)
    sums = torch.zeros(d.k.shape), torch.zeros(d.v.shape)
    of_softmax = given or {"out": out, "lse": lse}
    result = of_softmax["out"].to(d.q.dtype).nan_to_num(0.0)
    queries = (d.grad, d.q, result, of_softmax["lse"].nan_to_num(0.0, math.inf, -math.inf))
    kernel.backward(queries, (d.k, d.v), dq, sums, range(d.k.shape[1]), task)
    d_bias = torch.from_numpy(bias)
    return {"out": out, "lse": lse, "dq": dq, "dk": sums[0], "dv": sums[1], "bias": d_bias}


def attention_over(layout: BlockLayout, heads: int, kernel: Any) -> SpanAttention:
    task = SpanTask([HeadSpans(spans_of(layout), range(heads))], layout.causal)
    return SpanAttention(kernel, task, (heads, layout.seq_len))


def assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare relative to the largest number; infinities and NaN must be at the same places."""
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got == -math.inf, expected == -math.inf)
    if expected.numel():
        finite = [t.nan_to_num(0.0, 0.0, 0.0) for t in (got, expected)]
        scale = max(1.0, float(finite[1].abs().max()))
        assert (finite[0] - finite[1]).abs().max() <= tolerance * scale


@needs_native
@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", [0, 3, 20, 22, 25, 26])
def test_the_compiled_kernel_equals_the_definition(
    seed: int, dtype: torch.dtype, merge: bool
) -> None:
    """Also merged into an earlier softmax, and with the gradient of a bias on each run."""
    d = random_case(seed, dtype)
    given = define(d, merge)
    given = {"out": given["out"].to(dtype).float(), "lse": given["lse"].float()}
    expected, got = define(d, merge, given), run(native, d, merge, given)
    heads = list(d.task.parts[0].heads)
    for name in ("out", "lse"):
        assert_near(got[name][:, heads], expected[name][:, heads], 1e-5)
    if not merge:  # gradients for a random output of the softmax have no bound
        assert got["out"][:, [h for h in range(d.q.shape[1]) if h not in heads]].isnan().all()
        assert_near(got["dq"][:, heads], expected["dq"][:, heads], 1e-4)
        for name in ("dk", "dv", "bias"):
            assert_near(got[name], expected[name], 1e-4)


@kernels
def test_constant_values_come_back_and_the_future_does_not(kernel: Any) -> None:
    """Faults 2 and 3: bit for bit, also where a chunk of keys is cut by the diagonal."""
    torch.manual_seed(0)
    layout = make_layout("local-window", 300, 64, 0.5, causal=True)
    attention = attention_over(layout, 2, kernel)
    q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
    torch.testing.assert_close(
        attention.forward(q, k, torch.ones_like(v), False)[0], torch.ones_like(v)
    )
    before = attention.forward(q, k, v, False)[0]
    for token in (1, 63, 64, 130, 299):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, token:], v2[:, :, token:] = 30 * torch.randn(32), -7
        after = attention.forward(q, k2, v2, False)[0]
        assert torch.equal(after[:, :, :token], before[:, :, :token])
        assert not torch.equal(after[:, :, token:], before[:, :, token:])


@needs_native
def test_more_threads_than_key_heads_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one key head on several threads, whose sums are locked row by row."""
    torch.manual_seed(0)
    layout = make_layout("random", 2000, 32, 0.7, causal=False)
    q, k, v, grad = (torch.randn(1, heads, 2000, 32) for heads in (2, 1, 1, 2))
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        native._pool.cache_clear()
        attention = attention_over(layout, 2, native)
        out, lse = attention.forward(q, k, v, True)
        assert lse is not None
        found.append((out, *attention.backward((grad, q, out, lse), (k, v))))
    native._pool.cache_clear()
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][0], found[1][0])


@kernels
@pytest.mark.parametrize("fault", ["query", "key", "last key", "infinite"])
def test_nan_and_infinity_reach_exactly_the_rows_that_see_them(kernel: Any, fault: str) -> None:
    """In output, log-sum-exp and gradients; they are never hidden by zeros or other weights."""
    if fault == "infinite" and kernel is torch_spans:
        pytest.skip("torch's fused kernel for CPUs returns NaN for other scores of this size too")
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 300, 32) for _ in range(4))
    if fault == "query":
        q[0, 0, 7, 3] = math.nan
        sees = torch.arange(300) == 7
    elif fault == "infinite":
        q[0, 0, 7], k[0, 0, 9] = 1e30, 1e30
        sees = torch.arange(300) == 7
    else:
        at = 130 if fault == "key" else 127
        k[0, 0, at, 3] = math.nan
        sees = torch.arange(300) // 128 == at // 128
    layout = make_layout("local-window", 300, 128, 0.99, causal=False)
    attention = attention_over(layout, 1, kernel)
    out, lse = attention.forward(q, k, v, True)
    assert lse is not None
    assert torch.equal(out[0, 0].isfinite().all(1), ~sees)
    assert torch.equal(lse[0, 0].isfinite(), ~sees)
    dq = attention.backward((grad, q, out, lse), (k, v))[0]
    assert torch.equal(dq[0, 0].isfinite().all(1), ~sees)


@needs_native
def test_a_forked_child_starts_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the parent's pool do not exist in the child, which would wait forever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    native._pool.cache_clear()
    layout = make_layout("local-window", 300, 128, 0.5, causal=False)
    attention = attention_over(layout, 1, native)
    q = torch.ones(1, 1, 300, 8)
    expected = attention.forward(q, q, q, False)[0]
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if torch.equal(attention.forward(q, q, q, False)[0], expected) else 1)
    native._pool.cache_clear()
    assert os.waitpid(child, 0)[1] == 0
