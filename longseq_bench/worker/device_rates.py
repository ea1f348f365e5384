"""Rates of the ranks' devices: matrix products, for the share of peak; copies, for decoding.

Each is that of the fastest of some calls, the first of which only warms up, over all ranks at the
same time.
"""

from collections.abc import Callable

import torch

from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.meters.clock import clock_for

MIN_SIZE, MAX_SIZE, LONG_S = 128, 8192, 0.01
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
    while slowest_s < LONG_S and size < MAX_SIZE:
        size *= 2
        slowest_s = group.all_max(_product_s(group, device, dtype, size))[0]
        rate = max(rate, 2 * size**3 / slowest_s)
    if device == "cpu" and native.unavailable_reason() is None:
        rate = max(rate, _native_rate(group))
    return _sum_over_ranks(group, rate)


def _product_s(group: Group, device: str, dtype: DType, size: int) -> float:
    generator = torch.Generator(device).manual_seed(0)
    # equal numbers need less power: a GPU multiplies ones a ninth faster
    a, b = (
        torch.empty(size, size, dtype=getattr(torch, dtype), device=device)
        .normal_(generator=generator)
        for _ in range(2)
    )  # fmt: skip
    out = torch.empty_like(a)
    return _fastest_s(group, device, lambda: torch.mm(a, b, out=out))


def _native_rate(group: Group) -> float:
    flops: list[int] = []
    seconds = _fastest_s(group, "cpu", lambda: flops.append(native.product_flops(TURNS)))
    return flops[-1] / seconds


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
