"""The memory of standard attention, against numbers computed by hand."""

import pytest

from longseq_bench.analysis.sweeps import standard_bytes
from longseq_bench.core.model import Workload


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # q, k, v, out of 10 tokens, 2 and 1 heads of 4, two batches; scores and weights
        ({}, 4 * (10 * 2 * 4 * (2 + 1 + 1 + 2) + 2 * (2 * 2 * 100))),
        ({"dtype": "bfloat16"}, 2 * (10 * 2 * 4 * (2 + 1 + 1 + 2) + 2 * (2 * 2 * 100))),
        ({"causal": True}, 4 * (10 * 2 * 4 * (2 + 1 + 1 + 2) + 2 * (2 * 2 * 100)) + 100),
        # v and out of 3
        ({"v_head_dim": 3}, 4 * (10 * 2 * ((2 + 1) * 4 + (1 + 2) * 3) + 2 * (2 * 2 * 100))),
        (
            {"v_head_dim": 3, "mode": "train"},
            4 * (10 * 2 * ((2 + 1) * 4 + (1 + 2 + 2 + 1) * 3) + 3 * (2 * 2 * 100)),
        ),
        # and the gradients of out and v; weights and two gradients
        ({"mode": "train"}, 4 * (10 * 2 * 4 * (2 + 1 + 1 + 2 + 2 + 1) + 3 * (2 * 2 * 100))),
    ],
)
def test_standard_attention_keeps_the_score_matrix_more_than_once(
    fields: dict[str, object], expected: int
) -> None:
    shape = {"seq_len": 10, "batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, **fields}
    assert standard_bytes(Workload.model_validate(shape)) == expected
