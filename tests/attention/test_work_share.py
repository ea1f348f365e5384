"""The share of the work that each rank does, against pairs that are counted one by one."""

from typing import Any

import numpy as np
import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

TOKENS, HEADS = 48, 8


def ranks_of(name: str, causal: bool, size: int, **options: Any) -> list[Attention]:
    w = Workload(seq_len=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=16, causal=causal)
    make = IMPLEMENTATIONS.get(name)
    return [make(w, Group(rank, size), **options) for rank in range(size)]


def counted_share(attention: Attention) -> float:
    """The share of the pairs that the rank's queries see, by the pattern."""
    everything = np.arange(TOKENS)
    pairs = [
        attention.multiplicity(q, everything, 0).sum()
        for q in (attention.shard.queries, everything)
    ]
    return float(pairs[0] / pairs[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {}), ("ring", {"order": "contiguous"}), ("ring", {"order": "striped"}),
        ("collective", {}), ("collective", {"order": "contiguous"}),
        ("block-sparse", {"sparsity": 0.5, "block": 1}),
    ],
)  # fmt: skip
def test_a_rank_that_computes_its_own_rows_has_the_pairs_that_they_see(
    name: str, options: dict[str, Any], causal: bool
) -> None:
    for one in ranks_of(name, causal, 4, **options):
        assert one.work_share() == pytest.approx(counted_share(one), rel=1e-12)


def test_ranks_of_usp_share_the_work_of_their_group() -> None:
    """The two groups of two ranks each have half of the tokens in zigzag order."""
    shares = [one.work_share() for one in ranks_of("usp", True, 4, ulysses=2)]
    assert shares == pytest.approx([1 / 4] * 4)
