"""Memory of a whole model by formula."""

import pytest

from longseq_bench.config.models import load_model
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import DryRunEstimate, Workload
from longseq_bench.core.model_files import LayerKind
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.settings import Checkpoint, Sharding
from longseq_bench.search.model_memory import ModelMemory, ModelPlan
from tests.make import trial

SHAPE = {"heads": 2, "kv_heads": 2, "head_dim": 4, "v_head_dim": 4}
FULL = LayerKind(kind="full", layers=3, **SHAPE)
MODEL = ModelShape(
    name="small", source="", layers=3, hidden_size=10, dtype="bfloat16", parameters=800,
    vocab_size=50, mlp_width=20, kinds=(FULL,), **SHAPE,
)  # fmt: skip
TRAIN = Workload(seq_len=100, batch=2, heads=2, head_dim=4, dtype="bfloat16", mode="train")
FORWARD = TRAIN.model_copy(update={"mode": "forward"})
DECODE = TRAIN.model_copy(update={"mode": "decode", "new_tokens": 1})

# by hand, on one of 4 ranks: 2 · 100 / 4 tokens of 2 bytes; 800 parameters of 2, 2 and 12 bytes
TOKENS, WEIGHTS, GRADIENTS, OPTIMIZER = 50, 1600, 1600, 9600
CHECKPOINTS = TOKENS * 10 * 2 * 2
ACTIVATIONS = TOKENS * (4 * 10 + 4 * 20) * 2
LOGITS = TOKENS * 50 * (2 + 4)


