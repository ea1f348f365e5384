"""A module's parameters sharded over ranks by FairScale's FullyShardedDataParallel.

FairScale 0.4.13 has CUDA's streams written into it and calls two functions of torch.distributed
that later versions have made private. On a CPU every call is in order already, so its streams are
replaced by nothing, in its own module alone; its two collectives go through our group on any
device, where their bytes are counted.
"""

from __future__ import annotations

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
    """Why it can't be used here; None where it can."""
    if importlib.util.find_spec("fairscale") is None:
        return "FairScale is not installed; pip install 'longseq-bench[transports]' brings it"
    if dtype != "float32":
        return f"FairScale shards float32 parameters without mixed precision, not {dtype}"
    return None


def bytes_sent(head_dim: int, dtype_bytes: int, size: int, train: bool) -> int:
    """What a rank sends of parameters in one pass, padding included: its shard to all others, in
    training once more for backward, and its part of every other's gradient."""
    shard = -(-parameter_bytes(head_dim, 1) // size) * dtype_bytes
    return (size - 1) * shard * (3 if train else 1)


class Sharded:
    """A module under FullyShardedDataParallel; gradients are summed over ranks, not averaged."""

    def __init__(self, module: nn.Module, group: Group, device: str) -> None:
        self._group = group
        make, internal = _library(device)
        _Collectives.group = group
        self.module: Any = make(
            module,
            process_group=group.data,
            process_group_reduce_scatter=internal,
            compute_device=torch.device(device),
            # else whole parameters would stay, and only a first pass would gather them
            disable_reshard_on_root=False,
            # larger buckets take a path that gloo refuses
            bucket_cap_mb=0,
        )
        self.module.set_gradient_divide_factors(1.0, 1.0, recursive=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for flat in self.module.params:
            flat.grad = None
        out: Tensor = self.module(q, k, v)
        return out

    def gradients(self, head_dim: int) -> dict[str, Tensor]:
        """The whole gradient of every matrix, gathered from all ranks' shards."""
        (flat,) = self.module.params
        size = self._group.size
        whole = flat.grad.new_zeros(size, flat.grad.numel())
        whole[self._group.rank] = flat.grad
        joined = self._group.all_sum(whole.cpu()).flatten()
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
    """The one order of everything on a CPU."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs beside it."""


@cache
def _library(device: str) -> tuple[Any, Any]:
    """FullyShardedDataParallel, and how it is told to use one process group. Once a process."""
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
        """With streams that do nothing; holds the kernel that it registered."""

        registered = kernels

        def _setup_streams(self) -> None:
            super()._setup_streams()
            for name in ("fp32_to_fp16", "all_gather", "post_backward"):
                self._streams[name] = only

    return OnCpu, ProcessGroupName.default
