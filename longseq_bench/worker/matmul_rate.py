"""The rate of matrix products on this rank's device: the denominator of the share of peak."""

import torch

from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.meters.clock import clock_for

MIN_SIZE, MAX_SIZE, LONG_S = 128, 8192, 0.01
"""Rows and columns of the square matrices: doubled until a product takes long enough."""
PRODUCTS, TURNS = 6, 5_000


def measure_matmul_rate(group: Group, device: str, dtype: DType) -> float:
    """Return the FLOP/s of the fastest of some products, over all ranks at the same time.

    On a CPU float32 products of the compiled kernel count too: the library that torch calls does
    not use all vector units of every processor, and none for float16.
    """
    rate = _torch_rate(group, device, dtype)
    if device == "cpu" and native.unavailable_reason() is None:
        rate = max(rate, _native_rate(group))
    return float(group.all_sum(torch.tensor([rate], dtype=torch.float64))[0])


def _torch_rate(group: Group, device: str, dtype: DType) -> float:
    """Return the rate of torch's products of the size that takes long enough on the slowest rank.

    float16 takes seconds on CPUs without units for it, so the size begins small.
    """
    size, rate = MIN_SIZE, 0.0
    while True:
        seconds = group.all_max(_product_s(group, device, dtype, size))[0]
        rate = max(rate, 2 * size**3 / seconds)
        if seconds >= LONG_S or size >= MAX_SIZE:
            return rate
        size *= 2


def _product_s(group: Group, device: str, dtype: DType, size: int) -> float:
    """Return the seconds of the fastest product of this size; the first one only warms up."""
    generator = torch.Generator(device).manual_seed(0)
    # equal numbers need less power: a GPU multiplies ones a ninth faster
    a, b = (
        torch.empty(size, size, dtype=getattr(torch, dtype), device=device)
        .normal_(generator=generator)
        for _ in range(2)
    )  # fmt: skip
    out, clock = torch.empty_like(a), clock_for(device)
    for _ in range(PRODUCTS):
        group.barrier()
        with clock:
            torch.mm(a, b, out=out)
    return min(clock.wall[1:])


def _native_rate(group: Group) -> float:
    clock = clock_for("cpu")
    flops = 0
    for _ in range(PRODUCTS):
        group.barrier()
        with clock:
            flops = native.product_flops(TURNS)
    return flops / min(clock.wall[1:])
