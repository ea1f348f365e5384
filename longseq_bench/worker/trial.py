"""One trial, inside its own process: build, warm up, one pass under the budget, check, time.

The pass under the budget is the one that is checked and whose peak is taken; its limits are lifted
before anything is computed that is not the trial's own. Exact accounting of the heap slows down
whatever allocates much, so time is measured, and a time budget judged, on passes without it. A
search's run (repeats 0) is such a pass alone where memory is far from its budget, and has one more
where only the exact one was too slow.

Of several ranks each runs this in a process of its own. Whatever decides what comes next is agreed
on by all, so that none waits for a pass that another does not run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.distributed.group import Group
from longseq_bench.meters.base import Meter
from longseq_bench.meters.cuda_memory import CudaMemory
from longseq_bench.meters.heap_peak import HeapPeak
from longseq_bench.meters.storage_peak import StoragePeak
from longseq_bench.meters.tracked_peak import TrackedPeak
from longseq_bench.worker import limits
from longseq_bench.worker.check import check, finite, zero_rows
from longseq_bench.worker.dense_baseline import dense_flops
from longseq_bench.worker.exception_mapping import outcome_of_exception
from longseq_bench.worker.inputs import Pass, draw, rows_of
from longseq_bench.worker.kernel_workspace import KernelWorkspace
from longseq_bench.worker.measurement_log import MeasurementLog, samples_of
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.passes import (
    bytes_sent_by_formula,
    run_pass,
    synchronize,
    unsupported_setting,
    wait_for_all_ranks,
    warm_up,
)
from longseq_bench.worker.timing import timed

ROOM_SHARE, ROOM_BYTES = 1.25, 256 * 2**20
"""What a pass with the fast heap may map beyond its budget: blocks that it keeps for later."""

FAR_SHARE = 0.05
"""Memory is far from its budget where the floor is below this share of it."""

_TINY = 1e-30


def run_trial(trial: Trial, sender: MessageSender, group: Group | None = None) -> Outcome:
    """The outcome of a trial on this rank, whatever it raises. Only a native death says nothing.

    group: the ranks of the trial; one alone where None.
    """
    group = Group.alone() if group is None else group
    log = MeasurementLog(group.rank)
    try:
        outcome = _probe(trial, sender, group, log)
    except Exception as error:
        limits.lift_heap_limit()
        outcome = outcome_of_exception(error, sender.phase)
    return log.attach_to(outcome)


def _probe(trial: Trial, sender: MessageSender, group: Group, log: MeasurementLog) -> Outcome:
    if trial.threads:
        torch.set_num_threads(trial.threads)
    make = IMPLEMENTATIONS.get(trial.implementation)
    attention = make(trial.workload, group, **trial.options)
    if reason := unsupported_setting(trial):
        raise UnsupportedError(reason)
    if trial.device == "cuda":
        limits.use_allocator(trial.allocator)
    if trial.device == "cpu" and (blurred := limits.exact_heap()):
        log.facts["heap"] = blurred
    warm_up(make, trial, group)
    rows = rows_of(attention, trial.seed)
    if trial.fit_only:
        return _fits(attention, trial, rows, sender, log)
    if _memory_is_far(trial, group):
        one = _quick_pass(attention, trial, rows, sender, log)
    else:
        one = _exact_pass(attention, trial, rows, sender, log)
    if over := _over_budget(trial, group, log, sender):
        return over
    again = _late_by_accounting_alone(trial, log)
    if not again and (late := _state_time(trial, log, sender)):
        return late
    _state_cost(attention, trial, log)
    sender.start_phase("check")
    wrong = _check(attention, one, rows, log)
    if wrong:
        return Outcome(status="wrong", reason=wrong, phase="check")
    _wire_error(attention, one, trial.device, log)
    if again:
        one.out, one.grads, one.aside = None, None, False
        _timed_once(attention, one, trial, sender, log)
        if late := _state_time(trial, log, sender):
            return late
    if trial.repeats:
        timed(attention, one, trial, sender, log)
        if late := _too_slow(trial, log, sender):
            return late
    return Outcome(status="ok")


def _fits(
    attention: Attention, trial: Trial, rows: Tensor, sender: MessageSender, log: MeasurementLog
) -> Outcome:
    """Whether the memory of a pass is there. Of loops whose turns are alike only the first are
    taken, so nothing of what comes out is looked at, and what is left out would hold is not in the
    process: the peak is that of tensors, with what the table says of fused kernels."""
    meta_mode.limit_loops()
    wait_for_all_ranks(attention.group, sender)
    meter = StoragePeak(trial.device, KernelWorkspace(torch.get_num_threads()))
    with _under_budget(trial, log), meter:
        _first_pass(attention, trial, rows, sender, MeasurementLog(log.rank), "loops capped")
    log.extend(meter.measurements())
    log.add("own_tokens", "1", len(attention.shard.queries))
    log.facts |= {"memory_meter": meter.name, "fit_only": "loops capped; nothing was checked"}
    log.facts |= attention.facts()
    return _over_budget(trial, attention.group, log, sender) or Outcome(status="ok")


def _memory_is_far(trial: Trial, group: Group) -> bool:
    """Whether a search's run may do without exact accounting: time will be its limit."""
    if trial.device != "cpu" or trial.repeats or trial.time_budget is None:
        return False
    budget = trial.memory_budget
    return budget is None or floor_bytes(trial.workload) <= FAR_SHARE * budget * group.size


