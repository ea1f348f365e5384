"""A pass walked through without its data: tensors on torch's `meta` device have shapes and no
numbers, kernels are not launched, and of loops whose turns are alike only the first are taken.

What is needed of memory is then known in a moment, for lengths, devices and worlds that are not
here. A process says once that it is dry, and stays so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from longseq_bench.core.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

TURNS = 24
"""Of a loop over tiles: as many as it takes until one is as large as any."""

STEPS = 6
"""Of a loop over transfers: the third is as the rest, backward one later."""


@dataclass
class _State:
    device: str = ""
    capped: bool = False
    elsewhere: set[int] = field(default_factory=set)


_state = _State()


def enable(device: str) -> None:
    """From now on meta tensors stand for tensors on this kind of device, and loops are capped."""
    _state.device, _state.capped = device, True


def limit_loops() -> None:
    """Cap loops alone: what is computed is then wrong, but what is allocated is not."""
    _state.capped = True


def is_meta() -> bool:
    """Whether nothing is computed."""
    return bool(_state.device)


def device_kind(tensor: Any) -> str:
    """The kind of device that a tensor is on, or stands for."""
    kind: str = tensor.device.type
    return _state.device if kind == "meta" else kind


def are_loops_limited() -> bool:
    """Whether what is computed is not looked at: it may be left out."""
    return _state.capped


def device_for(device: str) -> str:
    """Where a tensor for a device of this kind is to be made."""
    return "meta" if _state.device else device


def mark_off_device(tensor: Tensor) -> Tensor:
    """The tensor, of whose storage it is known from now on that it is not on the device."""
    storage = tensor.untyped_storage()
    _state.elsewhere.add(storage._cdata)
    weakref.finalize(storage, _state.elsewhere.discard, storage._cdata)
    return tensor


def is_off_device(storage: Any) -> bool:
    """Whether a storage was said to be elsewhere."""
    return storage._cdata in _state.elsewhere


def refuse_limited_loops() -> None:
    """Raises UnsupportedError where loops are capped and data is there, for what is no loop."""
    if _state.capped and not _state.device:
        raise UnsupportedError("one kernel call does all of it: its pass can't be cut short")


def limited(items: Iterable[T], most: int = TURNS) -> Iterator[T]:
    """All items; the first few where loops are capped."""
    return islice(items, most) if _state.capped else iter(items)
