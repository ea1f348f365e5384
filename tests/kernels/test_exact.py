"""The contract of kernels of exact attention, over the registry.

Output, log-sum-exp and gradients are compared with plain attention in float64. Kernels for CUDA are
skipped without a GPU.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError, UnknownNameError, UnsupportedError
from longseq_bench.kernels.exact import _flash_backward, cudnn, efficient, flash_attn_2
from longseq_bench.kernels.exact._flash_backward import MAX_INDEX, backward_elements
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use, select
from longseq_bench.kernels.exact.flash import Flash
from tests.kernels import plain_attention

SHAPES = [(1, 4, 4, 1, 1), (2, 4, 2, 7, 7), (1, 6, 2, 130, 130), (2, 2, 1, 5, 67), (1, 4, 2, 67, 5)]
"""B, Hq, Hk, Nq, Nk."""

CAUSAL = [shape for shape in SHAPES if shape[3] == shape[4]]
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}

Shape = tuple[int, int, int, int, int]


pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [
    pytest.param(name, marks=[pytest.mark.cuda] * (KERNELS.get(name).device == "cuda"))
    for name in KERNELS.names()
]


def make(name: str, dtype: torch.dtype = torch.float32) -> ExactKernel:
    """Return a kernel; skip the test if it can't run here."""
    use = Use(KERNELS.get(name).device, dtype, 16, True)
    if reason := KERNELS.get(name).unavailable_reason(use):
        pytest.skip(reason)
    return select(name, use)[0]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each kernel."""
    return str(request.param)


def narrow(name: str) -> torch.dtype:
    """Return a dtype that every kernel of its device supports."""
    return torch.float32 if KERNELS.get(name).device == "cpu" else torch.float16


def inputs(shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    B, Hq, Hk, Nq, Nk = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, Hq, Nq, 16), (B, Hk, Nk, 16), (B, Hk, Nk, 16))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def gradient_like(out: Tensor) -> Tensor:
    """Return the same numbers in every run; with others a 16-bit dtype may miss the tolerance."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(out.shape, generator=generator, dtype=torch.double)
    return numbers.to(out.device, out.dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    got, expected = got.detach(), expected.detach()
    scale = max(float(expected.abs().max()), 0.5)
    assert float((got.double() - expected.double()).abs().max()) < ALLOWED[dtype] * scale


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    ("shape", "causal"), [*((s, False) for s in SHAPES), *((s, True) for s in CAUSAL)]
)
def test_it_equals_the_reference(name: str, shape: Shape, causal: bool, dtype: torch.dtype) -> None:
    kernel = make(name, dtype)
    q, k, v = tensors = inputs(shape, dtype, kernel.device)
    out, lse = kernel.forward(*tensors, causal)
    grad_out = gradient_like(out)
    leaves = [t.double().requires_grad_() for t in tensors]
    expected, expected_lse = plain_attention.forward(*leaves, causal)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype.itemsize == 8 else torch.float)
    assert lse.shape == out.shape[:3]
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    expected_grads = torch.autograd.grad(expected, leaves, grad_out.double())
    grads = kernel.backward((grad_out, q, out, lse), (k, v), causal)
    for got, grad in zip(grads, expected_grads, strict=True):
        assert got.shape == grad.shape
        assert_near(got, grad, dtype)
    assert kernel.calls == {"forward": 1, "backward": 1}
    assert list(kernel.ran()) == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [0, 30, 90])
def test_merged_parts_equal_one_softmax(name: str, cut: int, dtype: torch.dtype) -> None:
    """Also if one part has no keys; the sums are float32."""
    kernel = make(name, dtype)
    q, k, v = tensors = inputs((2, 4, 2, 40, 90), dtype, kernel.device)
    grad_out = gradient_like(q)
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out)
    out, lse = torch.zeros_like(q, dtype=torch.float32), torch.full_like(expected_lse, -torch.inf)
    lse = lse.float()
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in tensors)
    parts = [own for own in (slice(0, cut), slice(cut, 90)) if own.start < own.stop]
    for own in parts:
        kernel.merge(q, k[:, :, own], v[:, :, own], out, lse)
    queries = grad_out, q, out.to(dtype), lse
    for own in parts:
        d_keys = dk[:, :, own], dv[:, :, own]
        kernel.add_gradients(queries, (k[:, :, own], v[:, :, own]), dq, d_keys)
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    for got, grad in zip((dq, dk, dv), expected_grads, strict=True):
        assert_near(got, grad, dtype)
    assert kernel.calls == {"forward": len(parts), "backward": len(parts)}


