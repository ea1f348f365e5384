"""The gate and the probe over ranks: what one rank does wrong is wrong for all, at 2, 3 and 4."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import Measurement, Outcome, Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import reference, timing
from longseq_bench.worker import trial as trial_module
from longseq_bench.worker.check import Errors, check
from longseq_bench.worker.inputs import WHOLE_ROWS, draw_inputs, select_checked_rows
from longseq_bench.worker.measurement_log import MeasurementLog
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.passes import run_pass, warm_up_tokens
from tests.make import trial
from tests.ranks import Ranks
from tests.worker.spread import LATE_S, Spread

SHORT, LONG = 61, WHOLE_ROWS + 89
HOWS = ("contiguous", "striped", "full", "heads", "batch", "heads module")
worlds = pytest.mark.parametrize("world", [2, 3, 4])
sizes = pytest.mark.parametrize(
    ("tokens", "world"), [(SHORT, 2), (SHORT, 3), (SHORT, 4), (LONG, 3)]
)
Options = dict[str, Any]


class Silent(MessageSender):
    """Tells nobody, but remembers the phases."""

    def __init__(self) -> None:
        self.phase = "start"
        self.phases: list[str] = []

    def _send(self, message: dict[str, object]) -> None:
        self.phases.append(str(message.get("phase")))


def workload(tokens: int = SHORT, **fields: Any) -> Workload:
    known = {"heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 4, "mode": "train"}
    return Workload(seq_len=tokens, **{**known, **fields})


def gated(group: Group, w: Workload, options: Options, chunk: int = 65_536) -> tuple[Errors, ...]:
    """What the gate says on this rank, and what all agree on."""
    attention = Spread(w, group, **options)
    attention.prepare("cpu")
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    for _ in range(2):  # nothing of the first is left in the second
        run_pass(attention, one)
    assert one.out is not None
    with patch.object(reference, "KEY_CHUNK", chunk):
        own = check(attention, one.inputs, one.out, rows, one.grad_out, one.grads)
    if not torch.isfinite(one.out).all():
        own.raise_to("out", math.inf)
    return own, own.largest_over_ranks(group)


# ---- right ones --------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_right_ones_pass(ranks: Ranks, how: str, causal: bool, tokens: int, world: int) -> None:
    w = workload(tokens, causal=causal)
    for own, agreed in ranks(world, gated, w, {"how": how}):
        assert agreed.over_tolerance("float32") is None
        assert own.worst < 5e-6
        parameters = {"dWq", "dWk", "dWv", "dWo"} if how in ("batch", "heads module") else set()
        assert set(agreed.largest) == {"out", "dq", "dk", "dv"} | parameters


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_ones_pass_in_half_precision(ranks: Ranks, how: str, dtype: Any) -> None:
    w = workload(LONG, causal=True, dtype=dtype)
    for _, agreed in ranks(3, gated, w, {"how": how}):
        assert agreed.over_tolerance(dtype) is None


@pytest.mark.parametrize("how", HOWS)
def test_key_chunks_make_no_difference(ranks: Ranks, how: str) -> None:
    w = workload(LONG, causal=True)
    for chunk in (7, 64):
        for _, agreed in ranks(3, gated, w, {"how": how}, chunk):
            assert agreed.worst < 5e-6


@pytest.mark.parametrize("how", HOWS)
def test_batch_rows_a_few_at_a_time_make_no_difference(ranks: Ranks, how: str) -> None:
    for _, agreed in ranks(3, gated_in_slabs, workload(), {"how": how}):
        assert agreed.worst < 5e-6


def gated_in_slabs(group: Group, w: Workload, options: Options) -> tuple[Errors, ...]:
    with patch.object(reference, "SLAB_ELEMENTS", 1):
        return gated(group, w, options)


# ---- wrong ones --------------------------------------------------------------------------------

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
HOW = {"holder": "full", "parameter": "batch"}


@sizes
@pytest.mark.parametrize(("fault", "fields", "name"), FAULTS, ids=[f[0] for f in FAULTS])
def test_one_wrong_rank_is_wrong_for_all(
    ranks: Ranks, fault: str, fields: Options, name: str, tokens: int, world: int
) -> None:
    w = workload(tokens, **fields)
    found = ranks(world, gated, w, {"how": HOW.get(fault, "contiguous"), "fault": fault})
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
@pytest.mark.parametrize("how", ["contiguous", "striped"])
def test_keys_that_nobody_sees_have_no_gradient(ranks: Ranks, how: str, world: int) -> None:
    """Beside the largest of all ranks, not of a rank that has none."""
    for stray, caught in (("0", False), ("1e-9", False), ("0.01", True), ("nan", True)):
        options = {"how": how, "sees": 20, "fault": f"stray {stray}"}
        for own, agreed in ranks(world, gated, workload(), options):
            assert (agreed.over_tolerance("float32") is not None) == caught, stray
            assert own.largest["dk"] < math.inf or stray == "nan"


def test_tokens_that_nobody_holds_are_an_error(ranks: Ranks) -> None:
    for text in ranks.failures(3, gated, workload(), {"fault": "gap"}):
        assert "do not cover every token once" in (text or "")


def test_nothing_as_long_as_the_sequence_is_brought_together(ranks: Ranks) -> None:
    w = workload(20_000, batch=1, heads=2, kv_heads=1)
    for largest in ranks(2, most_summed, w):
        assert 0 < largest < w.seq_len


def most_summed(group: Group, w: Workload) -> int:
    """Elements of the largest tensor that the gate sums over ranks, in each of its heads and
    head_dim; its attention need not be right."""
    attention = Spread(w, group)
    rows = select_checked_rows(attention, 0)
    one = draw_inputs(attention, "cpu", 0, rows)
    assert one.grad_out is not None
    seen, total = [], Group.all_sum

    def watched(self: Group, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return total(self, tensor)

    with patch.object(Group, "all_sum", watched):
        check(attention, one.inputs, one.inputs[0], rows, one.grad_out, one.inputs)
    return max(seen)


# ---- inputs ------------------------------------------------------------------------------------


def drawn(group: Group, w: Workload, options: Options) -> tuple[Any, ...]:
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
def test_equal_parts_hold_equal_numbers_and_others_do_not(ranks: Ranks, world: int) -> None:
    found = ranks(world, drawn, workload(LONG), {"how": "full"})
    (q, k, v, grad), *_ = found[0]
    for (q2, k2, v2, grad2), *_ in found[1:]:
        assert (q == q2).all()
        assert (grad == grad2).all()
        most = min(k.shape[2], k2.shape[2])
        assert (k[:, :, :most] != k2[:, :, :most]).mean() > 0.99
        assert (v[:, :, :most] != v2[:, :, :most]).mean() > 0.99
    assert (k != v).mean() > 0.99
    assert (q[0] != q[1]).mean() > 0.99


def test_key_heads_of_several_ranks_hold_equal_numbers(ranks: Ranks) -> None:
    found = ranks(4, drawn, workload(), {"how": "heads"})
    for first, second in ((0, 1), (2, 3)):
        for tensor in (1, 2):
            assert (found[first][0][tensor] == found[second][0][tensor]).all()
        assert (found[first][0][0] != found[second][0][0]).mean() > 0.99


@worlds
@pytest.mark.parametrize("how", ["contiguous", "striped"])
def test_the_first_and_last_row_of_every_rank_is_checked(
    ranks: Ranks, how: str, world: int
) -> None:
    found = ranks(world, drawn, workload(LONG), {"how": how})
    for (*_, grad), rows, queries, _ in found:
        assert rows == found[0][1]
        assert {queries[0], queries[-1]} <= set(rows)
        live = [q for q, row in zip(queries, (grad != 0).any((0, 1, 3)), strict=True) if row]
        assert live == [q for q in queries if q in rows]


def test_a_rank_alone_draws_one_tensor_after_the_other() -> None:
    w = workload(LONG, mode="forward")
    attention = Spread(w, Group.alone())
    one = draw_inputs(attention, "cpu", 7, select_checked_rows(attention, 7))
    source = torch.Generator().manual_seed(7)
    for tensor in one.inputs:
        assert torch.equal(tensor, torch.empty_like(tensor).normal_(generator=source))


@pytest.mark.parametrize("tokens", [100, 2048, 2049, 8191, 10_007, 1_000_003])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_a_warm_up_has_the_tail_of_every_rank(world: int, tokens: int) -> None:
    """The shapes that libraries keep something for come before the budget."""
    short = warm_up_tokens(tokens, world)
    assert short <= min(tokens, 2 * 1024 * world)
    for rank in range(world):
        own, brief = ((n * (rank + 1) // world) - (n * rank // world) for n in (tokens, short))
        assert brief % 1024 == own % 1024
        assert brief >= min(own, 1024)


# ---- whole trials ------------------------------------------------------------------------------


def tried(group: Group, asked: Trial) -> Outcome:
    """A trial of Spread, or of what is asked for."""
    if asked.implementation == "spread":
        IMPLEMENTATIONS.register("spread")(Spread)
    return trial_module.run_trial(asked, Silent(), group)


def asked(name: str = "spread", tokens: int = LONG, options: Options | None = None, **fields: Any):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 4}
    known = {**shape, "repeats": 0, "threads": 1, "time_cap": 60.0}
    return trial(name, tokens, options, **{**known, **fields})


@pytest.mark.parametrize(("how", "world"), [*((how, 3) for how in HOWS), ("heads", 4)])
def test_every_rank_keeps_its_own_measurements(ranks: Ranks, how: str, world: int) -> None:
    wanted = asked(tokens=SHORT, options={"how": how}, mode="train", repeats=2)
    outcomes = ranks(world, tried, wanted)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert {m.rank for m in outcome.measurements} == {rank}
        assert outcome.largest("max_error") == outcomes[0].largest("max_error")
        assert outcome.largest("bytes_formula") == 12345
        for kind in ("time", "compute_time", "communication_time", "cpu_time"):
            assert len(outcome.samples(kind)) == 2
    tokens = sum(outcome.largest("own_tokens") or 0 for outcome in outcomes)
    assert tokens == SHORT * (1 if how in ("contiguous", "striped") else world)


def test_a_rank_alone_has_one_kind_of_timed_pass() -> None:
    outcome = tried(Group.alone(), asked("sdpa", 64, repeats=2))
    assert outcome.status == "ok"
    assert outcome.samples("compute_time") == outcome.samples("communication_time") == ()


def test_bytes_are_those_of_the_checked_pass_alone(ranks: Ranks) -> None:
    for rank, outcome in enumerate(ranks(3, tried, asked(repeats=3))):
        held = (LONG * (rank + 1) // 3) - (LONG * rank // 3)
        assert outcome.samples("bytes_sent") == (2 * 4 * 2 * held * 8 * 4,)


@pytest.mark.parametrize("fault", ["out", "nan", "dk", "parameter", "nan gradient"])
def test_all_ranks_say_wrong(ranks: Ranks, fault: str) -> None:
    options = {"how": HOW.get(fault, "contiguous"), "fault": fault}
    outcomes = ranks(3, tried, asked(options=options, mode="train", repeats=2))
    assert len({(o.status, o.reason, o.phase) for o in outcomes}) == 1
    assert outcomes[0].status == "wrong"
    assert outcomes[0].samples("time") == ()
    reason = "not finite" if fault.startswith("nan") else "on rank"
    assert reason in (outcomes[0].reason or "")


def test_the_slowest_rank_is_late_for_all(ranks: Ranks) -> None:
    """Rows of the batch apart: nobody waits for the late rank, but its verdict."""
    late = {"options": {"how": "batch", "fault": "late"}, "time_budget": LATE_S / 2}
    for repeats in (0, 2):
        outcomes = ranks(2, tried, asked(tokens=SHORT, repeats=repeats, **late))
        assert [o.status for o in outcomes] == ["timeout", "timeout"]
        assert len({o.reason for o in outcomes}) == 1


@pytest.mark.parametrize("over", [None, 0, 1])
def test_memory_of_one_rank_makes_all_take_the_exact_pass(ranks: Ranks, over: int | None) -> None:
    for outcome in ranks(2, bounded, over):
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


def bounded(group: Group, over: int | None) -> Outcome:
    """A trial whose first pass seems to take more than the budget on one rank."""
    peaks = iter([2e9 if group.rank == over else 1e6, 1e6])
    with patch.object(trial_module, "find_meter", lambda role, context: FixedPeak(next(peaks))):
        return tried(group, asked(memory_budget=10**9, time_budget=600.0))


def overdrawn(group: Group, enforced: bool) -> Outcome | None:
    """The last rank's peak is twice the budget."""
    log = MeasurementLog(group.rank)
    log.add("peak", "B", 2e6 if group.rank == group.size - 1 else 1e3)
    if not enforced:
        log.facts["budget"] = "not enforced here"
    of = asked(memory_budget=10**6)
    attention = Spread(workload(SHORT), group)
    run = trial_module._TrialRun(of, attention, torch.arange(1), Silent(), log)
    return run.over_memory_budget()


