"""A way to compute attention, forward and backward, made differentiable once for all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import tiling, torch_fused

Triple = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(Protocol):
    """q (B, Hq, N, D); k, v (B, Hk, M, D); out like q; log-sum-exp (B, Hq, N), wide."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, where kept, the log-sum-exp."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        """Gradients of q, k, v."""
        ...


@runtime_checkable
class InPlaceKernel(AttentionKernel, Protocol):
    """A core that reads rows of q for the last time before it has their result."""

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, written over q."""
        ...

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Gradients of q, k, v without what a forward left; that of q over q where asked."""
        ...


class TiledKernel:
    """A plan of tiles on one device; see kernels/tiling.py."""

    def __init__(self, plan: tiling.Plan) -> None:
        self._plan = plan

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return tiling.forward(q, k, v, self._plan, keep_lse)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        return tiling.backward(grad_out, q, k, v, out, lse, self._plan)


class InPlaceTiledKernel(TiledKernel):
    """A plan in whose blocks every row and head is once."""

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tiling.forward_inplace(q, k, v, self._plan)

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        return tiling.backward_recompute(grad_out, q, k, v, self._plan, inplace)


class FusedKernel:
    """One call of the fused kernel: every query sees every key, or, causal, those before it."""

    def __init__(self, causal: bool) -> None:
        self._causal = causal

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        meta_mode.refuse_limited_loops()
        return torch_fused.forward(q, k, v, self._causal)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        return torch_fused.backward(grad_out, q, k, v, out, lse, self._causal)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, train: bool) -> Tensor:
    """The core's attention, differentiable where `train`."""
    if train:
        return cast(Tensor, _Attend.apply(q, k, v, kernel))  # type: ignore[no-untyped-call]
    with torch.no_grad(), disable_autocast(q):
        return kernel.forward(q, k, v, False)[0]


def disable_autocast(t: Tensor) -> AbstractContextManager[Any]:
    """Inside, kernels are called in the dtype of their inputs, forward as backward, whatever
    autocast would have."""
    if t.device.type == "meta":
        return nullcontext()
    return torch.autocast(t.device.type, enabled=False)


def refuse_second_derivative() -> None:
    """For the start of a backward. Raises UnsupportedError where its own derivative is asked for
    (create_graph): it would count as 0, and nothing would say so."""
    if torch.is_grad_enabled():
        raise UnsupportedError("there is no second derivative of this attention (create_graph)")


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel) -> Tensor:
        with disable_autocast(q):
            out, lse = kernel.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, out, lse = ctx.saved_tensors
        return *ctx.kernel.backward(grad_out, q, k, v, out, lse), None
