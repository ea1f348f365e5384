"""One trial, inside its own process: build, warm up, one pass under the budget, check, time.

The pass under the budget is the one that is checked and whose peak is taken; its limits are lifted
before anything is computed that is not the trial's own. Exact accounting of the heap slows down
whatever allocates much, so time is measured, and a time budget judged, on passes without it. A
search's run (repeats 0) is such a pass alone where memory is far from its budget, and has one more
where only the exact one was too slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.comm.group import Group
from longseq_bench.cost import floor_bytes
from longseq_bench.kernels import local
from longseq_bench.meters.base import Meter
from longseq_bench.meters.clock import clock_for
from longseq_bench.meters.cuda_memory import CudaMemory
from longseq_bench.meters.heap import HeapPeak
from longseq_bench.meters.tracked import TrackedPeak
from longseq_bench.model import Measurement, Outcome, Trial, Workload
from longseq_bench.probe import limits
from longseq_bench.probe.check import check, checked_rows, zero_rows
from longseq_bench.probe.faults import outcome_of
from longseq_bench.probe.tell import Teller
from longseq_bench.stats import settled

WARM_UP_TOKENS = 1024
"""From 768 query rows up torch's CPU kernel multiplies its largest tiles: MKL then holds the
buffers (4 MiB a thread) that it keeps for good. The tail modulo this goes with it, because oneDNN
compiles a kernel for every shape it meets, and keeps that too. None is charged to the trial."""

TIMED_WARM_UPS = 1
ROOM_SHARE, ROOM_BYTES = 1.25, 256 * 2**20
"""What a pass with the fast heap may map beyond its budget: blocks that it keeps for later."""

FAR_SHARE = 0.05
"""Memory is far from its budget where the floor is below this share of it."""

SETTLED_WITHIN = 0.02


@dataclass
class Pass:
    """What one pass takes and leaves."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor | None
    out: Tensor | None = None
    grads: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass
class Notes:
    """Measurements and facts gathered so far, kept whatever happens next."""

    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, unit: str, value: float) -> None:
        self.measurements.append(Measurement(name=name, unit=unit, samples=(value,)))

    def onto(self, outcome: Outcome) -> Outcome:
        return outcome.model_copy(
            update={
                "measurements": (*outcome.measurements, *self.measurements),
                "facts": {**self.facts, **outcome.facts},
            }
        )


def probe(trial: Trial, teller: Teller) -> Outcome:
    """The outcome of a trial, whatever it raises. Only a native death says nothing."""
    notes = Notes()
    try:
        outcome = _probe(trial, teller, notes)
    except Exception as error:
        limits.lift_heap_limit()
        outcome = outcome_of(error, teller.phase)
    return notes.onto(outcome)


def _probe(trial: Trial, teller: Teller, notes: Notes) -> Outcome:
    w = trial.workload
    if trial.threads:
        torch.set_num_threads(trial.threads)
    make = IMPLEMENTATIONS.get(trial.implementation)
    attention = make(w, Group.alone(), **trial.options)
    if trial.device == "cpu" and (blurred := limits.exact_heap()):
        notes.facts["heap"] = blurred
    _warm_up(make, trial)
    rows = checked_rows(w.seq_len, trial.seed)
    if _memory_is_far(trial):
        one = _quick_pass(attention, trial, rows, teller, notes)
    else:
        one = _exact_pass(attention, trial, rows, teller, notes)
    notes.add("pass_time", "s", notes.facts["pass_s"])
    for verdict in (_over_budget(trial, notes, teller), _too_slow(trial, notes, teller)):
        if verdict:
            return verdict
    _state_cost(attention, notes)
    teller.enter("check")
    wrong = _check(attention, one, rows, w, notes)
    if wrong:
        return Outcome(status="wrong", reason=wrong, phase="check")
    if trial.repeats:
        _time(attention, one, trial, teller, notes)
        if late := _too_slow(trial, notes, teller):
            return late
    return Outcome(status="ok")


