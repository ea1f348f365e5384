"""Timed passes, over several ranks split into computing and communication; rates of the devices.

A rate (matrix products, for the share of peak; copies, for decoding) is that of the fastest of some
calls, the first of which only warms up, over all ranks at the same time.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import DType, Trial
from longseq_bench.core.stats import settled
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.meters.clock import MIN_HEAD_START_S, Clock, CudaClock, clock_for
from longseq_bench.worker import memory
from longseq_bench.worker.dense_baseline import dense_baseline_for
from longseq_bench.worker.messages import MeasurementLog
from longseq_bench.worker.passes import Pass, TrialRun, run_forward, run_pass, synchronize
from longseq_bench.worker.repeat_check import RepeatCheck
from longseq_bench.worker.throttling import Throttling

MIN_SIZE, MAX_SIZE, RATE_S = 128, 8192, 0.01
"""Rows and columns of the square matrices: doubled until a product takes long enough."""
CALLS, TURNS = 6, 5_000

COPIED_BYTES, MIN_COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}, 32 * 2**20
"""Bytes of the source, larger than the caches. Ranks share the cores of a CPU: each copies its
part."""


def measure_matmul_rate(group: Group, device: str, dtype: DType) -> float:
    """Return the FLOP/s of matrix products.

    On a CPU float32 products of the compiled kernel count too: the library that torch calls does
    not use all vector units of every processor, and none for float16.
    """
    # float16 takes seconds on CPUs without units for it, so the size begins small
    size, rate, slowest_s = MIN_SIZE // 2, 0.0, 0.0
    while slowest_s < RATE_S and size < MAX_SIZE:
        size *= 2
        slowest_s = group.all_max(_product_s(group, device, dtype, size))[0]
        rate = max(rate, 2 * size**3 / slowest_s)
    if device == "cpu" and native.unavailable_reason() is None:
        flops: list[int] = []
        seconds = _fastest_s(group, "cpu", lambda: flops.append(native.product_flops(TURNS)))
        rate = max(rate, flops[-1] / seconds)
    return _sum_over_ranks(group, rate)


def _product_s(group: Group, device: str, dtype: DType, size: int) -> float:
    generator = torch.Generator(device).manual_seed(0)
    # equal numbers need less power: a GPU multiplies ones a ninth faster
    drawn = {"dtype": getattr(torch, dtype), "device": device, "generator": generator}
    a, b = (torch.randn(size, size, **drawn) for _ in range(2))
    out = torch.empty_like(a)
    return _fastest_s(group, device, lambda: torch.mm(a, b, out=out))


def measure_copy_bandwidth(group: Group, device: str) -> float:
    """Return the bytes/s of copies by torch; bytes read and bytes written count."""
    size = COPIED_BYTES[device]
    if device == "cpu":
        size = max(MIN_COPIED_BYTES, size // group.size)
    # pages that were never written are all one page, which stays in the cache
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy = torch.zeros_like(source)
    seconds = _fastest_s(group, device, lambda: copy.copy_(source))
    return _sum_over_ranks(group, 2 * source.nbytes / seconds)


def _fastest_s(group: Group, device: str, call: Callable[[], object]) -> float:
    clock = clock_for(device)
    for _ in range(CALLS):
        group.barrier()
        with clock:
            call()
    return min(clock.wall[1:])


def _sum_over_ranks(group: Group, rate: float) -> float:
    return float(group.all_sum(torch.tensor([rate], dtype=torch.float64))[0])


_HALVES = {
    "compute_time": ("computing", {"communicate": False}),
    "communication_time": ("transfers", {"compute": False}),
}
"""Passes of which only one half runs: their measurement, their name, and Group.only's switches.

