"""Memory of a whole model by formula."""

import pytest

from longseq_bench.core.model import DryRunEstimate, Workload
from longseq_bench.core.model_files import LayerKind
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.search.model_memory import ModelMemory, ModelPlan, Sharding, model_memory
from tests.make import trial

SHAPE = {"heads": 2, "kv_heads": 2, "head_dim": 4, "v_head_dim": 4}
FULL = LayerKind(kind="full", layers=3, **SHAPE)
MODEL = ModelShape(
    name="small", source="", layers=3, hidden_size=10, dtype="bfloat16", parameters=800,
    kinds=(FULL,), **SHAPE,
)  # fmt: skip
TRAIN = Workload(seq_len=100, batch=2, heads=2, head_dim=4, dtype="bfloat16", mode="train")
FORWARD = TRAIN.model_copy(update={"mode": "forward"})
DECODE = TRAIN.model_copy(update={"mode": "decode", "new_tokens": 1})

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
    assert memory == ModelMemory(None, CHECKPOINTS, *expected)
    assert memory.known == CHECKPOINTS + sum(expected)


def test_forward_needs_weights_alone() -> None:
    assert model_memory(MODEL, FORWARD, 4, "zero3") == ModelMemory(None, None, 400, None, None)


def test_decoding_keeps_the_caches_of_all_other_layers() -> None:
    """Each kind with its own shape; a layer with a window keeps no more than that."""
    sliding = LayerKind(kind="sliding", layers=5, window=30, **{**SHAPE, "kv_heads": 1})
    linear = LayerKind(kind="linear", layers=7)
    mixed = MODEL.model_copy(update={"layers": 15, "kinds": (FULL, sliding, linear)})
    per_token = 2 * 2  # rows of the batch, bytes
    caches = 2 * 2 * 8 * 100 * per_token + 5 * 1 * 8 * 30 * per_token
    memory = model_memory(mixed, DECODE, 1, "zero3")
    assert memory == ModelMemory(caches, None, WEIGHTS, None, None)
    assert model_memory(mixed, DECODE, 4, "zero3").caches == caches // 4
    plan = ModelPlan(mixed, "zero3")
    step, training = (trial().replace(workload=w) for w in (DECODE, TRAIN))
    assert plan.step_seconds(step, 0.5, 100.0) == 0.5 + (caches + WEIGHTS) / 100
    assert plan.step_seconds(training, 0.5, 100.0) is None


def test_unknown_parameters_are_left_out() -> None:
    unknown = MODEL.model_copy(update={"parameters": None})
    memory = model_memory(unknown, TRAIN, 4, "zero3")
    assert memory == ModelMemory(None, CHECKPOINTS, None, None, None)
    assert memory.known == CHECKPOINTS
    estimate = DryRunEstimate(peak_bytes=5, rest_bytes=memory.known)
    assert ModelPlan(unknown, "zero3").total(estimate) is None
    assert ModelPlan(MODEL, "zero3").total(estimate) == 5 + CHECKPOINTS
