"""Tiles of the Triton kernels, in a process of their own: `stream` in processes.py runs it.

The argument is JSON: what to do, and jobs [kernel, head_dim, causal, tile]. A tile is
queries, keys, warps, stages and maximum of registers or null. `compile` fills Triton's cache by one
process per core, without a GPU. `time` then measures one job after the other, and dense attention
for jobs of the kernel `dense`. Each result is printed as JSON when it is known, so that a tile that
ends the process loses no other result.
"""

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import inf
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from typing_extensions import override

from benchmarks.gpu.items import Figures
from benchmarks.gpu.processes import die_with_parent
from benchmarks.triton_static import MULTIPROCESSOR, RESERVED, WARP
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.cost import visible_pairs
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.triton_blocks import TritonBlocks
from longseq_bench.kernels.triton_tiles import Shape, capability_of, select_shape
from longseq_bench.meters.clock import CYCLES_PER_S, MIN_HEAD_START_S, clock_for
from longseq_bench.patterns.blocks import make_layout

TOKENS, HEADS, BLOCK, SPARSITY = 2**16, 8, 128, 0.95
DTYPE = torch.bfloat16
REPEATS, CALLS = 8, 4
DENSE_KERNELS = ("cudnn", "flash")

Job = tuple[str, int, bool, Any]
"""As in the argument; the tile of dense attention is null."""


class OnlyTile(Shape):
    """A tile that no smaller one replaces where it does not fit."""

    @override
    def smaller(self) -> None:
        return None


