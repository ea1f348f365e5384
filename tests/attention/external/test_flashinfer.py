"""FlashInfer's decoding and block-sparse attention up to the call: fakes, parameters as in 0.7.2.

The fakes compute in torch. That of decoding reads pages by their strides, as the kernels do.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_sparse import BlockSparse
from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import build_attention, make_inputs
from tests.kernels import plain_attention

pytestmark = pytest.mark.usefixtures("one_thread", "oldest_versions")

NAME = "flashinfer-decode"


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, cap: float | None) -> Tensor:
    """Attention in the layout (B, N, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    counts = visible.expand(q.shape[2], k.shape[2])
    out, _ = plain_attention.forward(*(t.double() for t in (q, k, v)), counts=counts, soft_cap=cap)
    return out.to(q).transpose(1, 2)


class BatchDecodeWithPagedKVCacheWrapper:
    resolved_backend = "fa2"

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, use_tensor_cores: bool
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()  # it has to be zero at first
        self.tensor_cores = use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int, q_data_type: Any,
        kv_data_type: Any, q_len_per_req: int, logits_soft_cap: float | None,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1
        assert q_data_type == kv_data_type == torch.bfloat16
        assert self.tensor_cores or q_len_per_req == 1
        self.ends, self.indices, self.last = indptr.tolist(), indices, last_page_len.tolist()
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.queries, self.left, self.cap = q_len_per_req, window_left, logits_soft_cap

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        k_pages, v_pages = paged_kv_cache
        heads, kv_heads, head_dim, page = self.shape
        assert q.shape == (len(self.last) * self.queries, heads, head_dim)
        assert k_pages.shape[1:] == (kv_heads, page, head_dim)
        assert k_pages.stride() == v_pages.stride()
        rows = []
        for b, (first, stop) in enumerate(zip(self.ends, self.ends[1:], strict=False)):
            pages = self.indices[first:stop].long()
            tokens = (stop - first - 1) * page + self.last[b]
            k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:tokens] for x in (k_pages, v_pages))
            far = torch.arange(tokens - self.queries, tokens)[:, None] - torch.arange(tokens)
            seen = (far >= 0) & (far <= self.left) if self.left >= 0 else far >= 0
            own = q[b * self.queries : (b + 1) * self.queries]
            rows.append(attend(own[None], k[None], v[None], seen, self.cap)[0])
        return torch.cat(rows)


class VariableBlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, block_mask_map: Tensor, block_row_sz: Tensor, block_col_sz: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, causal: bool = False, *, logits_soft_cap: float | None,
        sm_scale: float | None, q_data_type: Any, kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert block_mask_map.dtype == torch.bool
        assert block_row_sz.dtype == block_col_sz.dtype == torch.int32
        assert len(block_mask_map) == len(block_row_sz) == len(block_col_sz) == num_kv_heads
        assert (sm_scale, q_data_type, kv_data_type) == (head_dim**-0.5, torch.bfloat16, None)
        self.kept, self.sizes = block_mask_map, (block_row_sz.tolist(), block_col_sz.tolist())
        self.heads, self.causal, self.cap = (num_qo_heads, num_kv_heads), causal, logits_soft_cap

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (len(q), len(k)) == self.heads
        group, out = len(q) // len(k), torch.full_like(q, torch.nan)
        for h, rows, columns in zip(range(len(k)), *self.sizes, strict=True):
            queries = torch.arange(q.shape[1]).split(rows)
            keys = torch.arange(k.shape[1]).split(columns)
            for own, kept in zip(queries, self.kept[h], strict=True):
                seen = torch.cat(
                    [some for some, is_kept in zip(keys, kept, strict=True) if is_kept]
                )
                # the mask of its kernels: positions are those in the list of kept keys
                late = torch.arange(len(seen)) + len(own) - torch.arange(len(own))[:, None]
                visible = (late <= len(seen)) | (not self.causal)
                heads = q[h * group : (h + 1) * group, own].transpose(0, 1)[None]
                k_v = (t[h, seen][None, :, None] for t in (k, v))
                part = attend(heads, *k_v, visible, self.cap)[0]
                out[h * group : (h + 1) * group, own] = part.transpose(0, 1)
        return out


class OfCuda(BlockSparse):
    """Prepared as on CUDA, and given tensors on a CPU."""

    def prepare(self, device: str) -> None:
        super().prepare("cuda")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = BatchDecodeWithPagedKVCacheWrapper, VariableBlockSparseAttentionWrapper
    fake = SimpleNamespace(**{kind.__name__: kind for kind in kinds})
    monkeypatch.setitem(sys.modules, "flashinfer", fake)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "sliding-window:20"])
def test_it_equals_the_reference(kv_heads: int, new_tokens: int, mask: str) -> None:
    more: Any = {"soft_cap": 0.7 if mask == "causal" and kv_heads == 1 else None, "mask": mask}
    w = make_workload(
        96, kv_heads=kv_heads, dtype="bfloat16", mode="decode", new_tokens=new_tokens, **more
    )
    assert_equals_reference(NAME, {"page": 8}, w)


def test_a_cache_whose_heads_are_next_to_tokens_is_copied() -> None:
    """Pages are views by the strides of a contiguous cache."""
    w = make_workload(96, kv_heads=2, causal=True, dtype="bfloat16", mode="decode")
    attention, (q, k, v) = build_attention(NAME, {"page": 8}, w), make_inputs(w)
    beside = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    assert torch.equal(attention(q, *beside), attention(q, k, v))


def test_pages_are_the_cache_itself() -> None:
    """A copy of the cache would take longer than the step."""
    w = make_workload(96, kv_heads=2, dtype="bfloat16", mode="decode")
    attention: Any = build_attention(NAME, {"page": 96}, w)
    k = make_inputs(w)[1]
    pages = attention._pages(k)
    assert pages.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert torch.equal(pages[2], k[1])  # page = cache: the second sequence after two KV heads
    assert attention.facts()["kernel"] == "FlashInfer fa2"


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("indices", {"kv_heads": 2, "causal": True}),
        ("indices", {"soft_cap": 0.7}),
        ("strided", {"kv_heads": 1, "causal": True}),
    ],
)
def test_blocks_equal_the_reference(pattern: Any, fields: Any) -> None:
    """Lists of each KV head, a list of all; the last block is short."""
    options = {"pattern": pattern, "kernel": "flashinfer", "block": 16, "sparsity": 0.5}
    assert_equals_reference(OfCuda, options, make_workload(150, dtype="bfloat16", **fields))


def test_blocks_that_flashinfer_cannot_compute_are_refused() -> None:
    w, of_flashinfer = make_workload(64, dtype="bfloat16"), {"kernel": "flashinfer"}
    assert build_attention(OfCuda, of_flashinfer, w).facts()["library"] == "flashinfer-python 0.7.2"
    with pytest.raises(UserError, match="kernel=flashinfer plans before the passes, not in each"):
        build_attention("block-sparse-adaptive", of_flashinfer, w)
    for fields, words in (
        ({"mode": "train"}, "a forward in 16 bits on CUDA"),
        ({"dtype": "float32"}, "a forward in 16 bits on CUDA"),
        ({"sink": True}, "kernel=flashinfer has no sinks"),
        ({"mask": "prefix:9"}, "it needs a block layout: one rank, no mask but causal"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            build_attention(
                OfCuda, of_flashinfer, make_workload(64, **{"dtype": "bfloat16"} | fields)
            )
