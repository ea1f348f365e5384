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
from longseq_bench.worker.exception_mapping import outcome_of
from longseq_bench.worker.inputs import Pass, draw, rows_of
from longseq_bench.worker.kernel_workspace import Inside
from longseq_bench.worker.measurement_log import Notes, samples_of
from longseq_bench.worker.messages import Teller
from longseq_bench.worker.passes import (
    bytes_of,
    meaningless,
    meet,
    run_pass,
    synchronize,
    warm_up,
)
from longseq_bench.worker.timing import timed

ROOM_SHARE, ROOM_BYTES = 1.25, 256 * 2**20
"""What a pass with the fast heap may map beyond its budget: blocks that it keeps for later."""

FAR_SHARE = 0.05
"""Memory is far from its budget where the floor is below this share of it."""

_TINY = 1e-30


def probe(trial: Trial, teller: Teller, group: Group | None = None) -> Outcome:
    """The outcome of a trial on this rank, whatever it raises. Only a native death says nothing.

    group: the ranks of the trial; one alone where None.
    """
    group = Group.alone() if group is None else group
    notes = Notes(group.rank)
    try:
        outcome = _probe(trial, teller, group, notes)
    except Exception as error:
        limits.lift_heap_limit()
        outcome = outcome_of(error, teller.phase)
    return notes.onto(outcome)


def _probe(trial: Trial, teller: Teller, group: Group, notes: Notes) -> Outcome:
    if trial.threads:
        torch.set_num_threads(trial.threads)
    make = IMPLEMENTATIONS.get(trial.implementation)
    attention = make(trial.workload, group, **trial.options)
    if reason := meaningless(trial):
        raise UnsupportedError(reason)
    if trial.device == "cuda":
        limits.use_allocator(trial.allocator)
    if trial.device == "cpu" and (blurred := limits.exact_heap()):
        notes.facts["heap"] = blurred
    warm_up(make, trial, group)
    rows = rows_of(attention, trial.seed)
    if trial.fit_only:
        return _fits(attention, trial, rows, teller, notes)
    if _memory_is_far(trial, group):
        one = _quick_pass(attention, trial, rows, teller, notes)
    else:
        one = _exact_pass(attention, trial, rows, teller, notes)
    if over := _over_budget(trial, group, notes, teller):
        return over
    again = _late_by_accounting_alone(trial, notes)
    if not again and (late := _state_time(trial, notes, teller)):
        return late
    _state_cost(attention, trial, notes)
    teller.enter("check")
    wrong = _check(attention, one, rows, notes)
    if wrong:
        return Outcome(status="wrong", reason=wrong, phase="check")
    _wire_error(attention, one, trial.device, notes)
    if again:
        one.out, one.grads, one.aside = None, None, False
        _timed_once(attention, one, trial, teller, notes)
        if late := _state_time(trial, notes, teller):
            return late
    if trial.repeats:
        timed(attention, one, trial, teller, notes)
        if late := _too_slow(trial, notes, teller):
            return late
    return Outcome(status="ok")


def _fits(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes
) -> Outcome:
    """Whether the memory of a pass is there. Of loops whose turns are alike only the first are
    taken, so nothing of what comes out is looked at, and what is left out would hold is not in the
    process: the peak is that of tensors, with what the table says of fused kernels."""
    meta_mode.limit_loops()
    meet(attention.group, teller)
    meter = StoragePeak(trial.device, Inside(torch.get_num_threads()))
    with _under_budget(trial, notes), meter:
        _first_pass(attention, trial, rows, teller, Notes(notes.rank), "loops capped")
    notes.take(meter.measurements())
    notes.add("own_tokens", "1", len(attention.shard.queries))
    notes.facts |= {"memory_meter": meter.name, "fit_only": "loops capped; nothing was checked"}
    notes.facts |= attention.facts()
    return _over_budget(trial, attention.group, notes, teller) or Outcome(status="ok")


