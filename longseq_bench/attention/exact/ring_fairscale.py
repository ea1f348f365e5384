"""A ring in a module whose parameters are sharded by FairScale's FullyShardedDataParallel.

FairScale 0.4.13 uses CUDA streams on every device, and it calls two collectives that newer versions
of torch no longer have under these names. Both problems are solved by replacing the names `torch`
and `dist` in FairScale's modules only: on a CPU, where calls run in order, by a torch whose streams
do nothing; on every device by collectives of our Group, which counts their bytes.
"""

import contextlib
import types
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Cost
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.attention.projections import Projected, parameter_bytes, projection_flops
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


class FairscaleRing(Ring):
    """A ring in a module with projections, whose parameters FullyShardedDataParallel shards.

    Gradients of parameters are summed over ranks, not averaged.
    """

    @override
    def refuse(self, w: Workload, group: Group) -> None:
        super().refuse(w, group)
        if w.dtype != "float32":
            raise UnsupportedError(
                f"FairScale shards float32 parameters without mixed precision, not {w.dtype}"
            )
        if w.v_head_dim != w.head_dim:
            raise UnsupportedError("transport=fairscale needs a v_head_dim equal to the head_dim")

    def prepare(self, device: str) -> None:
        """Build the module and shard its parameters."""
        super().prepare(device)
        from fairscale.internal.parallel import ProcessGroupName

        module = Projected(super().__call__, self.workload.head_dim, self.torch_dtype, device)
        self._weights = {n: m.detach().clone() for n, m in module.weights.items()}
        _replace_collectives(self.group)
        self._sharded: Any = _sharded_class(device)(
            module,
            process_group=self.group.data,
            process_group_reduce_scatter=ProcessGroupName.default,
            compute_device=torch.device(device),
            # otherwise the full parameters stay in memory after the first pass
            disable_reshard_on_root=False,
            # larger buckets use a path that gloo refuses
            bucket_cap_mb=0,
        )
        self._sharded.set_gradient_divide_factors(1.0, 1.0, recursive=True)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # FairScale keeps all weights in one flat parameter, padded to a multiple of the ranks
        self._sharded.params[0].grad = None
        with torch.set_grad_enabled(self.workload.train):
            out: Tensor = self._sharded(q, k, v)
        return out

    @override
    def projections(self) -> dict[str, Tensor]:
        return self._weights

    @override
    def parameter_gradients(self) -> dict[str, Tensor]:
        """Return the full gradient of every weight, gathered from the shards of all ranks."""
        own_shard, size = self._sharded.params[0].grad, self.group.size
        shards = own_shard.new_zeros(size, own_shard.numel())
        shards[self.group.rank] = own_shard
        padded = self.group.all_sum(shards.cpu()).flatten()
        (weights,) = self._sharded.local_metadata_dict()["param_metadata"][0]["params"].values()
        parts = torch.split(padded[: sum(weights["numels"])], weights["numels"])
        gradients = {
            name.split(".")[-1]: part.view(self.workload.head_dim, -1)
            for name, part in zip(weights["names"], parts, strict=True)
        }
        if self.queries == "full":
            # every rank had the whole gradient of these two, and FairScale summed all of them
            gradients |= {name: gradients[name] / size for name in ("q", "out")}
        return gradients

    @override
    def cost(self) -> Cost:
        cost = super().cost()
        return replace(cost, flops=cost.flops + projection_flops(self.workload))

    @override
    def bytes_sent(self) -> int:
        """Return the bytes of keys, gradients and parameters, whose padding is included.

        A rank sends its shard of the parameters to all others. In training it sends it again for
        backward, and to every other rank that rank's shard of its gradients.
        """
        w, others = self.workload, self.group.size - 1
        shard_bytes = -(-parameter_bytes(w.head_dim, 1) // self.group.size) * w.dtype_bytes
        return super().bytes_sent() + others * shard_bytes * (3 if w.train else 1)


def _patched(module: types.ModuleType, **replacements: Any) -> types.ModuleType:
    """Return a view of a module in which some names have other values."""
    view = types.ModuleType(module.__name__)
    vars(view).update(vars(module), **replacements)
    return view


def _replace_collectives(group: Group) -> None:
    """Make FairScale call the all-gather and reduce-scatter of a group."""
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp_module
    from fairscale.internal import reduce_scatter_bucketer

    def all_gather(out: Tensor, own: Tensor, **_: Any) -> None:
        group.all_gather(out.view(group.size, -1), own.flatten()).wait()

    def reduce_scatter(out: Tensor, parts: Tensor, **_: Any) -> None:
        group.reduce_scatter(out.flatten(), parts.view(group.size, -1)).wait()

    fsdp_module.dist = reduce_scatter_bucketer.dist = _patched(
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
    fsdp_module.torch = _patched(torch, cuda=cuda)
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
