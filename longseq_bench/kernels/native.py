"""The compiled CPU kernel (native.cpp) over spans, for any pattern; spans.py has the contract.

As many Python threads as torch has call the library; each takes units of work (forward: a tile of
one head; backward: a KV head) from a shared counter.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.base import Pair, Queries
from longseq_bench.kernels.cpp_build import library
from longseq_bench.kernels.spans import SPAN_ARRAYS, STEP_ARRAYS, HeadSpans, SpanTask
from longseq_bench.meta_mode import are_loops_limited

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The index is the dtype's number in native.cpp."""

LOCKS = 4096
_STACK_BYTES = 512 * 1024


def fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Return fields of one type for a ctypes.Structure."""
    return [(name, kind) for name in names]


class TensorPointer(ctypes.Structure):
    """Address and strides of a tensor (lanes.h)."""

    _fields_ = [("data", ctypes.c_void_p), *fields(ctypes.c_int64, "batch", "head", "token")]


class _Problem(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "dtype", "dim", "batches", "group", "causal", "wide", "merge"),
        *fields(ctypes.c_float, "scale", "cap"),
        *fields(TensorPointer, "q", "k", "v", "out", "lse", "grad", "dq", "dk", "dv"),
        *fields(ctypes.c_void_p, *STEP_ARRAYS),
        *fields(ctypes.c_int64, "tiles", "tile_step"),
        *fields(ctypes.c_void_p, *SPAN_ARRAYS),
        ("heads", ctypes.c_int64),
        ("head", ctypes.c_void_p),
        *fields(ctypes.c_int64, "kv_heads", "parts"),
        *fields(ctypes.c_void_p, "kv_head", "counter", "locks", "bias", "scratch"),
    ]


@functools.cache
def unavailable_reason(dtype: torch.dtype = torch.float32) -> str | None:
    """Return the reason why this kernel can't be used here, or None."""
    return library_reason("kernel", SOURCE, dtype)


def library_reason(kernel: str, source: Path, dtype: torch.dtype) -> str | None:
    """Return the reason why the compiled library of a source can't be used here, or None."""
    if dtype not in DTYPES:
        return f"the compiled {kernel} does not support {dtype}"
    try:
        compiled = library(source)
    except UnsupportedError as error:
        return str(error)
    if dtype == torch.float16 and not compiled.has_float16():
        return "the compiler of this machine does not support float16"
    return None


def name() -> str:
    """Return the kernel's name with its vector width."""
    return f"native ({library(SOURCE).lanes()} lanes)"


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, task: SpanTask
) -> None:
    """See SpanKernel.forward. Raises UnsupportedError without a compiled kernel."""
    problem = _problem(q, k, v, out, task)
    if are_loops_limited():
        _allocate_scratch(problem, False, q.device)
        return
    set_tensors(problem, q=q, k=k, v=v, out=out, lse=lse)
    for part in task.parts:
        _set_spans(problem, part)
        _run("forward", problem)