class TiledBlocks(TritonBlocks):
    """TritonBlocks whose kernels can be given a tile. kernel: the one that is measured.

    compiles: take tensors of the host, and launch only that kernel.
    """

    def __init__(self, causal: bool, compiles: bool = False) -> None:
        super().__init__([make_layout("local-window", TOKENS, BLOCK, SPARSITY, causal)])
        self.kernel, self.compiles = "", compiles
        self.timed = False
        self.events: list[tuple[Any, Any]] = []

    def use(self, kernel: str, head_dim: int, tile: Shape) -> None:
        """Give a kernel this tile from now on."""
        self.kernel = kernel
        self._shapes[kernel, head_dim, DTYPE] = tile
        self._launches.clear()  # they were prepared with another tile

    @override
    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if not self.compiles:
            super()._check(q, k, v)

    @override
    def _launch(self, name: str, *arguments: Any, **constants: Any) -> None:
        if self.compiles and name != self.kernel:
            return
        if not self.timed or name != self.kernel:
            super()._launch(name, *arguments, **constants)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # the device sleeps while the host launches, so that only the kernel is between the events
        torch.cuda._sleep(round(MIN_HEAD_START_S * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        start.record()
        super()._launch(name, *arguments, **constants)
        end.record()
        self.events.append((start, end))


def run(blocks: TiledBlocks, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run the pass of the measured kernel and return its results."""
    q, k, v, grad_out, out, lse = tensors
    if blocks.kernel == "forward":
        return (blocks.forward(q, k, v, True)[0],)
    dq, dk, dv = blocks.backward((grad_out, q, out, lse), (k, v))
    return (dq,) if blocks.kernel == "dq" else (dk, dv)


# ---- compile: real launches on a device that does nothing ----------------------------------------


def compile_tiles(jobs: list[Job], capability: int, processes: int | None) -> None:
    """Compile each tile as a launch on a GPU of this capability would."""
    use_idle_device(capability)
    cores = len(os.sched_getaffinity(0))
    # fork: torch and triton are imported once; no CUDA has been started
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes or cores, fork, die_with_parent) as pool:
        for figures in pool.map(compile_tile, jobs):
            print(json.dumps(figures), flush=True)


def use_idle_device(capability: int) -> None:
    """Let Triton compile for a device of this capability; launches do nothing."""
    room, threads = MULTIPROCESSOR.get(capability, MULTIPROCESSOR[90])
    loaded = (None, None, 0, 0, threads)
    device: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, WARP),
        launcher_cls=lambda *_: lambda *_: None,
        utils=SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": room - RESERVED},
            load_binary=lambda *_: loaded,
            unload_module=lambda _: None,
        ),
    )
    driver.set_active(device)


def compile_tile(job: Job) -> Figures:
    """Compile one tile. cached: Triton found it in its cache."""
    kernel, head_dim, causal, tile = job
    blocks, hits = _compiling(causal), list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    try:
        blocks.use(kernel, head_dim, OnlyTile(*tile))
        # nothing writes to these tensors, so they take no memory
        tensors = [torch.empty(1, HEADS, TOKENS, head_dim, dtype=DTYPE) for _ in range(5)]
        run(blocks, (*tensors, torch.empty(1, HEADS, TOKENS)))
    except KernelLimitError as error:
        return {"job": job, "does_not_fit": str(error)}
    except Exception as error:
        return {"job": job, "error": f"{type(error).__name__}: {error}"[:500]}
    return {"job": job, "cached": hits == [True]}


@cache
def _compiling(causal: bool) -> TiledBlocks:
    return TiledBlocks(causal, compiles=True)


# ---- time ----------------------------------------------------------------------------------------


def time_tiles(jobs: list[Job]) -> None:
    """Print the time of each tile, and how far its result is from that of the chosen tile."""
    for head_dim, causal in dict.fromkeys((job[1], job[2]) for job in jobs):
        own = [job for job in jobs if (job[1], job[2]) == (head_dim, causal)]
        if any(job[0] == "dense" for job in own):
            emit(["dense", head_dim, causal, None], **dense(head_dim, causal))
        blocks, generator = TiledBlocks(causal), torch.Generator("cuda").manual_seed(0)
        q, k, v, grad_out = (
            torch.randn(1, HEADS, TOKENS, head_dim, device="cuda", dtype=DTYPE, generator=generator)
            for _ in range(4)
        )
        out, lse = blocks.forward(q, k, v, True)
        assert lse is not None
        for kernel in ("forward", "dq", "dkv"):
            tiles = [job[3] for job in own if job[0] == kernel]
            _time_kernel(blocks, kernel, tiles, (q, k, v, grad_out, out, lse))


def dense(head_dim: int, causal: bool) -> Figures:
    """Return the seconds of kernels of dense attention, forward and backward."""
    w = Workload(
        seq_len=TOKENS, heads=HEADS, head_dim=head_dim, dtype="bfloat16", causal=causal,
        mode="train",
    )  # fmt: skip
    found: Figures = {}
    for kernel in DENSE_KERNELS:
        options: dict[str, Any] = {"kernel": kernel}
        try:
            attention = IMPLEMENTATIONS.get("fused")(w, Group.alone(), **options)
            attention.prepare("cuda")
        except UnsupportedError:
            continue
        shape = (1, HEADS, TOKENS, head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=DTYPE).requires_grad_() for _ in "qkv")
        out = attention(q, k, v)
        grad_out = torch.randn_like(out)
        forward, backward = clock_for("cuda"), clock_for("cuda")
        for _ in range(REPEATS + 2):
            with forward:
                attention(q, k, v)
            with backward:
                torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        found[kernel] = {
            "forward_s": median(forward.wall[2:]), "backward_s": median(backward.wall[2:])
        }  # fmt: skip
    return {"kernels": found}


def _time_kernel(
    blocks: TiledBlocks, kernel: str, tiles: list[list[Any]], tensors: tuple[Tensor, ...]
) -> None:
    """Time the tiles of a kernel; the other kernel of the backward has its fastest tile so far."""
    layout, (q, *_) = blocks.layouts[0], tensors
    head_dim = q.shape[-1]
    chosen = select_shape(kernel, BLOCK, head_dim, DTYPE, capability_of(q), causal=layout.causal)
    blocks.use(kernel, head_dim, chosen)
    expected = run(blocks, tensors)
    fastest = (inf, chosen)
    for tile in tiles:
        job = [kernel, head_dim, layout.causal, tile]
        blocks.use(kernel, head_dim, OnlyTile(*tile))
        try:
            got = run(blocks, tensors)
            times, calls = _times(blocks, tensors)
        except KernelLimitError as error:
            emit(job, does_not_fit=str(error))
            continue
        except Exception as error:
            if is_device_lost():
                raise
            emit(job, error=f"{type(error).__name__}: {error}"[:500])
            continue
        fastest = min(fastest, (median(times), Shape(*tile)), key=lambda one: one[0])
        emit(
            job, seconds=median(times), fastest_s=min(times), call_s=median(calls),
            difference=max(map(difference, got, expected)), pairs=layout.visible_pairs,
            density=layout.visible_pairs / visible_pairs(layout.seq_len, layout.causal),
        )  # fmt: skip
    blocks.use(kernel, head_dim, fastest[1])


def _times(blocks: TiledBlocks, tensors: tuple[Tensor, ...]) -> tuple[list[float], list[float]]:
    """Return the seconds of the kernel, and those of whole calls from the host's side."""
    calls, blocks.events, blocks.timed = list[float](), [], True
    for _ in range(REPEATS):
        run(blocks, tensors)
    torch.cuda.synchronize()
    blocks.timed = False
    for _ in range(CALLS):
        start = time.perf_counter()
        run(blocks, tensors)
        torch.cuda.synchronize()
        calls.append(time.perf_counter() - start)
    return [start.elapsed_time(end) / 1e3 for start, end in blocks.events], calls


def difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value; infinity for no number."""
    return float(((got - expected).abs().max() / expected.abs().max()).nan_to_num(inf))


def is_device_lost() -> bool:
    """Return True if the device can't be used any more, as after an illegal access."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def emit(job: list[Any], **figures: Any) -> None:
    """Print the result of a job."""
    print(json.dumps({"job": job, **figures}), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    run_jobs: Any = {"compile": compile_tiles, "time": time_tiles}[given.pop("what")]
    run_jobs(**given)


if __name__ == "__main__":
    main()
