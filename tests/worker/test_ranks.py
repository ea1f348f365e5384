"""The check, inputs, timing and trials over 2, 3 and 4 ranks: a fault of one rank fails all."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import Measurement, Outcome, Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import matmul_rate, reference, row_check, timing
from longseq_bench.worker import trial as trial_module
from longseq_bench.worker.check import check
from longseq_bench.worker.errors import Errors
from longseq_bench.worker.inputs import FULL_CHECK_TOKENS, draw_inputs, select_checked_rows
from longseq_bench.worker.measurement_log import MeasurementLog
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.passes import run_pass, warm_up_tokens
from tests.make import trial
from tests.ranks import Ranks
from tests.worker.spread import LATE_S, Spread

SHORT, LONG = 61, FULL_CHECK_TOKENS + 89
SPLITS = ("contiguous", "striped", "full", "heads", "batch", "heads module")
worlds = pytest.mark.parametrize("world", [2, 3, 4])
sizes = pytest.mark.parametrize(("tokens", "world"), [(SHORT, 2), (SHORT, 4), (LONG, 3)])
Options = dict[str, Any]


class Silent(MessageSender):
    """A MessageSender that only keeps the phases."""

    def __init__(self) -> None:
        self.phase = "start"
        self.phases: list[str] = []

    def _send(self, message: dict[str, object]) -> None:
        self.phases.append(str(message.get("phase")))


def sizes_for(split: str) -> Options:
    """Return a small shape; only a split batch needs a row for each of four ranks."""
    return {"heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 4 if split == "batch" else 2}


def workload(tokens: int = SHORT, split: str = "", **fields: Any) -> Workload:
    return Workload(seq_len=tokens, **{**sizes_for(split), "mode": "train", **fields})


def check_pass(
    group: Group, w: Workload, options: Options, chunk: int = 65_536
) -> tuple[Errors, ...]:
    """Return the errors on this rank, and the agreed ones of all ranks."""
    attention = Spread(w, group, **options)
    attention.prepare("cpu")
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    for _ in range(2):  # the second pass must not depend on the first
        run_pass(attention, one)
    assert one.out is not None
    with patch.object(reference, "KEY_CHUNK", chunk):
        own = check(attention, one.inputs, one.out, rows, one.grad_out, one.grads)
    if not torch.isfinite(one.out).all():
        own.raise_to("out", math.inf)
    return own, own.largest_over_ranks(group)


# ---- correct implementations -------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("tokens", "world", "causal"),
    [(SHORT, 2, True), (SHORT, 4, False), (LONG, 3, False), (LONG, 3, True)],
)
def test_correct_ones_pass(ranks: Ranks, split: str, tokens: int, world: int, causal: bool) -> None:
    w = workload(tokens, split, causal=causal)
    for own, agreed in ranks(world, check_pass, w, {"split": split}):
        assert agreed.over_tolerance("float32") is None
        assert own.worst < 5e-6
        parameters = {"dWq", "dWk", "dWv", "dWo"} if split in ("batch", "heads module") else set()
        assert set(agreed.largest) == {"out", "dq", "dk", "dv"} | parameters


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_correct_ones_pass_in_half_precision(ranks: Ranks, split: str, dtype: Any) -> None:
    w = workload(LONG, split, causal=True, dtype=dtype)
    for _, agreed in ranks(3, check_pass, w, {"split": split}):
        assert agreed.over_tolerance(dtype) is None


@pytest.mark.parametrize("split", SPLITS)
def test_key_chunks_make_no_difference(ranks: Ranks, split: str) -> None:
    w = workload(LONG, split, causal=True)
    for _, agreed in ranks(3, check_pass, w, {"split": split}, 50):
        assert agreed.worst < 5e-6


@pytest.mark.parametrize("split", SPLITS)
def test_batch_rows_a_few_at_a_time_make_no_difference(ranks: Ranks, split: str) -> None:
    for _, agreed in ranks(3, check_pass_in_slabs, workload(SHORT, split), {"split": split}):
        assert agreed.worst < 5e-6


def check_pass_in_slabs(group: Group, w: Workload, options: Options) -> tuple[Errors, ...]:
    with patch.object(reference, "SLAB_ELEMENTS", 1):
        return check_pass(group, w, options)


# ---- faults ------------------------------------------------------------------------------------

FAULTS = [
    ("out", {}, "out"),
    ("far key", {}, "out"),
    ("block diagonal", {}, "out"),
    ("future", {"causal": True}, "out"),
    ("nan", {}, "out"),
    ("dk", {}, "dk"),
    ("holder", {}, "out"),
    ("parameter", {}, "dWk"),
]
SPLIT_OF = {"holder": "full", "parameter": "batch"}


@sizes
@pytest.mark.parametrize(("fault", "fields", "name"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_of_one_rank_fails_all(
    ranks: Ranks, fault: str, fields: Options, name: str, tokens: int, world: int
) -> None:
    split = SPLIT_OF.get(fault, "contiguous")
    w = workload(tokens, split, **fields)
    found = ranks(world, check_pass, w, {"split": split, "fault": fault})
    assert len({str(agreed) for _, agreed in found}) == 1
    agreed = found[0][1]
    assert f"{name} on rank " in (agreed.over_tolerance("float32") or "")
    alone = {"out": world - 1, "nan": world - 1, "future": world - 1, "holder": 1, "far key": 0}
    if fault in alone and tokens == SHORT:
        wrong = [r for r, (own, _) in enumerate(found) if own.largest[name] > 1e-4]
        assert wrong == [alone[fault]] == [agreed.ranks[name]]
    if fault in ("dk", "parameter"):
        assert agreed.largest["out"] < 5e-6


@worlds
@pytest.mark.parametrize("split", ["contiguous", "striped"])
def test_keys_that_no_query_sees_have_no_gradient(ranks: Ranks, split: str, world: int) -> None:
    """They are compared with the largest gradient of all ranks, also on a rank that has none."""
    for stray, caught in (("0", False), ("1e-9", False), ("0.01", True), ("nan", True)):
        options = {"split": split, "visible_keys": 20, "fault": f"stray {stray}"}
        for own, agreed in ranks(world, check_pass, workload(), options):
            assert (agreed.over_tolerance("float32") is not None) == caught, stray
            assert own.largest["dk"] < math.inf or stray == "nan"


def test_tokens_that_no_rank_has_are_an_error(ranks: Ranks) -> None:
    for text in ranks.failures(3, check_pass, workload(), {"fault": "gap"}):
        assert "do not cover every token once" in (text or "")


def test_no_sum_over_ranks_is_as_long_as_the_sequence(ranks: Ranks) -> None:
    w = workload(20_000, batch=1, heads=2, kv_heads=1)
    for largest in ranks(2, largest_sum, w):
        assert 0 < largest < w.seq_len


def largest_sum(group: Group, w: Workload) -> int:
    """Return the elements of the largest tensor that the check sums over ranks."""
    attention = Spread(w, group)
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    assert one.grad_out is not None
    sizes, all_sum = [], Group.all_sum

    def watched(self: Group, tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return all_sum(self, tensor)

    with patch.object(Group, "all_sum", watched):
        check(attention, one.inputs, one.inputs[0], rows, one.grad_out, one.inputs)
    return max(sizes)


# ---- inputs ------------------------------------------------------------------------------------


def draw(group: Group, w: Workload, options: Options) -> tuple[Any, ...]:
    attention = Spread(w, group, **options)
    rows = select_checked_rows(attention, 3)
    one = draw_inputs(attention, "cpu", 3, rows)
    assert one.grad_out is not None
    queries = attention.shard.queries
    return (
        [t.detach().numpy() for t in (*one.inputs, one.grad_out)], rows.tolist(),
        queries.tolist(), attention.shard.keys.tolist(),
    )  # fmt: skip


@worlds
def test_equal_parts_have_equal_numbers_and_others_do_not(ranks: Ranks, world: int) -> None:
    found = ranks(world, draw, workload(LONG), {"split": "full"})
    (q, k, v, grad), *_ = found[0]
    for (q2, k2, v2, grad2), *_ in found[1:]:
        assert (q == q2).all()
        assert (grad == grad2).all()
        n = min(k.shape[2], k2.shape[2])
        assert (k[:, :, :n] != k2[:, :, :n]).mean() > 0.99
        assert (v[:, :, :n] != v2[:, :, :n]).mean() > 0.99
    assert (k != v).mean() > 0.99
    assert (q[0] != q[1]).mean() > 0.99


def test_key_heads_of_several_ranks_have_equal_numbers(ranks: Ranks) -> None:
    found = ranks(4, draw, workload(), {"split": "heads"})
    for first, second in ((0, 1), (2, 3)):
        for tensor in (1, 2):
            assert (found[first][0][tensor] == found[second][0][tensor]).all()
        assert (found[first][0][0] != found[second][0][0]).mean() > 0.99


@worlds
@pytest.mark.parametrize("split", ["contiguous", "striped"])
def test_the_first_and_last_row_of_every_rank_is_checked(
    ranks: Ranks, split: str, world: int
) -> None:
    found = ranks(world, draw, workload(LONG), {"split": split})
    for (*_, grad), rows, queries, _ in found:
        assert rows == found[0][1]
        assert {queries[0], queries[-1]} <= set(rows)
        non_zero = [q for q, row in zip(queries, (grad != 0).any((0, 1, 3)), strict=True) if row]
        assert non_zero == [q for q in queries if q in rows]


def test_one_rank_draws_one_tensor_after_the_other() -> None:
    w = workload(LONG, mode="forward")
    attention = Spread(w, Group.alone())
    one = draw_inputs(attention, "cpu", 7, select_checked_rows(attention, 7))
    source = torch.Generator().manual_seed(7)
    for tensor in one.inputs:
        assert torch.equal(tensor, torch.empty_like(tensor).normal_(generator=source))


@pytest.mark.parametrize("tokens", [100, 2048, 2049, 8191, 10_007, 1_000_003])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_a_warm_up_has_the_remainder_of_every_rank(world: int, tokens: int) -> None:
    """Libraries keep buffers by shape; the warm-up allocates those of the trial's last block."""
    short = warm_up_tokens(tokens, world)
    assert short <= min(tokens, 2 * 1024 * world)
    for rank in range(world):
        own, warm_up = ((n * (rank + 1) // world) - (n * rank // world) for n in (tokens, short))
        assert warm_up % 1024 == own % 1024
        assert warm_up >= min(own, 1024)


# ---- whole trials ------------------------------------------------------------------------------


def run(group: Group, one: Trial) -> Outcome:
    """Run a trial, with small matrix products; register Spread first if the trial needs it."""
    if one.implementation == "spread":
        IMPLEMENTATIONS.register("spread")(Spread)
    with patch.multiple(matmul_rate, MAX_SIZE=matmul_rate.MIN_SIZE, TURNS=50):
        return trial_module.run_trial(one, Silent(), group)


def trial_for(
    name: str = "spread", tokens: int = LONG, options: Options | None = None, **fields: Any
):
    shape = sizes_for((options or {}).get("split", ""))
    known = {**shape, "repeats": 0, "threads": 1, "time_cap": 60.0}
    return trial(name, tokens, options, **{**known, **fields})


@pytest.mark.parametrize(("split", "world"), [*((split, 3) for split in SPLITS), ("heads", 4)])
def test_every_rank_keeps_its_own_measurements(ranks: Ranks, split: str, world: int) -> None:
    one = trial_for(tokens=SHORT, options={"split": split}, mode="train", repeats=2)
    outcomes = ranks(world, run, one)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert {m.rank for m in outcome.measurements} == {rank}
        assert outcome.largest("max_error") == outcomes[0].largest("max_error")
        assert outcome.largest("bytes_formula") == 12345
        for kind in ("time", "compute_time", "communication_time", "cpu_time"):
            assert len(outcome.samples(kind)) == 2
    tokens = sum(outcome.largest("own_tokens") or 0 for outcome in outcomes)
    assert tokens == SHORT * (1 if split in ("contiguous", "striped") else world)


def test_one_rank_has_one_kind_of_timed_pass() -> None:
    outcome = run(Group.alone(), trial_for("sdpa", 64, repeats=2))
    assert outcome.status == "ok"
    assert outcome.samples("compute_time") == outcome.samples("communication_time") == ()


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(
    ("name", "keep"), [("sdpa", "all"), ("ring", "nothing"), ("spread", "all")]
)
def test_timed_passes_are_right_on_a_gpu_which_draws_its_inputs_again(
    name: str, keep: Any, mode: Any
) -> None:
    """The inputs have other signs by then than when they were drawn first."""
    with patch.object(row_check, "_can_redraw", lambda one: one.redraw is not None):
        outcome = run(Group.alone(), trial_for(name, 700, mode=mode, keep=keep, repeats=5))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.largest("checked_passes")


def test_bytes_are_those_of_the_checked_pass_only(ranks: Ranks) -> None:
    for rank, outcome in enumerate(ranks(3, run, trial_for(repeats=3))):
        own = (LONG * (rank + 1) // 3) - (LONG * rank // 3)
        assert outcome.samples("bytes_sent") == (2 * 2 * 2 * own * 8 * 4,)


@pytest.mark.parametrize("fault", ["out", "nan", "dk", "parameter", "nan gradient"])
def test_all_ranks_have_the_status_wrong(ranks: Ranks, fault: str) -> None:
    options = {"split": SPLIT_OF.get(fault, "contiguous"), "fault": fault}
    outcomes = ranks(3, run, trial_for(options=options, mode="train", repeats=2))
    assert len({(o.status, o.reason, o.phase) for o in outcomes}) == 1
    assert outcomes[0].status == "wrong"
    assert outcomes[0].samples("time") == ()
    reason = "not finite" if fault.startswith("nan") else "on rank"
    assert reason in (outcomes[0].reason or "")


def test_the_slowest_rank_is_late_for_all(ranks: Ranks) -> None:
    """With a split batch no rank waits in the pass, but the slowest one decides the status."""
    late = {"options": {"split": "batch", "fault": "late"}, "time_budget": LATE_S / 2}
    for repeats in (0, 2):
        outcomes = ranks(2, run, trial_for(tokens=SHORT, repeats=repeats, **late))
        assert [o.status for o in outcomes] == ["timeout", "timeout"]
        assert len({o.reason for o in outcomes}) == 1


def test_memory_outside_the_allocator_counts_for_the_budget_of_a_gpu() -> None:
    """It may grow after the limit was set, which caps torch's tensors only."""
    one = trial_for("sdpa", 64, device="cuda", memory_budget=1000)
    log, rows = MeasurementLog(0), torch.arange(1)
    attention = IMPLEMENTATIONS.get("sdpa")(one.workload, Group.alone())
    own_run = trial_module._TrialRun(one, attention, rows, Silent(), log, outside_before=200)
    log.add("peak", "B", 2000.0)
    assert own_run.over_memory_budget() is None  # a formula's peak: the limit itself judges
    log.add("reserved", "B", 700.0)
    log.add("outside_allocator", "B", 300.0)
    assert own_run.over_memory_budget() is None
    log.add("outside_allocator", "B", 301.0)
    outcome = own_run.over_memory_budget()
    assert outcome is not None
    assert (outcome.status, outcome.reason) == (
        "oom",
        "a rank held 1001 bytes, and the budget is 1000; outside the allocator there were 301 "
        "here, 200 before the pass",
    )


@pytest.mark.parametrize("over", [None, 0, 1])
def test_all_ranks_run_the_exact_pass_if_one_needs_it(ranks: Ranks, over: int | None) -> None:
    for outcome in ranks(2, run_with_peak, over):
        assert outcome.status == "ok"
        assert bool(outcome.samples("peak_bound")) == (over is None)
        assert bool(outcome.samples("peak")) == (over is not None)


class FixedPeak(Meter):
    """A meter that returns a given peak."""

    name = "fixed"
    role = "memory"

    def __init__(self, peak: float) -> None:
        self._peak = peak

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self._peak,))]


