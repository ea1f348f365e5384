"""The check, inputs, timing and trials over several ranks: a fault of one rank fails all."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Measurement, Outcome, Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Shard
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import memory, reference, timing
from longseq_bench.worker.check import Errors, check
from longseq_bench.worker.checked_rows import FULL_CHECK_TOKENS, select_checked_rows
from longseq_bench.worker.messages import MeasurementLog, MessageSender
from longseq_bench.worker.passes import TrialRun, draw_inputs, run_pass
from longseq_bench.worker.trial import run_trial
from tests.make import trial
from tests.ranks import Ranks, RanksFailed

SHORT, LONG = 61, FULL_CHECK_TOKENS + 89
LATE_S = 0.1
Options = dict[str, Any]
SPLITS: dict[str, tuple[str, Options]] = {
    "contiguous": ("ring", {"order": "contiguous"}),
    "striped": ("ring", {"order": "striped"}),
    "full": ("ring", {"queries": "full"}),
    "heads": ("head-parallel", {}),
    "batch": ("ddp", {}),
}
"""Ways to split an attention over ranks: its name and options."""

SHAPE: Options = {"heads": 6, "kv_heads": 3, "head_dim": 8, "batch": 3}


class Silent(MessageSender):
    """A MessageSender that sends nothing."""

    def __init__(self) -> None:
        super().__init__(MagicMock())


def workload(tokens: int = SHORT, **fields: Any) -> Workload:
    return Workload(seq_len=tokens, **{**SHAPE, "mode": "train", **fields})


def spoil(attention: Attention, fault: str) -> None:
    """Put a fault into the last rank."""
    group, right = attention.group, type(attention)
    if group.rank < group.size - 1:
        return

    def call(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fault == "dk" or fault.startswith("stray"):
            k = k.clone()
            k.register_hook(spoil_gradient)
        out: Tensor = right.__call__(self, q, k, v)
        if fault in ("out", "nan"):
            factor = torch.ones_like(out)
            factor[0, 0, out.shape[2] // 3, 0] = math.nan
            return out * (1.01 if fault == "out" else factor)
        return out

    def spoil_gradient(gradient: Tensor) -> Tensor:
        if fault == "dk":
            return torch.zeros_like(gradient)
        unseen = torch.from_numpy(attention.shard.keys % 2 == 1)
        gradient = gradient.clone()
        gradient[:, 0, unseen] = float(fault.split()[1])
        return gradient

    def parameter_gradients(self: Attention) -> dict[str, Tensor]:
        found = right.parameter_gradients(self)
        return {n: 1.1 * g if fault == "parameter" and n == "k" else g for n, g in found.items()}

    methods = {"__call__": call, "parameter_gradients": parameter_gradients}
    attention.__class__ = type("Wrong", (right,), methods)
    if fault == "gap":
        attention.shard = Shard.of_tokens(attention.workload, attention.shard.queries[1:])


def check_pass(
    group: Group, w: Workload, name: str, options: Options, fault: str = "", small: bool = False
) -> tuple[Errors, ...]:
    """Return the errors on this rank, and the agreed ones of all ranks.

    small: keys in chunks, and one row of the batch at a time.
    """
    attention = IMPLEMENTATIONS.get(name)(w, group, **options)
    attention.prepare("cpu")
    if fault:
        spoil(attention, fault)
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    for _ in range(2):  # the second pass must not depend on the first
        run_pass(attention, one)
    assert one.out is not None
    sizes = {"KEY_CHUNK": 50, "SLAB_ELEMENTS": 1} if small else {"KEY_CHUNK": 65_536}
    with patch.multiple(reference, **sizes):
        own = check(attention, one.inputs, one.out, rows, one.grad_out, one.grads)
    if not torch.isfinite(one.out).all():
        own.raise_to("out", math.inf)
    return own, own.largest_over_ranks(group)


# ---- the check ---------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("tokens", "dtype"), [(LONG, "float32"), (SHORT, "float16")])
def test_correct_ones_pass(ranks: Ranks, split: str, tokens: int, dtype: Any) -> None:
    w = workload(tokens, causal=tokens == LONG, dtype=dtype)
    for own, agreed in ranks(3, check_pass, w, *SPLITS[split], "", dtype == "float32"):
        assert agreed.over_tolerance(dtype) is None
        assert own.worst < 5e-6 or dtype != "float32"
        parameters = {"dWq", "dWk", "dWv", "dWo"} if split == "batch" else set()
        assert set(agreed.largest) == {"out", "dq", "dk", "dv"} | parameters


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize(
    ("fault", "split", "name"),
    [
        ("out", "contiguous", "out"), ("out", "full", "out"), ("out", "heads", "out"),
        ("nan", "contiguous", "out"), ("dk", "striped", "dk"), ("parameter", "batch", "dWk"),
    ],
)  # fmt: skip
def test_a_fault_of_one_rank_fails_all(
    ranks: Ranks, fault: str, split: str, name: str, tokens: int
) -> None:
    found = ranks(3, check_pass, workload(tokens), *SPLITS[split], fault)
    assert len({str(agreed) for _, agreed in found}) == 1
    agreed = found[0][1]
    assert f"{name} on rank " in (agreed.over_tolerance("float32") or "")
    if name == "out" and tokens == SHORT:
        wrong = [r for r, (own, _) in enumerate(found) if own.largest[name] > 1e-4]
        assert wrong == [2] == [agreed.ranks[name]]
    if fault in ("dk", "parameter"):
        assert agreed.largest["out"] < 5e-6


def test_keys_that_no_query_sees_have_no_gradient(ranks: Ranks) -> None:
    """They are compared with the largest gradient of all ranks. Head 0 sees every second token."""
    w, options = workload(64, kv_heads=6), {"segments": (64,), "dilation": (2,)}
    for stray, caught in (("1e-9", False), ("0.01", True), ("nan", True)):
        for _, agreed in ranks(2, check_pass, w, "dilated", options, f"stray {stray}"):
            assert (agreed.over_tolerance("float32") is not None) == caught, stray


def test_tokens_that_no_rank_has_are_an_error(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks(3, check_pass, workload(), "ring", {}, "gap")
    assert all("do not cover every token once" in (text or "") for text in failed.value.texts)


# ---- inputs ------------------------------------------------------------------------------------


def draw(group: Group, w: Workload, options: Options) -> tuple[Any, ...]:
    attention = IMPLEMENTATIONS.get("ring")(w, group, **options)
    rows = select_checked_rows(attention, 3)
    one = draw_inputs(attention, "cpu", 3, rows)
    assert one.grad_out is not None
    tensors = [t.detach().numpy() for t in (*one.inputs, one.grad_out)]
    return tensors, rows.tolist(), attention.shard.queries.tolist()


def test_equal_parts_have_equal_numbers_and_others_do_not(ranks: Ranks) -> None:
    found = ranks(3, draw, workload(LONG), {"queries": "full"})
    (q, k, v, grad), *_ = found[0]
    for (q2, k2, v2, grad2), *_ in found[1:]:
        assert (q == q2).all()
        assert (grad == grad2).all()
        n = min(k.shape[2], k2.shape[2])
        assert (k[:, :, :n] != k2[:, :, :n]).mean() > 0.99
        assert (v[:, :, :n] != v2[:, :, :n]).mean() > 0.99
    assert (k != v).mean() > 0.99
    assert (q[0] != q[1]).mean() > 0.99


@pytest.mark.parametrize("order", ["contiguous", "striped"])
def test_the_first_and_last_row_of_every_rank_is_checked(ranks: Ranks, order: str) -> None:
    found = ranks(3, draw, workload(LONG), {"order": order})
    for (*_, grad), rows, queries in found:
        assert rows == found[0][1]
        assert {queries[0], queries[-1]} <= set(rows)
        non_zero = [q for q, row in zip(queries, (grad != 0).any((0, 1, 3)), strict=True) if row]
        assert non_zero == [q for q in queries if q in rows]


# ---- whole trials ------------------------------------------------------------------------------


def run(group: Group, one: Trial) -> Outcome:
    """Run a trial, with small matrix products."""
    with patch.multiple(timing, MAX_SIZE=timing.MIN_SIZE, TURNS=50):
        return run_trial(one, Silent(), group)


def trial_for(
    name: str = "ring", tokens: int = LONG, options: Options | None = None, **fields: Any
) -> Trial:
    known = {**SHAPE, "repeats": 0, "threads": 1, "time_cap": 60.0}
    return trial(name, tokens, options, **{**known, **fields})


@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_keeps_its_own_measurements(ranks: Ranks, split: str) -> None:
    name, options = SPLITS[split]
    outcomes = ranks(3, run, trial_for(name, SHORT, options, mode="train", repeats=2))
    for rank, outcome in enumerate(outcomes):
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert {m.rank for m in outcome.measurements} == {rank}
        assert outcome.largest("max_error") == outcomes[0].largest("max_error")
        # bytes are those of the checked pass only
        assert outcome.samples("bytes_sent") == outcome.samples("bytes_formula")
        for kind in ("time", "compute_time", "communication_time", "cpu_time"):
            assert len(outcome.samples(kind)) == 2
    tokens = sum(outcome.largest("own_tokens") or 0 for outcome in outcomes)
    assert tokens == SHORT * (1 if split in ("contiguous", "striped") else 3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("every row on the last rank", "on rank 2"), ("dv of the last rank", "on rank 2"),
     ("one NaN", "the output is not finite: row "), ("dv is not finite", "dv is not finite: row ")],
)  # fmt: skip
def test_all_ranks_have_the_status_wrong(ranks: Ranks, kind: str, words: str) -> None:
    one = trial_for("faulty", options={"kind": kind}, mode="train", repeats=2)
    outcomes = ranks(3, run, one)
    assert len({(o.status, o.reason, o.phase) for o in outcomes}) == 1
    assert outcomes[0].status == "wrong"
    assert outcomes[0].samples("time") == ()
    assert words in (outcomes[0].reason or "")


def run_late(group: Group, one: Trial) -> Outcome:
    """Run a trial in which the last rank is late."""
    kind = IMPLEMENTATIONS.get(one.implementation)
    call = kind.__call__

    def late(self: Attention, *qkv: Tensor) -> Tensor:
        if group.rank:
            time.sleep(LATE_S)
        return call(self, *qkv)

    with patch.object(kind, "__call__", late):
        return run(group, one)


@pytest.mark.parametrize("repeats", [0, 2])
def test_the_slowest_rank_is_late_for_all(ranks: Ranks, repeats: int) -> None:
    """With a split batch no rank waits in the pass, but the slowest one decides the status."""
    one = trial_for("ddp", SHORT, repeats=repeats, time_budget=LATE_S / 2)
    outcomes = ranks(2, run_late, one)
    assert [o.status for o in outcomes] == ["timeout", "timeout"]
    assert len({o.reason for o in outcomes}) == 1


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [None, 1])
def test_all_ranks_run_the_exact_pass_if_one_needs_it(ranks: Ranks, over: int | None) -> None:
    for outcome in ranks(2, run_with_peak, over):
        assert outcome.status == "ok"
        assert bool(outcome.samples("peak_bound")) == (over is None)
        assert bool(outcome.samples("peak")) == (over is not None)


def run_with_peak(group: Group, over: int | None) -> Outcome:
    """Run a trial whose first pass has a peak above the budget on one rank."""
    meters = []
    for peak in (2e9 if group.rank == over else 1e6, 1e6):
        meters.append(MagicMock())
        meters[-1].name = "fixed"
        found = [Measurement(name="peak", unit="B", samples=(peak,))]
        meters[-1].measurements.return_value = found
    with patch.object(memory, "memory_meter", MagicMock(side_effect=meters)):
        return run(group, trial_for(memory_budget=10**9, time_budget=600.0))


def judge_peak(group: Group, enforced: bool) -> Outcome | None:
    """Judge a trial in which the last rank's peak is twice the budget."""
    log = MeasurementLog(group.rank)
    log.add("peak", "B", 2e6 if group.rank == group.size - 1 else 1e3)
    if not enforced:
        log.facts["budget"] = "not enforced here"
    one = trial_for(memory_budget=10**6)
    attention = IMPLEMENTATIONS.get("ring")(one.workload, group)
    first = memory.FirstPass(one, attention, torch.arange(1), Silent(), log)
    return first.over_budget()


