"""The memory bandwidth of the ranks: the denominator of the share of bandwidth of decoding."""

import torch

from longseq_bench.distributed.group import Group
from longseq_bench.meters.clock import clock_for

COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}
"""Bytes of the source, larger than the caches. On a CPU ranks share the cores, so each copies its
part."""
MIN_COPIED_BYTES = 32 * 2**20
COPIES = 6


def measure_copy_bandwidth(group: Group, device: str) -> float:
    """Return the bytes/s of the fastest of some copies by torch, over all ranks at the same time.

    Bytes that are read and bytes that are written count: twice the size of the source. The source
    is written first: pages that were never written are all one page, which stays in the cache.
    """
    size = COPIED_BYTES[device]
    if device == "cpu":
        size = max(MIN_COPIED_BYTES, size // group.size)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy, clock = torch.zeros_like(source), clock_for(device)
    for _ in range(COPIES):
        group.barrier()
        with clock:
            copy.copy_(source)
    # the first one only warms up
    rate = 2 * source.nbytes / min(clock.wall[1:])
    return float(group.all_sum(torch.tensor([rate], dtype=torch.float64))[0])
