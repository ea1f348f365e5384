"""Spans computed by exact attention: every pattern against the layout's own definition."""

import pytest
import torch

from longseq_bench.attention.sparse.block_sparse import build_layout_kernel
from longseq_bench.kernels import torch_spans
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from tests.kernels.plain_attention import ALLOWED, PassResult, assert_passed, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, BLOCK = 4, 16


def layout_of(pattern: str, tokens: int, causal: bool, block: int = BLOCK) -> BlockLayout:
    special = 20 if pattern in ("global-local", "sink-window") else 0
    return make_layout(pattern, tokens, block, 0.6, causal, 3, min(special, tokens))


def assert_layout(
    layout: BlockLayout, kv_heads: int = 2, dtype: torch.dtype = torch.float32, batch: int = 2
) -> None:
    tensors, grad_out = inputs(layout.seq_len, dtype, (HEADS, kv_heads), batch=batch)
    kernel = build_layout_kernel("torch", (layout,), HEADS)
    q, *keys = tensors
    out, lse = kernel.forward(*tensors, True)
    assert lse is not None
    alone, none = kernel.forward(*tensors, False)
    assert none is None
    assert torch.equal(alone, out)
    grads = kernel.backward((grad_out, q, out, lse), tuple(keys))
    like = torch.float16 if dtype.itemsize == 2 else dtype
    assert_passed(PassResult(out, lse, grads), [layout], tensors, grad_out, like=like)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_equals_its_definition(
    pattern: str, causal: bool, kv_heads: int, dtype: torch.dtype
) -> None:
    assert_layout(layout_of(pattern, 171, causal), kv_heads, dtype, batch=1)


@pytest.mark.parametrize(
    ("tokens", "block"), [(1, 16), (15, 16), (160, 16), (300, 1), (300, 5), (300, 300), (300, 512)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_any_length_and_block_size(tokens: int, block: int, causal: bool) -> None:
    pattern = "random" if block == BLOCK else "strided"
    assert_layout(layout_of(pattern, tokens, causal, block))


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
        assert_layout(layout_of(pattern, 301, causal))


@pytest.mark.parametrize("pattern", ["local-window", "random", "global-local"])
def test_temporaries_stay_small(pattern: str) -> None:
    tokens = 16_384
    (q, k, v), _ = inputs(tokens, heads=(HEADS, HEADS))
    special = 128 if pattern == "global-local" else 0
    layout = make_layout(pattern, tokens, 128, 0.95, True, 0, special)
    kernel = build_layout_kernel("torch", (layout,), HEADS)
    out_bytes = q.untyped_storage().nbytes()
    meter = StoragePeak("cpu")
    with meter:
        kernel.forward(q, k, v, False)
    # keys and values as they are gathered and as rows of a batch; those of all tiles are 100 MB
    assert out_bytes < meter.peak < out_bytes + 3 * torch_spans.MIN_GATHERED_BYTES