def _quick_pass(
    attention: Attention, trial: Trial, rows: Tensor, sender: MessageSender, log: MeasurementLog
) -> Pass:
    """A pass with the fast heap, which tells the time and an upper bound of the peak: blocks kept
    for later are in it. It is good enough where even that bound is inside every rank's budget."""
    group, here, meter = (
        attention.group,
        MeasurementLog(log.rank),
        _peak_meter(trial.device, attention),
    )
    wait_for_all_ranks(group, sender)
    mapped = limits.mapped_bytes()
    limits.fast_heap()
    if trial.memory_budget:
        limits.limit_heap(round(trial.memory_budget * ROOM_SHARE) + ROOM_BYTES)
    try:
        with meter:
            one = _first_pass(attention, trial, rows, sender, here)
    finally:
        limits.lift_heap_limit()
    bound = meter.measurements()[0].samples[0]
    if trial.memory_budget and group.all_max(bound)[0] > trial.memory_budget:
        del one
        limits.exact_heap()
        return _exact_pass(attention, trial, rows, sender, log, mapped)
    log.merge(here)
    log.add("peak_bound", "B", bound)
    return one


def _exact_pass(
    attention: Attention, trial: Trial, rows: Tensor, sender: MessageSender, log: MeasurementLog,
    mapped: int | None = None,
) -> Pass:  # fmt: skip
    """The pass under the budget, its peak taken exactly.

    mapped: bytes mapped before anything of the trial was, where that is no longer so.
    """
    wait_for_all_ranks(attention.group, sender)
    with _under_budget(trial, log, mapped), _peak_meter(trial.device, attention) as meter:
        one = _first_pass(attention, trial, rows, sender, log, "exact")
    log.extend(meter.measurements())
    log.facts["memory_meter"] = meter.name
    log.exact = True
    return one


def _late_by_accounting_alone(trial: Trial, log: MeasurementLog) -> bool:
    """Whether the exact pass was slower than the time budget allows, and nothing else would tell
    the time: a pass with the fast heap has to, once this one's results have been looked at."""
    late = trial.time_budget is not None and log.pass_s > trial.time_budget
    return late and log.exact and trial.device == "cpu" and not trial.repeats


def _state_time(trial: Trial, log: MeasurementLog, sender: MessageSender) -> Outcome | None:
    log.add("pass_time", "s", log.own_pass_s)
    log.facts["pass_s"] = log.pass_s
    return _too_slow(trial, log, sender)


def _first_pass(
    attention: Attention,
    trial: Trial,
    rows: Tensor,
    sender: MessageSender,
    log: MeasurementLog,
    part: str = "",
) -> Pass:
    """Inputs, plan and one pass. `part` says of what kind it is."""
    sender.start_phase("inputs")
    one = draw(attention, trial.device, trial.seed, rows, trial.keep)
    sender.start_phase("plan")
    start = time.perf_counter()
    attention.prepare(trial.device)
    synchronize(trial.device)
    planned = time.perf_counter() - start
    log.add("own_tokens", "1", len(attention.shard.queries))
    attention.group.traffic.bytes_sent = 0
    _timed_once(attention, one, trial, sender, log, part)
    log.add("plan_time", "s", planned + attention.layout_s)
    log.add("bytes_sent", "B", attention.group.traffic.bytes_sent)
    return one


def _timed_once(
    attention: Attention,
    one: Pass,
    trial: Trial,
    sender: MessageSender,
    log: MeasurementLog,
    part: str = "",
) -> None:
    """A pass that all ranks begin together, as long as on the slowest of them."""
    wait_for_all_ranks(attention.group, sender)
    start = time.perf_counter()
    run_pass(attention, one, sender, part)
    synchronize(trial.device)
    log.own_pass_s = time.perf_counter() - start
    log.pass_s = attention.group.all_max(log.own_pass_s)[0]


