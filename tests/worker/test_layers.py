"""Steps of decoding over all layers of a model: their caches, their work, and their checks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.own_source import find_file
from longseq_bench.core.cost import attention_flops, floor_bytes, floor_tokens
from longseq_bench.core.model import Layers, Outcome, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.passes import build_layers, draw_layers
from tests.trials import complete, exact, passed, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, WINDOW = 1500, 64
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
FULL = Layers(kind="full", layers=3, **SHAPE)
SLIDING = Layers(kind="sliding", layers=5, window=WINDOW, **SHAPE | {"kv_heads": 1})
KINDS = (FULL, SLIDING)
BYTES = 4 * 2 * 32
"""Of a key and a value of a head, in float32."""
CACHES = BYTES * (3 * 2 * TOKENS + 5 * 1 * WINDOW)


def workload(tokens: int = TOKENS, **fields: Any) -> Workload:
    return Workload(seq_len=tokens, mode="decode", layers=KINDS, **SHAPE, **fields)


def run(launcher: LocalLauncher, name: str, **fields: Any) -> Outcome:
    shape = {"mode": "decode", "layers": KINDS, **SHAPE}
    return run_trial(launcher, complete(launcher, name, TOKENS, **shape, **fields))


def test_every_layer_has_a_cache_of_its_own_and_other_numbers() -> None:
    layers = build_layers(IMPLEMENTATIONS.get("ring"), workload(), Group.alone(), {})
    first = draw_layers(layers, "cpu", 1, torch.zeros(0))
    passes = [first, *(one for _, one in first.others)]
    caches = [tensor for one in passes for tensor in one.inputs[1:]]
    assert sum(cache.nbytes for cache in caches) == CACHES
    assert len({cache[0, 0, 0, 0].item() for cache in caches}) == len(caches) == 16


def test_the_floor_and_the_flops_count_all_layers() -> None:
    w = workload()
    assert floor_bytes(w) == CACHES
    scales = 2 * 4 * (3 * 2 * 12 + 5 * 1 * 1)
    assert floor_bytes(workload(kv_dtype="int8")) == CACHES // 4 + scales
    assert attention_flops(w) == 2 * (32 + 32) * 4 * (3 * TOKENS + 5 * WINDOW)
    for budget in (CACHES - 1, CACHES, 10 * CACHES):
        tokens = floor_tokens(w, budget)
        assert floor_bytes(workload(tokens)) <= budget < floor_bytes(workload(tokens + 1))
    assert floor_tokens(w, 2 * CACHES, 3) == floor_tokens(w, 6 * CACHES)
    assert floor_tokens(w, 1) == 0


@exact
def test_a_trial_holds_and_reads_the_caches_of_all_layers(launcher: LocalLauncher) -> None:
    outcome = passed(run(launcher, "ring", repeats=2, memory_budget=2 * CACHES))
    assert outcome.largest("floor") == outcome.largest("bytes_to_read") == CACHES
    assert outcome.largest("flops") == attention_flops(workload())
    # small blocks may lie in memory that was there; a full layer is a third of all
    assert 0.97 * CACHES <= (outcome.largest("peak") or 0) < 1.1 * CACHES
    (estimate,) = launcher.dry_run(
        [complete(launcher, "ring", TOKENS, mode="decode", layers=KINDS, **SHAPE)]
    )
    assert (estimate.floor_bytes, estimate.flops) == (CACHES, outcome.largest("flops"))
    assert CACHES <= estimate.peak_bytes < 1.02 * CACHES
    refused = run(launcher, "ring", memory_budget=int(0.9 * CACHES))
    assert refused.status == "oom"


WRONG = """
from torch.nn.functional import scaled_dot_product_attention as sdpa
calls = 0
def f(q, k, v, enable_gqa=True):
    global calls
    calls += 1
    out = sdpa(q, k, v, enable_gqa=True)
    if k.shape[2] == {window} and ({when}):
        {fault}
    return out
"""
CLAMPED = "out = (q @ k.mT / 32**0.5).clamp(-6, 6).softmax(-1) @ v"


@pytest.mark.parametrize(
    ("when", "fault", "reason"),
    [
        ("calls % 8 == 0", "out = out + 1", "in a layer with 64 tokens"),
        ("calls > 40", "out = out * 1.01", "out of a timed pass is"),
        ("True", CLAMPED, "with matching and two-level scores"),
    ],
    ids=["one layer", "later passes", "large scores"],
)
def test_a_fault_in_layers_that_are_not_the_first_is_seen(
    launcher: LocalLauncher, tmp_path: Path, when: str, fault: str, reason: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(WRONG.format(window=WINDOW, when=when, fault=fault))
    name = f"{path}:f"
    outcome = run(launcher, name, source=find_file(name).source, repeats=6)
    assert (outcome.status, reason in (outcome.reason or "")) == ("wrong", True), outcome.reason