def _memory_is_far(trial: Trial, group: Group) -> bool:
    """Whether a search's run may do without exact accounting: time will be its limit."""
    if trial.device != "cpu" or trial.repeats or trial.time_budget is None:
        return False
    budget = trial.memory_budget
    return budget is None or floor_bytes(trial.workload) <= FAR_SHARE * budget * group.size


def _quick_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes
) -> Pass:
    """A pass with the fast heap, which tells the time and an upper bound of the peak: blocks kept
    for later are in it. It is good enough where even that bound is inside every rank's budget."""
    group, here, meter = attention.group, Notes(notes.rank), _peak_meter(trial.device, attention)
    meet(group, teller)
    mapped = limits.mapped_bytes()
    limits.fast_heap()
    if trial.memory_budget:
        limits.limit_heap(round(trial.memory_budget * ROOM_SHARE) + ROOM_BYTES)
    try:
        with meter:
            one = _first_pass(attention, trial, rows, teller, here)
    finally:
        limits.lift_heap_limit()
    bound = meter.measurements()[0].samples[0]
    if trial.memory_budget and group.all_max(bound)[0] > trial.memory_budget:
        del one
        limits.exact_heap()
        return _exact_pass(attention, trial, rows, teller, notes, mapped)
    notes.join(here)
    notes.add("peak_bound", "B", bound)
    return one


def _exact_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes,
    mapped: int | None = None,
) -> Pass:  # fmt: skip
    """The pass under the budget, its peak taken exactly.

    mapped: bytes mapped before anything of the trial was, where that is no longer so.
    """
    meet(attention.group, teller)
    with _under_budget(trial, notes, mapped), _peak_meter(trial.device, attention) as meter:
        one = _first_pass(attention, trial, rows, teller, notes, "exact")
    notes.take(meter.measurements())
    notes.facts["memory_meter"] = meter.name
    notes.exact = True
    return one


def _late_by_accounting_alone(trial: Trial, notes: Notes) -> bool:
    """Whether the exact pass was slower than the time budget allows, and nothing else would tell
    the time: a pass with the fast heap has to, once this one's results have been looked at."""
    late = trial.time_budget is not None and notes.pass_s > trial.time_budget
    return late and notes.exact and trial.device == "cpu" and not trial.repeats


def _state_time(trial: Trial, notes: Notes, teller: Teller) -> Outcome | None:
    notes.add("pass_time", "s", notes.own_pass_s)
    notes.facts["pass_s"] = notes.pass_s
    return _too_slow(trial, notes, teller)


def _first_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes, part: str = ""
) -> Pass:
    """Inputs, plan and one pass. `part` says of what kind it is."""
    teller.enter("inputs")
    one = draw(attention, trial.device, trial.seed, rows, trial.keep)
    teller.enter("plan")
    start = time.perf_counter()
    attention.prepare(trial.device)
    synchronize(trial.device)
    planned = time.perf_counter() - start
    notes.add("own_tokens", "1", len(attention.shard.queries))
    attention.group.traffic.bytes_sent = 0
    _timed_once(attention, one, trial, teller, notes, part)
    notes.add("plan_time", "s", planned + attention.layout_s)
    notes.add("bytes_sent", "B", attention.group.traffic.bytes_sent)
    return one


def _timed_once(
    attention: Attention, one: Pass, trial: Trial, teller: Teller, notes: Notes, part: str = ""
) -> None:
    """A pass that all ranks begin together, as long as on the slowest of them."""
    meet(attention.group, teller)
    start = time.perf_counter()
    run_pass(attention, one, teller, part)
    synchronize(trial.device)
    notes.own_pass_s = time.perf_counter() - start
    notes.pass_s = attention.group.all_max(notes.own_pass_s)[0]


