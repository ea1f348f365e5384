"""Tiles of the Triton kernels: how many queries and keys a program holds, its warps and stages.

`python -m benchmarks.triton_static` compiles each of them without a GPU and prints its registers,
spills, shared memory, programs per multiprocessor and loads in flight.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from longseq_bench.core.errors import KernelLimitError, UnsupportedError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (16, 32, 64, 128, 256)


def unavailable_reason(block: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the Triton kernels don't support a workload; None if they do."""
    if block not in BLOCKS:
        return f"Triton's tiles need a block of 16, 32, 64, 128 or 256 tokens, not {block}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"Triton's tiles need a head_dim of 16 to 256 in steps of 16, not {head_dim}"
    if dtype not in DTYPES:
        return f"the Triton kernels support float16, bfloat16, float32, not {str(dtype)[6:]}"
    return None


@dataclass(frozen=True)
class Shape:
    """The tile of a kernel: queries by keys, its warps, and its pipeline stages.

    max_registers: of a thread, so that a second program fits the multiprocessor; None: any number.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Options for Triton's compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.max_registers} if self.max_registers else {})

    def smaller(self) -> Shape | None:
        """Return the next tile that takes less shared memory, or None."""
        # with one stage no load overlaps computation, so the second stage is removed last
        if self.stages > 2 or (self.stages == 2 and max(self.queries, self.keys) == 16):
            return replace(self, stages=self.stages - 1)
        if max(self.queries, self.keys) == 16:
            return None
        if self.queries >= self.keys:
            return replace(self, queries=self.queries // 2)
        return replace(self, keys=self.keys // 2)


_MAX_REGISTERS = 255
"""Maximum of a thread. Without it the assembler sometimes spills some bytes to fit two programs."""

_ANY = "any"
_SELECTED_BY = ("kernel", "bytes", "head_dim", "capability", "tail", "mask")


@cache
def _tiles() -> dict[tuple[str, ...], Shape]:
    """Return the tiles of data/tiles.csv, which explains them, by what selects them."""
    text = files("longseq_bench").joinpath("data/tiles.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found = {}
    for row in rows:
        sizes = (
            int(row[name] or 0) for name in ("queries", "keys", "warps", "stages", "registers")
        )
        queries, keys, warps, stages, registers = sizes
        shape = Shape(queries, keys, warps, stages, registers or None)
        found[tuple(row[name] for name in _SELECTED_BY)] = shape
    return found


def select_shape(
    kernel: str,
    block: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: int = 9,
    tail: bool = False,
    causal: bool = False,
) -> Shape:
    """Return the first tile to try for a kernel, never larger than a block.

    kernel: forward, dq or dkv.
    capability: major number of the device's compute capability. tail: the last block is short.
    """
    if reason := unavailable_reason(block, head_dim, dtype):
        raise UnsupportedError(reason)
    shape = _find(kernel, dtype.itemsize, head_dim, capability, tail, causal)
    queries, keys = min(shape.queries, block), min(shape.keys, block)
    is_full = (queries, keys) == (shape.queries, shape.keys)
    # dK and dV of 64 keys by 128 take half the registers of 8 warps, all of 4
    is_large = is_full or (kernel == "dkv" and keys * head_dim > 64 * 64)
    return replace(shape, queries=queries, keys=keys, warps=shape.warps if is_large else 4)


def _find(
    kernel: str, size: int, head_dim: int, capability: int, tail: bool, causal: bool
) -> Shape:
    room = next(str(dim) for dim in (64, 128, 256) if head_dim <= dim)
    tails, masks = ("yes", "no") if tail else ("no",), ("causal" if causal else "full", _ANY)
    keys = product((kernel,), (str(size),), (room,), (str(capability), _ANY), tails, masks)
    key = next(key for key in keys if key in _tiles())
    shape = _tiles()[key]
    if tail and key[_SELECTED_BY.index("tail")] == "no" and shape.max_registers:
        # the masks of a short last block need more registers
        return replace(shape, max_registers=_MAX_REGISTERS)
    return shape


def run_fitting(tile: Shape, run: Callable[[Shape], None]) -> Shape:
    """Run with `tile`, or with the next smaller one that fits the device; return the tile.

    Raises KernelLimitError if the smallest tile does not fit.
    """
    while True:
        try:
            run(tile)
        except OutOfResources as error:
            if (smaller := tile.smaller()) is None:
                reason = f"no tile is small enough for this device: {error}"
                raise KernelLimitError(reason) from error
            tile = smaller
        else:
            return tile


# ---- launches ------------------------------------------------------------------------------------

MAX_PROGRAMS = 2**31 - 1


class Launch:
    """A launch of a kernel with the same arguments each time, but for the data of its tensors.

    Triton looks at every argument to find out what it has compiled, which takes longer than many a
    kernel. So the first call keeps what was compiled, and later ones start that.
    sizes, constants: the parameters after the tensors, in order, and options of the compiler.

    Raises KernelLimitError for too many programs.
    """

    def __init__(
        self, kernel: Any, programs: int, sizes: Sequence[Any], constants: dict[str, Any]
    ) -> None:
        if programs > MAX_PROGRAMS:
            raise KernelLimitError(
                f"{programs} programs are more than the maximum of one launch, {MAX_PROGRAMS}"
            )
        self.name: str = kernel.__name__
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._sizes, self._constants = tuple(sizes), constants
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current device; nothing on meta tensors."""
        if tensors[0].is_meta:
            return
        # Triton compiles a kernel again for a tensor that begins elsewhere
        aligned = not any(t.data_ptr() % 16 for t in tensors)
        if self._compiled is not None and aligned:
            self._compiled(*tensors, *self._sizes)
            return
        made = self._kernel[self._grid](*tensors, *self._sizes, **self._constants)
        if aligned and isinstance(made, CompiledKernel):  # not in the interpreter
            names = self._kernel.arg_names[len(tensors) + len(self._sizes) :]
            self._sizes += tuple(self._constants[name] for name in names)
            self._constants = {k: v for k, v in self._constants.items() if k not in names}
            self._compiled = made[self._grid]


def on_device(owner: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of a tensor the current one, on which Triton launches."""
    is_other = owner.is_cuda and owner.device.index != torch.cuda.current_device()
    return torch.cuda.device(owner.device) if is_other else contextlib.nullcontext()


def capability_of(owner: Tensor) -> int:
    """Return the major number of a device's compute capability; 9 in Triton's interpreter."""
    return torch.cuda.get_device_capability(owner.device)[0] if owner.is_cuda else 9
