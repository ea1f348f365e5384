"""The contract of kernels of exact attention, over the registry.

Output, log-sum-exp and gradients are compared with plain attention in float64. Kernels for CUDA are
skipped without a GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError, UnknownNameError, UnsupportedError
from longseq_bench.core.workload import Scores
from longseq_bench.kernels import native
from longseq_bench.kernels.exact import native as exact_native
from longseq_bench.kernels.exact import torch_fused
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use, select
from longseq_bench.kernels.exact.torch_fused import Efficient, Flash, backward_elements
from tests.kernels import plain_attention
from tests.kernels.plain_attention import ALLOWED, assert_near

Shape = tuple[int, int, int, int, int]
SHAPES = [(1, 4, 4, 1, 1), (2, 4, 2, 7, 7), (1, 6, 2, 130, 130), (2, 2, 1, 5, 67), (1, 4, 2, 67, 5)]
"""B, Hq, Hk, Nq, Nk."""
UNALIGNED = (1, 6, 2, 33, 50)

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [
    pytest.param(name, marks=[pytest.mark.cuda] * (KERNELS.get(name).device == "cuda"))
    for name in KERNELS.names()
]


def make(
    name: str, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (16, 16)
) -> ExactKernel:
    """Return a kernel; skip the test if it can't run here. dims: head_dim and v_head_dim."""
    use = Use(KERNELS.get(name).device, dtype, dims[0], True, v_head_dim=dims[1])
    if reason := KERNELS.get(name).unavailable_reason(use):
        pytest.skip(reason)
    return select(name, use)[0]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each kernel."""
    return str(request.param)


def inputs(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu", dims: Any = (16, 16)
) -> list[Tensor]:
    B, Hq, Hk, Nq, Nk = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, Hq, Nq, dims[0]), (B, Hk, Nk, dims[0]), (B, Hk, Nk, dims[1]))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def gradient_like(out: Tensor) -> Tensor:
    """Return the same numbers in every run; with others a 16-bit dtype may miss the tolerance."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(out.shape, generator=generator, dtype=torch.double)
    return numbers.to(out.device, out.dtype)


def masked(shape: Shape) -> Tensor:
    """Return a mask of half the pairs, with a key in every row; 33 and 50 keys are unaligned."""
    _, _, _, rows, keys = shape
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[torch.arange(rows), torch.arange(rows) % keys] = True
    return mask


CASES = [
    *(("full", shape) for shape in SHAPES),
    *(("causal", shape) for shape in SHAPES[:3]),
    *(("mask", shape) for shape in (SHAPES[0], SHAPES[1], UNALIGNED, SHAPES[3], SHAPES[4])),
]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    # masks are for 32 bits and fewer
    [(*c, d) for c in CASES for d in ALLOWED if (c[0], d) != ("mask", torch.float64)],
)
def test_it_equals_the_reference(name: str, kind: str, shape: Shape, dtype: torch.dtype) -> None:
    """A v_head_dim of its own, too, with grouped heads."""
    own_v = shape[1] == 2 * shape[2] and kind != "mask" and dtype != torch.float64
    dims = (24, 16) if own_v else (16, 16)
    kernel = make(name, dtype, dims)
    q, k, v = tensors = inputs(shape, dtype, kernel.device, dims)
    mask = masked(shape) if kind == "mask" else None
    counts = torch.ones(shape[3:]).tril() if kind == "causal" else mask
    out, lse = kernel.forward(*tensors, kind == "causal", mask=mask)
    grad_out = gradient_like(out)
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out, counts)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype.itemsize == 8 else torch.float)
    assert lse.shape == out.shape[:3]
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    grads = kernel.backward((grad_out, q, out, lse), (k, v), kind == "causal", mask=mask)
    for got, grad in zip(grads, expected_grads, strict=True):
        assert got.shape == grad.shape
        assert_near(got, grad, dtype)
    if mask is None:  # another kernel may run masked calls
        assert kernel.calls == {"forward": 1, "backward": 1}
        assert list(kernel.ran()) == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cut", "dims"), [(0, (16, 16)), (30, (24, 16)), (90, (16, 16))])
