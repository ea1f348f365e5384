"""The pass under the memory budget: it is limited, and its peak is measured.

The limit is lifted before the harness computes anything of its own. Exact accounting of the heap
slows down code that allocates often, so it is never used in timed passes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from longseq_bench import meta_mode
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.model import Outcome
from longseq_bench.kernels import host_memory
from longseq_bench.meters.base import MeterContext, find_meter
from longseq_bench.meters.storage_peak import StoragePeak
from longseq_bench.worker import limits
from longseq_bench.worker.inputs import Pass, draw_inputs
from longseq_bench.worker.kernel_workspace import KernelWorkspace
from longseq_bench.worker.messages import MeasurementLog, samples_of
from longseq_bench.worker.passes import TrialRun, synchronize, wait_for_all_ranks

FAST_HEAP_FACTOR, FAST_HEAP_EXTRA_BYTES = 1.25, 256 * 2**20
"""A pass with the fast heap may map this much more than its budget: glibc keeps freed blocks."""

FAR_FROM_BUDGET_SHARE = 0.05
"""Memory is far from the budget if the floor is below this share of it."""


@dataclass
class FirstPass(TrialRun):
    """The first pass of a trial."""

    outside_before: int = 0
    """Bytes outside CUDA's allocator when its limit was set."""

    def check_fit(self) -> Outcome:
        """Check only that a pass fits in memory: loops over equal blocks run the first ones only.

        The peak is that of tensors, plus the tabulated workspace of fused kernels.
        """
        log = self.log
        meta_mode.limit_loops()
        wait_for_all_ranks(self.attention.group, self.sender)
        meter = StoragePeak(self._meter_context())
        with self._limit(), meter:
            self._run(MeasurementLog(log.rank), "loops capped")
        log.extend(meter.measurements())
        log.add("own_tokens", "1", self.attention.shard.tokens)
        log.facts |= {"memory_meter": meter.name, "fit_only": "loops capped; nothing was checked"}
        log.facts |= self.attention.facts()
        return self.over_budget() or Outcome(status="ok")

    def is_far_from_budget(self) -> bool:
        """Return True if a step of a search needs no exact accounting of the heap."""
        trial = self.trial
        if trial.device != "cpu" or trial.repeats or trial.time_budget is None:
            return False
        if trial.memory_budget is None:
            return True
        of_all = trial.memory_budget * self.attention.group.size
        return floor_bytes(trial.workload) <= FAR_FROM_BUDGET_SHARE * of_all

    def run_quick(self) -> Pass:
        """Run a pass with the fast heap. It gives the time and an upper bound of the peak.

        The bound includes freed blocks. If it is above the budget on a rank, an exact pass follows.
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
                one = self._run(log)
        finally:
            limits.lift_heap_limit()
        bound = max(samples_of(meter.measurements(), "peak"))
        if trial.memory_budget and group.all_max(bound)[0] > trial.memory_budget:
            del one
            limits.use_exact_heap()
            return self.run_exact(mapped)
        self.log.merge(log)
        self.log.add("peak_bound", "B", bound)
        return one

    def run_exact(self, mapped: int | None = None) -> Pass:
        """Run the pass under the budget and measure its exact peak.

        mapped: bytes mapped before the trial allocated anything; None if it has not allocated yet.
        """
        budget = self.trial.memory_budget
        # before the limit: this loads plug-ins, which are not the trial's memory
        meter = find_meter("memory", replace(self._meter_context(), data_limit=budget))
        wait_for_all_ranks(self.attention.group, self.sender)
        with self._limit(mapped), meter:
            one = self._run(self.log, "exact")
        self.log.extend(meter.measurements())
        self.log.facts["memory_meter"] = meter.name
        self.log.exact = True
        return one

    def _meter_context(self) -> MeterContext:
        workspace = KernelWorkspace(torch.get_num_threads())
        return MeterContext(self.trial.device, self.attention.on_host, workspace)

    def _run(self, log: MeasurementLog, part: str = "") -> Pass:
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
        self.time_pass(one, log, part)
        if host_bytes := host_memory.usage.peak:
            log.add("host_memory", "B", host_bytes)
        log.add("plan_time", "s", prepared_s + attention.layout_s)
        if attention.counts_traffic:
            log.add("bytes_sent", "B", attention.group.traffic.bytes_sent)
        return one

    @contextmanager
    def _limit(self, mapped: int | None = None) -> Iterator[None]:
        """Enforce the trial's memory budget inside the block."""
        budget, is_cuda = self.trial.memory_budget, self.trial.device == "cuda"
        try:
            if budget and is_cuda:
                torch.cuda.empty_cache()
                self.outside_before = limits.limit_cuda(budget)
            elif budget and (reason := limits.limit_heap(budget, mapped)):
                self.log.facts["budget"] = reason
            yield
        finally:
            # the check and the dense baseline are not the attention's memory
            if is_cuda:
                torch.cuda.set_per_process_memory_fraction(1.0)
            else:
                limits.lift_heap_limit()
                limits.use_fast_heap()

    def over_budget(self) -> Outcome | None:
        """Return out of memory if a rank held more than the budget, and no limit has prevented it.

        On CUDA the limit is set before the pass, and memory outside the allocator may grow in it.
        """

        def largest(name: str) -> float:
            return max(samples_of(self.log.measurements, name), default=0.0)

        budget, outside = self.trial.memory_budget, 0.0
        if self.trial.device == "cuda":
            outside = largest("outside_allocator")
            held = largest("reserved") + outside if outside else 0.0
        else:
            held = largest("peak") if "budget" in self.log.facts else 0.0
        held = self.attention.group.all_max(held)[0]
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
