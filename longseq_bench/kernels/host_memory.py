"""Tensors in the host's memory, outside the memory budget of the device.

For CUDA this is pinned memory. For a CPU, whose memory the budget limits, it is a mapped file: the
system loads and evicts its pages as it has room, and they do not count as data of the process. The
file is unlinked at once, so nothing is left, however the process ends.
"""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longseq_bench import meta_mode
from longseq_bench.core.errors import UnsupportedError


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros in host memory for a kind of device.

    Raises UnsupportedError if the folder for temporary files has too little space.
    """
    if meta_mode.is_meta():
        with _disable_current_modes():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return meta_mode.mark_off_device(tensor)
    if device == "cuda":
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
    return _mapped(tuple(shape), dtype)


def copy(t: Tensor, device: str) -> Tensor:
    """Return a copy in host memory for a kind of device; a mapped copy does not stay resident.

    Raises UnsupportedError as `zeros` does.
    """
    result, t = zeros(t.shape, t.dtype, device), t.detach()
    if meta_mode.is_meta():
        return result.copy_(t)
    copied_bytes = _COPIED_BYTES if device == "cuda" else RESIDENT_BYTES
    step = max(1, copied_bytes // max(1, t.shape[-1] * t.element_size()))
    # head by head: torch first copies a tensor whose heads are next to its tokens where it is
    for b, head in product(range(t.shape[0]), range(t.shape[1])):
        for start in range(0, t.shape[2], step):
            result[b, head, start : start + step] = t[b, head, start : start + step]
            if device != "cuda":
                _evict(result)
    return result


def _evict(mapped: Tensor) -> None:
    """Return the pages to the system, so that they don't count in a peak; the file keeps them."""
    page = os.sysconf("SC_PAGESIZE")
    start = -(-mapped.data_ptr() // page) * page
    length = (mapped.data_ptr() + mapped.nbytes - start) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONTNEED)


RESIDENT_BYTES, _DONTNEED = 2**20, 4
_COPIED_BYTES = 2**24
"""Bytes that are copied together from a GPU."""


def zeros_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros in host memory of the same kind as t."""
    return zeros(t.shape, dtype or t.dtype, "cuda" if t.is_pinned() else "cpu")


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = max(1, torch.Size(shape).numel())
    needed = count * dtype.itemsize
    try:
        with tempfile.TemporaryFile(prefix="longseq-") as file:
            # fail here: a later write to a page without space on the disk would raise SIGBUS
            os.posix_fallocate(file.fileno(), 0, needed)
            path = f"/proc/self/fd/{file.fileno()}"
            with _disable_current_modes():
                flat = torch.from_file(path, shared=True, size=count, dtype=dtype)
    except OSError as error:
        raise UnsupportedError(
            f"{needed:,} bytes are needed in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR "
            "to another folder"
        ) from None
    return meta_mode.mark_off_device(flat)[: torch.Size(shape).numel()].view(shape)
