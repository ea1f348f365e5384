"""Rows of libraries that need a GPU, up to the call: a fake has the parameters that a row gives.

The fakes compute what the library's documentation says, so that layouts, masks and heads of the
row are compared with the definition in float64. They do not show that the library computes it.
Parameters are among those of ring-flash-attn 0.1.8, flashinfer-python 0.7.2, xformers
0.0.35, natten 0.21.7, transformer-engine 2.20.2 and fla-core 0.6.0.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.distributed.group import Group
from longseq_bench.testing.contract import assert_equals_reference, both_masks, make_workload
from longseq_bench.testing.definition import build_attention, count_pairs, make_inputs
from tests.attention.external.plain import attend, distances

pytestmark = pytest.mark.usefixtures("one_thread", "oldest_versions")


def install(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> None:
    """Let a module with these members, and the packages around it, be there to import."""
    package = ""
    for part in module.split(".")[:-1]:
        package = f"{package}.{part}".lstrip(".")
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**members))


# ---- xformers ----------------------------------------------------------------------------------


# masks of xformers.ops.fmha.attn_bias, as functions of the tokens that return pairs


def local_mask(window_left: int, window_right: int) -> Any:
    return lambda n: (distances(n) <= window_left) & (distances(n) >= -window_right)


def block_diagonal(causal: bool) -> Any:
    def from_seqlens(q_seqlen: list[int], kv_seqlen: list[int] | None = None) -> Any:
        owner = torch.arange(len(q_seqlen)).repeat_interleave(torch.tensor(q_seqlen))
        same = owner[:, None] == owner
        return lambda n: same & (distances(n) >= 0) if causal else same

    return SimpleNamespace(from_seqlens=from_seqlens)


BIASES = {
    "LowerTriangularMask": lambda: lambda n: distances(n) >= 0,
    "LocalAttentionFromBottomRightMask": local_mask,
    "BlockDiagonalMask": block_diagonal(causal=False),
    "BlockDiagonalCausalMask": block_diagonal(causal=True),
}


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None
) -> Tensor:
    shape = query.shape
    if query.ndim == 5:  # B, M, groups, heads of a group, K: key and value have equal ones
        assert key.shape[2:4] == query.shape[2:4]
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    assert query.shape[2] == key.shape[2]
    visible = None if attn_bias is None else attn_bias(shape[1])
    return attend(query, key, value, visible).reshape(shape)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "mask",
    ["full", "causal", "sliding-window:1", "sliding-window:9", "documents:30,1,33",
     "full-documents:30,1,33"],
)  # fmt: skip
def test_xformers(monkeypatch: pytest.MonkeyPatch, mask: str, kv_heads: int) -> None:
    members = {"memory_efficient_attention": memory_efficient_attention}
    install(monkeypatch, "xformers.ops", **members)
    install(monkeypatch, "xformers.ops.fmha.attn_bias", **BIASES)
    w = make_workload(64, mode="train", kv_heads=kv_heads, mask=mask)
    assert_equals_reference("xformers", {}, w)


# ---- FlashInfer --------------------------------------------------------------------------------


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, causal: bool, window_left: int, q_data_type: Any,
    ) -> None:  # fmt: skip
        assert qo_indptr.dtype == torch.int32
        assert torch.equal(qo_indptr, kv_indptr)
        assert q_data_type == torch.bfloat16
        self.ends, self.causal, self.left = qo_indptr.tolist(), causal, window_left
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.heads
        assert q.shape == (self.ends[-1], heads, head_dim)
        assert k.shape == v.shape == (self.ends[-1], kv_heads, head_dim)
        parts = []
        for first, stop in zip(self.ends, self.ends[1:], strict=False):
            far = distances(stop - first)
            seen = far >= 0 if self.causal else torch.ones_like(far, dtype=torch.bool)
            if self.left >= 0:
                seen &= far <= self.left
            own = (t[None, first:stop] for t in (q, k, v))
            parts.append(attend(*own, seen)[0])
        return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "mask",
    ["full", "causal", "sliding-window:9", "documents:30,1,33", "full-documents:30,1,33"],
)
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, mask: str, kv_heads: int) -> None:
    kind = BatchPrefillWithRaggedKVCacheWrapper
    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=kind)
    w = make_workload(64, kv_heads=kv_heads, mask=mask, dtype="bfloat16")
    assert_equals_reference("flashinfer", {}, w)
    assert build_attention("flashinfer", {}, w).facts()["library"] == "flashinfer-python 0.2.3"


# ---- NATTEN ------------------------------------------------------------------------------------


def na1d(query: Tensor, key: Tensor, value: Tensor, kernel_size: int, is_causal: bool) -> Tensor:
    assert 2 <= kernel_size <= query.shape[1]
    assert is_causal
    far = distances(query.shape[1])
    return attend(query, key, value, (far >= 0) & (far < kernel_size))


@pytest.mark.parametrize("window", [2, 9, 100])
def test_natten(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    install(monkeypatch, "natten.functional", na1d=na1d)
    w = make_workload(64, mode="train", mask=f"sliding-window:{window}")
    assert_equals_reference("natten", {}, w)


# ---- several ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "rank", "causal", "positions"),
    [
        ("ring-flash-attention", {"order": "striped"}, 1, True, [*range(1, 64, 4)]),
        ("yunchang", {"ulysses": 1}, 1, False, [*range(16, 32)]),
        ("yunchang", {"ulysses": 2}, 3, False, [*range(48, 64)]),
        ("yunchang", {"ulysses": 2}, 1, True, [*range(48, 64)]),
        ("yunchang", {"ulysses": 1}, 1, True, [*range(8, 16), *range(48, 56)]),
        ("transformer-engine", {}, 1, True, [*range(8, 16), *range(48, 56)]),
        ("torch-context-parallel", {}, 1, True, [*range(8, 16), *range(48, 56)]),
    ],
)
def test_a_rank_holds_the_tokens_that_the_library_expects(
    name: str, options: dict[str, Any], rank: int, causal: bool, positions: list[int]
) -> None:
    w = make_workload(64, causal=causal, dtype="bfloat16")
    attention = IMPLEMENTATIONS.get(name)(w, Group(rank, 4), **options)
    assert attention.shard.queries.tolist() == positions
    assert not attention.counts_traffic  # it sends past our group


@pytest.mark.parametrize(
    ("order", "function", "causal"),
    [
        ("contiguous", "ring_flash_attn_func", False),
        ("zigzag", "zigzag_ring_flash_attn_func", True),
        ("striped", "stripe_flash_attn_func", True),
    ],
)
def test_ring_flash_attention(
    monkeypatch: pytest.MonkeyPatch, order: str, function: str, causal: bool
) -> None:
    def ring(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, group: Any = None) -> Tensor:
        calls.append((causal, group))
        assert (q.shape, k.shape, v.shape) == ((2, 32, 4, 16), (2, 32, 2, 16), (2, 32, 2, 16))
        return 2 * q

    calls: list[Any] = []
    install(monkeypatch, "ring_flash_attn", **{function: ring})
    w = make_workload(32, causal=causal, kv_heads=2, dtype="bfloat16")
    kind = IMPLEMENTATIONS.get("ring-flash-attention")
    attention = kind(w, Group(1, 2, data="the ranks"), order=order)
    attention.prepare("cpu")
    q, k, v = make_inputs(w)
    assert torch.equal(attention(q, k, v), 2 * q)
    assert calls == [(causal, "the ranks")]


# ---- TransformerEngine -------------------------------------------------------------------------


class DotProductAttention:
    def __init__(
        self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
    ) -> None:  # fmt: skip
        assert (qkv_format, attention_dropout) == ("bshd", 0.0)
        self.heads, self.head_dim, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        self.causal = {"causal": True, "no_mask": False}[attn_mask_type]

    def __call__(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        assert query_layer.shape[2:] == (self.heads, self.head_dim)
        assert key_layer.shape[2:] == (self.groups, self.head_dim)
        tokens = query_layer.shape[1]
        seen = distances(tokens) >= 0 if self.causal else None
        return attend(query_layer, key_layer, value_layer, seen).flatten(2)


@both_masks
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_transformer_engine(monkeypatch: pytest.MonkeyPatch, causal: bool, kv_heads: int) -> None:
    install(monkeypatch, "transformer_engine.pytorch", DotProductAttention=DotProductAttention)
    w = make_workload(64, causal=causal, kv_heads=kv_heads, dtype="bfloat16", mode="train")
    assert_equals_reference("transformer-engine", {}, w)


# ---- flash-linear-attention: block_indices per token and KV head, -1 for none ------------------

NSA = "native-sparse-attention"


def parallel_nsa(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: int, block_size: int
) -> Tensor:
    assert block_indices.dtype == torch.int64
    B, N, H, S = block_indices.shape
    assert k.shape[:3] == (B, N, H)
    assert block_counts == S  # its backward counts this many
    assert all(t.is_contiguous() for t in (q, k, v, block_indices))
    own = torch.arange(N) // block_size
    seen = (block_indices[..., None] == own).sum(3)  # (B, N, H, N)
    assert int(seen.max()) == 1  # a block twice would be weighed twice
    visible = (seen > 0).transpose(1, 2) & (distances(N) >= 0)
    return attend(q, k, v, visible.repeat_interleave(q.shape[2] // H, 1))


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IMPLEMENTATIONS.get(NSA), "block", 16)
    monkeypatch.setattr(IMPLEMENTATIONS.get(NSA), "blocks", 4)
    install(monkeypatch, "fla.ops.nsa", parallel_nsa=parallel_nsa)


def nsa_workload(seq_len: int = 200, **fields: Any) -> Any:
    known = {"causal": True, "heads": 32, "kv_heads": 2, "dtype": "bfloat16"}
    return make_workload(seq_len, **{**known, **fields})


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("seq_len", [200, 40, 7])
def test_native_sparse_attention(seq_len: int) -> None:
    assert_equals_reference(NSA, {}, nsa_workload(seq_len, mode="train"))


@pytest.mark.usefixtures("fla")
def test_a_query_sees_the_first_block_and_the_nearest_ones() -> None:
    attention = build_attention(NSA, {}, nsa_workload())
    pairs = count_pairs(attention)[0]
    keys = np.flatnonzero(pairs[150])  # block 9
    assert keys.tolist() == [*range(16), *range(7 * 16, 151)]
    assert attention.cost().flops == pytest.approx(4 * 16 * 2 * 32 * float(pairs.sum()))
    blocks = 1 + 2 + 3 + 10 * 4  # of 13 rows with the triangle of 91
    assert attention.measures() == {"density_achieved": blocks / 91, "uncovered": 0.0}
