"""Whole trials on a GPU: one after the other, with other allocators, and from host memory."""

import subprocess
import sys
from typing import Any

import pytest

from longseq_bench.launchers.local import LocalLauncher
from tests.trials import passed, run

pytestmark = pytest.mark.cuda
modes = pytest.mark.parametrize("mode", ["forward", "train"])

GIB = 2**30
SHAPE: dict[str, Any] = {"device": "cuda", "heads": 8, "head_dim": 64, "dtype": "bfloat16"}
SHAPE["threads"] = None


@modes
def test_a_second_trial_in_one_fork_server(launcher: LocalLauncher, mode: str) -> None:
    """Nothing of the first trial is left: CUDA can't be used in a process forked after it was."""
    first, larger, second = (
        passed(run(launcher, "sdpa", tokens, mode=mode, **SHAPE))
        for tokens in (16_384, 65_536, 16_384)
    )
    assert (larger.largest("peak") or 0) > 3 * (first.largest("peak") or 0)
    assert second.largest("peak") == first.largest("peak")


def test_passes_have_the_clock_of_the_gpu(launcher: LocalLauncher) -> None:
    """Where NVML gives one, and the matrix product has one too."""
    outcome = passed(run(launcher, "sdpa", 65_536, repeats=3, **SHAPE))
    assert len(outcome.samples("sm_clock")) in (0, len(outcome.samples("time")))
    clocks = outcome.samples("sm_clock") + outcome.samples("matmul_sm_clock")
    assert all(2e8 < hz <= 1e6 * outcome.facts["clocks"]["highest_mhz"] for hz in clocks)
    assert outcome.facts["memory_counted"].startswith("by ")


@modes
@pytest.mark.parametrize(
    ("name", "options", "padded"),
    [("sdpa", {}, False), ("fused", {"kernel": "flash"}, True),
     ("fused", {"kernel": "efficient"}, False), ("ring", {}, True)],
)  # fmt: skip
def test_a_v_head_dim_of_its_own(
    launcher: LocalLauncher, name: str, options: dict[str, Any], padded: bool, mode: str
) -> None:
    """The shape of DeepSeek-V3, with fewer heads: q and k of 192, v of 128."""
    shape = {**SHAPE, "head_dim": 192, "v_head_dim": 128, "causal": True}
    outcome = passed(run(launcher, name, 4096, options, mode=mode, repeats=2, **shape))
    assert outcome.facts["every_row_checked"]
    assert ("padded_v" in outcome.facts) == padded


@modes
@pytest.mark.parametrize("name", ["flex", "fused", "ring", "block-sparse", "dense"])
def test_sinks(launcher: LocalLauncher, name: str, mode: str) -> None:
    outcome = passed(run(launcher, name, 4096, mode=mode, repeats=2, sink=True, **SHAPE))
    assert ("dsink" in outcome.facts["errors"]) == (mode == "train")


@modes
def test_the_expandable_allocator_runs_and_has_the_same_peak(
    launcher: LocalLauncher, mode: str
) -> None:
    default, expandable = (
        passed(run(launcher, "fused", 65_536, mode=mode, allocator=name, **SHAPE)).largest("peak")
        for name in ("default", "expandable")
    )
    assert default
    assert expandable == pytest.approx(default, rel=0.01)


@modes
@pytest.mark.parametrize("timing", ["cold", "graph"])
def test_passes_are_timed_with_a_cold_cache_and_as_a_graph(
    launcher: LocalLauncher, timing: str, mode: str
) -> None:
    outcome = passed(run(launcher, "fused", 8192, mode=mode, timing=timing, repeats=3, **SHAPE))
    assert outcome.largest("checked_passes") == len(outcome.samples("time")) == 3


def test_the_expandable_allocator_is_the_one_that_is_used() -> None:
    """In a process of its own, because it has to be chosen before the first allocation."""
    code = (
        "import torch; from longseq_bench.worker.memory import use_allocator\n"
        "use_allocator('expandable'); kept = torch.empty(2**24, device='cuda')\n"
        "print(all(s['is_expandable'] for s in torch.cuda.memory_snapshot()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("keep", ["all", "inputs", "nothing"])
@pytest.mark.parametrize("name", ["fused", "block-sparse", "block-sparse-multihead", "hilbert"])
def test_every_row_is_right_whatever_a_pass_keeps(
    launcher: LocalLauncher, name: str, keep: str
) -> None:
    """Known rows, and those of a float64 reference, are where the results are."""
    shape = {**SHAPE, "mode": "train", "keep": keep}
    outcome = run(launcher, name, 2048, repeats=2, **shape)
    if keep == "nothing" and outcome.status == "unsupported":
        pytest.skip(outcome.reason or "")
    assert passed(outcome).facts["every_row_checked"]


@pytest.mark.slow
@modes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_offload_runs_under_a_budget_below_the_floor(
    launcher: LocalLauncher, causal: bool, mode: str
) -> None:
    """q, k, v and the output take 2 GiB, with gradients 4; they stay in host memory."""
    settings: dict[str, Any] = {**SHAPE, "mode": mode, "causal": causal}
    resident = run(launcher, "ring", 2**19, memory_budget=2 * GIB, **settings)
    assert resident.status == "oom", resident.reason
    options = {"offload": "host", "chunk": 16_384}
    outcome = passed(run(launcher, "ring", 2**19, options, memory_budget=2 * GIB, **settings))
    assert outcome.samples("max_error")
    assert 0 < (outcome.largest("peak") or 0) < GIB
