"""The split-KV kernels of decoding: compiled on a CPU, and of Triton in its interpreter."""

import importlib.util
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels import decode
from longseq_bench.kernels.decode import SeenKeys, choose_splits
from longseq_bench.kernels.quantised import Quantised, before_quantisation, rows_of
from tests.kernels.triton_interpreter import Interpreted

pytestmark = pytest.mark.usefixtures("one_thread")

compiled = pytest.mark.skipif(
    decode.unavailable_reason() is not None, reason=str(decode.unavailable_reason())
)
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)
TOLERANCE = 2e-6
"""Of the output, which is float32: inputs are exact in float64, and weights are not rounded."""
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of Triton, which rounds weights to the dtype of the values before it multiplies them."""


@dataclass(frozen=True)
class Step:
    """A step of decoding: B, Hq, Hk, new tokens, keys, D, Dv, dtype; with a scale, of a latent."""

    batch: int
    heads: int
    kv_heads: int
    new_tokens: int
    keys: int
    dim: int
    v_dim: int
    dtype: torch.dtype = torch.float32
    scores: Scores = PLAIN_SCORES
    kv_dtype: str | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.keys)
        of_keys = self.kv_heads, self.keys
        shapes = [(self.heads, self.new_tokens, self.dim), (*of_keys, self.dim)]
        shapes += [(*of_keys, self.v_dim)]
        q, k, v = (
            torch.randn(self.batch, *shape, generator=generator).to(self.dtype) for shape in shapes
        )
        if self.kv_dtype:
            k, v = (quantise(t, self.kv_dtype) for t in (k, v))
        return q, k, v if self.scores.scale is None else k[..., : self.v_dim]

    def seen(self) -> SeenKeys:
        """Each new token sees other keys; the last of several sees none."""
        first = np.arange(self.new_tokens) * 3 + min(5, self.keys - 1)
        stop = np.maximum(first, self.keys - np.arange(self.new_tokens) * 2)
        if self.new_tokens > 1:
            stop[-1] = first[-1]
        return SeenKeys(first, stop)


STEPS = [
    Step(2, 4, 4, 1, 1300, 16, 16),
    Step(1, 8, 2, 3, 1300, 128, 128),
    Step(2, 6, 2, 1, 77, 20, 24),
    Step(1, 5, 1, 2, 2100, 7, 5),
    Step(1, 3, 1, 1, 1, 80, 80),
    Step(1, 2, 2, 7, 64, 64, 40),
    Step(2, 7, 1, 3, 1300, 57, 40, scores=Scores(scale=0.2)),
    Step(1, 6, 2, 2, 700, 80, 64, scores=Scores(soft_cap=1.5)),
    *(Step(1, 2, 2, 1, n, 57, 40, scores=Scores(scale=0.2)) for n in (1, 7, 8, 10)),
    Step(2, 1, 1, 1, 1303, 320, 296, scores=Scores(scale=0.2, soft_cap=1.5)),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
QUANTISED = [
    replace(STEPS[0], kv_dtype="int8", keys=300),
    replace(STEPS[1], kv_dtype="fp8", keys=300, dtype=BF16),
    replace(STEPS[2], kv_dtype="int8", dtype=FP16),
    replace(STEPS[3], kv_dtype="fp8", keys=400),
    replace(STEPS[4], kv_dtype="int8", dtype=BF16),
    replace(STEPS[5], kv_dtype="fp8", dtype=FP16),
    replace(STEPS[7], kv_dtype="int8", dtype=BF16),
    replace(STEPS[7], kv_dtype="fp8", keys=300),
]


def define(step: Step) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp in float64, by the definition."""
    (q, k, v), seen = step.tensors(), step.seen()
    every = slice(None), slice(None), slice(0, step.keys)
    k, v = (rows_of(t, *every).double() for t in (k, v))
    k, v = (t.repeat_interleave(step.heads // step.kv_heads, 1) for t in (k, v))
    scores, cap = q.double() @ k.mT * step.scores.scale_for(step.dim), step.scores.soft_cap
    scores = cap * torch.tanh(scores / cap) if cap else scores
    keys = np.arange(step.keys)
    visible = (keys >= seen.first[:, None]) & (keys < seen.stop[:, None])
    scores = scores.masked_fill(~torch.from_numpy(visible), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def quantise(numbers: Tensor, kv_dtype: str) -> Quantised:
    cache = Quantised.empty(tuple(numbers.shape), kv_dtype, "cpu")

    def draw(part: Tensor, i: int, j: int, start: int) -> None:
        own = numbers[i, j, start : start + len(part)]
        part.fill_(6e4)[: len(own)] = own

    cache.fill_from(draw, numbers.dtype)
    return cache


def move(tensor: Tensor, device: str) -> Tensor:
    moved = tensor.to(device)
    if isinstance(tensor, Quantised):
        moved = moved.as_subclass(Quantised)
        moved.scale = tensor.scale.to(device)
    return moved


def run_triton(
    step: Step, device: str, cut: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cut: a key from which on all keys are a second part."""
    from longseq_bench.kernels import triton_decode

    seen, (q, k, v) = step.seen(), (move(t, device) for t in step.tensors())
    parts: tuple[SeenKeys, ...] = (seen,)
    if cut is not None:
        first = SeenKeys(np.minimum(seen.first, cut), np.minimum(seen.stop, cut))
        parts = first, SeenKeys(np.maximum(seen.first, cut), np.maximum(seen.stop, cut))
    if step.scores.scale:
        v = k[..., : step.v_dim]  # on the device, too, a part of k
    out, lse = triton_decode.forward(q, k, v, parts, dtype, step.scores)
    return out.cpu(), lse.cpu()


def assert_defined(got: tuple[Tensor, Tensor], step: Step, allowed: float) -> None:
    out, lse = define(step)
    assert (got[0].dtype, got[0].shape) == (torch.float32, out.shape)
    torch.testing.assert_close(got[0].double(), out, rtol=0, atol=allowed)
    torch.testing.assert_close(got[1].double(), lse, rtol=0, atol=2e-5)


@compiled
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_equals_the_definition(step: Step, dtype: torch.dtype) -> None:
    if reason := decode.unavailable_reason(dtype):
        pytest.skip(reason)
    step = replace(step, dtype=dtype)
    got = decode.forward(*step.tensors(), step.seen(), step.scores)
    assert_defined(got, step, TOLERANCE)


@compiled
@pytest.mark.parametrize("step", QUANTISED, ids=str)
def test_a_quantised_cache_equals_the_definition(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits begin anywhere in a block of keys with one scale."""
    monkeypatch.setattr(decode, "MIN_SPLIT_KEYS", 150)
    got = decode.forward(*step.tensors(), step.seen(), step.scores)
    assert_defined(got, step, TOLERANCE)


@pytest.mark.parametrize(("kv_dtype", "steps"), [("int8", 0.5), ("fp8", 2**-4)])
def test_a_number_is_quantised_to_the_nearest(kv_dtype: str, steps: float) -> None:
    """By the largest of 128 tokens of its head; fp8 has relative steps of 2^-3 above 2^-6."""
    numbers = torch.randn(2, 3, 300, 20) * torch.tensor([1.0, 100, 0])[:, None, None]
    cache = quantise(numbers, kv_dtype)
    got = torch.stack([rows_of(cache, 0, j, slice(130, 300)) for j in range(3)])
    of_block = numbers[0, :, 128:256].abs().amax((1, 2)), numbers[0, :, 256:].abs().amax((1, 2))
    largest = torch.stack(of_block, 1).repeat_interleave(128, 1)[:, 2:172, None]
    scale = largest / {"int8": 127, "fp8": 448}[kv_dtype]
    allowed = scale * steps if kv_dtype == "int8" else numbers[0, :, 130:].abs() * steps
    error = (got - numbers[0, :, 130:]).abs()
    assert (error <= allowed.maximum(scale * 2**-9) * 1.0001 + 1e-30).all()
    assert cache.nbytes + cache.scale.nbytes == numbers.numel() + 2 * 3 * 3 * 4
    assert torch.equal(rows_of(before_quantisation((cache,) * 3)[1], 1, 0, slice(7, 9)),
                       numbers[1, 0, 7:9])  # fmt: skip


@compiled
def test_threads_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits on two threads; a cache whose tokens are outside of its heads."""
    monkeypatch.setattr(decode, "MIN_SPLIT_KEYS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = STEPS[1]
    q, k, v = step.tensors()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert choose_splits(2, 1300, 2, 10) == 8
    assert_defined(decode.forward(*strided, step.seen()), step, TOLERANCE)


@compiled
def test_large_scores_and_nan() -> None:
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 700, 16), torch.randn(1, 1, 700, 16)
    q[..., 0], k[0, 0, 600, 0] = 400, 400
    seen = SeenKeys(np.array([0]), np.array([700]))
    torch.testing.assert_close(decode.forward(q, k, v, seen)[0][0, 0, 0], v[0, 0, 600])
    k[0, 0, 3, 0] = math.nan
    assert decode.forward(q, k, v, seen)[0].isnan().all()
    k[...] = math.nan
    assert decode.forward(q, k, v, seen)[0].isnan().all()


@needs_triton
@pytest.mark.parametrize(
    ("step", "dtype"),
    [(step, torch.float32) for step in STEPS]
    + [(STEPS[1], torch.bfloat16), (STEPS[2], torch.float16), (STEPS[6], torch.bfloat16)]
    + [(step, step.dtype) for step in QUANTISED],
    ids=str,
)
def test_triton_equals_the_definition(
    interpreted: Interpreted, step: Step, dtype: torch.dtype
) -> None:
    step = replace(step, dtype=dtype)
    assert_defined(interpreted(run_triton, step, "cpu"), step, ROUNDED[dtype])


@needs_triton
@pytest.mark.parametrize(
    ("step", "cut"),
    [(STEPS[1], 100), (STEPS[3], 3), (STEPS[5], 64), (replace(QUANTISED[1], dtype=FP32), 100)],
    ids=str,
)
def test_triton_computes_sets_of_keys_together(
    interpreted: Interpreted, step: Step, cut: int
) -> None:
    """Also where a set has no key, and with an output in the dtype of the model."""
    assert_defined(interpreted(run_triton, step, "cpu", cut), step, TOLERANCE)
    out, _ = interpreted(run_triton, step, "cpu", cut, torch.float16)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), define(step)[0], rtol=0, atol=2e-3)


def test_the_limits_of_triton_are_named() -> None:
    reason = decode.cuda_limit_reason(24, 16, torch.float32)
    assert reason == "24 query rows per KV head are more than 16"
    assert decode.cuda_limit_reason(24, 16, torch.bfloat16) is None
    assert "head_dim 512" in (decode.cuda_limit_reason(1, 512, torch.bfloat16) or "")
    assert decode.cuda_limit_reason(1, 512, torch.bfloat16, decode.MAX_LATENT) is None


@pytest.mark.cuda
@needs_triton
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("step", [*STEPS, *QUANTISED, Step(2, 32, 8, 4, 40_000, 128, 128)], ids=str)
def test_triton_on_a_gpu(step: Step, dtype: torch.dtype) -> None:
    step = replace(step, dtype=dtype)
    assert_defined(run_triton(step, "cuda"), step, ROUNDED[dtype])
