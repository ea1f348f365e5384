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

from longseq_bench.attention.projections import parameter_bytes
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
        from fairscale.internal.parallel import ProcessGroupName

        self._group = group
        _use_collectives_of(group)
        self.module: Any = _sharded_class(device)(
            module,
            process_group=group.data,
            process_group_reduce_scatter=ProcessGroupName.default,
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
        shards = flat.grad.new_zeros(self._group.size, flat.grad.numel())
        shards[self._group.rank] = flat.grad
        joined = self._group.all_sum(shards.cpu()).flatten()
        (saved,) = self.module.local_metadata_dict()["param_metadata"][0]["params"].values()
        parts = torch.split(joined[: sum(saved["numels"])], saved["numels"])
        return {
            name.split(".")[-1]: part.view(head_dim, head_dim)
            for name, part in zip(saved["names"], parts, strict=True)
        }


class _ModuleWith(types.ModuleType):
    """A module in which some names are replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _use_collectives_of(group: Group) -> None:
    """Let FairScale's two collectives go through a group."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as sharded
    from fairscale.internal import reduce_scatter_bucketer

    def all_gather(out: Tensor, own: Tensor, **_: Any) -> None:
        group.all_gather(out.view(group.size, -1), own.flatten()).wait()

    def reduce_scatter(out: Tensor, given: Tensor, **_: Any) -> None:
        group.reduce_scatter(out.flatten(), given.view(group.size, -1)).wait()

    sharded.dist = reduce_scatter_bucketer.dist = _ModuleWith(
        torch.distributed, _all_gather_base=all_gather, _reduce_scatter_base=reduce_scatter
    )


class _NoStream(torch.Stream):
    """A stream on a CPU, where calls run in order."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: nothing runs in parallel."""


@cache
def _sharded_class(device: str) -> Any:
    """Return FullyShardedDataParallel; on a CPU with streams that do nothing."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as sharded

    if device == "cuda":
        return sharded.FullyShardedDataParallel
    stream = _NoStream(device="cpu")
    cuda = types.SimpleNamespace(
        Stream=_NoStream,
        current_stream=lambda: stream,
        synchronize=lambda: None,
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: False,
    )
    sharded.torch = _ModuleWith(torch, cuda=cuda)
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels.impl("record_stream", lambda tensor, stream: None, "CPU")

    class OnCpu(sharded.FullyShardedDataParallel):  # type: ignore[misc]
        # a library is valid as long as it lives
        library = kernels

        def _setup_streams(self) -> None:
            super()._setup_streams()
            self._streams |= dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream)

    return OnCpu