def run_with_peak(group: Group, over: int | None) -> Outcome:
    """Run a trial whose first pass has a peak above the budget on one rank."""
    peaks = iter([2e9 if group.rank == over else 1e6, 1e6])
    with patch.object(trial_module, "find_meter", lambda role, context: FixedPeak(next(peaks))):
        return run(group, trial_for(memory_budget=10**9, time_budget=600.0))


def judge_peak(group: Group, enforced: bool) -> Outcome | None:
    """Judge a trial in which the last rank's peak is twice the budget."""
    log = MeasurementLog(group.rank)
    log.add("peak", "B", 2e6 if group.rank == group.size - 1 else 1e3)
    if not enforced:
        log.facts["budget"] = "not enforced here"
    one = trial_for(memory_budget=10**6)
    attention = Spread(workload(SHORT), group)
    trial_run = trial_module._TrialRun(one, attention, torch.arange(1), Silent(), log)
    return trial_run.over_memory_budget()


def test_all_ranks_exceed_a_budget_that_is_not_enforced(ranks: Ranks) -> None:
    """An enforced budget can't be exceeded, even if the measured peak is higher."""
    for outcome in ranks(3, judge_peak, False):
        assert outcome.status == "oom"
        assert "the peak was 2000000 bytes" in outcome.reason
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
    call, barrier = Spread.__call__, Group.barrier

    def make_clock(device: str) -> Scripted:
        clock = Scripted()
        clock.walls, clock.events = iter(script[group.rank]), events
        return clock

    def watched(self: Spread, *qkv: torch.Tensor) -> torch.Tensor:
        events.append((self.group.computes, self.group.traffic.communicates))
        return call(self, *qkv)

    def logged_barrier(self: Group) -> None:
        events.append("barrier")
        barrier(self)

    with (
        patch.object(timing, "clock_for", make_clock),
        patch.object(Spread, "__call__", watched),
        patch.object(Group, "barrier", logged_barrier),
    ):
        yield events


