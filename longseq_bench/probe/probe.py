"""One trial, inside its own process: build, warm up, one pass under the budget, check, time.

The pass under the budget is the one that is checked and whose peak is taken; its limits are lifted
before anything is computed that is not the trial's own. Timing follows with an allocator that is
not slowed down by exact accounting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.comm.group import Group
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
    with _under_budget(trial, notes), _peak_meter(trial.device) as meter:
        one = _first_pass(attention, trial, rows, teller, notes)
    _after_pass(attention, meter, notes)
    peak = next((m.samples[0] for m in notes.measurements if m.name == "peak"), 0.0)
    if trial.memory_budget and "budget" in notes.facts and peak > trial.memory_budget:
        reason = f"the peak was {peak:.0f} bytes; the budget of {trial.memory_budget} is"
        return Outcome(status="oom", reason=f"{reason} {notes.facts['budget']}", phase=teller.phase)
    if trial.time_budget and notes.facts["pass_s"] > trial.time_budget:
        return Outcome(status="timeout", reason=_too_slow(trial, notes), phase=teller.phase)
    teller.enter("check")
    wrong = _check(attention, one, rows, w, notes)
    if wrong:
        return Outcome(status="wrong", reason=wrong, phase="check")
    if trial.repeats:
        _time(attention, one, trial, teller, notes)
    return Outcome(status="ok")


def _first_pass(
    attention: Attention, trial: Trial, rows: Tensor, teller: Teller, notes: Notes
) -> Pass:
    """Inputs, plan and one pass, all inside the budget."""
    teller.enter("inputs")
    one = _inputs(trial.workload, trial.device, trial.seed, rows)
    teller.enter("plan")
    start = time.perf_counter()
    attention.plan(trial.device)
    _synchronize(trial.device)
    notes.add("plan_time", "s", time.perf_counter() - start)
    start = time.perf_counter()
    run_pass(attention, one, teller)
    _synchronize(trial.device)
    notes.facts["pass_s"] = time.perf_counter() - start
    return one


def run_pass(attention: Attention, one: Pass, teller: Teller | None = None) -> None:
    """Forward, and in train backward; leaves the output and the gradients in `one`."""
    if teller:
        teller.enter("forward")
    one.out = attention(*one.inputs)
    if one.grad_out is not None:
        if teller:
            teller.enter("backward")
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
def _under_budget(trial: Trial, notes: Notes) -> Iterator[None]:
    """The trial's memory limit, enforced while the block runs."""
    if trial.device == "cuda":
        if trial.memory_budget:
            torch.cuda.empty_cache()
            limits.limit_cuda(trial.memory_budget)
        yield
        return
    if trial.memory_budget and (unbounded := limits.limit_heap(trial.memory_budget)):
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


def _after_pass(attention: Attention, meter: Meter, notes: Notes) -> None:
    notes.measurements += meter.measurements()
    notes.add("pass_time", "s", notes.facts["pass_s"])
    cost = attention.cost()
    notes.add("flops", "FLOP", cost.flops)
    notes.add("floor", "B", cost.floor_bytes)
    notes.add("bytes_sent", "B", cost.bytes_sent)
    for name, share in attention.measures().items():
        notes.add(name, "1", share)
    notes.facts |= {"memory_meter": meter.name, **attention.facts()}


def _too_slow(trial: Trial, notes: Notes) -> str:
    return f"one pass took {notes.facts['pass_s']:.3g} s of {trial.time_budget:.3g} s allowed"


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
    for _ in range(TIMED_WARM_UPS):
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
