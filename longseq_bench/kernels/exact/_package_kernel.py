"""A kernel of a FlashAttention package: what versions 2, 3 and 4 share."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import half_reason
from longseq_bench.kernels.exact._flash_buffers import allocate_flash_3_and_4
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import ExactKernel, Use
from longseq_bench.meta_mode import is_meta


class PackageKernel(ExactKernel):
    """A kernel for CUDA and 16 bits of a package that users install.

    A subclass names the package and calls its functions, which take tensors (B, N, H, D). A plan
    calls none of them: it needs no package, and allocates tensors of the same sizes.
    """

    device = "cuda"
    optional = True
    package: ClassVar[Package]

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self._module: Any = None if is_meta() else self.package.load()

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use)
        return reason or (None if is_meta() else cls.package.unavailable_reason())

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if is_meta():
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        out, lse, *_ = self._call_forward(
            **transpose(q=q, k=k, v=v), softmax_scale=q.shape[3] ** -0.5, causal=causal
        )
        return out.transpose(1, 2), lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (_, q, _, _), (k, v) = queries, keys
        if is_meta():
            gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            self._allocate_buffers(q, k)  # in addition to the gradients
            return gradients
        return self._call_backward(queries, keys, q.shape[3] ** -0.5, causal)

    @abstractmethod
    def _call_forward(self, **given: Any) -> Any:
        """Return the output, the log-sum-exp (B, H, N), and what else the package returns.

        given: q, k, v, softmax_scale and causal.
        """

    @abstractmethod
    def _call_backward(self, queries: Queries, keys: Pair, scale: float, causal: bool) -> Triple:
        """Return the gradients; all tensors are (B, H, N, D) here."""

    def _allocate_buffers(self, q: Tensor, k: Tensor) -> None:
        allocate_flash_3_and_4(q, k)


def transpose(**tensors: Tensor) -> dict[str, Tensor]:
    """Return tensors (B, H, N, D) as a package takes them, (B, N, H, D)."""
    return {name: t.transpose(1, 2) for name, t in tensors.items()}