@contextmanager
def _under_budget(trial: Trial, notes: Notes, mapped: int | None = None) -> Iterator[None]:
    """The trial's memory limit, enforced while the block runs."""
    if trial.device == "cuda":
        if trial.memory_budget:
            torch.cuda.empty_cache()
            limits.limit_cuda(trial.memory_budget)
        yield
        return
    if trial.memory_budget and (unbounded := limits.limit_heap(trial.memory_budget, mapped)):
        notes.facts["budget"] = unbounded
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
        return StoragePeak(device, Inside(torch.get_num_threads()))
    return HeapPeak() if HeapPeak.unavailable_reason() is None else TrackedPeak()


def _over_budget(trial: Trial, group: Group, notes: Notes, teller: Teller) -> Outcome | None:
    """Where nothing enforces the budget, the peak decides: the largest of all ranks."""
    enforced = "budget" not in notes.facts
    own = 0.0 if enforced else max(samples_of(notes.measurements, "peak"), default=0.0)
    peak = group.all_max(own)[0]
    if not trial.memory_budget or peak <= trial.memory_budget:
        return None
    how = notes.facts.get("budget", "not enforced on another rank")
    reason = f"the peak was {peak:.0f} bytes; the budget of {trial.memory_budget} is {how}"
    return Outcome(status="oom", reason=reason, phase=teller.phase)


def _state_cost(attention: Attention, trial: Trial, notes: Notes) -> None:
    cost = attention.cost()
    notes.add("flops", "FLOP", cost.flops)
    notes.add("floor", "B", cost.floor_bytes)
    notes.add("bytes_formula", "B", bytes_of(attention, trial))
    shares = attention.measures()
    for name, share in shares.items():
        notes.add(name, "1", share)
    if "density_achieved" in shares:
        notes.add("dense_flops", "FLOP", dense_flops(attention))
    notes.facts |= attention.facts()


def _too_slow(trial: Trial, notes: Notes, teller: Teller) -> Outcome | None:
    """Late where the timed passes, or the one pass of a search, took more than is allowed, each as
    long as on its slowest rank."""
    if trial.repeats and not notes.slowest:
        return None
    took = median(notes.slowest) if notes.slowest else notes.pass_s
    if trial.time_budget is None or took <= trial.time_budget:
        return None
    reason = f"one pass took {took:.3g} s of {trial.time_budget:.3g} s allowed"
    return Outcome(status="timeout", reason=reason, phase=teller.phase)


def _check(attention: Attention, one: Pass, rows: Tensor, notes: Notes) -> str | None:
    """Why some rank's output is wrong, or None, the same on all; the errors are kept either way."""
    assert one.out is not None
    group = attention.group
    own = check(attention, one.drawn, one.out, rows, one.grad_out, one.grads)
    errors = own.agreed(group)
    notes.add("max_error", "1", errors.worst)
    notes.add("zero_rows", "1", zero_rows(one.out, group))
    notes.facts["errors"] = errors.largest
    if not finite([one.out], group):
        return "the output has values that are not finite"
    if not finite(list(one.grads or ()), group):
        return "a gradient has values that are not finite"
    return errors.beyond(attention.coarsest_dtype)


def _wire_error(attention: Attention, one: Pass, device: str, notes: Notes) -> None:
    """How far a compressed transfer moves the output: the largest difference from a pass without
    compression, beside the largest magnitude of its row."""
    plain = getattr(attention, "uncompressed", None)
    if getattr(attention, "wire", None) is None or plain is None:
        return
    assert one.out is not None
    twin: Attention = plain()
    twin.prepare(device)
    with torch.no_grad():
        meet(attention.group)
        exact = twin(*one.drawn)
        worst = 0.0
        for got, want in zip(one.out.flatten(0, 1), exact.flatten(0, 1), strict=True):
            scale = want.float().abs().amax(-1).clamp_min(_TINY)
            apart = (got.float() - want.float()).abs().amax(-1) / scale
            worst = max(worst, float(apart.max()))
    notes.add("wire_error", "1", attention.group.all_max(worst)[0])
