"""Timed passes, and over several ranks the split into computing and communication.

All ranks start a pass together; that wait is in no sample. A pass takes as long as on its slowest
rank. Over several ranks three kinds of pass alternate, so that drift affects them equally: complete
passes, passes that only compute, and passes that only communicate. A sparse attention alternates
with the dense baseline (dense_baseline.py). Meters of the role `extra` run around complete passes.

On CUDA the device is kept busy before the first timed pass until its clocks have
risen, and several short passes are one sample.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import Trial
from longseq_bench.core.stats import settled
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.meters.base import Meter, MeterContext, available_meters
from longseq_bench.meters.clock import MIN_HEAD_START_S, Clock, CudaClock, clock_for
from longseq_bench.worker import limits
from longseq_bench.worker.dense_baseline import dense_baseline_for
from longseq_bench.worker.inputs import Pass
from longseq_bench.worker.messages import MeasurementLog, MessageSender
from longseq_bench.worker.passes import run_forward, run_pass
from longseq_bench.worker.repeat_check import RepeatCheck

_HALVES = {
    "compute_time": ("computing", {"communicate": False}),
    "communication_time": ("transfers", {"compute": False}),
}
"""Passes of which only one half runs: their measurement, their name, and Group.only's switches.

Without the other half the output is not valid; it is dropped."""

TIMED_WARM_UPS = 1
LONG_S = 1.0
"""After a warm-up pass that takes this long, a GPU needs no other one."""
SETTLED_WITHIN = 0.02

REST_S = 0.01
"""Pause before a timed pass of a kernel with threads of its own. torch's threads spin for some
milliseconds after an operation like a check, and such kernels were up to 20 % slower meanwhile.
torch's own kernels have no pause: after it their threads must wake, which cost 4 % of 4 ms."""


def run_timed_passes(
    attention: Attention, one: Pass, check: RepeatCheck, trial: Trial, sender: MessageSender,
    log: MeasurementLog,
) -> None:  # fmt: skip
    """Run passes until the slowest rank's median is known to 2 %, or the time cap is reached.

    Every rank keeps all of its own samples. The results in `one` are dropped; `check` sees those of
    every pass. Passes of the dense baseline don't count for the cap, so that a sparse attention is
    timed as often as any other.
    """
    group = attention.group
    one.out = one.grads = None
    one.keep_output = False
    if one.grad_out is not None:
        one.grad_out.normal_()
    clock = clock_for(trial.device)
    has_halves = group.size > 1 and attention.counts_traffic
    halves = {name: clock_for(trial.device) for name in _HALVES if has_halves}
    extra = available_meters("extra", MeterContext(trial.device, attention.on_host))
    warm_ups = TIMED_WARM_UPS if trial.repeats > 1 else 0
    dense = dense_baseline_for(attention, one, trial, warm_ups, log)
    for _ in range(warm_ups):
        _warm_up(attention, one, check, sender)
    if warm_ups and (log.compiled or log.pass_s < LONG_S):
        # a pass in place spends its inputs, and an extra meter has one sample per pass
        can_batch = trial.keep != "nothing" and not extra
        _prepare_cuda_clocks([clock, *halves.values()], attention, one, check, sender, can_batch)
    layout_s: list[float] = []
    end = time.perf_counter() + trial.time_cap
    while len(clock.wall) < trial.repeats:
        part = f"pass {len(clock.wall) + 1}"
        sender.start_phase("check", part)
        check.change_inputs(one)
        _time_pass(attention, one, clock, sender, part, extra, trial.allocator == "fresh")
        sender.start_phase("check", part)
        check.add(one)
        layout_s += filter(None, [attention.layout_s])
        for name, half in halves.items():
            part, switches = _HALVES[name]
            with group.only(**switches):
                of_pass = f"{part} of pass {len(clock.wall)}"
                _time_pass(attention, one, half, sender, of_pass, fresh=trial.allocator == "fresh")
            one.out = one.grads = None
        if dense:
            end += dense.run(sender, clock.wall[-1])
        late = time.perf_counter() > end
        slowest, stop = group.all_max(clock.wall[-1], float(late))
        log.slowest.append(slowest)
        if settled(log.slowest, SETTLED_WITHIN) or stop:
            break
    _log_meters(log, clock, extra, halves)
    if layout_s:
        log.add("plan_time", "s", *layout_s)
    if dense:
        dense.add_to(log)
        sender.start_phase("time")


