"""Memory of a whole model by formula."""

import pytest

from longseq_bench.core.model import Workload
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.search.model_memory import ModelMemory, Sharding, model_memory

MODEL = ModelShape(
    name="small", source="", heads=2, kv_heads=2, head_dim=4, v_head_dim=4, layers=3,
    hidden_size=10, dtype="bfloat16", parameters=800,
)  # fmt: skip
TRAIN = Workload(seq_len=100, batch=2, heads=2, head_dim=4, dtype="bfloat16", mode="train")
FORWARD = TRAIN.model_copy(update={"mode": "forward"})

# by hand: 2 · 100 / 4 tokens of 10 · 2 bytes in 3 layers; 800 parameters of 2, 2 and 12 bytes
CHECKPOINTS, WEIGHTS, GRADIENTS, OPTIMIZER = 50 * 20 * 3, 1600, 1600, 9600


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [("none", (WEIGHTS, GRADIENTS, OPTIMIZER)), ("zero1", (WEIGHTS, GRADIENTS, OPTIMIZER // 4)),
     ("zero2", (WEIGHTS, GRADIENTS // 4, OPTIMIZER // 4)),
     ("zero3", (WEIGHTS // 4, GRADIENTS // 4, OPTIMIZER // 4))],
)  # fmt: skip
def test_a_rank_of_four_in_training(sharding: Sharding, expected: tuple[int, ...]) -> None:
    memory = model_memory(MODEL, TRAIN, 4, sharding)
    assert memory == ModelMemory(CHECKPOINTS, *expected)
    assert memory.total(7) == 7 + CHECKPOINTS + sum(expected)


def test_forward_needs_weights_alone() -> None:
    assert model_memory(MODEL, FORWARD, 4, "zero3") == ModelMemory(None, 400, None, None)


def test_unknown_parameters_leave_no_sum() -> None:
    unknown = MODEL.model_copy(update={"parameters": None})
    memory = model_memory(unknown, TRAIN, 4, "zero3")
    assert memory == ModelMemory(CHECKPOINTS, None, None, None)
    assert memory.total(7) is None
