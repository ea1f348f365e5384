"""Rows of libraries that need a GPU, up to the call: a fake has the parameters that a row gives.

The fakes compute what the library's documentation says, so that layouts, masks and heads of the
row are compared with the definition in float64. They do not show that the library computes it.
Parameters are among those of ring-flash-attn 0.1.8 and flashinfer-python 0.7.2.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.distributed.group import Group
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import build_attention, make_inputs
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


# ---- several ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "positions"),
    [("striped", [*range(1, 64, 4)]), ("zigzag", [*range(8, 16), *range(48, 56)])],
)
def test_a_rank_holds_the_tokens_that_the_library_expects(order: str, positions: list[int]) -> None:
    w = make_workload(64, causal=True, dtype="bfloat16")
    attention = IMPLEMENTATIONS.get("ring-flash-attention")(w, Group(1, 4), order=order)
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