def test_backward_of_a_part_of_a_larger_softmax(name: str) -> None:
    """Output and log-sum-exp are those of all keys; the keys are some of them."""
    dtype = narrow(name)
    kernel = make(name, dtype)
    q, k, v = inputs((1, 2, 2, 40, 90), dtype, kernel.device)
    grad_out = gradient_like(q)
    out, lse, (dq, dk, dv) = plain_attention.gradients((q, k, v), grad_out)
    out, lse = out.to(dtype), lse.float()
    parts = [
        kernel.backward((grad_out, q, out, lse), (k[:, :, own], v[:, :, own]))
        for own in (slice(0, 30), slice(30, 90))
    ]
    assert_near(parts[0][0] + parts[1][0], dq, dtype)
    assert_near(torch.cat([parts[0][1], parts[1][1]], 2), dk, dtype)
    assert_near(torch.cat([parts[0][2], parts[1][2]], 2), dv, dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_strided_tokens_and_heads_equal_their_copies(name: str, causal: bool) -> None:
    """Tiles are views: every third token, every second head, heads next to tokens."""
    kernel = make(name, narrow(name))
    full = inputs((1, 8, 8, 90, 90), narrow(name), kernel.device)
    views = [t[:, 1::2, 2::3] for t in full]
    views[2] = views[2].transpose(1, 2).contiguous().transpose(1, 2)
    copies = [t.contiguous() for t in views]
    out, lse = kernel.forward(*views, causal)
    expected, expected_lse = kernel.forward(*copies, causal)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(out, expected)
    grad_out = gradient_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    (q, *keys), (q2, *keys2) = views, copies
    grads = kernel.backward((grad_out, q, out, lse), keys, causal)
    expected_grads = kernel.backward(
        (grad_out.contiguous(), q2, expected, expected_lse), keys2, causal
    )
    for got, grad in zip(grads, expected_grads, strict=True):
        # FlexAttention is compiled for each kind of strides, and rounds a gradient of 0 by 2e-7
        atol = 1e-6 if name == "flex" else 1e-7
        torch.testing.assert_close(got, grad, rtol=1e-6, atol=atol)


def test_the_reference_equals_torch() -> None:
    q, k, v = (t.double() for t in inputs((2, 4, 2, 33, 33)))
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(plain_attention.forward(q, k, v, causal)[0], expected)


MASKED = [(1, 4, 4, 1, 1), (2, 4, 2, 7, 7), (1, 6, 2, 33, 50), (2, 2, 1, 5, 67), (1, 4, 2, 67, 5)]


def masked(shape: Shape) -> Tensor:
    """Return a mask of half the pairs, with a key in every row; 33 and 50 keys are unaligned."""
    _, _, _, rows, keys = shape
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[torch.arange(rows), torch.arange(rows) % keys] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", MASKED)
def test_masks_equal_the_reference(name: str, shape: Shape, dtype: torch.dtype) -> None:
    kernel = make(name, dtype)
    q, k, v = tensors = inputs(shape, dtype, kernel.device)
    mask = masked(shape)
    out, lse = kernel.forward(*tensors, mask=mask)
    grad_out = gradient_like(out)
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out, mask)
    assert (out.dtype, lse.dtype) == (dtype, torch.float)
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    grads = kernel.backward((grad_out, q, out, lse), (k, v), mask=mask)
    for got, grad in zip(grads, expected_grads, strict=True):
        assert got.shape == grad.shape
        assert_near(got, grad, dtype)


