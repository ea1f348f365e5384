"""FlashInfer's paged decoding up to the call: a fake with parameters of its wheel 0.7.2.

The fake reads pages by their strides, as the kernels do, and computes in torch.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = BatchDecodeWithPagedKVCacheWrapper
    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=kind)
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