Without the other half the output is not valid; it is dropped."""

TIMED_WARM_UPS = 1
LONG_S = 1.0
"""After a warm-up pass that takes this long, a GPU needs no other one."""
SETTLED_WITHIN, MIN_SAMPLES = 0.02, 6
"""Timing ends when the median is known that well, after this number of passes or later."""
READINGS, MAX_READING = 20, 20.0
"""Readings of numbers that exist, of which the fastest is known, and how much longer the first one
after a pass may take: a result that is computed when it is read takes more."""

REST_S = 0.01
"""Pause before a timed pass of a kernel with threads of its own: torch's threads spin for some
milliseconds after a check, and such kernels were up to 20 % slower meanwhile. Threads of torch's
own kernels would have to wake after it, which cost 4 % of 4 ms."""

WARM_S = 0.2
"""Seconds of work after which a GPU has left its idle clocks."""
SAMPLE_S, MAX_PASSES = 1e-3, 50
"""A sample takes at least about this long, and has at most so many passes."""
HEAD_START_FACTOR, MAX_HEAD_START_S = 1.2, 0.02

CACHES, USUAL_CACHE_BYTES = Path("/sys/devices/system/cpu"), 64 * 2**20
"""The caches of a CPU by Linux, and the size of one where the system does not say."""


def cache_bytes(device: str) -> int:
    """Return the bytes of the last-level cache: of a GPU, or of all those of a CPU."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    found = CACHES.glob("cpu[0-9]*/cache/index3/shared_cpu_list")
    sizes = {file.read_text(): (file.parent / "size").read_text() for file in found}
    return sum(1024 * int(size.strip("K\n")) for size in sizes.values()) or USUAL_CACHE_BYTES


def preparation_of(trial: Trial) -> Callable[[], object]:
    """Return what is called before each timed pass: it gives memory back, or flushes caches."""
    if trial.allocator == "fresh":  # each pass writes to memory that was not used yet
        return memory.release_free_memory
    size = 2 * cache_bytes(trial.device) if trial.timing == "cold" else 0
    # filling alone may go past the caches
    return partial(torch.zeros(size, dtype=torch.uint8, device=trial.device).add_, 1)


def run_timed_passes(run: TrialRun, pass_: Pass, check: RepeatCheck) -> None:
    """Run passes until the slowest rank's median is known to 2 %, or the time cap is reached.

    Every rank keeps all of its own samples. `check` sees the results of every pass; the last one
    and another have new scores. Passes of the dense baseline don't count for the cap: a sparse
    attention is timed as often as any other. Nor do checks with float64.
    """
    attention, trial, sender, log = run.attention, run.trial, run.sender, run.log
    group = attention.group
    pass_.out = pass_.grads = None
    pass_.keep_output = False
    if pass_.grad_out is not None:
        torch.manual_seed(run.seed)
        pass_.grad_out.normal_()
    clock = clock_for(trial.device)
    has_halves = group.size > 1 and attention.counts_traffic
    halves = {name: clock_for(trial.device) for name in _HALVES if has_halves}
    warm_ups = TIMED_WARM_UPS if trial.repeats > 1 else 0
    throttling = Throttling(group, trial.device == "cuda")
    passes = _Passes(run, pass_, check, preparation_of(trial), throttling)
    dense = dense_baseline_for(run, pass_, warm_ups, passes.prepare)
    for _ in range(warm_ups):
        passes.warm_up()
    passes.capture()
    on_cuda = [found for found in (clock, *halves.values()) if isinstance(found, CudaClock)]
    if on_cuda and warm_ups and log.pass_s < LONG_S:
        # a pass in place spends its inputs
        can_batch = trial.keep != "nothing" and trial.timing != "cold"
        prepare_clocks(on_cuda, passes.run_unchecked, group, can_batch)
    layout_s: list[float] = []
    end, is_last = time.perf_counter() + trial.time_cap, log.pass_s > trial.time_cap
    while len(clock.wall) < trial.repeats:
        part = f"pass {len(clock.wall) + 1}"
        is_last |= len(clock.wall) + 1 == trial.repeats
        end += passes.run_checked(clock, part, is_last)
        layout_s += filter(None, [attention.layout_s])
        for name, half in halves.items():
            half_name, switches = _HALVES[name]
            with group.only(**switches):
                passes.run(half, f"{half_name} of {part}")
            pass_.out = pass_.grads = None
        if dense:
            end += dense.run(sender, clock.wall[-1])
            passes.throttling.read_dense()
        late = time.perf_counter() + clock.wall[-1] > end
        slowest, stop = group.all_max(clock.wall[-1], float(late))
        log.slowest.append(slowest)
        if is_last:
            break
        is_last = bool(stop) or settled(log.slowest, SETTLED_WITHIN)
    passes.judge_layout()
    passes.write_profile()
    _log_clocks(log, clock, halves)
    passes.throttling.add_to(log)
    if layout_s:
        log.add("plan_time", "s", *layout_s)
    if dense:
        dense.add_to(log)
        sender.start_phase("time")