def test_a_budget_that_nothing_enforces_is_over_for_all(ranks: Ranks) -> None:
    """What is enforced was not exceeded, even if the mark of the heap is higher."""
    for outcome in ranks(3, overdrawn, False):
        assert outcome.status == "oom"
        assert "the peak was 2000000 bytes" in outcome.reason
    assert ranks(3, overdrawn, True) == [None] * 3


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
    """Whole passes take what the script says for this rank; all that happens is noted."""
    events: list[Any] = []
    call, barrier = Spread.__call__, Group.barrier

    def clock(device: str) -> Scripted:
        made = Scripted()
        made.walls, made.events = iter(script[group.rank]), events
        return made

    def watched(self: Spread, *qkv: torch.Tensor) -> torch.Tensor:
        events.append((self.group.computes, self.group.traffic.communicates))
        return call(self, *qkv)

    def met(self: Group) -> None:
        events.append("met")
        barrier(self)

    with (
        patch.object(timing, "clock_for", clock),
        patch.object(Spread, "__call__", watched),
        patch.object(Group, "barrier", met),
    ):
        yield events


def paced(group: Group, script: list[list[float]]) -> tuple[list[Any], MeasurementLog, bool]:
    """Events and samples of timed passes that take so long."""
    attention = Spread(workload(SHORT), group)
    one = draw_inputs(attention, "cpu", 0, select_checked_rows(attention, 0))
    wanted = asked(tokens=SHORT, repeats=len(script[0]), time_cap=60.0)
    log = MeasurementLog(group.rank)
    with scripted(group, script) as events:
        timing.run_timed_passes(attention, one, wanted, Silent(), log)
    return events, log, one.out is None and one.grads is None