def memory(plan: ModelPlan, workload: Workload, ranks: int) -> ModelMemory:
    return plan.memory(trial().replace(workload=workload, world_size=ranks))


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [("none", (WEIGHTS, GRADIENTS, OPTIMIZER)), ("zero1", (WEIGHTS, GRADIENTS, OPTIMIZER // 4)),
     ("zero2", (WEIGHTS, GRADIENTS // 4, OPTIMIZER // 4)),
     ("zero3", (WEIGHTS // 4, GRADIENTS // 4, OPTIMIZER // 4))],
)  # fmt: skip
def test_a_rank_of_four_in_training(sharding: Sharding, expected: tuple[int, ...]) -> None:
    found = memory(ModelPlan(MODEL, sharding), TRAIN, 4)
    assert found == ModelMemory(None, ACTIVATIONS, CHECKPOINTS, LOGITS, *expected)
    assert found.known == ACTIVATIONS + CHECKPOINTS + LOGITS + sum(expected)


def test_checkpoints_by_policy() -> None:
    """By hand: 4 h + 4 w, and q, k, v and the output of 2 heads, in two other layers."""
    kept = TOKENS * (4 * 10 + 4 * 20 + 4 * 2 * 4) * 2 * 2
    policies: dict[Checkpoint, int] = {"none": kept + TOKENS * 2 * 4 * 2, "selective": kept}
    for policy, expected in policies.items():
        assert memory(ModelPlan(MODEL, checkpoint=policy), TRAIN, 4).checkpoints == expected


def test_tensor_parallel_ranks_share_all_but_the_copies_of_kv_heads() -> None:
    wide = MODEL.model_copy(
        update={"heads": 4, "kinds": (FULL.model_copy(update={"heads": 4, "kv_heads": 1}),)}
    )
    plan = ModelPlan(wide, tp=2)
    whole = TRAIN.model_copy(update={"heads": 4, "kv_heads": 1})
    split = plan.split(whole)
    assert (split.heads, split.kv_heads) == (2, 1)
    found, copies = memory(plan, split, 4), 3 * 1 * 10 * 8
    assert found.weights == (800 + copies) * 2 // 8
    assert (found.activations, found.checkpoints) == (ACTIVATIONS // 2, CHECKPOINTS // 2)
    assert found.logits == LOGITS // 2
    step = DECODE.model_copy(update={"heads": 2, "kv_heads": 1})
    assert memory(plan, step, 4).caches == 2 * 8 * 100 * 2 * 2 // 4
    for tp in (3, 8):
        with pytest.raises(UserError, match=f"--tp {tp} can't split 4 query heads and 1 KV heads"):
            ModelPlan(wide, tp=tp).split(whole)


def test_forward_needs_weights_and_the_activations_of_a_layer() -> None:
    """A residual, a hidden state and the MLP of all tokens; logits of the last of each sequence."""
    activations = TOKENS * (2 * 10 + 3 * 20) * 2 + 2 * 50 * 6
    assert memory(ModelPlan(MODEL), FORWARD, 4) == ModelMemory(None, activations, weights=400)
    narrow = MODEL.model_copy(update={"mlp_width": 1})
    assert memory(ModelPlan(narrow), FORWARD, 4).activations == TOKENS * (20 + 32) * 2 + 600


def test_a_chunk_of_the_prefill_has_activations_in_decoding() -> None:
    for chunk, tokens in ((0, 2), (40, 10)):
        found = memory(ModelPlan(MODEL, prefill_chunk=chunk), DECODE, 4)
        assert found.activations == tokens * (2 * 10 + 3 * 20) * 2 + 2 * 50 * 6


def test_decoding_keeps_the_caches_of_all_other_layers() -> None:
    """Each kind with its own shape; a layer with a window keeps no more than that."""
    sliding = LayerKind(kind="sliding", layers=5, window=30, **{**SHAPE, "kv_heads": 1})
    linear, shared = LayerKind(kind="linear", layers=7), LayerKind(kind="shared", layers=2, **SHAPE)
    mixed = MODEL.model_copy(update={"layers": 17, "kinds": (FULL, sliding, linear, shared)})
    per_token = 2 * 2  # rows of the batch, bytes
    caches = 2 * 2 * 8 * 100 * per_token + 5 * 1 * 8 * 30 * per_token
    plan = ModelPlan(mixed)
    found = memory(plan, DECODE, 1)
    assert (found.caches, found.weights) == (caches, WEIGHTS)
    assert memory(plan, DECODE, 4).caches == caches // 4
    heads = 2 * 2 * (2 * 2 + 5 * 1)  # rows of the batch, k and v
    numbers = 2 * (2 * 2 * 8 * 100 + 5 * 1 * 8 * 30)
    quantised = DECODE.model_copy(update={"kv_dtype": "fp8"})
    assert memory(plan, quantised, 1).caches == numbers + 4 * heads
    step, training = (trial().replace(workload=w) for w in (DECODE, TRAIN))
    assert plan.step_seconds(step, 0.5, 100.0) == 0.5 + (caches + WEIGHTS) / 100
    assert plan.step_seconds(training, 0.5, 100.0) is None


def test_latent_attention_caches_its_latent() -> None:
    """DeepSeek-V3 has 576 elements a token and layer, 512 of them the value (arXiv 2412.19437)."""
    plan = ModelPlan(load_model("deepseek-v3"), tp=8)
    fields = plan.shape.workload_fields({"mode": "decode", "dtype": "float32"})
    split = plan.split(Workload(seq_len=100, **fields))
    assert (split.heads, split.kv_heads, split.head_dim, split.v_head_dim) == (16, 1, 576, 512)
    assert memory(plan, split, 1).caches == 60 * 576 * 100 * 4


# On one of 8 tensor-parallel ranks. Bytes of a token: 512 in a layer of Llama 4 and MiniMax-M2,
# 1,024 in Qwen3-Next, 1,152 in a latent, 2,048 in full layers of Gemma 4, and in its sliding ones
# 2,048 or 1,024. All full layers but one keep 128k tokens, chunked ones 8k, sliding ones 1k.
@pytest.mark.parametrize(
    ("name", "mib"),
    [("llama-4-scout", 11 * 64 + 36 * 4), ("gemma-4-31b", 9 * 256 + 50 * 2),
     ("gemma-4-26b-a4b", 4 * 256 + 25 * 1), ("qwen3-next-80b-a3b", 11 * 128),
     ("minimax-m2", 61 * 64), ("deepseek-v3.2", 60 * 144), ("kimi-linear-48b", 6 * 144)],
)  # fmt: skip
def test_caches_of_built_in_models_are_those_counted_by_hand(name: str, mib: int) -> None:
    w = Workload(seq_len=2**17, heads=8, head_dim=64, dtype="bfloat16", mode="decode")
    assert memory(ModelPlan(load_model(name), tp=8), w, 1).caches == mib * 2**20


def test_unknown_parameters_are_left_out() -> None:
    unknown = MODEL.model_copy(update={"parameters": None})
    found = memory(ModelPlan(unknown), TRAIN, 4)
    assert found == ModelMemory(None, ACTIVATIONS, CHECKPOINTS, LOGITS)
    estimate = DryRunEstimate(peak_bytes=5, rest_bytes=CHECKPOINTS)
    assert ModelPlan(unknown).total(estimate) is None
    assert ModelPlan(MODEL).total(estimate) == 5 + CHECKPOINTS
