"""A module's parameters sharded over ranks by FairScale's FullyShardedDataParallel.

FairScale 0.4.13 uses CUDA streams on every device and calls two functions of torch.distributed that
later versions made private. On a CPU all calls run in order, so its streams are replaced by ones
that do nothing, in its own module only. Its two collectives go through our group on any device,
where their bytes are counted.
"""

import contextlib
import importlib.util
import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from longseq_bench.attention.projections import NAMES, parameter_bytes
from longseq_bench.distributed.group import Group


def unavailable_reason(dtype: str) -> str | None:
    """Return why FairScale cannot be used here; None if it can."""
    if importlib.util.find_spec("fairscale") is None:
        return "FairScale is not installed; pip install 'longseq-bench[transports]' brings it"
    if dtype != "float32":
        return f"FairScale shards float32 parameters without mixed precision, not {dtype}"
    return None


def bytes_sent(head_dim: int, dtype_bytes: int, size: int, train: bool) -> int:
    """Return the bytes of parameters that a rank sends in one pass, padding included.

    It sends its shard to all other ranks; in training a second time for backward, and its part of
    every other rank's gradient.
    """
    shard = -(-parameter_bytes(head_dim, 1) // size) * dtype_bytes
    return (size - 1) * shard * (3 if train else 1)


class ShardedModule:
    """A module in FullyShardedDataParallel; gradients are summed over ranks, not averaged."""

    def __init__(self, module: nn.Module, group: Group, device: str) -> None:
        self._group = group
        make, internal = _library(device)
        _Collectives.group = group
        self.module: Any = make(
            module,
            process_group=group.data,
            process_group_reduce_scatter=internal,
            compute_device=torch.device(device),
            # otherwise full parameters stay, and only the first pass gathers them
            disable_reshard_on_root=False,
            # larger buckets use a path that gloo refuses
            bucket_cap_mb=0,
        )
        self.module.set_gradient_divide_factors(1.0, 1.0, recursive=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the module's output, its old gradients dropped."""
        for flat in self.module.params:
            flat.grad = None
        out: Tensor = self.module(q, k, v)
        return out

    def gradients(self, head_dim: int) -> dict[str, Tensor]:
        """Return the full gradient of every weight, gathered from the shards of all ranks."""
        (flat,) = self.module.params
        size = self._group.size
        shards = flat.grad.new_zeros(size, flat.grad.numel())
        shards[self._group.rank] = flat.grad
        joined = self._group.all_sum(shards.cpu()).flatten()
        (saved,) = self.module.local_metadata_dict()["param_metadata"][0]["params"].values()
        parts = torch.split(joined[: sum(saved["numels"])], saved["numels"])
        named = dict(zip(saved["names"], parts, strict=True))
        return {
            name: next(t for full, t in named.items() if full.split(".")[-1] == name).view(
                head_dim, head_dim
            )
            for name in NAMES
        }


class _Collectives(types.ModuleType):
    """torch.distributed as FairScale sees it."""

    group: Group

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @classmethod
    def _all_gather_base(cls, out: Tensor, own: Tensor, group: Any = None) -> None:
        cls.group.all_gather(out.view(cls.group.size, -1), own.flatten()).wait()

    @classmethod
    def _reduce_scatter_base(cls, out: Tensor, given: Tensor, group: Any = None) -> None:
        cls.group.reduce_scatter(out.flatten(), given.view(cls.group.size, -1)).wait()


class _NoStream(torch.Stream):
    """A stream on a CPU, where calls run in order."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: nothing runs in parallel."""


@cache
def _library(device: str) -> tuple[Any, Any]:
    """Return FullyShardedDataParallel and its name for a single process group."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as sharded
    from fairscale.internal import reduce_scatter_bucketer
    from fairscale.internal.parallel import ProcessGroupName

    sharded.dist = reduce_scatter_bucketer.dist = _Collectives("dist")
    if device == "cuda":
        return sharded.FullyShardedDataParallel, ProcessGroupName.default
    only = _NoStream(device="cpu")

    class Torch(types.ModuleType):
        """torch as FairScale sees it on a CPU."""

        cuda = types.SimpleNamespace(
            Stream=_NoStream,
            current_stream=lambda: only,
            synchronize=lambda: None,
            stream=lambda stream: contextlib.nullcontext(),
            is_available=lambda: False,
        )

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    sharded.torch = Torch("torch")
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels.impl("record_stream", lambda tensor, stream: None, "CPU")

    class OnCpu(sharded.FullyShardedDataParallel):  # type: ignore[misc]
        """FullyShardedDataParallel with streams that do nothing."""

        registered = kernels

        def _setup_streams(self) -> None:
            super()._setup_streams()
            for name in ("fp32_to_fp16", "all_gather", "post_backward"):
                self._streams[name] = only

    return OnCpu, ProcessGroupName.default
