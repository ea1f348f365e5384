"""Option keep: recomputation, and passes whose outputs overwrite their inputs (in place)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Keep, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.passes import draw_inputs, run_pass
from tests.trials import MIB, complete, exact, run, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="no compiler here"
)

IN_PLACE: list[Any] = [
    ("ring", {"chunk": 100}),
    ("collective", {"chunk": 64}),
    pytest.param("block-sparse", {"sparsity": 0.5, "block": 32}, marks=needs_compiler),
    pytest.param("dilated", {"segments": (64, 128), "dilation": (1, 2)}, marks=needs_compiler),
    pytest.param("hilbert", {"segments": (64, 128), "dilation": (1, 2)}, marks=needs_compiler),
]
"""Implementations that can overwrite their inputs."""


def run_once(name: str, options: dict[str, Any], keep: Keep, **shape: Any) -> tuple[Tensor, ...]:
    """Return the output and the gradients of one pass."""
    w = Workload(seq_len=330, heads=4, head_dim=16, **shape)
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    one = draw_inputs(attention, "cpu", 0, torch.arange(330), keep)
    attention.prepare("cpu")
    run_pass(attention, one)
    assert one.out is not None
    return one.out, *(one.grads or ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(("name", "options"), IN_PLACE)
def test_results_do_not_depend_on_keep(
    name: str, options: dict[str, Any], mode: str, dtype: str
) -> None:
    shape = {"causal": dtype == "float32", "mode": mode, "dtype": dtype, "kv_heads": 2}
    plain = run_once(name, options, "all", **shape)
    for keep in ("inputs", "nothing") if mode == "train" else ("nothing",):
        found = run_once(name, options, keep, **shape)  # type: ignore[arg-type]
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        for got, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "options"), IN_PLACE)
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_results_overwrite_q(name: str, options: dict[str, Any], mode: Any) -> None:
    w = Workload(seq_len=330, heads=4, head_dim=16, mode=mode)
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    one = draw_inputs(attention, "cpu", 0, torch.arange(330), "nothing")
    before = one.inputs[0].detach().clone()
    attention.prepare("cpu")
    run_pass(attention, one)
    result = one.out if mode == "forward" else (one.grads or (None,))[0]
    assert result is not None
    assert result.data_ptr() == one.inputs[0].data_ptr()
    assert torch.equal(one.original_inputs[0], before)


@pytest.mark.parametrize("name", ["sdpa", "block-sparse-adaptive"])
def test_other_implementations_recompute_but_refuse_to_overwrite(name: str) -> None:
    plain = run_once(name, {}, "all", mode="train")
    for got, expected in zip(run_once(name, {}, "inputs", mode="train"), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mode in ("forward", "train"):
        with pytest.raises(UnsupportedError, match="inputs are read until the end"):
            run_once(name, {}, "nothing", mode=mode)


@exact
@pytest.mark.parametrize(
    ("keep", "mode", "tensors"), [("inputs", "train", 7), ("nothing", "forward", 3)]
)
def test_the_peak_is_a_known_number_of_tensors(
    launcher: LocalLauncher, keep: str, mode: str, tensors: int
) -> None:
    """The usual number is eight in training, four in forward. The trial is checked and timed."""
    shape = {"heads": 16, "mode": mode, "repeats": 1}
    of = complete(launcher, "ring", 1024, {"chunk": 64}, keep=keep, **shape)
    outcome = run_trial(launcher, of)
    assert (outcome.status, outcome.reason) == ("ok", None)
    whole = 1024 * 16 * 64 * 4
    peak = outcome.largest("peak") or 0
    assert tensors * whole < peak < (tensors + 0.6) * whole
    assert len(outcome.samples("time")) == 1
    assert set(outcome.facts["errors"]) == {"out", *(("dq", "dk", "dv") if mode == "train" else ())}
    (predicted,) = launcher.dry_run([of])
    # free blocks in the heap of the fork server, not the same in every run, are up to half a MiB
    assert predicted.peak_bytes == pytest.approx(peak, rel=0.03, abs=whole / 5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"keep": "inputs"}, "keep=inputs needs mode=train"),
        ({"keep": "nothing", "world_size": 2}, "inputs are read until the end"),
        ({"allocator": "expandable"}, "allocator=expandable needs device=cuda"),
        ({"allocator": "fresh", "device": "cuda"}, "allocator=fresh needs device=cpu"),
    ],
)
def test_impossible_settings_are_unsupported(
    launcher: LocalLauncher, fields: dict[str, Any], reason: str
) -> None:
    outcome = run(launcher, "ring", 512, **fields)
    assert outcome.status == "unsupported"
    assert reason in (outcome.reason or "")


@exact
def test_a_pass_that_is_timed_again_is_checked_by_its_first_results(
    launcher: LocalLauncher,
) -> None:
    """The pass is timed again after the check, because it overwrites the checked results."""
    fields = {"keep": "nothing", "mode": "train", "memory_budget": 256 * MIB}
    once = run(launcher, "ring", 3000, **fields)
    outcome = run(launcher, "ring", 3000, time_budget=0.97 * once.facts["pass_s"], **fields)
    assert outcome.status in ("ok", "timeout"), outcome.reason
    assert (outcome.largest("max_error") or 0) < 1e-4


@exact
def test_pages_of_mapped_files_do_not_count_for_the_peak(launcher: LocalLauncher) -> None:
    shape = {"heads": 4, "kv_heads": 1, "mode": "train", "dtype": "bfloat16"}
    of = complete(launcher, "ring", 4096, {"offload": "host"}, memory_budget=64 * MIB, **shape)
    (predicted,) = launcher.dry_run([of])
    outcome = run_trial(launcher, of)
    assert outcome.status == "ok"
    assert outcome.facts["memory_meter"] == "tensor peak (storages)"
    assert outcome.largest("peak") == pytest.approx(predicted.peak_bytes, rel=0.03)


def test_a_single_kernel_call_does_not_support_fit_only(launcher: LocalLauncher) -> None:
    outcome = run(launcher, "collective", 512, fit_only=True)
    assert outcome.status == "unsupported"
    assert "without loops to shorten" in (outcome.reason or "")
