"""The contract of kernels of exact attention, over the registry: those that run on a CPU.

Output, log-sum-exp and gradients are compared with plain attention in float64.
"""

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import UnknownNameError, UnsupportedError
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use, select
from tests.kernels import plain_attention

SHAPES = [(1, 4, 4, 1, 1), (2, 4, 2, 7, 7), (1, 6, 2, 130, 130), (2, 2, 1, 5, 67), (1, 4, 2, 67, 5)]
"""B, Hq, Hk, Nq, Nk."""

CAUSAL = [shape for shape in SHAPES if shape[3] == shape[4]]
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}

Shape = tuple[int, int, int, int, int]


pytestmark = pytest.mark.usefixtures("one_thread")

ON_CPU = [name for name in KERNELS.names() if KERNELS.get(name).device == "cpu"]


def make(name: str, dtype: torch.dtype = torch.float32, masked: bool = False) -> ExactKernel:
    """Return a kernel; skip the test if it can't run here."""
    use = Use("cpu", dtype, 16, True, masked)
    if reason := KERNELS.get(name).unavailable_reason(use):
        pytest.skip(reason)
    return select(name, use)[0]


@pytest.fixture(params=ON_CPU)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each kernel that runs on a CPU."""
    return str(request.param)


def inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    B, Hq, Hk, Nq, Nk = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, Hq, Nq, 16), (B, Hk, Nk, 16), (B, Hk, Nk, 16))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def gradient_like(out: Tensor) -> Tensor:
    """Return the same numbers in every run; with others a 16-bit dtype may miss the tolerance."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=torch.double).to(out.dtype)


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
    q, k, v = tensors = inputs(shape, dtype)
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
    q, k, v = tensors = inputs((2, 4, 2, 40, 90), dtype)
    grad_out = gradient_like(q)
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -torch.inf)
    dq, dk, dv = (torch.zeros(t.shape) for t in tensors)
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
    kernel = make(name)
    q, k, v = inputs((1, 2, 2, 40, 90))
    grad_out = gradient_like(q)
    out, lse, (dq, dk, dv) = plain_attention.gradients((q, k, v), grad_out)
    out, lse = out.float(), lse.float()
    parts = [
        kernel.backward((grad_out, q, out, lse), (k[:, :, own], v[:, :, own]))
        for own in (slice(0, 30), slice(30, 90))
    ]
    assert_near(parts[0][0] + parts[1][0], dq, torch.float32)
    assert_near(torch.cat([parts[0][1], parts[1][1]], 2), dk, torch.float32)
    assert_near(torch.cat([parts[0][2], parts[1][2]], 2), dv, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_strided_tokens_and_heads_equal_their_copies(name: str, causal: bool) -> None:
    """Tiles are views: every third token, every second head, heads next to tokens."""
    kernel = make(name)
    full = inputs((1, 8, 8, 90, 90))
    views = [t[:, 1::2, 2::3] for t in full]
    views[2] = views[2].transpose(1, 2).contiguous().transpose(1, 2)
    copies = [t.contiguous() for t in views]
    out, lse = kernel.forward(*views, causal)
    expected, expected_lse = kernel.forward(*copies, causal)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(out, expected)
    grad_out = torch.randn(1, 30, 4, 16).transpose(1, 2)
    (q, *keys), (q2, *keys2) = views, copies
    grads = kernel.backward((grad_out, q, out, lse), keys, causal)
    expected_grads = kernel.backward(
        (grad_out.contiguous(), q2, expected, expected_lse), keys2, causal
    )
    for got, grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-6, atol=1e-7)


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
    q, k, v = tensors = inputs(shape, dtype)
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
    kernel = make(name)
    tensors = inputs((2, 4, 2, 9, 21))
    out, lse = kernel.forward(*tensors, mask=torch.ones(9, 21, dtype=torch.bool))
    expected, expected_lse = kernel.forward(*tensors)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [[0], [3, 4], list(range(9))], ids=["first", "some", "all"])
def test_rows_without_keys_are_zero_and_have_no_weight(
    name: str, hidden: list[int], dtype: torch.dtype
) -> None:
    """As a part of a larger softmax: the log-sum-exp is that of all keys."""
    kernel = make(name, dtype)
    shape = (2, 4, 2, 9, 21)
    q, k, v = inputs(shape, dtype)
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