def _warm_up(attention: Attention, one: Pass, check: RepeatCheck, sender: MessageSender) -> None:
    """Run an untimed pass. Its forward checks every row; a backward is run with v as it was."""
    check.change_inputs(one)
    with check.every_row.warm_up(one):
        sender.start_phase("time", "warm-up")
        run_forward(attention, one)
        sender.start_phase("check", "every row")
    if one.grad_out is not None:
        check.change_inputs(one)
        sender.start_phase("time", "warm-up")
        run_pass(attention, one)
        sender.start_phase("check", "warm-up")
        check.add(one)


def _prepare_cuda_clocks(
    clocks: Sequence[Clock], attention: Attention, one: Pass, check: RepeatCheck,
    sender: MessageSender, can_batch: bool,
) -> None:  # fmt: skip
    """Prepare the clocks that measure a CUDA device; there are none on a CPU."""

    def time_pass(clock: CudaClock) -> None:
        sender.start_phase("check", "warm-up")
        check.change_inputs(one)
        _time_pass(attention, one, clock, sender, "warm-up")
        one.out = one.grads = None

    if found := [clock for clock in clocks if isinstance(clock, CudaClock)]:
        prepare_clocks(found, time_pass, attention.group, can_batch)


def _log_meters(
    log: MeasurementLog, clock: Clock, extra: list[Meter], halves: dict[str, Clock]
) -> None:
    for meter in (clock, *extra):
        log.extend(meter.measurements())
    for name, half in halves.items():
        log.add(name, "s", *half.wall)
    batch = f", mean of {clock.passes} passes a sample" if clock.passes > 1 else ""
    log.facts["timer"] = clock.name + batch
    if extra:
        log.facts["extra_meters"] = [meter.name for meter in extra]


def _time_pass(
    attention: Attention, one: Pass, clock: Clock, sender: MessageSender, part: str,
    extra: list[Meter] | None = None, fresh: bool = False,
) -> None:  # fmt: skip
    """Run a pass under the clock, which starts when all ranks are ready.

    fresh: it writes to memory that the process has not used yet.
    """
    sender.start_phase("time", part)
    if fresh:
        limits.release_free_memory()
    if native.has_threads():
        time.sleep(REST_S)
    with ExitStack() as meters:
        for meter in extra or ():
            meters.enter_context(meter)
        attention.group.barrier()
        with clock:
            for _ in range(clock.passes):
                run_pass(attention, one)


WARM_S = 0.2
"""Seconds of work after which a GPU has left its idle clocks."""

SAMPLE_S = 1e-3
"""A sample takes at least about this long."""
MAX_PASSES = 50
"""Maximum number of passes of a sample."""

HEAD_START_FACTOR = 1.2
MAX_HEAD_START_S = 0.02


def prepare_clocks(
    clocks: Sequence[CudaClock], time_pass: Callable[[CudaClock], None], group: Group,
    can_batch: bool,
) -> None:  # fmt: skip
    """Run passes until the device was busy for 200 ms, then set up the clocks by the last pass.

    Every rank runs the same number of passes, and gets the same head start and batches.

    Args:
        clocks: those of the timed passes, which keep no sample of this.
        time_pass: runs a pass under the clock that it gets.
        group: all ranks of the trial.
        can_batch: if a pass may follow another one without new inputs.
    """
    warming, busy_s = CudaClock(clocks[0].context), 0.0
    while busy_s < WARM_S:
        time_pass(warming)
        pass_s, dispatch_s = group.all_max(warming.wall[-1], warming.dispatch_s)
        busy_s += pass_s + warming.head_start_s
        # the first passes may have measured the host
        warming.head_start_s = head_start_of(dispatch_s)
    passes = passes_of_a_sample(pass_s) if can_batch else 1
    for clock in clocks:
        clock.passes = passes
        clock.head_start_s = head_start_of(dispatch_s * passes)


def head_start_of(dispatch_s: float) -> float:
    """Return the head start of the host, in s, for work that it issues in `dispatch_s`."""
    return min(max(HEAD_START_FACTOR * dispatch_s, MIN_HEAD_START_S), MAX_HEAD_START_S)


def passes_of_a_sample(pass_s: float) -> int:
    """Return the number of passes between two events, for passes of `pass_s` seconds."""
    return min(max(math.ceil(SAMPLE_S / max(pass_s, 1e-9)), 1), MAX_PASSES)
