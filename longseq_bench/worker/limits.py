"""A hard memory budget for this process, and the allocator behaviour that makes it exact.

CPU: RLIMIT_DATA is set to what is mapped now plus the budget. glibc is told to map every block from
128 KiB up on its own and to give it back at once; otherwise a true need of 52 MiB passes only at
130, and with it 52 fails and 53 passes.
CUDA: the caching allocator's fraction, less what lives outside it (context, libraries).
"""

from __future__ import annotations

import ctypes
import resource
import sys

import torch

from longseq_bench.core.model import Allocator
from longseq_bench.meters.heap_peak import status_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6
_FILL = 0x01
"""Blocks are filled with its complement when they are given out, 0xFE: -1.7e38 in float32 and
bfloat16, so that what is read before it is written is no small number."""
_MAP_FROM = 128 * 1024
_DYNAMIC_MAX = 32 * 1024 * 1024
"""Where glibc's own dynamic threshold ends (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""


def exact_heap() -> str | None:
    """Make what is resident follow what is allocated, from now on. Returns why it can't, or None.

    Blocks are filled as they are given out: a page that nobody has written counts against a budget
    and would not be in a peak. To be called before the warm-up, so that the warm-up leaves no free
    blocks behind.
    """
    settings = {_M_MMAP_THRESHOLD: _MAP_FROM, _M_TRIM_THRESHOLD: 0, _M_PERTURB: _FILL}
    reason = _mallopt(settings)
    if reason is None:
        # what imports freed would otherwise be used first, outside the budget
        ctypes.CDLL(None).malloc_trim(0)
    return reason


def fast_heap() -> str | None:
    """The state that glibc's dynamic thresholds settle into, for timing."""
    return _mallopt(
        {_M_MMAP_THRESHOLD: _DYNAMIC_MAX, _M_TRIM_THRESHOLD: 2 * _DYNAMIC_MAX, _M_PERTURB: 0}
    )


def mapped_bytes() -> int:
    """What counts against the data limit now; 0 where nothing does."""
    return status_bytes("VmData") if sys.platform.startswith("linux") else 0


def limit_heap(budget: int, mapped: int | None = None) -> str | None:
    """Let this process map `budget` bytes more than it has, or than it had when `mapped` was read.
    Returns why it can't, or None."""
    if not sys.platform.startswith("linux"):
        return f"not enforced: {sys.platform} has no data limit that counts mapped memory"
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, ((mapped_bytes() if mapped is None else mapped) + budget, hard)
    )
    return None


def lift_heap_limit() -> None:
    """Allow as much as the hard limit does, for what is not the trial's own (checks, messages)."""
    if sys.platform.startswith("linux"):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def limit_cuda(budget: int) -> None:
    """Cap the caching allocator so that all of this process on the device stays in the budget.

    Raises torch.OutOfMemoryError where what lives outside the allocator exceeds it already.
    """
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    allowed = min(budget, total) - outside
    if allowed <= 0:
        raise torch.OutOfMemoryError(
            f"{outside} of {budget} bytes are in use outside the allocator"
        )
    torch.cuda.set_per_process_memory_fraction(allowed / total)


def use_allocator(name: Allocator) -> None:
    """Set CUDA's caching allocator before it has given anything out."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{name == 'expandable'}")


def _mallopt(settings: dict[int, int]) -> str | None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return "this C library has no mallopt; small blocks may blur the budget and the peak"
    failed = [parameter for parameter, value in settings.items() if not mallopt(parameter, value)]
    return f"mallopt refused parameters {failed}" if failed else None