def _memory_is_far(trial: Trial) -> bool:
    """Whether a search's run may do without exact accounting: time will be its limit."""
    if trial.device != "cpu" or trial.repeats or trial.time_budget is None:
        return False
    budget = trial.memory_budget
    return budget is None or floor_bytes(trial.workload) <= FAR_SHARE * budget


def _quick_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes
) -> Pass:
    """A pass with the fast heap, which tells the time and an upper bound of the peak: blocks kept
    for later are in it. It is good enough where even that bound is inside the budget."""
    here, meter = Notes(), _peak_meter(trial.device)
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
    if trial.memory_budget and bound > trial.memory_budget:
        del one
        limits.exact_heap()
        return _exact_pass(attention, trial, rows, teller, notes, mapped)
    notes.measurements += here.measurements
    notes.facts |= here.facts
    notes.add("peak_bound", "B", bound)
    return one


def _exact_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes,
    mapped: int | None = None,
) -> Pass:  # fmt: skip
    """The pass under the budget, its peak taken exactly. Where it was slower than the time budget
    allows, and nothing else will tell the time, a pass with the fast heap does.

    mapped: bytes mapped before anything of the trial was, where that is no longer so.
    """
    with _under_budget(trial, notes, mapped), _peak_meter(trial.device) as meter:
        one = _first_pass(attention, trial, rows, teller, notes, "exact")
    notes.measurements += meter.measurements()
    notes.facts["memory_meter"] = meter.name
    late = trial.time_budget is not None and notes.facts["pass_s"] > trial.time_budget
    if late and trial.device == "cpu" and not trial.repeats:
        start = time.perf_counter()
        run_pass(attention, one, teller)
        notes.facts["pass_s"] = time.perf_counter() - start
    return one


def _first_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes, part: str = ""
) -> Pass:
    """Inputs, plan and one pass. `part` says of what kind it is."""
    teller.enter("inputs")
    one = _inputs(trial.workload, trial.device, trial.seed, rows)
    teller.enter("plan")
    start = time.perf_counter()
    attention.plan(trial.device)
    _synchronize(trial.device)
    notes.add("plan_time", "s", time.perf_counter() - start)
    start = time.perf_counter()
    run_pass(attention, one, teller, part)
    _synchronize(trial.device)
    notes.facts["pass_s"] = time.perf_counter() - start
    return one


def run_pass(attention: Attention, one: Pass, teller: Teller | None = None, part: str = "") -> None:
    """Forward, and in train backward; leaves the output and the gradients in `one`."""
    if teller:
        teller.enter("forward", part)
    one.out = attention(*one.inputs)
    if one.grad_out is not None:
        if teller:
            teller.enter("backward", part)
        dq, dk, dv = torch.autograd.grad(one.out, one.inputs, one.grad_out)
        one.grads = dq, dk, dv
        one.out = one.out.detach()


def _inputs(w: Workload, device: str, seed: int, rows: Tensor) -> Pass:
    """Seeded normal q, k, v; in train an output gradient that is zero outside the checked rows."""
    draw = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, w.dtype)

    def normal(heads: int) -> Tensor:
        shape = (w.batch, heads, w.seq_len, w.head_dim)
        made = torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw)
        return made.requires_grad_(w.train)

    q, k, v = normal(w.heads), normal(w.kv_heads), normal(w.kv_heads)
    if not w.train:
        return Pass((q, k, v), None)
    # laid out as (B, N, Hq, D), as a model's next layer gives it and fused kernels take it uncopied
    laid_out = torch.empty((w.batch, w.seq_len, w.heads, w.head_dim), dtype=dtype, device=device)
    grad_out = laid_out.zero_().transpose(1, 2)
    own = torch.randn(
        (w.batch, w.heads, len(rows), w.head_dim), generator=draw, dtype=dtype, device=device
    )
    grad_out[:, :, rows.to(device)] = own
    return Pass((q, k, v), grad_out)


