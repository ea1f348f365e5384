"""Peak of torch's tensors by their storages, on any device, `meta` included.

Every operation of forward and backward is counted when it is dispatched. A storage counts from the
operation that created it until its last reference is gone. The workspace of a fused kernel is not
visible; `context.workspace` gives its size.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from longseq_bench import meta_mode
from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import METERS, Meter


@METERS.register("storage-peak")
class StoragePeak(Meter):
    """Peak bytes of storages that are created while it runs, on the device of the context.

    current: bytes now. peak_workspace: the part of the peak that is a kernel's workspace.
    peak_indices: the part of the peak that is tensors of integers, such as the lists of a layout.
    most_indices: bytes of such tensors, and of all, when there were most of them.
    """

    name = "tensor peak (storages)"
    role = "memory"
    priority = 10

    @override
    def start(self) -> None:
        self.current = self.peak = self.peak_workspace = 0
        self._indices = self.peak_indices = 0
        self.most_indices = (0, 0)
        self._known: set[int] = set()
        self._mode: Any = _Watch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    @override
    def stop(self) -> None:
        self._mode.__exit__(None, None, None)

    @override
    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]

    def add_operation(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Count the new storages among an operator's outputs, and its workspace."""
        for tensor in _tensors(output):
            if tensor.device.type == self.context.device:
                storage = tensor.untyped_storage()
                if not meta_mode.is_off_device(storage):
                    self._add_storage(storage, not tensor.dtype.is_floating_point)
        workspace = self.context.workspace(op, args, kwargs)
        if self.current + workspace > self.peak:
            self.peak, self.peak_workspace = self.current + workspace, workspace
            self.peak_indices = self._indices
        self.most_indices = max(self.most_indices, (self._indices, self.current + workspace))

    def _add_storage(self, storage: Any, is_index: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.current += size
        self._indices += size if is_index else 0
        weakref.finalize(storage, self._remove_storage, key, size, is_index)

    def _remove_storage(self, key: int, size: int, is_index: bool) -> None:
        self._known.discard(key)
        self.current -= size
        self._indices -= size if is_index else 0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, meter: StoragePeak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch imports its compiler at the first call
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._meter.add_operation(func, args, kwargs or {}, output)
        return output


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
