"""Meta mode: run a pass on tensors without data, to find out how much memory it needs.

Tensors are on torch's `meta` device: they have shapes and no values, and kernels are not launched.
Loops with similar iterations run only a few of them. The memory of a pass is then known within
seconds, also for lengths, devices and world sizes that this machine does not have.

`limited_loops` alone shortens the loops of a pass on real tensors: the results are wrong, but the
allocations are right.

Both hold for all threads: on CUDA, autograd runs a backward pass in threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from longseq_bench.core.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MAX_TILES = 24
"""Iterations of a limited loop over tiles; the largest tile is among the first ones."""

MAX_STEPS = 6
"""Iterations of a limited loop over transfers: all are alike from the third on (in a backward pass
from the fourth on)."""


@dataclass(frozen=True)
class _Mode:
    device: str = ""
    capability: tuple[int, int] | None = None
    loops_limited: bool = False


_mode = _Mode()


@contextmanager
def standing_for(device: str, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Run a block in meta mode: meta tensors stand for tensors on this kind of device.

    capability: compute capability of the GPU, which decides what runs on it; None: any.
    """
    global _mode
    before, _mode = _mode, _Mode(device, capability, loops_limited=True)
    try:
        yield
    finally:
        _mode = before


def limited_loops() -> AbstractContextManager[None]:
    """Limit loops without meta mode: meta tensors stand for no device."""
    return standing_for("")


def is_meta() -> bool:
    """Return True in meta mode; for code without a tensor, which knows it by `Tensor.is_meta`."""
    return bool(_mode.device)


def capability() -> tuple[int, int] | None:
    """Return the compute capability of the GPU for which meta mode stands, if it is known."""
    return _mode.capability


def are_loops_limited() -> bool:
    """Return True if loops are limited: results are wrong then, so computation may be left out."""
    return _mode.loops_limited


def limited(items: Iterable[T], max_items: int = MAX_TILES) -> Iterator[T]:
    """Yield all items; only the first `max_items` if loops are limited."""
    return islice(items, max_items) if _mode.loops_limited else iter(items)


def refuse_limited_loops() -> None:
    """Raise UnsupportedError if loops are limited on real data; for passes without a loop."""
    if _mode.loops_limited and not _mode.device:
        raise UnsupportedError("fit_only: the pass is one kernel call without loops to shorten")


def device_kind(tensor: Any) -> str:
    """Return the kind of device that a tensor is on or stands for."""
    kind: str = tensor.device.type
    return _mode.device if kind == "meta" else kind


def device_for(device: str) -> str:
    """Return the torch device on which to create a tensor for this kind of device."""
    return "meta" if _mode.device else device


def mark_off_device(tensor: Tensor) -> Tensor:
    """Record that the storage of a tensor is not in device memory, and return the tensor."""
    tensor.untyped_storage().is_off_device = True  # type: ignore[attr-defined]
    return tensor


def is_off_device(storage: Any) -> bool:
    """Return True if a storage was marked by `mark_off_device`."""
    return hasattr(storage, "is_off_device")
