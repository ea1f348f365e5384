"""Native sparse attention up to the call: a fake with parameters of fla-core 0.6.0.

The fake reads `block_indices` as the kernel does: per token and KV head, -1 for none.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import build_attention, count_pairs
from tests.attention.external.plain import attend, distances

pytestmark = pytest.mark.usefixtures("one_thread", "oldest_versions")

NAME, OPTIONS = "native-sparse-attention", {"block": 16, "blocks": 4}


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


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", SimpleNamespace(parallel_nsa=parallel_nsa))


def nsa_workload(seq_len: int = 200, **fields: Any) -> Any:
    known = {"causal": True, "heads": 32, "kv_heads": 2, "dtype": "bfloat16"}
    return make_workload(seq_len, **{**known, **fields})


@pytest.mark.parametrize("seq_len", [200, 40, 7])
def test_it_equals_the_reference(seq_len: int) -> None:
    assert_equals_reference(NAME, OPTIONS, nsa_workload(seq_len, mode="train"))


def test_a_query_sees_the_first_block_and_the_nearest_ones() -> None:
    attention = build_attention(NAME, OPTIONS, nsa_workload())
    pairs = count_pairs(attention)[0]
    keys = np.flatnonzero(pairs[150])  # block 9
    assert keys.tolist() == [*range(16), *range(7 * 16, 151)]
    assert attention.cost().flops == pytest.approx(4 * 16 * 2 * 32 * float(pairs.sum()))
    blocks = 1 + 2 + 3 + 10 * 4  # of 13 rows with the triangle of 91
    assert attention.measures() == {"density_achieved": blocks / 91, "uncovered": 0.0}
