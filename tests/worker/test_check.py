"""The numerics check: wrong attentions fail at every length and dtype, correct ones pass."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import misbehaving
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.testing.definition import Tensors, make_inputs, make_output_gradient
from longseq_bench.worker import check as check_module
from longseq_bench.worker.check import UNIT, Errors, check, count_zero_rows, is_finite
from longseq_bench.worker.checked_rows import (
    FULL_CHECK_TOKENS,
    MAX_PAIRS,
    MIN_STRETCHES,
    SAMPLED_ROWS,
    checked_rows,
    select_checked_rows,
)
from longseq_bench.worker.passes import Pass
from longseq_bench.worker.reference import Reference, Sum
from longseq_bench.worker.repeat_check import SUM_TOLERANCE, sum_errors
from tests.plugins.faulty import Faulty
from tests.trials import run
from tests.worker.test_row_check import drawn

SHORT, LONG = 300, 3000
WRONG: dict[str, tuple[Callable[..., Attention], dict[str, Any]]] = {
    "over heads": (misbehaving.OverHeads, {}),
    "block softmax": (partial(Faulty, kind="a softmax for each block"), {}),
    "leak": (partial(Faulty, kind="one key of the future"), {"causal": True}),
    "nan": (partial(Faulty, kind="one NaN"), {}),
    "block diagonal": (misbehaving.BlockDiagonal, {}),
    "gradient": (partial(Faulty, kind="dk is half"), {"mode": "train"}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def errors_for(make: Callable[..., Attention], tokens: int, seed: int = 0, **fields: Any) -> Errors:
    """Return the errors of an implementation on the inputs of a trial."""
    w = Workload(seq_len=tokens, **{"heads": 2, "head_dim": 16, **fields})
    attention = make(w, Group.alone())
    attention.prepare("cpu")
    return errors_of(attention, select_checked_rows(attention, seed), seed)


def errors_of(attention: Attention, rows: Tensor, seed: int = 0) -> Errors:
    qkv, grad_out = inputs(attention.workload, rows, seed)
    out = attention(*qkv)
    if not attention.workload.train:
        return check(attention, qkv, out, rows)
    grads = torch.autograd.grad(out, qkv, grad_out)
    return check(attention, qkv, out, rows, grad_out, grads)


def inputs(w: Workload, rows: Tensor, seed: int) -> tuple[Tensors, Tensor]:
    """q, k, v, and an output gradient that is zero outside `rows`."""
    whole = make_output_gradient(w)
    grad_out = torch.zeros_like(whole)
    grad_out[:, :, rows] = whole[:, :, rows]
    return make_inputs(w, seed), grad_out


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fault", sorted(WRONG))
def test_wrong_implementations_fail(fault: str, dtype: Any, tokens: int) -> None:
    make, fields = WRONG[fault]
    if fault == "nan" and tokens == LONG:
        return  # one value in a row that is not sampled: run_trial tests all values
    reason = errors_for(make, tokens, dtype=dtype, **fields).over_tolerance(dtype)
    assert reason is not None
    assert "off the float64 reference" in reason


@pytest.mark.parametrize("tokens", [1, SHORT, LONG])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["sdpa", "ring", "dilated", "block-sparse"])
def test_correct_ones_pass(name: str, dtype: Any, tokens: int) -> None:
    fields = {"causal": tokens != SHORT, "mode": "train", "kv_heads": 1}
    errors = errors_for(IMPLEMENTATIONS.get(name), tokens, dtype=dtype, **fields)
    assert errors.over_tolerance(dtype) is None
    assert set(errors.largest) == {"out", "dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_correct_implementations_pass_for_any_seed(dtype: Any) -> None:
    """The gradients of rows that see one or two keys cancel; only rounding errors are left."""
    for seed in range(20):
        errors = errors_for(
            IMPLEMENTATIONS.get("sdpa"), 24, seed, dtype=dtype, causal=True, mode="train",
            heads=4, head_dim=64,
        )  # fmt: skip
        assert errors.over_tolerance(dtype) is None, seed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [
    {"tokens": 137, "head_dim": 1}, {"tokens": 8192, "head_dim": 2, "heads": 1},
    {"tokens": 1_000_000, "mode": "decode", "head_dim": 4, "heads": 4},
])  # fmt: skip
def test_averages_that_cancel_are_right(shape: dict[str, Any], dtype: Any) -> None:
    """Their rows are nearly 0, and float32 rounds sums of terms that are not."""
    for seed in range(1 if shape["tokens"] > 1000 else 8):
        errors = errors_for(IMPLEMENTATIONS.get("sdpa"), seed=seed, dtype=dtype, **shape)
        assert errors.over_tolerance(dtype) is None, seed


def test_one_dropped_key_of_a_million_is_seen() -> None:
    """Fault 1, in float32."""
    w = Workload(seq_len=1_000_000, heads=1, head_dim=8, mode="decode")
    attention, qkv = IMPLEMENTATIONS.get("sdpa")(w, Group.alone()), make_inputs(w, 0)
    rows = torch.tensor([w.seq_len - 1])
    q, k, v = (tensor.double() for tensor in qkv)
    scores = q @ k.transpose(2, 3) / math.sqrt(8)
    assert check(attention, qkv, (scores.softmax(-1) @ v).float(), rows).worst < 1e-6
    at = int((scores[0, 0, 0] - scores.mean()).abs().argmin())
    scores[0, 0, 0, at] = -math.inf
    dropped = (scores.softmax(-1) @ v).float()
    assert check(attention, qkv, dropped, rows).over_tolerance("float32") is not None


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_determine_the_whole_gradients(causal: bool) -> None:
    """Sampled rows give all of dk and dv, because no other row has an output gradient."""
    tokens = FULL_CHECK_TOKENS + 400
    w = Workload(seq_len=tokens, heads=2, kv_heads=1, head_dim=16, causal=causal, mode="train")
    attention = IMPLEMENTATIONS.get("sdpa")(w, Group.alone())
    rows = checked_rows(tokens, 0)
    assert errors_of(attention, rows).worst < 1e-5
    qkv, grad_out = inputs(w, rows, 0)
    out = attention(*qkv)
    grads = torch.autograd.grad(out, qkv, grad_out)
    all_rows = check(attention, qkv, out, torch.arange(tokens), grad_out, grads)
    sampled = check(attention, qkv, out, rows, grad_out, grads)
    assert all_rows.largest["dk"] == pytest.approx(sampled.largest["dk"], rel=1e-3)
    assert all_rows.largest["dv"] == pytest.approx(sampled.largest["dv"], rel=1e-3)
    wrong = [g.clone() for g in grads]
    wrong[1][0, 0, 723] += wrong[1][0, 0].abs().max()
    assert check(attention, qkv, out, rows, grad_out, tuple(wrong)).largest["dk"] > 0.5


def test_each_gradient_of_each_head_and_batch_is_checked() -> None:
    w = Workload(seq_len=40, batch=2, heads=4, kv_heads=2, head_dim=16, mode="train")
    attention = IMPLEMENTATIONS.get("sdpa")(w, Group.alone())
    rows = torch.arange(40)
    qkv, grad_out = inputs(w, rows, 0)
    out = attention(*qkv)
    grads = torch.autograd.grad(out, qkv, grad_out)
    for tensor, name in enumerate(("dq", "dk", "dv")):
        for batch, head in itertools.product(range(2), range(grads[tensor].shape[1])):
            wrong = [g.clone() for g in grads]
            wrong[tensor][batch, head] *= 1.01
            found = check(attention, qkv, out, rows, grad_out, tuple(wrong)).largest
            assert found[name] > 2e-3
            assert all(error < 2e-4 for other, error in found.items() if other != name)


@pytest.mark.parametrize("name", ["block-sparse", "dilated", "hilbert"])
def test_the_reference_asks_only_about_keys_that_checked_rows_may_see(name: str) -> None:
    """At 100 million tokens, to ask about every key takes longer than the pass."""
    tokens, group = 300_000, Group.alone()
    attention: Any = IMPLEMENTATIONS.get(name)(Workload(seq_len=tokens, heads=1), group)
    asked, multiplicity = 0, attention.multiplicity

    def count(queries: Any, keys: Any, head: int) -> Any:
        nonlocal asked
        asked += len(keys)
        return multiplicity(queries, keys, head)

    attention.multiplicity = count
    rows = torch.arange(150_000, 150_064)
    k = torch.zeros(1, 1, 1, 64).expand(1, 1, tokens, 64)
    chunks = list(Reference(attention, (k, k, k), rows).chunks(range(1), counted_only=False))
    assert [chunk.at.start for chunk in chunks[1:]] == [chunk.at.stop for chunk in chunks[:-1]]
    assert (chunks[0].at.start, chunks[-1].at.stop) == (0, tokens)
    seen = sum(len(chunk.keys) for chunk in chunks)
    assert 0 < asked <= 2 * seen < tokens


def test_a_row_that_sees_nothing_must_be_zero() -> None:
    options = {"segments": (64,), "dilation": (2,)}
    w = Workload(seq_len=100, heads=1, head_dim=16)
    attention = IMPLEMENTATIONS.get("dilated")(w, Group.alone(), **options)
    attention.prepare("cpu")
    rows = torch.arange(100)
    qkv, _ = inputs(w, rows, 0)
    out = attention(*qkv)
    assert check(attention, qkv, out, rows).worst < 1e-5
    before = out.clone()
    zeros, all_rows = count_zero_rows(out, Group.alone())
    assert torch.equal(out, before)
    assert zeros / all_rows == 0.5
    out[0, 0, 1] = 0.1
    assert check(attention, qkv, out, rows).worst > 0.01


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_infinite_errors(value: float) -> None:
    errors = Errors()
    errors.add("out", torch.tensor([[1.0, value]]), Sum(torch.ones(1, 2).double()))
    assert errors.worst == math.inf
    assert errors.over_tolerance("bfloat16") is not None
    errors.add("out", torch.ones(1, 2), Sum(torch.ones(1, 2).double()))
    assert errors.worst == math.inf


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [FULL_CHECK_TOKENS + 1, 50_000, 2**18, 2**30])
def test_checked_rows_are_stratified(tokens: int, shared: bool) -> None:
    """All residues of blocks and both sides of their borders, in few stretches if these count."""
    for seed in range(8):
        rows = checked_rows(tokens, seed, blocks=[100], share_stretches=shared).numpy()
        assert (rows[0], rows[-1]) == (0, tokens - 1)
        assert SAMPLED_ROWS <= len(rows) <= SAMPLED_ROWS + 4
        assert {*rows % 128} == {*range(128)}
        for size in (64, 100, 128):
            assert sum(rows % size == 0) > 1
            assert sum(rows % size == size - 1) > 0
        stretches = len({*rows // 128})
        if shared and tokens > 2**16:
            allowed = max(MIN_STRETCHES, MAX_PAIRS // tokens)
            assert allowed // 2 <= stretches <= allowed + 4
        elif tokens >= 50_000:
            assert stretches > 100


def test_checked_rows_are_all_of_a_short_sequence_and_others_for_another_seed() -> None:
    assert checked_rows(FULL_CHECK_TOKENS, 0).tolist() == list(range(FULL_CHECK_TOKENS))
    attention = IMPLEMENTATIONS.get("sdpa")(Workload(seq_len=5000), Group.alone())
    rounds = [select_checked_rows(attention, 0, n).tolist() for n in range(3)]
    assert len(set(map(tuple, rounds))) == 3
    assert checked_rows(10**6, 3).tolist() == checked_rows(10**6, 3).tolist()
    assert checked_rows(10**6, 3).tolist() != checked_rows(10**6, 4).tolist()


# ---- bounds of errors: twice a plain implementation's, and no bias -------------------------------

ROWS, DIM = 400, 32


def compared(got: Tensor, expected: Tensor, plain: Tensor | None = None) -> Errors:
    errors = Errors(1)
    errors.add("out", got, Sum(expected, plain=plain))
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
    reason = compared(got, expected, expected.bfloat16().double()).over_tolerance("bfloat16")
    assert (reason is not None) == found
    assert not found or f"out is {factor:.3f}" in (reason or "")


def test_a_biased_head_is_found_among_right_ones() -> None:
    errors, expected = Errors(8), normal(ROWS, DIM)
    for head in range(8):
        got = (expected * (1.01 if head == 5 else 1)).bfloat16()
        plain = expected.bfloat16().double()
        errors.add("out", got, Sum(expected, plain=plain), head=head)
    assert "times the float64 reference on average" in (errors.over_tolerance("bfloat16") or "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("times", "found"), [(1.0, False), (1.9, False), (3.0, True)])
def test_errors_may_be_twice_those_of_a_plain_implementation(
    dtype: Any, times: float, found: bool
) -> None:
    expected = normal(ROWS, DIM)
    noise = 4 * UNIT[dtype] * normal(ROWS, DIM, seed=1)
    noise = noise.clamp(-12 * UNIT[dtype], 12 * UNIT[dtype])
    errors = compared(expected + times * noise.roll(1, 0), expected, expected + noise)
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


# ---- checks of whole tensors -------------------------------------------------------------------

SMALL = 2**14


def heads_next_to_tokens(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor (B, H, N, D) as fused kernels return it: (B, N, H, D) in memory."""
    b, h, n, d = shape
    return torch.ones(b, n, h, d, dtype=dtype).transpose(1, 2)


