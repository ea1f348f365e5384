"""FlexAttention by FlashAttention-4: where it can run, and what torch is asked for.

Its output is tested on a GPU with the package flash-attn-4 only.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_layout_attention import build_layout_kernel
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.kernels import flex_blocks
from longseq_bench.kernels.exact import _packages, flash_attn
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.flex_blocks import causal_mask_mod
from longseq_bench.kernels.flex_flash import FlexFlashBlocks, always_true, unavailable_reason
from longseq_bench.kernels.sparse_selection import Blocks, choose
from longseq_bench.patterns.blocks import make_layout
from tests.kernels import plain_attention

USE = Use("cuda", torch.bfloat16, 64, True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts the package and a GPU of a capability in place."""

    def put(major: int) -> None:
        monkeypatch.setattr(_packages, "version", lambda name: "4.0.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))

    return put


@pytest.mark.parametrize(
    ("major", "block", "words"),
    [
        (9, 128, None),
        (9, 256, "it needs blocks of 128 tokens on this GPU, not 256"),
        (10, 512, None),
        (10, 128, "it needs blocks of 256 tokens or a multiple of it on this GPU, not 128"),
        (8, 128, "it needs compute capability 9.0; this GPU has 8.0"),
        (12, 128, "it needs compute capability 9.x or 10.x; this GPU has 12.0"),
    ],
)
def test_the_block_has_the_tile_of_the_gpu(
    gpu: Any, major: int, block: int, words: str | None
) -> None:
    gpu(major)
    assert unavailable_reason(USE, block) == words


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (Use("cpu", torch.bfloat16, 64, False), "FlashAttention-4 is for CUDA"),
        (Use("cuda", torch.float32, 64, False), "it supports bfloat16 and float16, not float32"),
        (Use("cuda", torch.bfloat16, 192, False), "it needs a head_dim of at most 128"),
    ],
)
def test_what_it_can_not_compute_is_refused(gpu: Any, use: Use, words: str) -> None:
    gpu(9)
    assert words in (unavailable_reason(use, 128) or "")


def test_a_missing_package_and_a_pattern_without_blocks_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"kernel=flex-flash: .* pip install flash-attn-4"):
        choose("flex-flash", "cuda", "bfloat16", 64, Blocks(128, True))
    with pytest.raises(UnsupportedError, match="kernel=flex-flash: it needs a block layout"):
        choose("flex-flash", "cuda", "bfloat16", 64)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_is_asked_for_the_flash_backend(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    asked = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, **options: Any) -> Tensor:
        asked.update(options, mask_mod=block_mask.mask_mod)
        return q

    monkeypatch.setattr(flex_blocks, "attend", attend)
    q = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    layouts = (make_layout("random", 512, 128, 0.5, causal),)
    kernel = build_layout_kernel("flex-flash", layouts, 4)
    kernel.forward(q, q, q, False)
    mask_mod = causal_mask_mod if causal else always_true
    assert asked == {"kernel_options": {"BACKEND": "FLASH"}, "mask_mod": mask_mod}


def test_a_length_beyond_its_index_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(flash_attn, "MAX_INDEX", q.numel() - 1)
    kernel = FlexFlashBlocks([make_layout("random", 512, 128, 0.5, False)])
    with pytest.raises(KernelLimitError, match="flex-flash: a tensor spans 131,072 elements"):
        kernel.forward(q, q, q, False)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1024, 2000])
def test_it_equals_its_definition(tokens: int, causal: bool) -> None:
    """Also with a short last block."""
    block = 256 if torch.cuda.get_device_capability()[0] == 10 else 128
    if reason := unavailable_reason(USE, block):
        pytest.skip(reason)
    layouts = [make_layout("random", tokens, block, 0.5, causal)]
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads, tokens, 64) for heads in (4, 2, 2, 4)]
    tensors = [torch.randn(s, generator=draw, device="cuda").bfloat16() for s in shapes]
    *qkv, grad_out = tensors
    q, k, v = qkv
    kernel = FlexFlashBlocks(layouts)
    out, lse = kernel.forward(q, k, v, True)
    assert lse is not None
    seen = plain_attention.masks(layouts).to("cuda")
    want, want_lse, want_grads = plain_attention.gradients(qkv, grad_out, seen)
    torch.testing.assert_close(out.double(), want, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-2, atol=1e-2)
    for got, grad in zip(kernel.backward((grad_out, q, out, lse), (k, v)), want_grads, strict=True):
        torch.testing.assert_close(got.double(), grad, rtol=4e-2, atol=4e-2)
