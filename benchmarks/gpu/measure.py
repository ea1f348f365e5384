"""Measurements that touch the device, in a process of their own: `stream` in processes.py runs it.

The argument is JSON: the name of a function (`what`), the device, whether the sizes are toys, and
arguments. The figures are printed as JSON.
"""

import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.items import Figures
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.gpus import read_visible_gpus
from longseq_bench.core.model import DType, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.environment import installed_version
from longseq_bench.meters.clock import clock_for
from longseq_bench.worker.timing import measure_matmul_rate

REPEATS = 8
COPY_BYTES = {False: 2**32, True: 2**24}
"""Bytes of the tensor that is copied, by toy sizes."""
TOKENS = {False: 2**16, True: 512}
HEADS = {False: 8, True: 2}
DENSE = {
    "cuda": {"cudnn": "fused", "flash": "fused", "flex": "flex"},
    "cpu": {"native": "fused", "aten-flash-cpu": "fused"},
}
"""Kernels of dense attention by device, and the implementation that runs each."""


def main() -> None:
    arguments = json.loads(sys.argv[1])
    print(json.dumps(FUNCTIONS[arguments.pop("what")](**arguments)), flush=True)


def versions(device: str, toy: bool) -> Figures:
    """Return the versions that decide what runs."""
    gpus = read_visible_gpus()
    nccl: Any = torch.cuda.nccl.version() if device == "cuda" else None  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "triton": installed_version("triton"),
        "driver": gpus.driver,
        "gpus": list(gpus.names),
        "devices": torch.cuda.device_count(),
        "python": sys.version.split()[0],
    }


def ceilings(device: str, toy: bool) -> Figures:
    """Return the bandwidth of a copy (bytes read and written) and rates of matrix products."""
    source = torch.ones(COPY_BYTES[toy], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(times(device, lambda: target.copy_(source)))
    dtypes: tuple[DType, ...] = ("float32",) if toy else ("bfloat16", "float16", "float32")
    rates = {name: measure_matmul_rate(Group.alone(), device, name) for name in dtypes}
    return {
        "copy_bytes_per_s": 2 * source.numel() / seconds,
        **{f"{name}_flops": rate for name, rate in rates.items()},
    }


def dense(device: str, toy: bool, head_dim: int, causal: bool) -> Figures:
    """Return seconds and FLOP/s of each kernel of dense attention, forward and backward."""
    dtype = "float32" if toy else "bfloat16"
    found: Figures = {"tokens": TOKENS[toy], "kernels": {}}
    for kernel, implementation in DENSE[device].items():
        w = Workload(
            seq_len=TOKENS[toy], heads=HEADS[toy], head_dim=head_dim, dtype=dtype, causal=causal,
            mode="train",
        )  # fmt: skip
        options = {"kernel": kernel} if implementation == "fused" else {}
        try:
            found["kernels"][kernel] = _passes(device, w, implementation, options)
        except (UnsupportedError, KernelLimitError) as error:
            found["kernels"][kernel] = {"unavailable": str(error)}
    return found


def _passes(device: str, w: Workload, name: str, options: dict[str, str]) -> Figures:
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.prepare(device)
    shape = (w.batch, w.heads, w.seq_len, w.head_dim)
    dtype = getattr(torch, w.dtype)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    out = attention(q, k, v)
    grad_out = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)

    forward_s = median(times(device, lambda: attention(q, k, v).detach()))
    backward_s = median(times(device, backward))
    forward_flops = attention_flops(w.model_copy(update={"mode": "forward"}))
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "forward_flops": forward_flops / forward_s,
        "backward_flops": (attention_flops(w) - forward_flops) / backward_s,
    }


def times(device: str, run: Callable[[], object]) -> list[float]:
    """Return the seconds of some runs, after two that are not counted."""
    clock = clock_for(device)
    for _ in range(REPEATS + 2):
        with clock:
            run()
    return clock.wall[2:]


FUNCTIONS: dict[str, Callable[..., Figures]] = {
    "versions": versions, "ceilings": ceilings, "dense": dense,
}  # fmt: skip

if __name__ == "__main__":
    main()