@dataclass
class _Passes:
    of: TrialRun
    pass_: Pass
    check: RepeatCheck
    before: Callable[[], object]
    throttling: Throttling
    graph: torch.cuda.CUDAGraph | None = None

    def _needs_new_scores(self, index: int, is_last: bool) -> bool:
        """Return True for the last pass, and for a random one among those that time allows for.

        In decode the last one is enough: float64 takes as long as many steps. A pass that does not
        keep all overwrites q or drops the output.
        """
        at_random = random.Random(self.of.seed).randrange(MIN_SAMPLES)
        is_chosen = index == at_random and not self.of.trial.workload.decode
        return self.pass_.keep == "all" and (is_last or is_chosen)

    def capture(self) -> None:
        """Record a pass as a CUDA graph, if the trial asks for one. All later ones replay it."""
        if self.of.trial.timing != "graph":
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run_pass(self.of.attention, self.pass_)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            reason = "timing=graph: a pass that waits for the device can't be a CUDA graph"
            raise UnsupportedError(f"{reason} ({line})") from error
        self.graph, self._results = graph, (self.pass_.out, self.pass_.grads)

    def call(self) -> None:
        """Run a pass."""
        if self.graph is None:
            run_pass(self.of.attention, self.pass_)
        else:
            self.graph.replay()
            self.pass_.out, self.pass_.grads = self._results

    def judge_layout(self) -> None:
        """Check a pass with new scores, untimed, if timed ones keep less than a check needs.

        A layout that is never chosen again would be right for scores that stay.
        """
        if self.of.attention.chooses_layout and self.pass_.keep == "inputs":
            self.prepare(new_scores=True)
            self.pass_.keep_output = True
            self.call()
            self.check.judge(self.pass_)
            self.pass_.out = self.pass_.grads = None

    def write_profile(self) -> None:
        """Run one more pass under torch's profiler, if a file is given; rank 0 writes its trace."""
        if not (file := self.of.place.profile):
            return
        self.pass_.change_inputs()
        self.of.attention.group.barrier()
        with torch.profiler.profile() as profile:
            self.call()
            synchronize(self.of.trial.device)
        self.pass_.out = self.pass_.grads = None
        if not self.of.attention.group.rank:
            profile.export_chrome_trace(file)
            self.of.log.facts["profile"] = file

    def prepare(self, new_scores: bool = False) -> None:
        """Change the inputs, then the memory or the caches."""
        self.pass_.change_inputs(new_scores)
        self.before()

    def warm_up(self) -> None:
        """Run an untimed pass. Its forward checks every row; a backward is run with v as it was."""
        attention, start_phase = self.of.attention, self.of.sender.start_phase
        self.pass_.change_inputs()
        with self.check.every_row.warm_up(self.pass_):
            start_phase("time", "warm-up")
            run_forward(attention, self.pass_)
            start_phase("check", "every row")
        if self.pass_.grad_out is not None:
            self.pass_.change_inputs()
            start_phase("time", "warm-up")
            run_pass(attention, self.pass_)
            start_phase("check", "warm-up")
            self.check.add(self.pass_)

    def run_unchecked(self, clock: Clock) -> None:
        """Run a pass that raises the clocks of the device."""
        self.run(clock, "warm-up")
        self.pass_.out = self.pass_.grads = None

    def run_checked(self, clock: Clock, part: str, is_last: bool) -> float:
        """Run and check a pass, again after a pause if it was throttled.

        Returns the seconds of pauses and of checks with float64.
        """
        new_scores = self._needs_new_scores(len(clock.wall), is_last)
        self.run(clock, part, new_scores)
        start = time.perf_counter()
        self.throttling.read()
        self.of.sender.start_phase("check", part)
        self.check.add(self.pass_, new_scores)
        extra_s = (time.perf_counter() - start) * new_scores
        if new_scores and not is_last and isinstance(clock, CudaClock):
            self.run_unchecked(CudaClock())  # float64 has emptied the allocator
        if pause_s := self.throttling.drop_sample(clock, self.of.sender):
            extra_s += pause_s + self.run_checked(clock, part, is_last)
        return extra_s

    def run(self, clock: Clock, part: str, new_scores: bool = False) -> None:
        """Run a pass under the clock, which starts when all ranks are ready."""
        attention, start_phase = self.of.attention, self.of.sender.start_phase
        start_phase("check", part)
        self.prepare(new_scores)
        start_phase("time", part)
        if native.has_threads():
            time.sleep(REST_S)
        attention.group.barrier()
        clock.max_reading_s = self.max_reading_s
        with clock:
            for _ in range(clock.passes):
                self.call()
            clock.split()
            _read((self.pass_.out, *(self.pass_.grads or ())))

    @cached_property
    def max_reading_s(self) -> float:
        """The longest time in which results are read that a pass has computed."""
        clock = clock_for(self.of.trial.device)
        for _ in range(READINGS):
            with clock:
                _read([t for t in self.pass_.inputs if t.dtype != torch.float8_e4m3fn])
        return MAX_READING * min(clock.wall)


