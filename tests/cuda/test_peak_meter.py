"""The meter of device memory against tensors of known size."""

import pytest
import torch

from longseq_bench.meters.memory import CudaMemory

pytestmark = pytest.mark.cuda

MIB = 2**20


def allocate(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def figures(meter: CudaMemory) -> dict[str, float]:
    return {one.name: one.samples[0] for one in meter.measurements()}


def test_the_peak_is_the_sum_of_what_lives_at_once() -> None:
    """Not what was there before, and not what is there at the end."""
    before, meter = allocate(100), CudaMemory()
    with meter:
        kept = allocate(32)
        more = allocate(64)
        del more
        last = allocate(16)
    assert figures(meter)["peak"] == (32 + 64) * MIB
    assert figures(meter)["reserved"] >= (100 + 32 + 64) * MIB
    del before, kept, last


def test_work_in_a_kernel_counts_if_it_goes_through_the_allocator() -> None:
    """A product in bfloat16 needs its output; what torch adds is a fixed workspace."""
    a = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    a @ a
    torch.cuda.synchronize()
    meter = CudaMemory()
    with meter:
        out = a @ a
    assert figures(meter)["peak"] == out.numel() * 2
