"""The rate of matrix products on this rank's device: what a share of peak is a share of."""

import torch

from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.meters.clock import clock_for

SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices: 15 ms on two cores, a millisecond on a large GPU."""
PRODUCTS = 6


def measure_matmul_rate(group: Group, device: str, dtype: DType) -> float:
    """Return the FLOP/s of the fastest of some products, over all ranks at the same time.

    The first product only warms up.
    """
    size = SIZES[device]
    a, b = (torch.ones(size, size, dtype=getattr(torch, dtype), device=device) for _ in range(2))
    out = torch.empty_like(a)
    clock = clock_for(device)
    for _ in range(PRODUCTS):
        group.barrier()
        with clock:
            torch.mm(a, b, out=out)
    own = 2 * size**3 / min(clock.wall[1:])
    return float(group.all_sum(torch.tensor([own], dtype=torch.float64))[0])
