"""Tensors in the host's memory, outside the memory budget of the device.

For CUDA this is pinned memory. For a CPU, whose memory the budget limits, it is a mapped file: the
system loads and evicts its pages as it has room, and they do not count as data of the process. The
file is unlinked at once, so nothing is left, however the process ends.

torch's allocator rounds pinned memory up to a power of two, so a tensor may take almost twice its
size. `usage` counts the rounded sizes.
"""

import ctypes
import itertools
import math
import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longseq_bench import meta_mode
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.units import format_bytes
from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.merge import Tensors
from longseq_bench.kernels.tiling import Call, RowBlock, Tiling, wide


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

    Raises UnsupportedError if the folder for temporary files has too little space, MemoryError if
    so much memory can't be pinned.
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
    if t.is_meta:
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


# ---- tiles that come and go ----------------------------------------------------------------------
# A row block of queries stays on the device while its keys and values are copied tile by tile; the
# next tile is copied while the current one is computed. Sums of gradients of keys come and go with
# their keys, so that the host adds nothing. So the device's memory does not limit queries, keys or
# the output. On a CPU tiles are views of mapped files and nothing is copied.
#
# Shapes: as in kernels/tiling.py; q, k, v, out and the gradients are on the host.


class StreamedKernel:
    """An AttentionKernel over a tiling whose rows and keys are slices.

    exact: computes each piece on its device. On CUDA tiles are copied on a separate stream, in one
    order.
    """

    def __init__(self, tiling: Tiling, exact: ExactKernel) -> None:
        self._tiling, self._exact = tiling, exact
        real = exact.device == "cuda" and not meta_mode.is_meta()
        self._stream: Any = torch.cuda.Stream() if real else None  # type: ignore[no-untyped-call]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        out, lse = zeros_like(q), None
        if keep_lse:
            lse = zeros(q.shape[:3], wide(q), self._exact.device).fill_(-math.inf)
        for block in meta_mode.limited(self._tiling()):
            at = (slice(None), block.heads, block.rows)
            rows = self._copy(q[at])
            acc = torch.zeros_like(rows, dtype=wide(q))
            acc_lse = acc.new_full(acc.shape[:3], -math.inf)
            for call, (k_tile, v_tile) in self._keys(block, q, (k, v)):
                queries, own, own_lse = call.take((rows, acc, acc_lse), ())
                self._exact.merge(queries, (k_tile, v_tile), (own, own_lse), call.piece.causal)
                del k_tile, v_tile
            out[at] = acc
            if lse is not None:
                lse[at] = acc_lse
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v, given out and lse of the whole softmax."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq = zeros_like(q)
        dk, dv = (zeros_like(t, wide(t)) for t in (k, v))
        for block in meta_mode.limited(self._tiling()):
            at = (slice(None), block.heads, block.rows)
            own = [self._copy(t[at]) for t in (grad_out, q, out, lse)]
            acc = torch.zeros_like(own[1], dtype=wide(q))
            for call, (k_tile, v_tile, *sums) in self._keys(block, q, (k, v, dk, dv)):
                do, q_rows, o, row_lse, dq_rows = call.take((*own, acc), ())
                of_rows, tiles = (do, q_rows, o, row_lse), (k_tile, v_tile)
                own_sums = dq_rows, sums[0], sums[1]
                self._exact.add_gradients(of_rows, tiles, own_sums, call.piece.causal)
                self._copy_back((dk, dv), call, sums)
                del k_tile, v_tile, tiles, sums, own_sums
            dq[at] = acc
        if self._stream is not None:
            self._stream.synchronize()
        return dq, _to_dtype_of(dk, k), _to_dtype_of(dv, v)

    def _copy(self, tile: Tensor) -> Tensor:
        """Return the tile on the device."""
        if self._exact.device != "cuda":
            return tile
        if tile.is_meta:
            return tile.clone()
        copied = torch.empty(tile.shape, dtype=tile.dtype, device="cuda")
        for targets, sources in zip(copied, tile, strict=True):
            for target, source in zip(targets, sources, strict=True):
                # the rows of one head are contiguous; torch copies other layouts on the host first
                target.copy_(source, non_blocking=True)
        return copied

    def _keys(
        self, block: RowBlock, q: Tensor, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Call, Tensors]]:
        """Yield the calls of a row block, each with the tiles of its keys on the device.

        No two calls may have the same keys: the next tiles are copied meanwhile.
        """
        pending: tuple[Call, Tensors] | None = None
        calls = tiling.calls(block.pieces, q, tensors[0], block.heads.start)
        for call in itertools.chain(calls, [None]):
            started = (call, self._start(tensors, call)) if call else None
            if pending is not None:
                if self._stream is not None:
                    compute_stream = torch.cuda.current_stream()
                    compute_stream.wait_stream(self._stream)
                    for tile in pending[1]:
                        # its memory is not reused for copies until the computation has read it
                        tile.record_stream(compute_stream)
                yield pending
            pending = started
            del started

    def _start(self, tensors: Sequence[Tensor], call: Call) -> Tensors:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return [self._copy(t) for t in call.take((), tensors)]

    def _copy_back(self, tensors: Sequence[Tensor], call: Call, tiles: Tensors) -> None:
        """Copy computed tiles back to the host, after their computation and before later tiles."""
        if self._stream is None:
            return  # on a CPU the tiles are views
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, tile in zip(call.take((), tensors), tiles, strict=True):
                target.copy_(tile, non_blocking=True)
                tile.record_stream(self._stream)


def _to_dtype_of(total: Tensor, like: Tensor) -> Tensor:
    return total if total.dtype == like.dtype else zeros_like(like).copy_(total)
