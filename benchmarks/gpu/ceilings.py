"""The rates that bound everything else, in a process of its own: `stream` in processes.py runs it.

The argument is JSON: the device, and whether the sizes are toys. The figures are printed as JSON.
"""

import json
import sys

import torch

from benchmarks.gpu.items import Figures
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.meters.clock import clock_for
from longseq_bench.worker.timing import measure_matmul_rate

COPY_BYTES = {False: 2**32, True: 2**24}
"""Bytes of the tensor that is copied, by toy sizes."""
REPEATS = 10


def ceilings(device: str, toy: bool) -> Figures:
    """Return the bandwidth of a copy (bytes read and written) and rates of matrix products."""
    source = torch.ones(COPY_BYTES[toy], dtype=torch.uint8, device=device)
    target, clock = torch.empty_like(source), clock_for(device)
    for _ in range(REPEATS):
        with clock:
            target.copy_(source)
    dtypes: tuple[DType, ...] = ("float32",) if toy else ("bfloat16", "float16", "float32")
    rates = {name: measure_matmul_rate(Group.alone(), device, name) for name in dtypes}
    return {
        "copy_bytes_per_s": 2 * source.numel() / min(clock.wall),
        **{f"{name}_flops": rate for name, rate in rates.items()},
    }


if __name__ == "__main__":
    print(json.dumps(ceilings(*json.loads(sys.argv[1]))), flush=True)
