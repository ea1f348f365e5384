"""Spans computed by exact attention: every pattern against the layout's own definition."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_sparse import build_layout_kernel
from longseq_bench.kernels import torch_spans
from longseq_bench.kernels.tiling import wide
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from tests.kernels import plain_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, D, BLOCK = 4, 16, 16
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Relative to the largest number of the reference, but at least to 0.1."""


def layout_of(pattern: str, tokens: int, causal: bool, block: int = BLOCK) -> BlockLayout:
    special = 20 if pattern in ("global-local", "sink-window") else 0
    return make_layout(pattern, tokens, block, 0.6, causal, 3, min(special, tokens))


def inputs(
    tokens: int, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32, batch: int = 2
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, heads, tokens, D) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_near(got: Tensor, expected: Tensor, allowed: float) -> None:
    assert got.isfinite().all()
    error = (got.double() - expected).abs().max()
    assert float(error) < allowed * max(0.1, float(expected.abs().max()))


def assert_layout(layout: BlockLayout, qkvg: Sequence[Tensor]) -> None:
    q, k, v, grad_out = qkvg
    masks = plain_attention.masks([layout])
    expected, expected_lse, grads = plain_attention.gradients((q, k, v), grad_out, masks)
    kernel = build_layout_kernel("torch", (layout,), HEADS)
    out, lse = kernel.forward(q, k, v, True)
    assert lse is not None
    allowed = CLOSE[q.dtype]
    assert out.dtype == q.dtype
    assert lse.dtype == wide(q)
    assert_near(out, expected, allowed)
    assert_near(lse, expected_lse, min(allowed, 2e-3))
    alone, none = kernel.forward(q, k, v, False)
    assert none is None
    assert torch.equal(alone, out)
    for got, like, grad in zip(
        kernel.backward((grad_out, q, out, lse), (k, v)), (q, k, v), grads, strict=True
    ):
        assert got.dtype == like.dtype
        assert_near(got, grad, 3 * allowed)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_equals_its_definition(
    pattern: str, causal: bool, kv_heads: int, dtype: torch.dtype
) -> None:
    assert_layout(layout_of(pattern, 171, causal), inputs(171, kv_heads, dtype, batch=1))


@pytest.mark.parametrize(
    ("tokens", "block"), [(1, 16), (15, 16), (160, 16), (300, 1), (300, 5), (300, 300), (300, 512)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_any_length_and_block_size(tokens: int, block: int, causal: bool) -> None:
    pattern = "random" if block == BLOCK else "strided"
    assert_layout(layout_of(pattern, tokens, causal, block), inputs(tokens, 2))


@pytest.mark.parametrize(("rows", "gathered"), [(1, 64), (100, 20_000)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_size_of_calls_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: int, gathered: int, causal: bool
) -> None:
    """One tile at a time, and some of them; long rows in several calls."""
    monkeypatch.setattr(torch_spans, "ROWS", {"cpu": rows})
    monkeypatch.setattr(torch_spans, "MIN_GATHERED_BYTES", gathered)
    monkeypatch.setattr(torch_spans, "LEAST_KEYS", 40)
    for pattern in ("local-window", "global-local", "random"):
        assert_layout(layout_of(pattern, 301, causal), inputs(301, 2))


@pytest.mark.parametrize("pattern", ["local-window", "random", "global-local"])
def test_temporaries_stay_small(pattern: str) -> None:
    tokens = 16_384
    q, k, v, _ = inputs(tokens, batch=1)
    special = 128 if pattern == "global-local" else 0
    layout = make_layout(pattern, tokens, 128, 0.95, True, 0, special)
    kernel = build_layout_kernel("torch", (layout,), HEADS)
    out_bytes = q.untyped_storage().nbytes()
    meter = StoragePeak("cpu")
    with meter:
        kernel.forward(q, k, v, False)
    # keys and values as they are gathered and as rows of a batch; those of all tiles are 100 MB
    assert out_bytes < meter.peak < out_bytes + 3 * torch_spans.MIN_GATHERED_BYTES
