"""Trials of latent attention: one tensor is key and value, for the pass and for its checks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longseq_bench.attention.own_source import find_file
from longseq_bench.core.model import Outcome
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.testing.contract import make_workload
from longseq_bench.testing.definition import build_attention
from longseq_bench.worker.passes import draw_inputs, run_pass
from tests.trials import complete, exact, passed, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 6000
SHAPE = {"mode": "decode", "heads": 4, "latent": "96+32/48", "kv_heads": 1, "head_dim": 128}
CACHE = TOKENS * 128 * 4

OWN = """
from torch.nn.functional import scaled_dot_product_attention as sdpa
def f(q, k, v, scale, enable_gqa=True):
    rows, v = q.reshape(q.shape[0], 1, -1, q.shape[3]), {v}
    return sdpa(rows, k, k, scale=scale)[..., :v.shape[3]].reshape(*q.shape[:3], -1)
"""


def run(launcher: LocalLauncher, name: str, **fields: Any) -> Outcome:
    return run_trial(launcher, complete(launcher, name, TOKENS, **{**SHAPE, **fields}))


@exact
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_latent_is_held_and_read_once(launcher: LocalLauncher, ranks: int) -> None:
    outcome = passed(run(launcher, "ring", repeats=2, world_size=ranks))
    assert outcome.largest("floor") == outcome.largest("bytes_to_read") == CACHE
    assert CACHE / ranks <= (outcome.largest("peak") or 0) < 1.1 * CACHE / ranks
    assert outcome.facts["latent"] == "v is k[..., :96], a view; scores are 0.144338 q·k"
    assert outcome.facts["every_row_checked"] == ["matching and two-level scores"]


@exact
@pytest.mark.parametrize(("v", "peak"), [("v", 1.1), ("v.contiguous()", 1.85)])
def test_a_copy_of_the_values_counts_as_memory(
    launcher: LocalLauncher, tmp_path: Path, v: str, peak: float
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(v=v))
    name = f"{tmp_path}/own.py:f"
    outcome = passed(run(launcher, name, source=find_file(name).source))
    assert peak - 0.15 < (outcome.largest("peak") or 0) / CACHE < peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changed_inputs_stay_one_tensor_with_a_known_result(dtype: Any) -> None:
    w = make_workload(150, dtype=dtype, **{**SHAPE, "latent": "96+33"} | {"head_dim": 129})
    attention = build_attention("ring", {}, w)
    one = draw_inputs(attention, "cpu", 3, torch.arange(149, 150))
    one.protect_inputs()
    run_pass(attention, one)
    assert one.out is not None
    assert one.changes is not None
    first, keys = one.out, one.inputs[1].clone()
    for _ in range(5):
        one.change_inputs()
        assert one.changed_inputs() == ["q", "k"]
        run_pass(attention, one)
        assert torch.equal(one.out / one.changes.factor("out").to(first), first)
    assert torch.equal(one.inputs[1] / one.changes.factor("k").to(keys), keys)
    one.draw_again()
    assert torch.equal(one.inputs[1], keys)
    assert one.inputs[2].data_ptr() == one.inputs[1].data_ptr()
