"""Bounds of errors: twice a plain implementation's, and no bias."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.check import UNIT, Errors
from longseq_bench.worker.passes import Pass, checked_rows
from longseq_bench.worker.reference import Sum
from longseq_bench.worker.row_check import SUM_TOLERANCE, sum_errors
from tests.trials import run
from tests.worker.test_row_check import drawn

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, DIM = 400, 32


def errors_of(got: Tensor, expected: Tensor, plain: Tensor | None = None) -> Errors:
    errors = Errors(1)
    errors.add("out", got, Sum(expected), plain=plain)
    return errors


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("factor", "found"), [(1.0, False), (1.005, True), (0.995, True)])
def test_a_scale_of_half_a_percent_is_a_bias_though_every_error_is_allowed(
    factor: float, found: bool
) -> None:
    expected = normal(ROWS, DIM)
    got = (expected * factor).bfloat16()
    reason = errors_of(got, expected, expected.bfloat16().double()).over_tolerance("bfloat16")
    assert (reason is not None) == found
    assert not found or f"out is {factor:.3f}" in (reason or "")


def test_a_biased_head_is_found_among_right_ones() -> None:
    errors, expected = Errors(8), normal(ROWS, DIM)
    for head in range(8):
        got = (expected * (1.01 if head == 5 else 1)).bfloat16()
        errors.add("out", got, Sum(expected), head=head, plain=expected.bfloat16().double())
    assert "times the float64 reference on average" in (errors.over_tolerance("bfloat16") or "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("times", "found"), [(1.0, False), (1.9, False), (3.0, True)])
def test_errors_may_be_twice_those_of_a_plain_implementation(
    dtype: Any, times: float, found: bool
) -> None:
    expected = normal(ROWS, DIM)
    noise = 4 * UNIT[dtype] * normal(ROWS, DIM, seed=1)
    noise = noise.clamp(-12 * UNIT[dtype], 12 * UNIT[dtype])
    errors = errors_of(expected + times * noise.roll(1, 0), expected, expected + noise)
    reason = errors.over_tolerance(dtype)
    assert (reason is not None) == found
    assert not found or "in root mean square" in (reason or "")
    assert (errors.share_of_allowed(dtype) > 1) == found


def with_gradients(dtype: Any) -> tuple[Any, Pass]:
    w = Workload(
        seq_len=700, heads=4, kv_heads=2, head_dim=16, causal=True, dtype=dtype, mode="train"
    )
    attention = IMPLEMENTATIONS.get("sdpa")(w, Group.alone())
    torch.manual_seed(0)
    one = drawn(attention)
    one.grad_out = torch.randn_like(one.inputs[0])
    out = attention(*one.inputs)
    one.grads = torch.autograd.grad(out, one.inputs, one.grad_out)
    one.out = out.detach()
    return attention, one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_of_gradients_agree_and_one_wrong_row_breaks_them(dtype: Any) -> None:
    attention, one = with_gradients(dtype)
    found = sum_errors(attention, one)
    assert list(found) == ["Σ q·dq and Σ k·dk", "Σ v·dv and Σ out·dO"]
    assert max(found.values()) < SUM_TOLERANCE[dtype] / 2
    assert one.grads is not None
    for n, name in ((0, "Σ q·dq and Σ k·dk"), (1, "Σ q·dq and Σ k·dk"), (2, "Σ v·dv and Σ out·dO")):
        gradient = one.grads[n]
        kept = gradient[0, 1, 333].clone()
        gradient[0, 1, 333] += 2 * one.inputs[n][0, 1, 333].detach().sign()
        assert sum_errors(attention, one)[name] > SUM_TOLERANCE[dtype]
        gradient[0, 1, 333] = kept
    one.grads[2][0, 0, 0, 0] = math.nan
    assert sum_errors(attention, one)["Σ v·dv and Σ out·dO"] == math.inf


def test_a_wrong_row_of_dq_that_was_not_sampled_breaks_a_sum(launcher: LocalLauncher) -> None:
    seed = next(s for s in range(99) if 653 not in checked_rows(1300, s))
    fields = {"mode": "train", "causal": True, "repeats": 3, "seed": seed}
    outcome = run(launcher, "faulty", 1300, {"kind": "dq of one row"}, **fields)
    assert outcome.status == "wrong"
    assert (outcome.reason or "").startswith("Σ q·dq and Σ k·dk differ by ")
    right = run(launcher, "faulty", 1300, **fields)
    assert right.status == "ok"
    assert set(right.facts["gradient_sums"]) == {"Σ q·dq and Σ k·dk", "Σ v·dv and Σ out·dO"}