@worlds
def test_three_kinds_take_turns_and_ranks_meet_outside_the_clock(ranks: Ranks, world: int) -> None:
    """Fault 15: a barrier that is timed is no communication."""
    whole, compute, transfers = (True, True), (True, False), (False, True)
    turn = [e for kind in (whole, compute, transfers) for e in ("met", "start", kind, "stop")]
    for rank, (events, log, dropped) in enumerate(ranks(world, paced, [[1.0, 2.0]] * world)):
        assert events == [whole, *turn, *turn]
        assert dropped
        assert {m.name: (m.samples, m.rank) for m in log.measurements} == {
            "time": ((1.0, 2.0), rank),
            "cpu_time": ((0.0, 0.0), rank),
            "compute_time": ((1.0, 2.0), rank),
            "communication_time": ((1.0, 2.0), rank),
        }


def test_passes_settle_by_the_slowest_rank_of_each(ranks: Ranks) -> None:
    """Two ranks that take turns at being slow are steady together; one unsteady rank is not."""
    turns = [[1.0, 2.0] * 10, [2.0, 1.0] * 10]
    for _, log, _ in ranks(2, paced, turns):
        assert log.slowest == [2.0] * 6
    unsteady = [[1.0] * 20, [0.5 + 0.3 * i for i in range(20)]]
    for _, log, _ in ranks(2, paced, unsteady):
        assert len(log.slowest) == 20
        assert log.slowest[-1] == pytest.approx(6.2)