def test_merged_parts_equal_one_softmax(
    name: str, cut: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Also if one part has no keys; the sums are float32."""
    kernel = make(name, dtype, dims)
    q, k, v = tensors = inputs((2, 4, 2, 40, 90), dtype, kernel.device, dims)
    grad_out = gradient_like(q[..., : dims[1]])
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out)
    out = torch.zeros_like(expected, dtype=torch.float32)
    lse = torch.full_like(expected_lse, -torch.inf).float()
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in tensors)
    parts = [own for own in (slice(0, cut), slice(cut, 90)) if own.start < own.stop]
    for own in parts:
        kernel.merge(q, (k[:, :, own], v[:, :, own]), (out, lse))
    queries = grad_out, q, out.to(dtype), lse
    for own in parts:
        sums = dq, dk[:, :, own], dv[:, :, own]
        kernel.add_gradients(queries, (k[:, :, own], v[:, :, own]), sums)
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    for got, grad in zip((dq, dk, dv), expected_grads, strict=True):
        assert_near(got, grad, dtype)
    assert kernel.calls == {"forward": len(parts), "backward": len(parts)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    ("requested", "use", "words"),
    [
        ("flesh", Use("cpu", torch.float32, 64, False), "did you mean 'flash'"),
        ("flash", Use("cpu", torch.float32, 64, False), "kernel=flash: it runs on cuda only"),
        ("aten-flash-cpu", replace(Use("cpu", torch.float32, 64, False), scores=Scores(None, 5.0)),
         "kernel=aten-flash-cpu: it computes no soft_cap; native, dense and flex do"),
        ("auto", Use("cuda", torch.bfloat16, 1, False),
         r"no kernel of exact attention takes head_dim 1 in bfloat16 on cuda \(.*"
         "efficient: it needs a head_dim that is a multiple of 8"),
    ],
)  # fmt: skip
def test_a_kernel_that_can_not_run_is_named_with_the_reason(
    requested: str, use: Use, words: str
) -> None:
    with pytest.raises((UnknownNameError, UnsupportedError), match=words):
        select(requested, use)


def test_auto_says_why_it_does_not_take_the_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda dtype: "no compiler")
    kernel, facts = select("auto", Use("cpu", torch.float32, 64, False))
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
    make("native", dtype)
    monkeypatch.setattr(exact_native, "_cpu_flags", lambda: frozenset({flag}))
    assert select("auto", Use("cpu", dtype, 64, False))[0].name == chosen


def test_a_padded_v_head_dim_is_a_fact_and_a_larger_one_is_refused() -> None:
    words = "from 128 to 192 elements per head, in the kernel"
    for requested in ("auto", "aten-flash-cpu"):
        use = Use("cpu", torch.float32, 192, True, v_head_dim=128)
        assert select(requested, use)[1]["padded_v"] == words
        assert "padded_v" not in select(requested, replace(use, v_head_dim=192))[1]
        with pytest.raises(UnsupportedError, match="it needs a v_head_dim of at most 192"):
            select(requested, replace(use, v_head_dim=256))


# ---- limits of kernels for CUDA, which need no GPU -----------------------------------------------


@pytest.mark.parametrize(("most", "calls"), [(16, [(2, 8, 4)]), (15, [(1, 2, 1)] * 8)])
def test_flash_splits_a_backward_that_its_index_can_not_address(
    monkeypatch: pytest.MonkeyPatch, most: int, calls: list[tuple[int, ...]]
) -> None:
    """Each sequence and KV head is a call."""
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
    monkeypatch.setattr(torch_fused, "MAX_INDEX", backward_elements(1, most, 90, 16))
    kernel = Flash(Use("cuda", torch.bfloat16, 16, True))
    grads = kernel.backward((grad_out, q, out, lse), (k, v))
    assert seen == calls
    for got, expected in zip(grads, whole.backward((grad_out, q, out, lse), (k, v)), strict=True):
        assert_near(got, expected, torch.float32)


def test_a_head_that_an_index_can_not_address_is_a_limit() -> None:
    """2^31 is reached from 16.7 million tokens on with a head_dim of 128."""
    q, lse = torch.empty(1, 1, 2**24, 128, device="meta"), torch.empty(1, 1, 2**24, device="meta")
    use = Use("cuda", torch.bfloat16, 128, True)
    with pytest.raises(KernelLimitError, match="flash: the backward of one KV head has 2,147,4"):
        Flash(use).backward((q, q, q, lse), (q, q))
    with pytest.raises(KernelLimitError, match="efficient: 2,147,483,648 elements of a head"):
        Efficient(use).forward(q, q, q)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "words"),
    [
        ("flash", torch.bfloat16, 36, "a head_dim of at most 256, a multiple of 8"),
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