def test_all_ranks_exceed_a_budget_that_is_not_enforced(ranks: Ranks) -> None:
    """An enforced budget can't be exceeded, even if the measured peak is higher."""
    for outcome in ranks(3, judge_peak, False):
        assert outcome.status == "oom"
        assert "a rank held 2000000 bytes, and the budget is 1000000" in outcome.reason
    assert ranks(3, judge_peak, True) == [None] * 3


# ---- timing ------------------------------------------------------------------------------------


class Scripted(Clock):
    """A clock that reads scripted times and logs when it ran."""

    walls: Iterator[float]
    events: list[Any]

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")
        self.wall.append(next(self.walls))
        self.cpu.append(0.0)


@contextmanager
def scripted(group: Group, script: list[list[float]]) -> Iterator[list[Any]]:
    """Log events; complete passes take the scripted times of this rank."""
    events: list[Any] = []
    ring = IMPLEMENTATIONS.get("ring")
    call, barrier = ring.__call__, Group.barrier

    def make_clock(device: str) -> Scripted:
        clock = Scripted()
        clock.walls, clock.events = iter(script[group.rank]), events
        return clock

    def watched(self: Attention, *qkv: Tensor) -> Tensor:
        events.append((self.group.computes, self.group.traffic.communicates))
        return call(self, *qkv)

    def logged_barrier(self: Group) -> None:
        events.append("barrier")
        barrier(self)

    with (
        patch.object(timing, "clock_for", make_clock),
        patch.object(ring, "__call__", watched),
        patch.object(Group, "barrier", logged_barrier),
        patch.object(timing._Passes, "max_reading_s", 1.0),
    ):
        yield events


