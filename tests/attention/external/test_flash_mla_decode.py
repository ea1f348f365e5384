"""FlashMLA up to the call: a fake with parameters of its version 1.0.0, which computes in torch."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import build_attention, make_inputs

pytestmark = pytest.mark.usefixtures("one_thread", "oldest_versions")

NAME = "flash-mla-decode"


def get_mla_metadata(cache_seqlens: Tensor, heads_per_kv_head: int, kv_heads: int) -> Any:
    return (heads_per_kv_head, kv_heads), None


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: Any, softmax_scale: float, causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert k_cache.shape[1:] == (64, 1, 576)
    batch, new, heads, _ = q.shape
    assert tile_scheduler_metadata == (new * heads, 1)
    outs = []
    for b in range(batch):
        tokens = int(cache_seqlens[b])
        rows = k_cache[block_table[b].long()].flatten(0, 1)[:tokens, 0]
        seen = torch.ones(new, tokens, dtype=torch.bool)
        seen = seen.tril(tokens - new) if causal else seen
        k = rows.expand(heads, -1, -1)
        one = scaled_dot_product_attention(
            q[b].transpose(0, 1), k, k[..., :head_dim_v], seen, scale=softmax_scale
        )
        outs.append(one.transpose(0, 1))
    return torch.stack(outs), None


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_it_equals_the_reference(monkeypatch: pytest.MonkeyPatch, new_tokens: int) -> None:
    fake = SimpleNamespace(
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    shape = {"latent": "512+64", "head_dim": 576, "new_tokens": new_tokens}
    w = make_workload(128, causal=True, dtype="bfloat16", mode="decode", **shape)
    assert_equals_reference(NAME, {}, w)
    q, k, v = make_inputs(w)
    attention: Any = build_attention(NAME, {}, w)
    seen: list[Tensor] = []
    monkeypatch.setattr(
        fake, "flash_mla_with_kvcache", lambda *a, **b: seen.append(a[1]) or (a[0][..., :512],)
    )
    attention(q, k, v)
    assert seen[0].untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