def backward(
    queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
) -> None:
    """See SpanKernel.backward.

    With fewer KV heads than threads, sums are added in no fixed order, and their last bits differ
    from run to run.
    """
    grad_out, q, out, lse = queries
    k, v = keys
    problem = _problem(q, k, v, dq, task)
    if are_loops_limited():
        _allocate_scratch(problem, True, q.device)
        return
    set_tensors(problem, q=q, k=k, v=v, out=out, lse=lse)
    set_tensors(problem, grad=grad_out, dq=dq, dk=sums[0], dv=sums[1])
    # the kernel indexes sums by KV head; they begin at the first of kv_heads
    for tensor in (problem.dk, problem.dv):
        tensor.data -= kv_heads.start * tensor.head * sums[0].element_size()
    locks = np.zeros(LOCKS, dtype=np.uint8)
    for i, part in enumerate(task.parts):
        used_kv_heads = sorted({h // problem.group for h in part.heads} & {*kv_heads})
        if not used_kv_heads:
            continue
        kv = np.asarray(used_kv_heads, dtype=np.int32)
        _set_spans(problem, part)
        problem.kv_heads, problem.kv_head = len(kv), kv.ctypes.data
        problem.parts = -(-torch.get_num_threads() // (len(kv) * problem.batches))
        problem.locks = locks.ctypes.data if problem.parts > 1 else None
        problem.bias = task.bias[i].ctypes.data if task.bias else None
        _run("backward", problem)


def _allocate_scratch(problem: _Problem, back: bool, device: torch.device) -> Tensor:
    """Return working memory for all threads: a tensor, so that every meter of memory sees it."""
    thread_bytes = int(library(SOURCE).thread_bytes(ctypes.byref(problem), int(back)))
    return torch.empty(thread_bytes * torch.get_num_threads(), dtype=torch.uint8, device=device)


def check_inputs(kernel: str, reason: str | None, q: Tensor, *others: Tensor) -> None:
    """Raise UnsupportedError if a compiled kernel can't be used; reason: why not, or None."""
    if reason:
        raise UnsupportedError(f"the compiled {kernel} is not available: {reason}")
    if any(t.device.type != "cpu" or t.dtype != q.dtype for t in (q, *others)):
        found = ", ".join(f"{t.dtype} on {t.device}" for t in (q, *others))
        raise UnsupportedError(f"the {kernel} needs q, k, v of one dtype on a CPU: {found}")


def _problem(q: Tensor, k: Tensor, v: Tensor, result: Tensor, task: SpanTask) -> _Problem:
    """Return a task; its sizes alone while loops are limited. result: the output, or dq."""
    if not are_loops_limited():
        check_inputs("kernel", unavailable_reason(q.dtype), q, k, v)
    group, is_wide = q.shape[1] // k.shape[1], result.dtype != q.dtype or q.dtype == torch.float32
    sizes = q.shape[3], q.shape[0], group, task.causal, is_wide, task.merge
    problem = _Problem(DTYPES.index(q.dtype), *sizes, *task.scores.factors(q.shape[3]))
    _set_arrays(problem, task.steps, STEP_ARRAYS)
    return problem


def _set_arrays(problem: _Problem, owner: object, names: Sequence[str]) -> None:
    """Set pointers to arrays, which the owner keeps alive."""
    for name in names:
        array = getattr(owner, name)
        setattr(problem, name, None if array is None else array.ctypes.data)


def set_tensors(problem: ctypes.Structure, **tensors: Tensor | None) -> None:
    """Set addresses and strides of tensors."""
    for name, t in tensors.items():
        if t is not None:
            strides = (*t.stride(), 0)[:3]
            setattr(problem, name, TensorPointer(t.data_ptr(), *strides))


def _set_spans(problem: _Problem, part: HeadSpans) -> None:
    problem.tiles, problem.tile_step = len(part.spans.tile_start), part.spans.tile_step
    _set_arrays(problem, part.spans, SPAN_ARRAYS)
    problem.heads, problem.head = len(part.head), part.head.ctypes.data


def _run(function: str, problem: _Problem) -> None:
    counter = np.zeros(2, dtype=np.int64)
    scratch = _allocate_scratch(problem, function == "backward", torch.device("cpu"))
    problem.counter, problem.scratch = counter.ctypes.data, scratch.data_ptr()
    run_on_threads(getattr(library(SOURCE), function), problem, counter)


def run_on_threads(
    function: Callable[..., Any], problem: ctypes.Structure, counter: NDArray[np.int64]
) -> None:
    """Call a compiled function on as many threads as torch has, this one included.

    counter: the units of work that the function takes from it; a large number ends every call.
    """
    call, argument = function, ctypes.byref(problem)
    others: list[Future[int]] = []
    try:
        others += (_pool().submit(call, argument) for _ in range(torch.get_num_threads() - 1))
        call(argument)
        for other in others:
            other.result()
    finally:
        # also after an interrupt: no thread may still use this call's memory
        counter[0] = np.iinfo(np.int64).max // 2
        wait(others)


def product_flops(turns: int) -> int:
    """Multiply float32 matrices in the first-level cache on all threads; return the FLOPs."""
    others = [
        _pool().submit(library(SOURCE).multiply, turns) for _ in range(torch.get_num_threads() - 1)
    ]
    flops = int(library(SOURCE).multiply(turns)) * turns
    wait(others)
    return flops * torch.get_num_threads()


def has_threads() -> bool:
    """Return True if a call in this process has started the compiled kernel's own threads."""
    return _pool.cache_info().currsize > 0


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return threads with small stacks, because stacks count against the memory budget."""
    default_size = threading.stack_size(_STACK_BYTES)
    workers = max(1, torch.get_num_threads() - 1)
    pool = ThreadPoolExecutor(workers, "longseq-native")
    barrier = threading.Barrier(workers)
    try:
        # a pool starts no thread while one is idle: the barrier keeps all of them busy
        for thread in [pool.submit(barrier.wait) for _ in range(workers)]:
            thread.result()
    finally:
        threading.stack_size(default_size)
    return pool


if hasattr(os, "register_at_fork"):
    # threads don't survive a fork, and a pool without its threads would never finish
    os.register_at_fork(after_in_child=_pool.cache_clear)