def time_passes(group: Group, script: list[list[float]]) -> tuple[list[Any], MeasurementLog, bool]:
    """Return the events and the log of timed passes with scripted times."""
    attention = IMPLEMENTATIONS.get("ring")(workload(SHORT), group)
    attention.prepare("cpu")
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    of, log = trial_for(tokens=SHORT, repeats=len(script[0])), MeasurementLog(group.rank)
    with scripted(group, script) as events:
        timing.run_timed_passes(TrialRun(of, attention, rows, Silent(), log), one, MagicMock())
    return events, log, one.out is None and one.grads is None


def test_timing_ends_when_the_slowest_rank_is_steady(ranks: Ranks) -> None:
    """If two ranks alternate in being slow, the slowest of each pass is steady.

    After six passes one more has new scores.
    """
    alternating = [[1.0, 2.0] * 10, [2.0, 1.0] * 10]
    for _, log, _ in ranks(2, time_passes, alternating):
        assert log.slowest == [2.0] * 7
    unsteady = [[1.0] * 20, [0.5 + 0.3 * i for i in range(20)]]
    for _, log, _ in ranks(2, time_passes, unsteady):
        assert len(log.slowest) == 20
        assert log.slowest[-1] == pytest.approx(6.2)


# ---- compressed transfers, parts of passes ------------------------------------------------------