def memory_of(call: Callable[[Tensor], object], tensor: Tensor) -> int:
    """Return the peak of the tensors that a call with a tensor creates, in bytes."""
    meter = StoragePeak("cpu")
    with meter:
        tensor.detach()  # the meter counts it from here on
        before = meter.current
        call(tensor)
    assert before == tensor.nbytes
    return int(meter.peak) - before


@pytest.mark.parametrize("make", [heads_next_to_tokens, lambda s, d: torch.ones(s, dtype=d)])
def test_checks_need_little_memory_at_any_size(
    make: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that copies the output would not fit where a pass has used all memory."""
    monkeypatch.setattr(check_module, "MAX_BYTES", SMALL)
    # the sum of these numbers overflows float16, so every number is looked at
    out = make((2, 2, 4096, 32), torch.float16) * 0 + 60_000
    assert out.nbytes > 32 * SMALL
    alone = Group.alone()
    assert memory_of(is_finite, out) < 4 * SMALL
    assert memory_of(lambda t: count_zero_rows(t, alone), out) < 4 * SMALL


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 2, 4095, 7)])
def test_one_bad_number_is_found(value: float, at: tuple[int, ...]) -> None:
    out = heads_next_to_tokens((2, 3, 4096, 8), torch.float32)
    assert is_finite(out)
    out[at] = value
    assert not is_finite(out)
