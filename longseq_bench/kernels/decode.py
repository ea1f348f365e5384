"""Attention of a few new tokens to a KV cache: split-KV, merged by log-sum-exp.

A step of decoding has few queries, so kernels that are parallel over queries leave most of a device
idle. Here the keys are cut into splits, which all threads or multiprocessors share (Flash-Decoding;
over ranks tree attention, arXiv 2408.04093). On a CPU decode.cpp computes them, on CUDA
triton_decode.py.

Letters: B batch, Hq heads, Hk kv_heads, m new tokens, N cached tokens on this rank, D head_dim, Dv
v_head_dim, S splits.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longseq_bench.core.cost import KV_BLOCK
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels import native
from longseq_bench.kernels.cpp_build import library
from longseq_bench.kernels.native import fields
from longseq_bench.kernels.quantised import DTYPES, Quantised
from longseq_bench.meta_mode import are_loops_limited
from longseq_bench.patterns import Ints

SOURCE = Path(__file__).with_suffix(".cpp")
_CACHES = (*native.DTYPES, *DTYPES.values())  # by their number in decode.cpp

MIN_SPLIT_KEYS = 512
"""Keys of a split, at least: a split writes an output row, as many bytes as one value."""
UNITS_PER_THREAD = 8
"""Splits of all heads per thread, so that no thread waits long for the last one."""

MAX_ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""Query heads of a group times new tokens, at most, on CUDA: the rows of a tile. With more,
registers spill when the kernel is compiled for compute capability 8.0 and 9.0."""
MAX_HEAD_DIM, MAX_LATENT = 256, 512
"""Elements of a key or value, and of the value in a latent, at most, on CUDA."""


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """The keys first[i] ... stop[i] - 1 of a cache that new token i sees, as local indices (m,)."""

    first: Ints
    stop: Ints

    @property
    def begin(self) -> int:
        """The first key that any new token sees."""
        return int(self.first.min())

    @property
    def end(self) -> int:
        """The key after the last one that any new token sees."""
        return max(self.begin, int(self.stop.max()))


class _Decode(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "dtype", "dim", "v_dim", "batches", "kv_heads", "group"),
        *fields(ctypes.c_int64, "queries", "splits", "scale_block", "scales"),
        *fields(ctypes.c_void_p, "k_scale", "v_scale"),
        *fields(native.TensorPointer, "q", "k", "v"),
        *fields(ctypes.c_void_p, "first", "stop"),
        *fields(ctypes.c_int64, "begin", "end"),
        *fields(ctypes.c_double, "scale", "cap"),
        *fields(ctypes.c_void_p, "out", "lse", "scratch", "counter"),
    ]


@functools.cache
def unavailable_reason(dtype: torch.dtype = torch.float32) -> str | None:
    """Return the reason why the compiled kernel can't be used here, or None."""
    return native.library_reason("decode kernel", SOURCE, dtype)


def is_latent(k: Tensor, v: Tensor) -> bool:
    """Return True if values are the first elements of their keys, in the same memory."""
    return k.shape[3] > v.shape[3] and (k.data_ptr(), k.stride()) == (v.data_ptr(), v.stride())


def cuda_limit_reason(
    rows: int, head_dim: int, dtype: torch.dtype, most: int = MAX_HEAD_DIM
) -> str | None:
    """Return why the kernel of Triton can't compute a step, or None.

    rows: query heads of a KV head times new tokens.  head_dim: the larger one, that of q or of v.
    """
    if dtype not in MAX_ROWS:
        return f"the decode kernel of Triton does not support {dtype}"
    if rows > MAX_ROWS[dtype]:
        return f"{rows} query rows per KV head are more than {MAX_ROWS[dtype]}"
    return f"head_dim {head_dim} is above {most}" if head_dim > most else None


def choose_splits(units: int, keys: int, workers: int, min_keys: int = MIN_SPLIT_KEYS) -> int:
    """Return the number of splits of `keys` keys for `units` pairs of sequence and KV head."""
    return max(1, min(keys // min_keys, -(-UNITS_PER_THREAD * workers // units)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, seen: SeenKeys, scores: Scores = PLAIN_SCORES
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Hq, m, Dv) and log-sum-exp (B, Hq, m) of a CPU, in float32.

    q is (B, Hq, m, D), k (B, Hk, N, D) and v (B, Hk, N, Dv), which may be Quantised. A new token
    that sees no key has an output of 0 and a log-sum-exp of -inf. Raises UnsupportedError without a
    compiled kernel.
    """
    q, checked = (q.float(), ()) if isinstance(k, Quantised) else (q, (k, v))
    (batch, heads, queries, dim), kv_heads = q.shape, k.shape[1]
    threads = torch.get_num_threads()
    splits = choose_splits(batch * kv_heads, seen.end - seen.begin, threads)
    rows = (splits, batch, heads, queries)
    out = torch.empty(*rows, v.shape[3], device=q.device)
    lse = torch.empty(rows, device=q.device)
    if are_loops_limited():
        return merge_partials(out, lse)
    native.check_inputs("decode kernel", unavailable_reason(q.dtype), q, *checked)
    sizes = dim, v.shape[3], batch, kv_heads, heads // kv_heads, queries, splits
    problem = _Decode(_CACHES.index(k.dtype), *sizes, begin=seen.begin, end=seen.end)
    problem.scale, problem.cap = scores.factors(dim)
    native.set_tensors(problem, q=q, k=k, v=v)
    if isinstance(k, Quantised) and isinstance(v, Quantised):
        problem.k_scale, problem.v_scale = k.scale.data_ptr(), v.scale.data_ptr()
        problem.scales, problem.scale_block = k.scale.shape[2], KV_BLOCK
    first, stop = (np.ascontiguousarray(ends, dtype=np.int64) for ends in (seen.first, seen.stop))
    problem.first, problem.stop = first.ctypes.data, stop.ctypes.data
    problem.out, problem.lse = out.data_ptr(), lse.data_ptr()
    thread_bytes = int(library(SOURCE).thread_bytes(ctypes.byref(problem)))
    scratch = torch.empty(thread_bytes * threads, dtype=torch.uint8)
    counter = np.zeros(2, dtype=np.int64)
    problem.scratch, problem.counter = scratch.data_ptr(), counter.ctypes.data
    native.run_on_threads(library(SOURCE).decode, problem, counter)
    return merge_partials(out, lse)


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge softmaxes over different keys: out (S, ..., Dv) and lse (S, ...) -> without S.

    Rows whose lse is -inf in every part have an output of 0.
    """
    if out.shape[0] == 1:
        return out[0], lse[0]
    largest = lse.amax(0)
    weights = torch.exp(lse - largest.nan_to_num(neginf=0.0))
    total = weights.sum(0)
    weights /= total.where(total > 0, torch.ones_like(total))
    merged = (weights[..., None] * out).sum(0)
    return merged, largest + total.log()
