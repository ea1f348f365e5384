"""A hard memory budget for this process, and the allocator settings that make it exact.

The budget is what a trial may allocate beyond the idle process with torch loaded.
CPU: RLIMIT_DATA is set to the bytes mapped now plus the budget. glibc maps every block of 128 KiB
or more on its own and returns it at once. A trial that needs 52 MiB then fails with a budget of
52 MiB and passes with 53; without these settings it needs 130 MiB.
CUDA: an idle process holds nothing on the device, so the budget counts all that the trial holds
there. The caching allocator's fraction is the budget less what lies outside the allocator: the CUDA
context, buffers of NCCL, workspaces of libraries, and what other processes hold.
"""

import ctypes
import resource
import sys

import torch

from longseq_bench.core.model import Allocator
from longseq_bench.meters.heap_peak import status_bytes

_FILL = 0x01
"""New blocks are filled with its complement, 0xFE: -1.7e38 in float32 and bfloat16, which shows."""
_MMAP_THRESHOLD_BYTES = 128 * 1024
_DYNAMIC_MAX = 32 * 1024 * 1024
"""The largest value of glibc's dynamic threshold (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""


def use_exact_heap() -> str | None:
    """Make the resident size follow the allocated size. Returns the reason if it can't.

    New blocks are filled: a page that is never written counts against a budget, but would not be
    in a peak. Call this before the warm-up, which then leaves no free blocks behind.
    """
    reason = _mallopt(_MMAP_THRESHOLD_BYTES, 0, _FILL)
    if reason is None:
        # blocks that imports have freed would be used first, outside the budget
        release_free_memory()
    return reason


def use_fast_heap() -> str | None:
    """Set the largest dynamic thresholds of glibc, for timing. Returns the reason if it can't."""
    return _mallopt(_DYNAMIC_MAX, 2 * _DYNAMIC_MAX, 0)


def release_free_memory() -> None:
    """Return freed blocks to the system, so that the next pass writes to new pages."""
    ctypes.CDLL(None).malloc_trim(0)


def can_release() -> bool:
    """Return whether this C library can return freed blocks."""
    return hasattr(ctypes.CDLL(None), "malloc_trim")


def mapped_bytes() -> int:
    """Return the bytes that count for the data limit now; 0 on a system without such a limit."""
    return status_bytes("VmData") if sys.platform.startswith("linux") else 0


def limit_heap(budget: int, mapped: int | None = None) -> str | None:
    """Let this process map `budget` more bytes than now, or than `mapped`; return why it can't."""
    if not sys.platform.startswith("linux"):
        return f"not enforced: {sys.platform} has no data limit that counts mapped memory"
    before = mapped_bytes() if mapped is None else mapped
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, hard))
    return None


def lift_heap_limit() -> None:
    """Raise the limit to the hard limit, for the benchmark's own work (checks, messages)."""
    if sys.platform.startswith("linux"):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def limit_cuda(budget: int) -> int:
    """Cap the caching allocator, and return the bytes outside it.

    Raises torch.OutOfMemoryError if they already exceed the budget.
    """
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    allowed = min(budget, total) - outside
    if allowed <= 0:
        used = f"{outside} of {budget} bytes are in use outside the allocator"
        raise torch.OutOfMemoryError(used)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return outside


def use_allocator(name: Allocator) -> None:
    """Select CUDA's caching allocator. Call it before the first allocation."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{name == 'expandable'}")


def _mallopt(mmap_threshold: int, trim_threshold: int, fill: int) -> str | None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return "this C library has no mallopt; small blocks may blur the budget and the peak"
    settings = {-3: mmap_threshold, -1: trim_threshold, -6: fill}  # M_* of malloc.h
    failed = [parameter for parameter, value in settings.items() if not mallopt(parameter, value)]
    return f"mallopt refused parameters {failed}" if failed else None
