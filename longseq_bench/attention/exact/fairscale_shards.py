"""A module's parameters sharded over ranks by FairScale's FullyShardedDataParallel.

FairScale 0.4.13 uses CUDA streams on every device, and it calls two collectives that newer versions
of torch no longer have under these names. Both problems are solved by replacing the names `torch`
and `dist` in FairScale's modules only: on a CPU, where calls run in order, by a torch whose streams
do nothing; on every device by collectives of our Group, which counts their bytes.
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
    """Return the reason why FairScale can't be used; None if it can."""
    if importlib.util.find_spec("fairscale") is None:
        return "FairScale is not installed; pip install 'longseq-bench[transports]' brings it"
    if dtype != "float32":
        return f"FairScale shards float32 parameters without mixed precision, not {dtype}"
    return None


def bytes_sent(head_dim: int, dtype_bytes: int, size: int, train: bool) -> int:
    """Return the bytes of parameters that a rank sends in one pass, padding included.

    It sends its shard to all other ranks. In training it sends it again for backward, and to every
    other rank that rank's shard of its gradients.
    """
    shard_bytes = -(-parameter_bytes(head_dim, 1) // size) * dtype_bytes
    return (size - 1) * shard_bytes * (3 if train else 1)


class ShardedModule:
    """A module in FullyShardedDataParallel; gradients are summed over ranks, not averaged."""

    def __init__(self, module: nn.Module, group: Group, device: str) -> None:
        from fairscale.internal.parallel import ProcessGroupName

        self._group = group
        _replace_collectives(group)
        self.module: Any = _sharded_class(device)(
            module,
            process_group=group.data,
            process_group_reduce_scatter=ProcessGroupName.default,
            compute_device=torch.device(device),
            # otherwise the full parameters stay in memory after the first pass
            disable_reshard_on_root=False,
            # larger buckets use a path that gloo refuses
            bucket_cap_mb=0,
        )
        self.module.set_gradient_divide_factors(1.0, 1.0, recursive=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Drop the gradients of the last pass, and return the module's output."""
        for flat_parameter in self.module.params:
            flat_parameter.grad = None
        out: Tensor = self.module(q, k, v)
        return out

    def gradients(self, head_dim: int) -> dict[str, Tensor]:
        """Return the full gradient of every weight, gathered from the shards of all ranks."""
        # FairScale keeps all weights in one flat parameter, padded to a multiple of the ranks
        (own_shard,) = (flat_parameter.grad for flat_parameter in self.module.params)
        shards = own_shard.new_zeros(self._group.size, own_shard.numel())
        shards[self._group.rank] = own_shard
        padded = self._group.all_sum(shards.cpu()).flatten()
        (weights,) = self.module.local_metadata_dict()["param_metadata"][0]["params"].values()
        gradients = torch.split(padded[: sum(weights["numels"])], weights["numels"])
        return {
            name.split(".")[-1]: gradient.view(head_dim, head_dim)
            for name, gradient in zip(weights["names"], gradients, strict=True)
        }


class _PatchedModule(types.ModuleType):
    """A view of a module in which some names have other values."""

    def __init__(self, module: types.ModuleType, **replacements: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _replace_collectives(group: Group) -> None:
    """Make FairScale call the all-gather and reduce-scatter of a group."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp_module
    from fairscale.internal import reduce_scatter_bucketer

    def all_gather(out: Tensor, own: Tensor, **_: Any) -> None:
        group.all_gather(out.view(group.size, -1), own.flatten()).wait()

    def reduce_scatter(out: Tensor, parts: Tensor, **_: Any) -> None:
        group.reduce_scatter(out.flatten(), parts.view(group.size, -1)).wait()

    fsdp_module.dist = reduce_scatter_bucketer.dist = _PatchedModule(
        torch.distributed, _all_gather_base=all_gather, _reduce_scatter_base=reduce_scatter
    )


class _NoStream(torch.Stream):
    """A stream on a CPU, where calls run in order."""

    def wait_stream(self, stream: Any) -> None:
        """Return immediately: nothing runs in parallel."""


@cache
def _sharded_class(device: str) -> Any:
    """Return FullyShardedDataParallel; on a CPU with streams that do nothing."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp_module

    if device == "cuda":
        return fsdp_module.FullyShardedDataParallel
    stream = _NoStream(device="cpu")
    cuda = types.SimpleNamespace(
        Stream=_NoStream,
        current_stream=lambda: stream,
        synchronize=lambda: None,
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: False,
    )
    fsdp_module.torch = _PatchedModule(torch, cuda=cuda)
    # torch has no Tensor.record_stream for CPU tensors
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    aten.impl("record_stream", lambda tensor, stream: None, "CPU")

    class CpuFullyShardedDataParallel(fsdp_module.FullyShardedDataParallel):  # type: ignore[misc]
        # keeps the library alive: its kernels are removed with it
        library = aten

        def _setup_streams(self) -> None:
            super()._setup_streams()
            self._streams |= dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream)

    return CpuFullyShardedDataParallel