def time_passes(group: Group, script: list[list[float]]) -> tuple[list[Any], MeasurementLog, bool]:
    """Return the events and the log of timed passes with scripted times."""
    attention = Spread(workload(SHORT), group)
    one = draw_inputs(attention, "cpu", 0, select_checked_rows(attention, 0))
    one_trial = trial_for(tokens=SHORT, repeats=len(script[0]), time_cap=60.0)
    log = MeasurementLog(group.rank)
    with scripted(group, script) as events:
        timing.run_timed_passes(attention, one, MagicMock(), one_trial, Silent(), log)
    return events, log, one.out is None and one.grads is None


@worlds
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


def test_timing_ends_when_the_slowest_rank_is_steady(ranks: Ranks) -> None:
    """If two ranks alternate in being slow, the slowest of each pass is steady."""
    alternating = [[1.0, 2.0] * 10, [2.0, 1.0] * 10]
    for _, log, _ in ranks(2, time_passes, alternating):
        assert log.slowest == [2.0] * 6
    unsteady = [[1.0] * 20, [0.5 + 0.3 * i for i in range(20)]]
    for _, log, _ in ranks(2, time_passes, unsteady):
        assert len(log.slowest) == 20
        assert log.slowest[-1] == pytest.approx(6.2)


# ---- compressed transfers ----------------------------------------------------------------------