def _warm_up(make: type[Attention], trial: Trial) -> None:
    """A short pass of the same kind: threads, libraries and caches come before the budget."""
    shape = trial.workload.model_dump() | {"batch": 1}
    tokens = trial.workload.seq_len
    shape["seq_len"] = min(tokens, WARM_UP_TOKENS + tokens % WARM_UP_TOKENS)
    small = Workload.model_validate(shape)
    attention = make(small, Group.alone(), **trial.options)
    one = _inputs(small, trial.device, trial.seed, torch.zeros(1, dtype=torch.long))
    attention.plan(trial.device)
    run_pass(attention, one)
    if trial.device == "cpu":
        _hold_library_buffers(small)
    _synchronize(trial.device)
    attention.multiplicity(torch.arange(1).numpy(), torch.arange(1).numpy(), 0)


def _hold_library_buffers(w: Workload) -> None:
    """One call of the fused kernel at its largest tiles, whatever the implementation calls."""
    shape = (torch.get_num_threads(), 1, WARM_UP_TOKENS, w.head_dim)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, w.dtype)) for _ in range(3))
    out, lse = local.forward(q, k, v)
    if w.train:
        local.backward(out, q, k, v, out, lse)


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


def _peak_meter(device: str) -> Meter:
    if device == "cuda":
        return CudaMemory()
    return HeapPeak() if HeapPeak.why_not() is None else TrackedPeak()


def _over_budget(trial: Trial, notes: Notes, teller: Teller) -> Outcome | None:
    """Where nothing enforces the budget, the peak decides."""
    peak = max((m.samples[0] for m in notes.measurements if m.name == "peak"), default=0.0)
    if not trial.memory_budget or "budget" not in notes.facts or peak <= trial.memory_budget:
        return None
    reason = f"the peak was {peak:.0f} bytes; the budget of {trial.memory_budget} is"
    return Outcome(status="oom", reason=f"{reason} {notes.facts['budget']}", phase=teller.phase)


def _state_cost(attention: Attention, notes: Notes) -> None:
    cost = attention.cost()
    notes.add("flops", "FLOP", cost.flops)
    notes.add("floor", "B", cost.floor_bytes)
    notes.add("bytes_sent", "B", cost.bytes_sent)
    for name, share in attention.measures().items():
        notes.add(name, "1", share)
    notes.facts |= attention.facts()


def _too_slow(trial: Trial, notes: Notes, teller: Teller) -> Outcome | None:
    """Late where the timed passes, or the one pass of a search, took more than is allowed."""
    timed = [s for m in notes.measurements if m.name == "time" for s in m.samples]
    if trial.repeats and not timed:
        return None
    took = median(timed) if timed else notes.facts["pass_s"]
    if trial.time_budget is None or took <= trial.time_budget:
        return None
    reason = f"one pass took {took:.3g} s of {trial.time_budget:.3g} s allowed"
    return Outcome(status="timeout", reason=reason, phase=teller.phase)


def _check(attention: Attention, one: Pass, rows: Tensor, w: Workload, notes: Notes) -> str | None:
    """Why the output is wrong, or None; the errors are kept either way."""
    assert one.out is not None
    errors = check(attention, one.inputs, one.out, rows, one.grad_out, one.grads)
    notes.add("max_error", "1", errors.worst)
    notes.add("zero_rows", "1", zero_rows(one.out))
    notes.facts["errors"] = errors.largest
    if not torch.isfinite(one.out).all():
        return "the output has values that are not finite"
    return errors.beyond(w.dtype)


def _time(attention: Attention, one: Pass, trial: Trial, teller: Teller, notes: Notes) -> None:
    """Timed passes until the median is known to 2 % or the cap is reached; every sample is kept."""
    one.out = one.grads = None
    if one.grad_out is not None:
        one.grad_out.normal_()
    clock = clock_for(trial.device)
    for _ in range(TIMED_WARM_UPS if trial.repeats > 1 else 0):
        teller.enter("time", "warm-up")
        run_pass(attention, one)
        one.out = one.grads = None
    end = time.perf_counter() + trial.time_cap
    while len(clock.wall) < trial.repeats:
        teller.enter("time", f"pass {len(clock.wall) + 1}")
        with clock:
            run_pass(attention, one)
        one.out = one.grads = None
        if settled(clock.wall, SETTLED_WITHIN) or time.perf_counter() > end:
            break
    notes.measurements += clock.measurements()
    notes.facts["timer"] = clock.name


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