def test_a_mask_of_all_pairs_changes_nothing(name: str) -> None:
    kernel = make(name, narrow(name))
    tensors = inputs((2, 4, 2, 9, 21), narrow(name), kernel.device)
    out, lse = kernel.forward(*tensors, mask=torch.ones(9, 21, dtype=torch.bool))
    expected, expected_lse = kernel.forward(*tensors)
    assert_near(out, expected, narrow(name))
    assert_near(lse, expected_lse, narrow(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [[0], [3, 4], list(range(9))], ids=["first", "some", "all"])
def test_rows_without_keys_are_zero_and_have_no_weight(
    name: str, hidden: list[int], dtype: torch.dtype
) -> None:
    """As a part of a larger softmax: the log-sum-exp is that of all keys."""
    kernel = make(name, dtype)
    shape = (2, 4, 2, 9, 21)
    q, k, v = inputs(shape, dtype, kernel.device)
    mask = masked(shape)
    mask[hidden] = False
    out, lse = kernel.forward(q, k, v, mask=mask)
    assert not out[:, :, hidden].any()
    assert (lse[:, :, hidden] == -torch.inf).all()
    visible = [row for row in range(9) if row not in hidden]
    assert torch.isfinite(lse[:, :, visible]).all()
    full, full_lse = kernel.forward(q, k, v)
    grad_out = gradient_like(out)
    grads = kernel.backward((grad_out, q, full, full_lse), (k, v), mask=mask)
    assert not grads[0][:, :, hidden].any()
    if not visible:
        assert not any(grad.any() for grad in grads)
        return
    rows = [t[:, :, visible].contiguous() for t in (grad_out, q, full, full_lse)]
    expected_grads = kernel.backward(tuple(rows), (k, v), mask=mask[visible])
    for got, expected in zip((grads[0][:, :, visible], *grads[1:]), expected_grads, strict=True):
        assert_near(got, expected, dtype)


# ---- the choice ----------------------------------------------------------------------------------


def test_a_mask_goes_to_a_kernel_that_takes_it_and_the_record_says_so() -> None:
    kernel = make("native")
    q, k, v = inputs((1, 2, 2, 5, 7))
    kernel.forward(q, k, v)
    kernel.forward(q, k, v, mask=masked((1, 2, 2, 5, 7)))
    assert list(kernel.ran()) == ["native", "aten-flash-cpu (masked)"]


@pytest.mark.parametrize(
    ("requested", "error", "words"),
    [
        ("flesh", UnknownNameError, "did you mean 'flash'"),
        ("flash", UnsupportedError, "kernel=flash: it runs on cuda only"),
    ],
)
def test_a_kernel_that_can_not_run_is_named_with_the_reason(
    requested: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        select(requested, Use("cpu", torch.float32, 64, False))


def test_auto_says_why_no_kernel_can_run() -> None:
    words = (
        r"no kernel of exact attention takes head_dim 1 in bfloat16 on cuda \(.*"
        "efficient: it needs a head_dim that is a multiple of 8"
    )
    with pytest.raises(UnsupportedError, match=words):
        select("auto", Use("cuda", torch.bfloat16, 1, False))


def test_auto_takes_the_compiled_kernel_and_else_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from longseq_bench.kernels import native

    use = Use("cpu", torch.float32, 64, False)
    make("native")
    assert select("auto", use)[0].name == "native"
    monkeypatch.setattr(native, "unavailable_reason", lambda dtype: "no compiler")
    kernel, facts = select("auto", use)
    assert (kernel.name, facts) == ("aten-flash-cpu", {"not_native": "no compiler"})


@pytest.mark.parametrize(
    ("dtype", "flag", "chosen"),
    [
        (torch.bfloat16, "amx_bf16", "aten-flash-cpu"),
        (torch.bfloat16, "avx512f", "native"),
        (torch.float32, "amx_bf16", "native"),
    ],
)
def test_auto_leaves_16_bits_to_torch_where_the_cpu_has_matrix_units(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, flag: str, chosen: str
) -> None:
    from longseq_bench.kernels.exact import native

    make("native", dtype)
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset({flag}))
    assert select("auto", Use("cpu", dtype, 64, False))[0].name == chosen


# ---- limits of kernels for CUDA, which need no GPU -----------------------------------------------


def test_the_efficient_kernel_refuses_float64() -> None:
    """torch takes fewer dtypes than the name of its operator says."""
    reason = efficient.Efficient.unavailable_reason(Use("cuda", torch.float64, 64, False))
    assert reason == "it supports bfloat16, float16 and float32, not float64"


def test_cudnn_gets_no_backward_of_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN refuses it. The softmax has other keys too: their part of the output is given."""
    q, k, v = inputs((2, 4, 4, 1, 1), torch.float64)
    grad_out, out = torch.randn_like(q), torch.randn_like(q)
    lse = (q * k).sum(-1) / 4 + torch.rand(q.shape[:3])
    weight = torch.exp((q * k).sum(-1) / 4 - lse)[..., None]
    grad_score = weight * (grad_out * (v - out)).sum(-1, keepdim=True)
    expected = grad_score * k / 4, grad_score * q / 4, weight * grad_out

    def backward(*given: Any) -> list[Tensor]:
        grad_out, q, k, v, out, lse, *_, queries, keys, _, causal = given
        assert (queries, keys, causal) == (2, 1, False)
        weights = torch.exp(q @ k.mT / 4 - lse)
        grads = weights * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True))
        return [grads @ k / 4, grads.mT @ q / 4, weights.mT @ grad_out]

    fake = SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward)
    monkeypatch.setattr(cudnn, "_aten", fake)
    kernel = cudnn.Cudnn(Use("cuda", torch.float16, 16, True))
    for causal in (False, True):
        got = kernel.backward((grad_out, q, out, lse), (k, v), causal)
        for own, other in zip(got, expected, strict=True):
            torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("most", "calls"),
    [
        (16, [(2, 8, 4)]),
        (15, [(1, 8, 4)] * 2),
        (7, [(1, 6, 3), (1, 2, 1)] * 2),
        (5, [(1, 4, 2)] * 4),
        (3, [(1, 2, 1)] * 8),
        (1, [(1, 1, 1)] * 16),
    ],
)
@pytest.mark.parametrize("name", ["flash", "flash-attn-2"])
def test_flash_splits_a_backward_that_its_index_can_not_address(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int, calls: list[tuple[int, ...]]
) -> None:
    """By rows of the batch, then by KV heads, then by query heads of one KV head."""
    q, k, v = inputs((2, 8, 4, 40, 90))
    grad_out = gradient_like(q)
    whole = make("aten-flash-cpu")
    out, lse = whole.forward(q, k, v)
    seen = []

    def call(*part: Any) -> Any:
        _, queries, keys, *_, causal = part
        seen.append((*queries[1].shape[:2], keys[0].shape[1]))
        return whole.backward(queries, keys, causal)

    monkeypatch.setattr(Flash, "_backward_call", call)
    monkeypatch.setattr(flash_attn_2.FlashAttn2, "_call_backward", call)
    monkeypatch.setattr(Package, "load", lambda package: None)
    monkeypatch.setattr(_flash_backward, "MAX_INDEX", backward_elements(1, most, 90, 16))
    kernel = KERNELS.get(name)(Use("cuda", torch.bfloat16, 16, True))
    grads = kernel.backward((grad_out, q, out, lse), (k, v))
    assert seen == calls
    for got, expected in zip(grads, whole.backward((grad_out, q, out, lse), (k, v)), strict=True):
        assert_near(got, expected, torch.float32)


def test_one_head_that_flash_can_not_address_is_a_limit() -> None:
    """2^31 is reached from 16.7 million tokens on with a head_dim of 128."""
    kernel = Flash(Use("cuda", torch.bfloat16, 128, True))
    q, lse = torch.empty(1, 1, 2**24, 128, device="meta"), torch.empty(1, 1, 2**24, device="meta")
    with pytest.raises(KernelLimitError, match="flash: the backward of one head has 2,147,483,648"):
        kernel.backward((q, q, q, lse), (q, q))


def test_elements_of_the_backward_of_flash() -> None:
    """The kernel rounds tokens up to 128, and head_dim up to 32, beyond 128 up to 64."""
    assert backward_elements(1, 32, 524_288, 128) == MAX_INDEX + 1
    assert backward_elements(1, 1, 1, 8) == backward_elements(1, 1, 128, 32) == 128 * 32
    assert backward_elements(2, 3, 129, 80) == 2 * 3 * 256 * 96
    assert backward_elements(1, 1, 128, 136) == 128 * 192
    assert backward_elements(1, 1, 128, 200) == 128 * 256


def test_efficient_refuses_heads_that_its_index_can_not_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens times head_dim of at least 2^31."""
    monkeypatch.setattr(efficient, "MAX_INDEX", 100 * 16 - 1)
    kernel = efficient.Efficient(Use("cuda", torch.float32, 16, True))
    with pytest.raises(KernelLimitError, match=r"efficient: 1,600 elements of a head"):
        kernel.forward(*inputs((1, 1, 1, 100, 100)))


def test_efficient_backward_gets_an_output_with_heads_next_to_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another layout than (B, N, Hq, D) its delta is wrong."""
    seen = {}

    class Aten:
        def _scaled_dot_product_efficient_attention_backward(self, *args: Any) -> Any:
            grad_out, q, k, v, bias, out, lse, *_ = args
            seen.update(out=out, grad_out=grad_out, lse=lse, bias=bias)
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None

    monkeypatch.setattr(efficient, "_aten", Aten())
    kernel = efficient.Efficient(Use("cuda", torch.bfloat16, 16, True))
    q, k, v = inputs((2, 4, 2, 33, 50), torch.bfloat16)
    lse = torch.zeros(2, 4, 33)
    grads = kernel.backward((q, q, q, lse), (k, v), mask=masked((2, 4, 2, 33, 50)))
    for name in ("out", "grad_out"):
        assert seen[name].transpose(1, 2).is_contiguous()
        assert torch.equal(seen[name], q)
    assert seen["lse"].shape == (2, 4, 64)
    assert seen["bias"].shape == (2, 4, 33, 50)
    assert seen["bias"].stride(2) % 8 == 0
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "words"),
    [
        ("flash", torch.bfloat16, 36, "a head_dim of at most 256, a multiple of 8"),
        ("flash", torch.bfloat16, 264, "a head_dim of at most 256"),
        ("flash", torch.float32, 64, "it supports bfloat16 and float16, not float32"),
        ("cudnn", torch.bfloat16, 256, "a head_dim of at most 128"),
        ("efficient", torch.float32, 30, "a multiple of 4"),
    ],
)
def test_what_torch_would_pad_is_refused(
    name: str, dtype: torch.dtype, head_dim: int, words: str
) -> None:
    """Direct calls skip the padding of scaled_dot_product_attention."""
    reason = KERNELS.get(name).unavailable_reason(Use("cuda", dtype, head_dim, False))
    assert words in (reason or "")


@pytest.mark.parametrize("keep_lse", [False, True], ids=["without-lse", "with-lse"])
def test_the_memory_efficient_kernel_takes_a_mask_without_the_lse(keep_lse: bool) -> None:
    """torch returns no rows of the log-sum-exp then; meta tensors stand for those of a GPU."""
    kernel = efficient.Efficient(Use("cuda", torch.bfloat16, 64, False, masked=True))
    q, k = (torch.empty(2, 8, n, 64, dtype=torch.bfloat16, device="meta") for n in (40, 33))
    mask = torch.ones(40, 33, dtype=torch.bool, device="meta")
    out, lse = kernel.forward(q, k, k, mask=mask, keep_lse=keep_lse)
    assert out.shape == q.shape
    assert lse.shape == (2, 8, 40 if keep_lse else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", [n for n in KERNELS.names() if KERNELS.get(n).device == "cuda"])
def test_no_kernel_for_cuda_is_listed_as_available_without_a_gpu(name: str) -> None:
    assert KERNELS.get(name).unavailable_reason(Use("cuda", torch.bfloat16, 64, False))