def test_the_error_of_compressed_transfers_is_measured(ranks: Ranks) -> None:
    plain = ranks(3, run, trial_for("ring"))
    assert all(o.samples("wire_error") == () for o in plain)
    packed = ranks(3, run, trial_for("ring", options={"wire_dtype": "bfloat16"}))
    errors = {o.largest("wire_error") for o in packed}
    assert len(errors) == 1
    assert 1e-4 < (errors.pop() or 0) < 0.1
    for one, other in zip(plain, packed, strict=True):
        assert (other.status, other.reason) == ("ok", None)
        assert other.largest("bytes_sent") == (one.largest("bytes_sent") or 0) / 2


@pytest.mark.parametrize("world", [2, 3])
def test_three_kinds_of_pass_alternate_and_barriers_are_not_timed(ranks: Ranks, world: int) -> None:
    """Fault 15: a timed barrier would count as communication."""
    whole, compute, transfers = (True, True), (True, False), (False, True)
    cycle = [e for kind in (whole, compute, transfers) for e in ("barrier", "start", kind, "stop")]
    for rank, (events, log, dropped) in enumerate(ranks(world, time_passes, [[1.0, 2.0]] * world)):
        assert events == [whole, whole, *cycle, *cycle]  # the check of every row, the warm-up
        assert dropped
        assert {m.name: (m.samples, m.rank) for m in log.measurements} == {
            "time": ((1.0, 2.0), rank),
            "cpu_time": ((0.0, 0.0), rank),
            "compute_time": ((1.0, 2.0), rank),
            "communication_time": ((1.0, 2.0), rank),
        }
