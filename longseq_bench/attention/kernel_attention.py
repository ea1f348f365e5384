"""Attention given by a core: how it is called, and which kernel ran."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.kernels import torch_fused
from longseq_bench.kernels.base import Core, Frugal, attend, uncast


class CoredAttention(Attention):
    """An attention whose forward and backward are those of a Core."""

    @abstractmethod
    def core(self) -> Core:
        """How it is computed on this rank, with its peers."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.core(), train=self.workload.train)

    def anew(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, over: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        core = self.core()
        if not isinstance(core, Frugal):
            return super().anew(grad_out, q, k, v, over)
        with torch.no_grad(), uncast(q):
            return core.anew(grad_out, q, k, v, over)

    def over(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        core = self.core()
        if not isinstance(core, Frugal):
            return super().over(q, k, v)
        with torch.no_grad(), uncast(q):
            return core.over(q, k, v)

    def prepare(self, device: str) -> None:
        self._kernel = torch_fused.name(device, getattr(torch, self.workload.dtype))

    def facts(self) -> dict[str, Any]:
        return {"kernel": self._kernel}
