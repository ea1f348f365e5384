"""Tensors in the host's memory, which a device's budget does not bound.

Beside a CUDA device that is pinned memory. Beside a CPU, whose own memory is the budget's, it is a
file that is mapped: pages of it come and go as the system has room, and count as no data of the
process. The file has no name from the start, so nothing of it stays, however a process ends.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longseq_bench import meta_mode
from longseq_bench.core.errors import UnsupportedError


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros beside a device of this kind. Raises UnsupportedError where there is no room for them,
    or no place for a file."""
    if meta_mode.is_meta():
        with _disable_current_modes():
            made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return meta_mode.mark_off_device(made)
    if device == "cuda":
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
    return _mapped(tuple(shape), dtype)


def copy(t: Tensor, device: str) -> Tensor:
    """A copy beside a device of this kind, none of which stays resident. Raises UnsupportedError
    as `zeros`."""
    made = zeros(t.shape, t.dtype, device)
    if meta_mode.is_meta() or device == "cuda":
        return made.copy_(t.detach())
    for there, here in zip(made.flatten(0, 1), t.detach().flatten(0, 1), strict=True):
        step = max(1, RESIDENT_BYTES // max(1, here[:1].nbytes))
        for start in range(0, len(here), step):
            there[start : start + step] = here[start : start + step]
            _let_go(made)
    return made


def _let_go(mapped: Tensor) -> None:
    """Its pages stay in the file; the process gives them back, so that no peak has them."""
    page = os.sysconf("SC_PAGESIZE")
    start = -(-mapped.data_ptr() // page) * page
    length = (mapped.data_ptr() + mapped.nbytes - start) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONTNEED)


RESIDENT_BYTES, _DONTNEED = 2**20, 4


def zeros_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Beside the same device as a tensor of the host that lies beside one."""
    beside = "cuda" if t.is_pinned() else "cpu"
    return zeros(t.shape, dtype or t.dtype, beside)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    needed = max(1, count) * torch.empty(0, dtype=dtype).element_size()
    folder = tempfile.gettempdir()
    try:
        handle, path = tempfile.mkstemp(prefix="longseq-", dir=folder)
        try:
            # now rather than by a signal at the page that finds no room
            os.posix_fallocate(handle, 0, needed)
            with _disable_current_modes():
                flat = torch.from_file(path, shared=True, size=max(1, count), dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        raise UnsupportedError(
            f"{needed:,} bytes are needed in {folder}: {error.strerror}; TMPDIR may name "
            f"another place"
        ) from None
    return meta_mode.mark_off_device(flat)[:count].view(shape)
