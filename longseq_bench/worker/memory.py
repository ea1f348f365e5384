"""A hard memory budget for this process, its peak under it, and memory that kernels hide.

The budget is what a trial may allocate beyond the idle process with torch loaded.
CPU: RLIMIT_DATA is set to the bytes mapped now plus the budget. glibc maps every block of 128 KiB
or more on its own and returns it at once. A trial that needs 52 MiB then fails with a budget of
52 MiB and passes with 53; without these settings it needs 130 MiB.
CUDA: an idle process holds nothing on the device, so the budget counts all that the trial holds
there, and nothing of other processes. The caching allocator's fraction is the budget less what lies
outside the allocator (meters/own_gpu.py): the CUDA context, buffers of NCCL, workspaces.
"""

import ctypes
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.files import load_table
from longseq_bench.core.model import Allocator, Outcome, Trial
from longseq_bench.kernels import host_memory
from longseq_bench.meters.memory import Meter, StoragePeak, memory_meter, status_bytes
from longseq_bench.meters.own_gpu import own_gpu
from longseq_bench.worker.messages import samples_of
from longseq_bench.worker.passes import Pass, TrialRun, draw_layers, synchronize, wait_for_all_ranks

_FILL = 0x01
"""New blocks are filled with its complement, 0xFE: -1.7e38 in float32 and bfloat16, which shows."""
_MMAP_THRESHOLD_BYTES = 128 * 1024
_DYNAMIC_MAX = 32 * 1024 * 1024
"""The largest value of glibc's dynamic threshold (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""
_LIBC = ctypes.CDLL(None)
_IS_LINUX = sys.platform.startswith("linux")


def use_exact_heap() -> None:
    """Make the resident size follow the allocated size, by settings that only glibc has.

    New blocks are filled: a page that is never written counts against a budget, but would not be
    in a peak. Call this before the warm-up, which then leaves no free blocks behind.
    """
    _mallopt(_MMAP_THRESHOLD_BYTES, 0, _FILL)
    # blocks that imports have freed would be used first, outside the budget
    release_free_memory()


def use_fast_heap() -> None:
    """Set the largest dynamic thresholds of glibc, for timing."""
    _mallopt(_DYNAMIC_MAX, 2 * _DYNAMIC_MAX, 0)


def _mallopt(mmap_threshold: int, trim_threshold: int, fill: int) -> None:
    if hasattr(_LIBC, "mallopt"):
        for parameter, value in {-3: mmap_threshold, -1: trim_threshold, -6: fill}.items():
            _LIBC.mallopt(parameter, value)  # M_* of malloc.h


def release_free_memory() -> None:
    """Return freed blocks to the system, so that the next pass writes to new pages."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def mapped_bytes() -> int:
    """Return the bytes that count for the data limit now; 0 on a system without such a limit."""
    return status_bytes("VmData") if _IS_LINUX else 0


def limit_heap(budget: int, mapped: int | None = None) -> str | None:
    """Let this process map `budget` more bytes than now, or than `mapped`; return why it can't."""
    if not _IS_LINUX:
        return f"not enforced: {sys.platform} has no data limit that counts mapped memory"
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = mapped_bytes() if mapped is None else mapped
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, hard))
    return None


def lift_heap_limit() -> None:
    """Raise the limit to the hard limit, for the benchmark's own work (checks, messages)."""
    if _IS_LINUX:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def limit_cuda(budget: int) -> None:
    """Cap the caching allocator. Raises torch.OutOfMemoryError if more is in use outside of it."""
    _, total = torch.cuda.mem_get_info()
    outside = own_gpu.outside()
    allowed = min(budget, total) - outside
    if allowed <= 0:
        used = f"{outside} of {budget} bytes are in use outside the allocator"
        raise torch.OutOfMemoryError(used)
    torch.cuda.set_per_process_memory_fraction(allowed / total)


def name_other_processes(outcome: Outcome, trial: Trial) -> Outcome:
    """Add to an `oom` on a GPU who else holds memory there, if that left less than the budget."""
    if outcome.status != "oom" or trial.device != "cuda":
        return outcome
    try:
        others = own_gpu.describe_others(trial.memory_budget)
    except RuntimeError:  # the GPU can't be used any more
        others = None
    return outcome.model_copy(update={"reason": f"{outcome.reason}; {others}"} if others else {})