# ---- compressed transfers ----------------------------------------------------------------------


def test_what_a_compressed_transfer_moves_is_measured(ranks: Ranks) -> None:
    plain = ranks(3, tried, asked("ring"))
    assert all(o.samples("wire_error") == () for o in plain)
    packed = ranks(3, tried, asked("ring", options={"wire_dtype": "bfloat16"}))
    moved = {o.largest("wire_error") for o in packed}
    assert len(moved) == 1
    assert 1e-4 < (moved.pop() or 0) < 0.1
    for one, other in zip(plain, packed, strict=True):
        assert (other.status, other.reason) == ("ok", None)
        assert one.largest("bytes_sent") == one.largest("bytes_formula")
        assert other.largest("bytes_sent") == (one.largest("bytes_sent") or 0) / 2


# ---- extra meters ------------------------------------------------------------------------------


class Counter(Meter):
    """A meter of the role extra: it counts its passes, and which half of a pass ran in each."""

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


def counted(group: Group, of: Trial) -> Outcome:
    METERS.names()
    METERS.register("counter")(Counter)
    try:
        return tried(group, of)
    finally:
        del METERS._objects["counter"]


def test_an_extra_meter_runs_around_every_timed_pass_and_is_in_the_record(ranks: Ranks) -> None:
    for rank, outcome in enumerate(ranks(2, counted, asked(repeats=3))):
        (found,) = [m for m in outcome.measurements if m.name == "passes"]
        assert (found.samples, found.rank) == ((1.0, 2.0, 3.0), rank)
        assert outcome.facts["extra_meters"] == ["counter"]
    assert counted(Group.alone(), asked("sdpa", 64)).samples("passes") == ()