def test_the_error_of_compressed_transfers_is_measured(ranks: Ranks) -> None:
    plain = ranks(3, run, trial_for("ring"))
    assert all(o.samples("wire_error") == () for o in plain)
    packed = ranks(3, run, trial_for("ring", options={"wire_dtype": "bfloat16"}))
    errors = {o.largest("wire_error") for o in packed}
    assert len(errors) == 1
    assert 1e-4 < (errors.pop() or 0) < 0.1
    for one, other in zip(plain, packed, strict=True):
        assert (other.status, other.reason) == ("ok", None)
        assert one.largest("bytes_sent") == one.largest("bytes_formula")
        assert other.largest("bytes_sent") == (one.largest("bytes_sent") or 0) / 2


# ---- extra meters ------------------------------------------------------------------------------


class Counter(Meter):
    """A meter of the role extra: it counts its passes."""

    name = "counter"
    role = "extra"

    def __init__(self, context: MeterContext = ON_CPU) -> None:
        super().__init__(context)
        self.passes: list[float] = []

    def start(self) -> None:
        self.passes.append(len(self.passes) + 1.0)

    def stop(self) -> None: ...

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="passes", unit="1", samples=tuple(self.passes))]


def run_with_counter(group: Group, one: Trial) -> Outcome:
    METERS.names()
    METERS.register("counter")(Counter)
    try:
        return run(group, one)
    finally:
        del METERS._objects["counter"]


def test_an_extra_meter_runs_around_every_timed_pass_and_is_in_the_record(ranks: Ranks) -> None:
    for rank, outcome in enumerate(ranks(2, run_with_counter, trial_for(repeats=3))):
        (found,) = [m for m in outcome.measurements if m.name == "passes"]
        assert (found.samples, found.rank) == ((1.0, 2.0, 3.0), rank)
        assert outcome.facts["extra_meters"].count("counter") == 1
    assert run_with_counter(Group.alone(), trial_for("sdpa", 64)).samples("passes") == ()
