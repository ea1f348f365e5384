"""Workspace of torch's fused kernels, the table in data/workspaces.yaml.

    python -m benchmarks.workspaces                 # fit the coefficients of CPU kernels
    python -m benchmarks.workspaces --device cuda   # compare the formulas of CUDA kernels

CPU: each kernel is called twice on tensors of several shapes, the second time under the exact heap
meter; the size of its results is subtracted. Coefficients are fitted by least squares with a lower
bound of 0 and printed in the format of the table, with the largest residual.

CUDA: the peak of torch's allocator in one call, next to the results and workspace that a dry
run counts for the same call.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from longseq_bench.core.errors import LongseqError
from longseq_bench.kernels.exact.base import Use, select
from longseq_bench.meters.memory import HeapPeak, StoragePeak
from longseq_bench.worker import memory
from longseq_bench.worker.memory import KernelWorkspace

TOKENS = ((128, 2048), (512, 1024), (1024, 1024), (1024, 8192), (4096, 4096), (2048, 16384))
HEADS = ((8, 8), (8, 2), (1, 1))
DIMS = (64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("thread_short", "thread", "thread_dim", "query", "key", "kv", "row")


def measure_workspace(
    dtype: torch.dtype, backward: bool, n: int, m: int, hq: int, hk: int, d: int
) -> int:
    """Return the peak of one call in bytes, without its results."""
    q = torch.randn(1, hq, n, d).to(dtype)
    k, v = (torch.randn(1, hk, m, d).to(dtype) for _ in range(2))
    # strides as from a model's next layer; the kernel does not copy it
    grad = torch.randn(1, n, hq, d).to(dtype).transpose(1, 2)
    kernel, _ = select("aten-flash-cpu", Use("cpu", dtype, d, backward))
    out, lse = kernel.forward(q, k, v)

    def call() -> Any:
        return kernel.backward((grad, q, out, lse), (k, v)) if backward else kernel.forward(q, k, v)

    call()
    meter = HeapPeak()
    with meter:
        outputs = call()
    return int(meter.peak) - sum(int(t.untyped_storage().nbytes()) for t in outputs)


def features(threads: int, n: int, m: int, hq: int, hk: int, d: int) -> list[float]:
    """Return the factors of the coefficients."""
    return [
        threads * (n < 768), threads * (n >= 768), threads * d,
        hq * n * d, hq * m * d, hk * m * d, hq * n,
    ]  # fmt: skip


def fit(rows: list[list[float]], measured: list[float]) -> tuple[dict[str, float], float]:
    """Fit the coefficients; return them and the largest residual in bytes."""
    a, b = np.array(rows), np.array(measured)
    keep = list(range(len(NAMES)))
    while True:
        # drop the column with the most negative coefficient, one at a time
        found = np.linalg.lstsq(a[:, keep], b, rcond=None)[0]
        if (found >= 0).all():
            break
        del keep[int(found.argmin())]
    whole = np.zeros(len(NAMES))
    whole[keep] = found
    return dict(zip(NAMES, whole.round(4).tolist(), strict=True)), float(abs(a @ whole - b).max())


def measure_on_cuda(
    name: str, backward: bool, tokens: int, hq: int, hk: int, d: int
) -> tuple[int, int]:
    """Return the peak of one call in bytes: as the allocator measured it, and as a dry run counts.

    name: an exact kernel for CUDA, in bfloat16.
    """
    kernel, _ = select(name, Use("cuda", torch.bfloat16, d, backward))
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(1, hq, tokens, d, **make)
    k, v = (torch.randn(1, hk, tokens, d, **make) for _ in range(2))
    grad = torch.randn(1, tokens, hq, d, **make).transpose(1, 2)
    tensors = grad, q, *kernel.forward(q, k, v), k, v

    def call(tensors: Sequence[Tensor]) -> Any:
        grad, q, out, lse, k, v = tensors
        return kernel.backward((grad, q, out, lse), (k, v)) if backward else kernel.forward(q, k, v)

    call(tensors)  # cuDNN's plan, and one-time allocations
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(tensors)
    measured = torch.cuda.max_memory_allocated() - before
    meter = StoragePeak("cuda", KernelWorkspace())
    with meter:
        # the meter would take a view of what was there before for something new
        copies = [t.clone() for t in tensors]
        before = int(meter.current)
        call(copies)
    return measured, int(meter.peak) - before


def compare_on_cuda() -> None:
    print(f"# torch {torch.__version__}, {torch.cuda.get_device_name()}; bytes of one call")
    print("kernel backward tokens heads head_dim measured counted ratio")
    cases = itertools.product(
        ("flash", "cudnn", "efficient"), (False, True), (1024, 65_536), HEADS, DIMS
    )
    for name, backward, tokens, (hq, hk), d in cases:
        try:
            measured, counted = measure_on_cuda(name, backward, tokens, hq, hk, d)
        except LongseqError as error:
            print(f"{name} {backward} {tokens} {hq}/{hk} {d} {error}")
            continue
        ratio = measured / counted
        print(f"{name} {backward} {tokens} {hq}/{hk} {d} {measured} {counted} {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    if parser.parse_args().device == "cuda":
        compare_on_cuda()
    else:
        fit_on_cpu()


def fit_on_cpu() -> None:
    memory.use_exact_heap()
    # MKL keeps the buffers of its first large product; no call is charged for them
    warm_up = torch.zeros(torch.get_num_threads(), 2048, 64)
    torch.bmm(warm_up, warm_up.transpose(1, 2))
    threads = torch.get_num_threads()
    table: dict[str, Any] = {}
    for backward, dtype in itertools.product((False, True), DTYPES):
        rows, measured = [], []
        for (n, m), (hq, hk), d in itertools.product(TOKENS, HEADS, DIMS):
            rows.append(features(threads, n, m, hq, hk, d))
            measured.append(float(measure_workspace(dtype, backward, n, m, hq, hk, d)))
        found, left = fit(rows, measured)
        name = "_scaled_dot_product_flash_attention_for_cpu" + ("_backward" if backward else "")
        kind = str(dtype).removeprefix("torch.")
        table.setdefault(name, {})[kind] = found
        print(
            f"# {name} {kind}: off by {left / 2**20:.2f} MiB at most of {max(measured) / 2**20:.1f}"
        )
    print(yaml.safe_dump(table, sort_keys=False))


if __name__ == "__main__":
    main()