@contextmanager
def _under_budget(trial: Trial, log: MeasurementLog, mapped: int | None = None) -> Iterator[None]:
    """The trial's memory limit, enforced while the block runs."""
    if trial.device == "cuda":
        if trial.memory_budget:
            torch.cuda.empty_cache()
            limits.limit_cuda(trial.memory_budget)
        yield
        return
    if trial.memory_budget and (unbounded := limits.limit_heap(trial.memory_budget, mapped)):
        log.facts["budget"] = unbounded
    try:
        yield
    finally:
        limits.lift_heap_limit()
        limits.fast_heap()


def _peak_meter(device: str, attention: Attention) -> Meter:
    if device == "cuda":
        return CudaMemory()
    if attention.on_host:
        # pages of mapped files are resident as others are, and are not what the budget is for
        return StoragePeak(device, KernelWorkspace(torch.get_num_threads()))
    return HeapPeak() if HeapPeak.unavailable_reason() is None else TrackedPeak()


def _over_budget(
    trial: Trial, group: Group, log: MeasurementLog, sender: MessageSender
) -> Outcome | None:
    """Where nothing enforces the budget, the peak decides: the largest of all ranks."""
    enforced = "budget" not in log.facts
    own = 0.0 if enforced else max(samples_of(log.measurements, "peak"), default=0.0)
    peak = group.all_max(own)[0]
    if not trial.memory_budget or peak <= trial.memory_budget:
        return None
    how = log.facts.get("budget", "not enforced on another rank")
    reason = f"the peak was {peak:.0f} bytes; the budget of {trial.memory_budget} is {how}"
    return Outcome(status="oom", reason=reason, phase=sender.phase)


def _state_cost(attention: Attention, trial: Trial, log: MeasurementLog) -> None:
    cost = attention.cost()
    log.add("flops", "FLOP", cost.flops)
    log.add("floor", "B", cost.floor_bytes)
    log.add("bytes_formula", "B", bytes_sent_by_formula(attention, trial))
    shares = attention.measures()
    for name, share in shares.items():
        log.add(name, "1", share)
    if "density_achieved" in shares:
        log.add("dense_flops", "FLOP", dense_flops(attention))
    log.facts |= attention.facts()


def _too_slow(trial: Trial, log: MeasurementLog, sender: MessageSender) -> Outcome | None:
    """Late where the timed passes, or the one pass of a search, took more than is allowed, each as
    long as on its slowest rank."""
    if trial.repeats and not log.slowest:
        return None
    took = median(log.slowest) if log.slowest else log.pass_s
    if trial.time_budget is None or took <= trial.time_budget:
        return None
    reason = f"one pass took {took:.3g} s of {trial.time_budget:.3g} s allowed"
    return Outcome(status="timeout", reason=reason, phase=sender.phase)


def _check(attention: Attention, one: Pass, rows: Tensor, log: MeasurementLog) -> str | None:
    """Why some rank's output is wrong, or None, the same on all; the errors are kept either way."""
    assert one.out is not None
    group = attention.group
    own = check(attention, one.drawn, one.out, rows, one.grad_out, one.grads)
    errors = own.agreed(group)
    log.add("max_error", "1", errors.worst)
    log.add("zero_rows", "1", zero_rows(one.out, group))
    log.facts["errors"] = errors.largest
    if not finite([one.out], group):
        return "the output has values that are not finite"
    if not finite(list(one.grads or ()), group):
        return "a gradient has values that are not finite"
    return errors.beyond(attention.coarsest_dtype)


def _wire_error(attention: Attention, one: Pass, device: str, log: MeasurementLog) -> None:
    """How far a compressed transfer moves the output: the largest difference from a pass without
    compression, beside the largest magnitude of its row."""
    plain = getattr(attention, "uncompressed", None)
    if getattr(attention, "wire", None) is None or plain is None:
        return
    assert one.out is not None
    twin: Attention = plain()
    twin.prepare(device)
    with torch.no_grad():
        wait_for_all_ranks(attention.group)
        exact = twin(*one.drawn)
        worst = 0.0
        for got, want in zip(one.out.flatten(0, 1), exact.flatten(0, 1), strict=True):
            scale = want.float().abs().amax(-1).clamp_min(_TINY)
            apart = (got.float() - want.float()).abs().amax(-1) / scale
            worst = max(worst, float(apart.max()))
    log.add("wire_error", "1", attention.group.all_max(worst)[0])