def _read(results: Sequence[Tensor | None]) -> None:
    """Read a number of each head of each tensor, on its device: a lazy one is computed now."""
    torch.cat([result.detach()[..., -1, -1].flatten() for result in results if result is not None])


def _log_clocks(log: MeasurementLog, clock: Clock, halves: dict[str, Clock]) -> None:
    log.extend(clock.measurements())
    for name, half in halves.items():
        log.add(name, "s", *half.wall)
    batch = f", mean of {clock.passes} passes a sample" if clock.passes > 1 else ""
    log.facts["timer"] = clock.name + batch


def prepare_clocks(
    clocks: Sequence[CudaClock], run: Callable[[CudaClock], None], group: Group, can_batch: bool
) -> None:
    """Run passes until the device was busy for 200 ms, then set up the clocks by the last pass.

    Every rank runs the same number of passes, and gets the same head start of the host and batches.
    can_batch: if a pass may follow another one without new inputs.
    """
    warming, busy_s = CudaClock(), 0.0
    while busy_s < WARM_S:
        run(warming)
        pass_s, dispatch_s = group.all_max(warming.wall[-1], warming.dispatch_s)
        busy_s += pass_s + warming.head_start_s
        # the first passes may have measured the host
        warming.head_start_s = _head_start(dispatch_s)
    passes = passes_of_a_sample(pass_s) if can_batch else 1
    for clock in clocks:
        clock.passes = passes
        clock.head_start_s = _head_start(dispatch_s * passes)


def _head_start(dispatch_s: float) -> float:
    return min(max(HEAD_START_FACTOR * dispatch_s, MIN_HEAD_START_S), MAX_HEAD_START_S)


def passes_of_a_sample(pass_s: float) -> int:
    """Return the number of passes of `pass_s` seconds between two events."""
    return min(max(math.ceil(SAMPLE_S / max(pass_s, 1e-9)), 1), MAX_PASSES)
