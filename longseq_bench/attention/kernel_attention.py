"""Attention given by a core: how it is called, and which kernel ran."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.kernels import torch_fused
from longseq_bench.kernels.base import AttentionKernel, InPlaceKernel, attend, disable_autocast


class KernelAttention(Attention):
    """An attention whose forward and backward are those of an AttentionKernel."""

    @abstractmethod
    def build_kernel(self) -> AttentionKernel:
        """How it is computed on this rank, with its peers."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.build_kernel(), train=self.workload.train)

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        kernel = self.build_kernel()
        if not isinstance(kernel, InPlaceKernel):
            return super().backward_recompute(grad_out, q, k, v, inplace)
        with torch.no_grad(), disable_autocast(q):
            return kernel.backward_recompute(grad_out, q, k, v, inplace)

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = self.build_kernel()
        if not isinstance(kernel, InPlaceKernel):
            return super().forward_inplace(q, k, v)
        with torch.no_grad(), disable_autocast(q):
            return kernel.forward_inplace(q, k, v)

    def prepare(self, device: str) -> None:
        self._fused_kernel = torch_fused.name(device, getattr(torch, self.workload.dtype))

    def facts(self) -> dict[str, Any]:
        return {"kernel": self._fused_kernel}
