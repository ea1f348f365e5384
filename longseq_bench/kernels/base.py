"""The attention kernel: forward and backward on one device, made differentiable for all of them.

Shapes: q, out, grad_out (B, Hq, N, D); k, v (B, Hk, M, D), Hk divides Hq; lse (B, Hq, N), float32
or wider.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""

Triple = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""

Queries = tuple[Tensor, Tensor, Tensor, Tensor]
"""grad_out, q, out, and the lse of the softmax over all keys: what a backward pass starts from."""

OutputAndLse = tuple[Tensor, Tensor | None]
"""The output, and the log-sum-exp if it was kept."""


class AttentionKernel(Protocol):
    """Forward and backward of an attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp of the scores."""
        ...

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        ...


@runtime_checkable
class InPlaceKernel(AttentionKernel, Protocol):
    """A kernel that has read rows of q for the last time before it writes their result."""

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, written over q."""
        ...

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k and v, from the inputs alone; inplace: dq over q."""
        ...


class SplitKernel:
    """An AttentionKernel made of one kernel per part of the batch or of the heads.

    parts: index of q and of k and v, and the kernel. sums: dtype in which gradients of k and v are
    summed, if parts share them; None: that of k and v.
    """

    def __init__(
        self, parts: Sequence[tuple[Any, Any, AttentionKernel]], sums: torch.dtype | None = None
    ) -> None:
        self._parts, self._sums = parts, sums

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for at, kv_at, kernel in self._parts:
            out[at], own_lse = kernel.forward(q[at], k[kv_at], v[kv_at], keep_lse)
            if lse is not None and own_lse is not None:
                lse[at] = own_lse
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(t, dtype=self._sums) for t in (k, v))
        for at, kv_at, kernel in self._parts:
            own = grad_out[at], q[at], out[at], lse[at]
            grads = kernel.backward(own, (k[kv_at], v[kv_at]))
            dq[at] = grads[0]
            dk[kv_at] += grads[1]
            dv[kv_at] += grads[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, train: bool) -> Tensor:
    """Return the kernel's output, differentiable if `train`."""
    if train:
        return cast(Tensor, _Attend.apply(q, k, v, kernel))  # type: ignore[no-untyped-call]
    with torch.no_grad(), disable_autocast(q):
        return kernel.forward(q, k, v, False)[0]


def disable_autocast(t: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels run in the dtype of their inputs, also under autocast.

    Otherwise forward and backward could run in different dtypes.
    """
    if t.device.type == "meta":
        return nullcontext()
    return torch.autocast(t.device.type, enabled=False)


def refuse_second_derivative() -> None:
    """Raise UnsupportedError in a backward pass that is to be differentiated (create_graph).

    Its derivative would silently be 0.
    """
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
        return *ctx.kernel.backward((grad_out, q, out, lse), (k, v)), None
