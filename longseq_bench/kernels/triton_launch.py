"""Parts of every launch of a Triton kernel: grid, current device, rows without gaps."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError

MAX_PROGRAMS = 2**31 - 1
"""Programs of a one-dimensional grid."""


def grid_of(programs: int) -> tuple[int]:
    """Return the grid of this many programs. Raises KernelLimitError beyond MAX_PROGRAMS."""
    if programs > MAX_PROGRAMS:
        raise KernelLimitError(
            f"{programs} programs are more than the maximum of one launch, {MAX_PROGRAMS}"
        )
    return (programs,)


def on_device(owner: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of a tensor the current one, on which Triton launches."""
    return torch.cuda.device(owner.device) if owner.is_cuda else contextlib.nullcontext()


def capability_of(owner: Tensor) -> int:
    """Return the major number of a device's compute capability; 9 in Triton's interpreter."""
    return torch.cuda.get_device_capability(owner.device)[0] if owner.is_cuda else 9


def with_dense_rows(t: Tensor) -> Tensor:
    """Return a tensor whose last dimension has no gaps: itself, or a copy."""
    return t if t.stride(-1) == 1 else t.contiguous()
