"""Later passes: their inputs, the results that these have, and what a result must be."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.meters import clock as clock_module
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import timing
from longseq_bench.worker.checked_rows import select_checked_rows
from longseq_bench.worker.messages import MeasurementLog
from longseq_bench.worker.passes import Pass, TrialRun, draw_inputs, run_pass, warm_up
from longseq_bench.worker.repeat_check import RepeatCheck, find_invalid
from tests.make import trial
from tests.ranks import Ranks
from tests.worker.test_ranks import Silent, scripted, trial_for

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 150
BY_COLUMN: Any = [("sdpa", {}), ("ring", {"chunk": 40})]
BY_HEAD: Any = [
    ("block-sparse-multihead", {"block": 16}),
    ("block-sparse-adaptive", {"sparsity": 0.5, "block": 16, "scorer": "learned"}),
]


def drawn(name: str, options: Any, group: Group | None = None, **fields: Any) -> tuple[Any, Pass]:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "mode": "train", **fields}
    w = Workload(seq_len=TOKENS, causal=True, **shape)
    attention = IMPLEMENTATIONS.get(name)(w, group or Group.alone(), **options)
    attention.prepare("cpu")
    return attention, draw_inputs(attention, "cpu", 3, torch.arange(TOKENS))


def results_of(attention: Attention, one: Pass) -> dict[str, Tensor]:
    run_pass(attention, one)
    assert one.out is not None
    return {"out": one.out.double(), **{n: g.double() for n, g in one.gradients.items()}}


def as_bytes(one: Pass) -> list[bytes]:
    assert one.grad_out is not None
    return [t.detach().float().numpy().tobytes() for t in (*one.inputs, one.grad_out)]


@pytest.mark.parametrize("head_dim", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "options"), BY_COLUMN + BY_HEAD)
def test_no_two_passes_see_equal_bytes_and_every_result_is_known(
    name: str, options: Any, dtype: Any, head_dim: int
) -> None:
    """Exactly. One column of float16 has four combinations of signs, which all come."""
    attention, one = drawn(name, options, dtype=dtype, head_dim=head_dim)
    first, inputs = results_of(attention, one), as_bytes(one)
    seen = {b"".join(inputs[:3])}
    for _ in range(15):
        one.change_inputs()
        assert one.changes is not None
        seen.add(b"".join(as_bytes(one)[:3]))
        for result, got in results_of(attention, one).items():
            assert torch.equal(got / one.changes.factor(result), first[result])
    signs = head_dim if (name, options) in BY_COLUMN else 4
    assert len(seen) == (min(16, 4**signs) if dtype == "float16" else 16)
    one.draw_again()
    assert as_bytes(one)[:3] == inputs[:3]


def test_with_columns_enough_every_input_is_always_new() -> None:
    _, one = drawn("sdpa", {}, dtype="float16")
    passes = [as_bytes(one)]
    for _ in range(100):
        one.change_inputs()
        passes.append(as_bytes(one))
    assert [len(set(each)) for each in zip(*passes, strict=True)] == [101] * 4


def test_new_scores_are_of_one_pass_and_give_results_of_their_own() -> None:
    attention, one = drawn("sdpa", {})
    first = results_of(attention, one)["out"]
    errors = []
    for new_scores in (True, False):
        one.change_inputs(new_scores)
        assert one.changes is not None
        out = results_of(attention, one)["out"] / one.changes.factor("out")
        errors.append(float((out - first).abs().max()))
    assert errors[0] > 0.1
    assert errors[1] == 0


def change_on_rank(group: Group) -> tuple[Any, ...]:
    attention, one = drawn("ring", {"queries": "full"}, group)
    first = results_of(attention, one)
    for new_scores in (True, False, False):
        one.change_inputs(new_scores)
    assert one.changes is not None
    found = results_of(attention, one)
    errors = [(found[n] / one.changes.factor(n) - first[n]).abs().max().item() for n in found]
    return one.inputs[0].detach().numpy(), max(errors)


def test_ranks_change_equal_parts_alike(ranks: Ranks) -> None:
    (q, error), (other, other_error) = ranks(2, change_on_rank)
    assert (q == other).all()
    assert error == other_error == 0


def test_each_round_and_length_has_its_own_inputs_and_so_has_the_warm_up() -> None:
    def draw(one: Trial) -> Tensor:
        attention = IMPLEMENTATIONS.get("sdpa")(one.workload, Group.alone())
        run = TrialRun(one, attention, torch.arange(9), Silent(), MeasurementLog())
        return draw_inputs(attention, "cpu", run.seed, run.rows).inputs[1].flatten()[:99]

    trials = [trial(), trial(round=1), trial(seed=1), trial(seq_len=4097)]
    found = [draw(one) for one in (*trials, trial())]
    assert torch.equal(found[0], found[4])
    drawn_first: list[Tensor] = []

    def call(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        drawn_first.append(k.flatten()[:99])
        return q

    sdpa = IMPLEMENTATIONS.get("sdpa")
    with patch.object(sdpa, "__call__", call):
        for one in trials[:2]:
            warm_up(sdpa, one, Group.alone())
    every = torch.stack([*found[:4], *drawn_first])
    assert len(torch.unique(every[:, 0])) == 6


# ---- which passes have new scores ----------------------------------------------------------------


def new_scores_of(script: list[float], pass_s: float = 0.0, **fields: Any) -> list[bool]:
    """Time passes that take these seconds; return for each if it had new scores."""
    of, log = trial_for("ring", 64, repeats=len(script), **fields), MeasurementLog(pass_s=pass_s)
    attention = IMPLEMENTATIONS.get("ring")(of.workload, Group.alone())
    attention.prepare("cpu")
    run = TrialRun(of, attention, select_checked_rows(attention, 0), Silent(), log)
    one, check = draw_inputs(attention, "cpu", 0, run.rows, of.keep), MagicMock()
    with scripted(Group.alone(), [script]):
        timing.run_timed_passes(run, one, check)
    timed = [call.args[1] for call in check.add.call_args_list if len(call.args) == 2]
    assert len(timed) == len(log.slowest)
    return timed


def test_the_last_pass_and_one_before_have_new_scores() -> None:
    steady = new_scores_of([1.0] * 20)
    assert (len(steady), steady[-1], sum(steady[:-1])) == (7, True, 1)
    unsteady = new_scores_of([float(i) for i in range(1, 21)])
    assert (len(unsteady), unsteady[-1], sum(unsteady[:-1])) == (20, True, 1)
    assert new_scores_of([1.0]) == [True]
    assert new_scores_of([1.0] * 20, mode="decode", causal=True) == [False] * 6 + [True]


@pytest.mark.parametrize(("seconds", "pass_s", "passes"), [(100.0, 100.0, 1), (100.0, 1.0, 2)])
def test_a_pass_that_ends_after_the_time_cap_is_the_last(
    seconds: float, pass_s: float, passes: int
) -> None:
    """If that was not foreseen, one more is."""
    timed = new_scores_of([seconds] * 20, pass_s, time_cap=60.0)
    assert len(timed) == passes
    assert timed[-1]


def test_passes_whose_output_or_q_is_lost_keep_their_scores() -> None:
    fields = {"keep": "nothing", "mode": "train"}
    assert new_scores_of([1.0] * 3, **fields) == [False] * 3


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nn.Parameter, "the output is a Parameter; return a plain torch.Tensor"),
        (lambda out: out.to("meta"), "the output has no memory of its own on cpu for each of its"),
        (lambda out: out[:1, :1].expand_as(out), "the output has no memory of its own on cpu"),
        (lambda out: out.double(), "the output is float64 (2, 4, 150, 16); expected float32"),
        (lambda out: out[:, :2], "the output is float32 (2, 2, 150, 16); expected float32"),
        (lambda out: out.transpose(1, 2).contiguous().transpose(1, 2), None),
    ],
)
def test_a_result_is_a_plain_tensor_with_memory_for_each_number(
    make: Any, reason: str | None
) -> None:
    attention, one = drawn("sdpa", {})
    run_pass(attention, one)
    assert find_invalid(one) is None
    one.out = make(one.out)
    assert (find_invalid(one) or "").startswith(reason or "")
    assert (find_invalid(one) is None) == (reason is None)
    if reason:
        of = trial_for("sdpa", TOKENS)
        run = TrialRun(of, attention, torch.arange(TOKENS), Silent(), MeasurementLog())
        check = RepeatCheck(run, replace(one, out=torch.zeros(2, 4, TOKENS, 16)))
        check.add(one)
        assert check.over_tolerance("float32") == find_invalid(
            replace(one, out=make(one.inputs[0]))
        )


def test_an_output_may_be_on_the_host_if_it_was_copied_there() -> None:
    attention, one = drawn("sdpa", {})
    run_pass(attention, one)
    on_device: Any = [t.detach().to("meta") for t in one.inputs]
    one.inputs, one.grads = tuple(on_device), None
    assert (find_invalid(one) or "").endswith(
        "no memory of its own on meta for each of its numbers"
    )
    assert find_invalid(replace(one, keep="inputs")) is None


@pytest.mark.parametrize(("lazy_s", "wall_s"), [(0.0, 1.0), (1e-3, 1.0), (0.5, 1.5)])
def test_a_number_of_each_head_is_read_and_counts_if_that_takes_long(
    lazy_s: float, wall_s: float
) -> None:
    """Numbers that exist are read in 0.1 ms, a lazy result in the time that computing takes."""
    attention, one = drawn("sdpa", {})
    of = trial_for("sdpa", TOKENS, repeats=1)
    run = TrialRun(of, attention, torch.arange(9), Silent(), MeasurementLog())
    passes = timing._Passes(run, one, MagicMock(), list, MagicMock())
    now, read = [0.0], list[list[int]]()

    def call(_: Any) -> None:
        now[0] += 1.0
        grads: Any = [torch.ones(2, h, 9, 16) for h in (4, 2, 2)]
        one.out, one.grads = torch.ones(2, 4, 9, 16), tuple(grads)

    def cat(tensors: list[Tensor]) -> None:
        now[0] += 1e-4 + lazy_s * (one.out is not None)
        read.append([t.numel() for t in tensors])

    clock = Clock()
    time = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    with (
        patch.object(timing._Passes, "call", call),
        patch.object(torch, "cat", cat),
        patch.object(clock_module, "time", time),
    ):
        passes.run(clock, "")
    assert read == [[8, 4, 4]] * timing.READINGS + [[8, 8, 4, 4]]
    assert clock.wall == clock.cpu == [pytest.approx(wall_s, abs=2e-4)]
