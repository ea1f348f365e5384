"""One trial in its own process: build, warm up, one pass under the budget, check, time.

`_run_steps` is the life of a trial; read it first. `exception_mapping.py` turns an exception into
an outcome, and distinguishes out of memory from an error. A native crash reports nothing here; the
parent reads it from the exit status (launchers/exit_status.py).

The pass under the budget gives the peak memory, and its output is checked. The memory limit is
lifted before the harness computes anything of its own. Exact accounting of the heap slows down code
that allocates often, so it is never used in timed passes, and a pass that was late under it is
timed again before it counts as a timeout. So is a pass in which a rank compiled something.

A step of a search (repeats 0) has no timed passes. It is one pass, with exact accounting or, far
from the budget, with an upper bound of the peak. It runs a second pass with exact accounting if
that bound exceeds the budget, and one without if the first was too late. Every row is checked only
if the length runs again (round > 0), which confirms it.

Over several ranks, every rank runs this module in its own process. All ranks agree on every
decision about the next pass, so that no rank waits for a pass that another one skips.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.attention.base import Attention
from longseq_bench.attention.own_function import find_implementation
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import host_memory
from longseq_bench.meters.base import MeterContext, find_meter
from longseq_bench.meters.storage_peak import StoragePeak
from longseq_bench.worker import limits
from longseq_bench.worker.check import agree, all_finite, check, count_zero_rows, find_invalid
from longseq_bench.worker.compile_watch import CompileWatch
from longseq_bench.worker.copy_bandwidth import measure_copy_bandwidth
from longseq_bench.worker.dense_baseline import dense_flops
from longseq_bench.worker.exception_mapping import outcome_of_exception
from longseq_bench.worker.inputs import Pass, draw_inputs, select_checked_rows
from longseq_bench.worker.kernel_workspace import KernelWorkspace
from longseq_bench.worker.matmul_rate import measure_matmul_rate
from longseq_bench.worker.measurement_log import MeasurementLog, samples_of
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.passes import (
    bytes_sent_by_formula,
    run_forward,
    run_pass,
    synchronize,
    unsupported_setting,
    wait_for_all_ranks,
    warm_up,
)
from longseq_bench.worker.repeat_check import RepeatCheck
from longseq_bench.worker.row_check import MATCHING, EveryRowCheck
from longseq_bench.worker.row_slices import row_slices
from longseq_bench.worker.timing import run_timed_passes

FAST_HEAP_FACTOR, FAST_HEAP_EXTRA_BYTES = 1.25, 256 * 2**20
"""A pass with the fast heap may map this much more than its budget: glibc keeps freed blocks."""

FAR_FROM_BUDGET_SHARE = 0.05
"""Memory is far from the budget if the floor is below this share of it."""

MAX_EXTRA_PASS_S = 1.0
"""Longest pass after which further passes check every row, so that they cost little."""

_TINY = 1e-30


def run_trial(trial: Trial, sender: MessageSender, group: Group | None = None) -> Outcome:
    """Run a trial on this rank and return its outcome. It never raises an Exception.

    Args:
        trial: what to run.
        sender: reports each phase to the parent.
        group: the ranks of the trial; this process alone if None.
    """
    group = Group.alone() if group is None else group
    log = MeasurementLog(group.rank)
    try:
        outcome = _run_steps(trial, sender, group, log)
    except Exception as error:
        limits.lift_heap_limit()
        outcome = outcome_of_exception(error, sender.phase)
    return log.attach_to(outcome)


def _run_steps(trial: Trial, sender: MessageSender, group: Group, log: MeasurementLog) -> Outcome:
    # build, warm up
    attention = _build(trial, group, log)
    warm_up(type(attention), trial, group)
    rows = select_checked_rows(attention, trial.seed, trial.round, trial.options)
    run = _TrialRun(trial, attention, rows, sender, log)

    # one pass under the memory budget
    if trial.fit_only:
        return run.check_fit()
    one = run.quick_pass() if run.is_memory_far_from_budget() else run.exact_pass()
    if failure := run.over_memory_budget():
        return failure
    must_time_again = run.is_late_under_exact_accounting() or run.has_compiled()
    if not must_time_again and (failure := run.judge_pass_time()):
        return failure
    run.log_cost()

    # check
    if failure := run.check(one):
        return failure
    run.log_wire_error(one)

    # time
    if must_time_again:
        one.out, one.grads, one.keep_output = None, None, False
        run.time_one_pass(one)
        if failure := run.judge_pass_time():
            return failure
    every_row = EveryRowCheck(attention)
    if trial.repeats:
        repeats = RepeatCheck(attention, one, rows)
        every_row = repeats.every_row
        run_timed_passes(attention, one, repeats, trial, sender, log)
        log.add("matmul_rate", "FLOP/s", run.matmul_rate())
        if trial.workload.decode:
            log.add("copy_bandwidth", "B/s", run.copy_bandwidth())
        if failure := run.check_repeats(repeats) or run.over_time_budget():
            return failure
    return run.check_every_row(every_row, one) or Outcome(status="ok")


def _build(trial: Trial, group: Group, log: MeasurementLog) -> Attention:
    """Build the implementation and set up the allocator; may raise UnsupportedError."""
    if trial.threads:
        torch.set_num_threads(trial.threads)
    make = find_implementation(trial.implementation, trial.source)
    attention = make(trial.workload, group, **trial.options)
    if reason := unsupported_setting(trial):
        raise UnsupportedError(reason)
    if trial.device == "cuda":
        limits.use_allocator(trial.allocator)
    elif reason := limits.use_exact_heap():
        log.facts["heap"] = reason
    return attention


@dataclass
class _TrialRun:
    """The steps of one trial on this rank.

    rows: global query positions that are checked, the same on all ranks.
    """

    trial: Trial
    attention: Attention
    rows: Tensor
    sender: MessageSender
    log: MeasurementLog
    outside_before: int = 0
    """Bytes outside CUDA's allocator when its limit was set."""

    # ---- the pass under the budget -------------------------------------------------------------

    def check_fit(self) -> Outcome:
        """Check only that a pass fits in memory, in little time.

        Loops over equal blocks run their first blocks only, so the output is not checked, and the
        heap is smaller than in a complete pass. The peak is that of tensors, plus the tabulated
        workspace of fused kernels.
        """
        log = self.log
        meta_mode.limit_loops()
        wait_for_all_ranks(self.attention.group, self.sender)
        meter = StoragePeak(self._meter_context())
        with self._memory_limit(), meter:
            self._first_pass(MeasurementLog(log.rank), "loops capped")
        log.extend(meter.measurements())
        log.add("own_tokens", "1", self.attention.shard.tokens)
        log.facts |= {"memory_meter": meter.name, "fit_only": "loops capped; nothing was checked"}
        log.facts |= self.attention.facts()
        return self.over_memory_budget() or Outcome(status="ok")

    def is_memory_far_from_budget(self) -> bool:
        """Return True if a step of a search needs no exact accounting of the heap."""
        trial = self.trial
        if trial.device != "cpu" or trial.repeats or trial.time_budget is None:
            return False
        budget, ranks = trial.memory_budget, self.attention.group.size
        return budget is None or floor_bytes(trial.workload) <= (
            FAR_FROM_BUDGET_SHARE * budget * ranks
        )

    def quick_pass(self) -> Pass:
        """Run a pass with the fast heap. It gives the time and an upper bound of the peak.

        The bound includes freed blocks that glibc keeps. If it is above the budget on any rank, an
        exact pass follows.
        """
        trial, group = self.trial, self.attention.group
        log, meter = MeasurementLog(self.log.rank), find_meter("memory", self._meter_context())
        wait_for_all_ranks(group, self.sender)
        mapped = limits.mapped_bytes()
        limits.use_fast_heap()
        if trial.memory_budget:
            limits.limit_heap(round(trial.memory_budget * FAST_HEAP_FACTOR) + FAST_HEAP_EXTRA_BYTES)
        try:
            with meter:
                one = self._first_pass(log)
        finally:
            limits.lift_heap_limit()
        bound = max(samples_of(meter.measurements(), "peak"))
        if trial.memory_budget and group.all_max(bound)[0] > trial.memory_budget:
            del one
            limits.use_exact_heap()
            return self.exact_pass(mapped)
        self.log.merge(log)
        self.log.add("peak_bound", "B", bound)
        return one

    def exact_pass(self, mapped: int | None = None) -> Pass:
        """Run the pass under the budget and measure its exact peak.

        mapped: bytes mapped before the trial allocated anything; None if it has not allocated yet.
        """
        context = replace(self._meter_context(), data_limit=self.trial.memory_budget)
        # before the limit: this loads plug-ins, which are not the trial's memory
        meter = find_meter("memory", context)
        wait_for_all_ranks(self.attention.group, self.sender)
        with self._memory_limit(mapped), meter:
            one = self._first_pass(self.log, "exact")
        self.log.extend(meter.measurements())
        self.log.facts["memory_meter"] = meter.name
        self.log.exact = True
        return one

    def _meter_context(self) -> MeterContext:
        workspace = KernelWorkspace(torch.get_num_threads())
        return MeterContext(self.trial.device, self.attention.on_host, workspace)

    def _first_pass(self, log: MeasurementLog, part: str = "") -> Pass:
        """Draw the inputs, prepare the layout and run one pass. part: its kind, for the parent."""
        trial, attention = self.trial, self.attention
        host_memory.usage.restart()
        self.sender.start_phase("inputs")
        one = draw_inputs(attention, trial.device, trial.seed, self.rows, trial.keep)
        if not trial.fit_only:
            one.protect_inputs()
        self.sender.start_phase("plan")
        start = time.perf_counter()
        attention.prepare(trial.device)
        synchronize(trial.device)
        prepared_s = time.perf_counter() - start
        log.add("own_tokens", "1", attention.shard.tokens)
        if attention.group.size > 1 and attention.counts_traffic:
            # other code that sends by itself may share the work otherwise
            log.add("work_share", "1", attention.work_share())
        attention.group.traffic.bytes_sent = 0
        self.time_one_pass(one, log, part)
        if host_bytes := host_memory.usage.peak:
            log.add("host_memory", "B", host_bytes)
        log.add("plan_time", "s", prepared_s + attention.layout_s)
        if attention.counts_traffic:
            log.add("bytes_sent", "B", attention.group.traffic.bytes_sent)
        return one

    def time_one_pass(self, one: Pass, log: MeasurementLog | None = None, part: str = "") -> None:
        """Run a pass that all ranks begin together; its time is that of the slowest rank."""
        log = log or self.log
        wait_for_all_ranks(self.attention.group, self.sender)
        with CompileWatch() as watch:
            start = time.perf_counter()
            run_pass(self.attention, one, self.sender, part)
            synchronize(self.trial.device)
            log.own_pass_s = time.perf_counter() - start
        log.pass_s, compiled = self.attention.group.all_max(log.own_pass_s, float(watch.compiled))
        log.compiled = bool(compiled)

    @contextmanager
    def _memory_limit(self, mapped: int | None = None) -> Iterator[None]:
        """Enforce the trial's memory budget inside the block."""
        budget = self.trial.memory_budget
        if self.trial.device == "cuda":
            try:
                if budget:
                    torch.cuda.empty_cache()
                    self.outside_before = limits.limit_cuda(budget)
                yield
            finally:
                # the check and the dense baseline are not the attention's memory
                limits.lift_cuda_limit()
            return
        if budget and (reason := limits.limit_heap(budget, mapped)):
            self.log.facts["budget"] = reason
        try:
            yield
        finally:
            limits.lift_heap_limit()
            limits.use_fast_heap()

    # ---- verdicts ------------------------------------------------------------------------------

    def over_memory_budget(self) -> Outcome | None:
        """Return out of memory if a rank held more than the budget, and no limit has prevented it.

        On CUDA the limit is set before the pass, and memory outside the allocator may grow in it.
        """
        budget = self.trial.memory_budget
        inside, outside = self._held_unlimited()
        held = self.attention.group.all_max(inside + outside)[0]
        if not budget or held <= budget:
            return None
        if self.trial.device == "cuda":
            reason = (
                f"a rank held {held:.0f} bytes, and the budget is {budget}; outside the allocator "
                f"there were {outside:.0f} here, {self.outside_before} before the pass"
            )
        else:
            enforcement = self.log.facts.get("budget", "not enforced on another rank")
            reason = f"the peak was {held:.0f} bytes; the budget of {budget} is {enforcement}"
        return Outcome(status="oom", reason=reason, phase=self.sender.phase)

    def _held_unlimited(self) -> tuple[float, float]:
        """Return bytes that may be over the budget: inside the allocator of tensors, and outside.

        Both are 0 where a limit holds.
        """

        def largest(name: str) -> float:
            return max(samples_of(self.log.measurements, name), default=0.0)

        if self.trial.device == "cuda":
            outside = largest("outside_allocator")
            return (largest("reserved"), outside) if outside else (0.0, 0.0)
        return (largest("peak") if "budget" in self.log.facts else 0.0), 0.0

    def is_late_under_exact_accounting(self) -> bool:
        """Return True if the pass was over the time budget, but slowed by exact heap accounting.

        Another pass with the fast heap has to measure the time, after the check.
        """
        trial, log = self.trial, self.log
        late = trial.time_budget is not None and log.pass_s > trial.time_budget
        return late and log.exact and trial.device == "cpu" and not trial.repeats

    def has_compiled(self) -> bool:
        """Return True if a rank compiled something in a pass whose time counts.

        With timed passes it does not count: they follow a warm-up of the same shape.
        """
        if self.trial.repeats or not self.log.compiled:
            return False
        self.log.facts["timed_again"] = "the first pass compiled a kernel or a graph"
        return True

    def judge_pass_time(self) -> Outcome | None:
        """Log the time of the one pass; return a timeout if it is over the budget."""
        self.log.add("pass_time", "s", self.log.own_pass_s)
        self.log.facts["pass_s"] = self.log.pass_s
        return self.over_time_budget()

    def over_time_budget(self) -> Outcome | None:
        """Return a timeout if the median timed pass, or a search's one pass, was too slow.

        A pass takes as long as on its slowest rank.
        """
        trial, log = self.trial, self.log
        if trial.repeats and not log.slowest:
            return None
        seconds = median(log.slowest) if log.slowest else log.pass_s
        if trial.time_budget is None or seconds <= trial.time_budget:
            return None
        reason = f"one pass took {seconds:.3g} s of {trial.time_budget:.3g} s allowed"
        return Outcome(status="timeout", reason=reason, phase=self.sender.phase)

    def check(self, one: Pass) -> Outcome | None:
        """Compare the pass with the reference; return the outcome `wrong` on all ranks, or None."""
        self.sender.start_phase("check")
        assert one.out is not None
        group = self.attention.group
        if reason := find_invalid(one, group):
            return Outcome(status="wrong", reason=reason, phase="check")
        zeros, output_rows = count_zero_rows(one.out, group)
        self.log.add("zero_rows", "1", zeros / output_rows)
        uncovered = self.attention.measures().get("uncovered", 0.0)
        if zeros > round(uncovered * output_rows):
            reason = (
                f"{zeros:,} of {output_rows:,} output rows are zero; the pattern leaves "
                f"{uncovered:.2%}"
            )
            return Outcome(status="wrong", reason=reason, phase="check")
        own = check(
            self.attention, one.original_inputs, one.out, self.rows, one.grad_out, one.grads
        )
        errors = own.largest_over_ranks(group)
        dtype = self.attention.coarsest_dtype
        self.log.add("max_error", "1", errors.worst)
        self.log.add("error_of_allowed", "1", errors.share_of_allowed(dtype))
        self.log.add("bias", "1", errors.worst_bias)
        self.log.add("checked_rows", "1", len(self.rows))
        self.log.facts["errors"] = errors.largest
        if not all_finite([one.out], group):
            reason = "the output has values that are not finite"
        elif not all_finite(list(one.grads or ()), group):
            reason = "a gradient has values that are not finite"
        else:
            reason = errors.over_tolerance(dtype)
        return Outcome(status="wrong", reason=reason, phase="check") if reason else None

    def check_repeats(self, repeats: RepeatCheck) -> Outcome | None:
        """Return `wrong` on all ranks if a timed pass had other results than the checked one."""
        attention = self.attention
        own = repeats.over_tolerance(attention.coarsest_dtype)
        self.log.add("checked_passes", "1", repeats.passes)
        if repeats.sums:
            self.log.facts["gradient_sums"] = repeats.sums
        reason = agree(own, attention.group)
        return Outcome(status="wrong", reason=reason, phase="check") if reason else None

    def check_every_row(self, rows: EveryRowCheck, one: Pass) -> Outcome | None:
        """Check every row with special inputs; return `wrong` on all ranks, or None.

        Not where a search runs a length for the first time. Passes of their own run only if they
        are short. The inputs are lost.
        """
        attention, trial = self.attention, self.trial
        if not (trial.repeats or trial.round):
            return None
        self.sender.start_phase("check", "every row")
        one.out = one.grads = None
        if trial.device == "cuda":
            torch.cuda.empty_cache()
        if self.log.pass_s <= MAX_EXTRA_PASS_S:
            if not rows.done:
                with rows.warm_up(one):
                    run_forward(attention, one)
            if rows.can_have_equal_scores:
                with rows.equal_scores(one):
                    run_pass(attention, one)
            if rows.can_have_matching_scores and MATCHING not in rows.done:
                with rows.matching_scores(one):
                    run_pass(attention, one)
        self.log.facts["every_row_checked"] = rows.done
        reason = agree(rows.reason, attention.group)
        return Outcome(status="wrong", reason=reason, phase="check") if reason else None

    # ---- other values that are logged ----------------------------------------------------------

    def log_cost(self) -> None:
        """Log FLOPs, floor and bytes by formula, and the shares and facts of the implementation."""
        attention, log = self.attention, self.log
        cost, shares = attention.cost(), attention.measures()
        log.add("flops", "FLOP", cost.flops)
        log.add("floor", "B", cost.floor_bytes)
        if self.trial.workload.decode:
            log.add("bytes_to_read", "B", attention.bytes_to_read())
        if attention.counts_traffic:
            log.add("bytes_formula", "B", bytes_sent_by_formula(attention, self.trial))
        for name, share in shares.items():
            log.add(name, "1", share)
        if "density_achieved" in shares:
            log.add("dense_flops", "FLOP", dense_flops(attention))
        log.facts |= attention.facts()

    def matmul_rate(self) -> float:
        """Return the FLOP/s of matrix products of all ranks, in the dtype of the workload."""
        self.sender.start_phase("check", "matrix product")
        trial = self.trial
        return measure_matmul_rate(self.attention.group, trial.device, trial.workload.dtype)

    def copy_bandwidth(self) -> float:
        """Return the bytes/s that copies of all ranks read and write."""
        self.sender.start_phase("check", "copy")
        return measure_copy_bandwidth(self.attention.group, self.trial.device)

    def log_wire_error(self, one: Pass) -> None:
        """Log how much a compressed transfer changes the output.

        It is the largest difference from a pass without compression, over the largest magnitude of
        its row.
        """
        attention = self.attention
        uncompressed = attention.uncompressed()
        if uncompressed is None:
            return
        assert one.out is not None
        uncompressed.prepare(self.trial.device)
        with torch.no_grad():
            wait_for_all_ranks(attention.group)
            exact = uncompressed(*one.original_inputs)
            worst = 0.0
            for got, expected in zip(row_slices(one.out), row_slices(exact), strict=True):
                scale = expected.float().abs().amax(-1).clamp_min(_TINY)
                error = (got.float() - expected.float()).abs().amax(-1) / scale
                worst = max(worst, float(error.max()))
        self.log.add("wire_error", "1", attention.group.all_max(worst)[0])
