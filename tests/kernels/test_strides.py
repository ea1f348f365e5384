"""q, k, v and the gradient of the output may have any strides, by every kernel of one device.

Kernels read a contiguous head_dim, and `attend` copies tensors that have another one.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.decode import CacheAttention, choose_kernel
from longseq_bench.attention.one_rank import OneCall, backward_recompute, forward_inplace
from longseq_bench.attention.sparse.block_sparse import build_layout_kernel
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.base import AttentionKernel, attend
from longseq_bench.kernels.decode import SeenKeys
from longseq_bench.kernels.exact.base import KERNELS, Use, select
from longseq_bench.patterns.blocks import make_layout
from longseq_bench.testing.definition import build_attention
from tests.kernels.plain_attention import assert_near

NEEDS_TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")

pytestmark = pytest.mark.usefixtures("one_thread")

B, HEADS, KV_HEADS, N, D, BLOCK, NEW = 2, 4, 2, 43, 16, 16, 3

LAYOUTS: dict[str, Callable[..., tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {
    "head_dim-apart": lambda b, h, n, d: ((b, h, d, n), lambda t: t.transpose(2, 3)),
    "heads-beside-tokens": lambda b, h, n, d: ((b, n, h, d), lambda t: t.transpose(1, 2)),
    "every-second-number": lambda b, h, n, d: ((b, h, n, 2 * d), lambda t: t[..., ::2]),
    "one-head-for-all": lambda b, h, n, d: ((b, 1, n, d), lambda t: t.expand(b, h, n, d)),
    "one-number-a-row": lambda b, h, n, d: ((b, h, n, 1), lambda t: t.expand(b, h, n, d)),
    "overlapping-windows": lambda b, h, n, d: ((b, h, n + d - 1), lambda t: t.unfold(2, d, 1)),
}
"""For sizes of a tensor, those of the memory that it is a view of, and how."""

KINDS = [
    *(("exact", name) for name in KERNELS.names()),
    *((kind, name) for kind in ("blocks", "learned") for name in ("native", "torch")),
    *(("decode", name) for name in ("native", "aten-flash-cpu", "triton")),
]
"""What calls a kernel, and its name."""

DTYPES = (torch.float32, torch.bfloat16)


def cases() -> Iterator[Any]:
    """Yield kind, name, dtype and layout; one of Triton's blocks, which take seconds each."""
    for (kind, name), dtype, layout in product(KINDS, DTYPES, LAYOUTS):
        is_cuda = kind == "exact" and KERNELS.get(name).device == "cuda"
        marks = [pytest.mark.cuda] * is_cuda + [NEEDS_TRITON] * (name == "triton")
        values = kind, name, dtype, layout
        yield pytest.param(*values, marks=marks, id=f"{kind}-{name}-{str(dtype)[6:]}-{layout}")
    yield pytest.param("blocks", "triton", torch.bfloat16, "head_dim-apart", marks=NEEDS_TRITON)


def build(kind: str, name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return attention by a kernel of this kind and name."""
    if kind == "learned":
        sizes = {"batch": B, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": D}
        w = Workload(seq_len=N, **sizes, dtype=str(dtype)[6:], causal=True, mode="train")
        options = {"block": BLOCK, "sparsity": 0.5, "scorer": "learned", "kernel": name}
        return build_attention("block-sparse-adaptive", options, w)
    if kind == "decode":
        return partial(attend, kernel=build_decode(name, dtype), train=False)
    if kind == "blocks":
        layout = make_layout("random", N, BLOCK, 0.5, True)
        kernel = build_layout_kernel(name, (layout,), HEADS)
        return partial(attend, kernel=kernel, train=True)
    use = Use(KERNELS.get(name).device, dtype, D, True, causal=True)
    if reason := KERNELS.get(name).unavailable_reason(use):
        pytest.skip(reason)
    return partial(attend, kernel=OneCall(select(name, use)[0], True), train=True)


def build_decode(name: str, dtype: torch.dtype) -> AttentionKernel:
    stop = np.arange(N - NEW, N) + 1
    if name == "triton":
        from longseq_bench.kernels.triton_decode import forward as kernel
    else:
        w = Workload(seq_len=N, heads=HEADS, mode="decode", new_tokens=NEW)
        kernel, _ = choose_kernel(name, Use("cpu", dtype, D, False), w)
    return CacheAttention(kernel, (SeenKeys(np.zeros_like(stop), stop),), Group.alone())


def run(kind: str, name: str, dtype: torch.dtype, layout: str, is_dense: bool) -> list[Tensor]:
    """Return the output and the gradients of the memory of q, k and v.

    is_dense: each tensor is a contiguous copy of its view.
    """
    attention, queries = build(kind, name, dtype), NEW if kind == "decode" else N
    device = KERNELS.get(name).device if kind == "exact" else "cpu"
    generator = torch.Generator().manual_seed(0)
    leaves, tensors = [], []
    for heads, tokens in [(HEADS, queries), (KV_HEADS, N), (KV_HEADS, N), (HEADS, queries)]:
        sizes, view = LAYOUTS[layout](B, heads, tokens, D)
        leaf = torch.randn(sizes, generator=generator).to(device, dtype).requires_grad_()
        tensor = view(leaf)
        leaves.append(leaf)
        tensors.append(tensor.clone(memory_format=torch.contiguous_format) if is_dense else tensor)
    *qkv, grad_out = tensors
    out = attention(*qkv)
    if kind == "decode":
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves[:3], grad_out.detach())]


@pytest.mark.parametrize(("kind", "name", "dtype", "layout"), list(cases()))
def test_strides_change_no_result(
    kind: str, name: str, dtype: torch.dtype, layout: str, request: pytest.FixtureRequest
) -> None:
    call: Any = request.getfixturevalue("interpreted") if name == "triton" else lambda f, *a: f(*a)
    expected, results = (call(run, kind, name, dtype, layout, dense) for dense in (True, False))
    for one, got in zip(expected, results, strict=True):
        assert_near(got, one, dtype)


def test_a_pass_in_place_refuses_what_it_would_have_to_copy() -> None:
    w = Workload(seq_len=N, heads=2, head_dim=D, mode="train")
    attention = build_attention("ring", {}, w)
    q, k, v, grad_out = (torch.randn(1, 2, N, D) for _ in range(4))
    apart = grad_out.mT.contiguous().mT
    for call in (
        lambda: forward_inplace(attention, q, apart, v),
        lambda: backward_recompute(attention, apart, q, k, v, True),
    ):
        with pytest.raises(UnsupportedError, match="with a contiguous head_dim"):
            call()
