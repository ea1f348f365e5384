"""Peak of the tensors of torch by their storages, on any device, `meta` included.

Every operation is seen as it is dispatched, forward and backward; a storage counts from the
operation that made it until nobody holds it. What a fused kernel allocates inside itself is not
seen: `inside` says how much that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longseq_bench import meta_mode
from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import Meter

Inside = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that an operation, given its arguments, holds while it runs."""


class StoragePeak(Meter):
    """Peak bytes of storages made while it runs, on one kind of device."""

    name = "tensor peak (storages)"

    def __init__(self, device: str, inside: Inside = lambda op, args, kwargs: 0) -> None:
        self._device, self._inside = device, inside

    def start(self) -> None:
        self.now = self.peak = self.at_peak_inside = 0
        self._known: set[int] = set()
        self._mode: Any = _Watch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]

    def saw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        for tensor in _tensors(made):
            if tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if not meta_mode.is_off_device(storage):
                    self._hold(storage)
        inside = self._inside(op, args, kwargs)
        if self.now + inside > self.peak:
            self.peak, self.at_peak_inside = self.now + inside, inside

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, meter: StoragePeak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch wraps it against its compiler and imports all of that at the first call
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._meter.saw(func, args, kwargs or {}, made)
        return made


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, (tuple, list)):
        for one in made:
            yield from _tensors(one)