def use_allocator(name: Allocator) -> None:
    """Select CUDA's caching allocator. Call it before the first allocation."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{name == 'expandable'}")


FAST_HEAP_FACTOR, FAST_HEAP_EXTRA_BYTES = 1.25, 256 * 2**20
"""A pass with the fast heap may map this much more than its budget: glibc keeps freed blocks."""

FAR_FROM_BUDGET_SHARE = 0.05
"""Memory is far from the budget if the floor is below this share of it."""


@dataclass
class FirstPass(TrialRun):
    """The first pass of a trial."""

    def check_fit(self) -> Outcome:
        """Check only that a pass fits in memory: loops over equal blocks run the first ones only.

        The peak is that of tensors, plus the tabulated workspace of fused kernels.
        """
        log, meter = self.log, StoragePeak(self.trial.device, KernelWorkspace())
        with meta_mode.limited_loops(), self._limit(), meter:
            self._run("loops capped")
        log.measurements.clear()
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
        budget, meter, mapped = self.trial.memory_budget, self._meter(), mapped_bytes()
        use_fast_heap()
        with self._limit(FAST_HEAP_FACTOR, FAST_HEAP_EXTRA_BYTES), meter:
            pass_ = self._run()
        bound = max(samples_of(meter.measurements(), "peak"))
        if budget and self.attention.group.all_max(bound)[0] > budget:
            del pass_
            self.log.measurements.clear()
            use_exact_heap()
            return self.run_exact(mapped)
        self.log.add("peak_bound", "B", bound)
        return pass_

    def run_exact(self, mapped: int | None = None) -> Pass:
        """Run the pass under the budget and measure its exact peak.

        mapped: bytes mapped before the trial allocated anything; None if it has not allocated yet.
        """
        meter = self._meter(self.trial.memory_budget)
        with self._limit(mapped=mapped), meter:
            pass_ = self._run("exact")
        self.log.extend(meter.measurements())
        self.log.facts["memory_meter"] = meter.name
        self.log.exact = True
        return pass_

    def _meter(self, data_limit: int | None = None) -> Meter:
        on_host = self.attention.on_host
        return memory_meter(self.trial.device, on_host, KernelWorkspace(), data_limit)

    def _run(self, part: str = "") -> Pass:
        """Draw the inputs, prepare the layout and run one pass. part: its kind, for the parent."""
        trial, attention, log = self.trial, self.attention, self.log
        host_memory.usage.restart()
        self.sender.start_phase("inputs")
        seed = None if trial.fit_only else self.seed
        layers = attention, *self.others
        pass_ = draw_layers(layers, trial.device, seed, self.rows, trial.keep)
        if not trial.fit_only:
            pass_.protect_inputs()
        self.sender.start_phase("plan")
        start = time.perf_counter()
        for one in dict.fromkeys(layers):
            one.prepare(trial.device)
        synchronize(trial.device)
        prepared_s = time.perf_counter() - start
        log.add("own_tokens", "1", attention.shard.tokens)
        if attention.group.size > 1 and attention.counts_traffic:
            # other code that sends by itself may share the work otherwise
            log.add("work_share", "1", attention.work_share())
        attention.group.traffic.bytes_sent = 0
        self.time_pass(pass_, part)
        if host_bytes := host_memory.usage.peak:
            log.add("host_memory", "B", host_bytes)
        log.add("plan_time", "s", prepared_s + attention.layout_s)
        if attention.counts_traffic:
            log.add("bytes_sent", "B", attention.group.traffic.bytes_sent)
        return pass_

    @contextmanager
    def _limit(
        self, factor: float = 1.0, extra_bytes: int = 0, mapped: int | None = None
    ) -> Iterator[None]:
        """Limit memory to the budget times a factor, with some bytes more, when all are ready."""
        wait_for_all_ranks(self.attention.group, self.sender)
        budget, is_cuda = self.trial.memory_budget, self.trial.device == "cuda"
        budget = round(budget * factor) + extra_bytes if budget else None
        try:
            if is_cuda:
                torch.cuda.empty_cache()
                own_gpu.warmed_up(self.attention.group.size)
                self.log.facts["memory_counted"] = own_gpu.way
            if budget and is_cuda:
                limit_cuda(budget)
            elif budget and (reason := limit_heap(budget, mapped)):
                self.log.facts["budget"] = reason
            yield
        finally:
            # the check and the dense baseline are not the attention's memory
            if is_cuda:
                torch.cuda.set_per_process_memory_fraction(1.0)
            else:
                lift_heap_limit()
                use_fast_heap()

    def over_budget(self) -> Outcome | None:
        """Return out of memory if a rank held more than the budget, and no limit has prevented it.

        On CUDA the limit is set before the pass, and memory outside the allocator may grow in it.
        """

        def largest(name: str) -> float:
            return max(samples_of(self.log.measurements, name), default=0.0)

        budget, outside = self.trial.memory_budget, largest("outside_allocator")
        if self.trial.device == "cuda":
            held = largest("reserved") + outside if outside else 0.0
            why = f"outside the allocator there were {outside:.0f} here"
        else:
            held = largest("peak") if "budget" in self.log.facts else 0.0
            why = f"it is {self.log.facts.get('budget', 'not enforced on another rank')}"
        held = self.attention.group.all_max(held)[0]
        if not budget or held <= budget:
            return None
        reason = f"a rank held {held:.0f} bytes, and the budget is {budget}; {why}"
        return Outcome(status="oom", reason=reason, phase=self.sender.phase)


# ---- what fused kernels allocate outside tensors (data/workspaces.yaml) --------------------------
# Letters: B batch, Hq query heads, Hk KV heads, N query tokens, M key tokens, D head_dim, E bytes
# per element, P multiprocessors.

_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")

MULTIPROCESSORS = 132
"""Of an H100 or H200. FlashAttention splits the keys of a call with too few blocks of queries. That
takes less than 10 MB on any GPU."""

TableEntry = Mapping[str, Any]


class KernelWorkspace:
    """Bytes of workspace that an operator of torch needs while it runs.

    unknown: fused kernels that were called and are not in the table.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self.unknown: set[str] = set()

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the workspace of an operator with these arguments, in bytes."""
        schema: Any = getattr(op, "_schema", None)  # higher-order operators have none
        name = schema.name.removeprefix("aten::") if schema else ""
        if not name.startswith(_FUSED):
            return 0
        arguments = dict(zip((a.name for a in schema.arguments), args, strict=False))
        entry = load_table("workspaces.yaml").get(name, {})
        if "buffers" in entry:
            return self._sum_buffers(entry["buffers"], arguments)
        dtype = str(arguments["query"].dtype).removeprefix("torch.")
        if dtype not in entry:
            self.unknown.add(f"{name} {dtype}")
            return 0
        return self._fitted(entry[dtype], arguments)

    def _fitted(self, row: TableEntry, arguments: Mapping[str, Any]) -> int:
        q, k, grad_out = arguments["query"], arguments["key"], arguments.get("grad_out")
        # torch's CPU kernel copies a gradient (B, Hq, N, D) unless its layout is (B, N, Hq, D)
        copied = 0 if grad_out is None else _copied_bytes(grad_out)
        (b, h, n, d), m = q.shape, k.shape[2]
        # torch's CPU kernel works on 256 rows at a time from 768 rows on, on fewer before
        thread = row["thread"] if n >= 768 else row["thread_short"]
        return int(
            self._threads * (thread + row["thread_dim"] * d)
            + b * h * d * (row["query"] * n + row["key"] * m)
            + row["kv"] * k.numel()
            + b * h * row["row"] * n
            + copied
        )

    def _sum_buffers(self, buffers: Mapping[str, TableEntry], arguments: Mapping[str, Any]) -> int:
        """Return the bytes of a CUDA kernel's buffers; all of them exist at the same time."""
        q, k = arguments["query"], arguments["key"]
        b, h, n, d = q.shape
        wider = max(d, arguments["value"].shape[3])
        sizes: dict[str, int] = {"P": MULTIPROCESSORS, "E": q.itemsize, "D": wider}
        sizes |= {"B": b, "Hq": h, "Hk": k.shape[1], "N": n, "M": k.shape[2]}
        conditions = {
            "grouped": h != k.shape[1],
            "half": q.itemsize == 2,
            "narrow": d <= 128,
            "wide": d > 128,
            "few_rows": b * h * -(-n // 64) < 0.8 * 2 * MULTIPROCESSORS,
        }

        def size(factor: Any) -> int:
            """Return a factor: a number, a letter, or {letter: multiple} rounded up."""
            if isinstance(factor, dict):
                ((letter, multiple),) = factor.items()
                return -(-sizes[letter] // int(multiple)) * int(multiple)
            return sizes[factor] if isinstance(factor, str) else int(factor)

        total = 0
        for buffer in buffers.values():
            if not all(conditions[name] for name in buffer.get("when", ())):
                continue
            if "copy_of" in buffer:
                total += _copied_bytes(arguments[buffer["copy_of"]])
            else:
                total += prod(map(size, buffer["bytes"]))
        return total


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of the copy of a tensor (B, H, N, D) that is not laid out (B, N, H, D)."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes
