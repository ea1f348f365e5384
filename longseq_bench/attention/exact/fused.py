"""Exact attention in one call of a kernel; `kernel` chooses it."""

from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.masked import exact_call
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO


@implementation("fused")
class Fused(Attention):
    """One call of a kernel of exact attention, on one rank."""

    takes_masks = True
    takes_v_head_dim = True
    summary = "exact attention in one kernel call; sdpa calls torch's kernels only"

    def __init__(self, workload: Workload, group: Group, *, kernel: KernelOption = AUTO) -> None:
        self.exact_name = kernel
        super().__init__(workload, group)

    @override
    def build_kernel(self) -> AttentionKernel:
        return exact_call(self.exact, self.workload)
