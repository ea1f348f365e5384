"""Tensors in the host's memory, outside the memory budget of the device.

For CUDA this is pinned memory. For a CPU, whose memory the budget limits, it is a mapped file: the
system loads and evicts its pages as it has room, and they do not count as data of the process. The
file is unlinked at once, so nothing is left, however the process ends.

torch's allocator rounds pinned memory up to a power of two, so a tensor may take almost twice its
size. `usage` counts the rounded sizes.
"""

import ctypes
import os
import re
import tempfile
import weakref
from collections.abc import Sequence
from itertools import product

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longseq_bench import meta_mode
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.units import format_bytes


class Usage:
    """Bytes of host memory that tensors of this module take, now and at most.

    Call `restart` before something whose peak is of interest.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.current

    def add(self, tensor: Tensor, size: int) -> Tensor:
        """Count `size` bytes while the storage of a tensor exists, and return the tensor."""
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(tensor.untyped_storage(), self._remove, size)
        return tensor

    def _remove(self, size: int) -> None:
        self.current -= size


usage = Usage()


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch pins for a tensor of this size: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros in host memory for a kind of device.

    Raises:
        UnsupportedError: the folder for temporary files has too little space.
        MemoryError: so much memory can't be pinned.
    """
    if meta_mode.is_meta():
        with _disable_current_modes():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        size = tensor.nbytes
        size = pinned_bytes(size) if meta_mode.device_kind(tensor) == "cuda" else size
        return usage.add(meta_mode.mark_off_device(tensor), size)
    if device == "cuda":
        return _pinned(tuple(shape), dtype)
    return _mapped(tuple(shape), dtype)


def copy(t: Tensor, device: str) -> Tensor:
    """Return a copy in host memory for a kind of device; a mapped copy does not stay resident.

    Raises UnsupportedError and MemoryError as `zeros` does.
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


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    taken = pinned_bytes(size)
    problem = f"{format_bytes(size)} of pinned host memory take {format_bytes(taken)}"
    available = psutil.virtual_memory().available
    if taken > available:
        # to pin more memory than is available may stop the host
        raise MemoryError(f"{problem}, and {format_bytes(available)} are available")
    try:
        tensor = torch.zeros(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if not _PIN_FAILED.search(text):
            raise
        raise MemoryError(f"{problem}, and the driver can't pin them ({text})") from error
    return usage.add(tensor, taken)


_PIN_FAILED = re.compile(r"CUDA error: (out of memory|invalid argument)")


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
    usage.add(meta_mode.mark_off_device(flat), needed)
    return flat[: torch.Size(shape).numel()].view(shape)
