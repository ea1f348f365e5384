"""The attention kernel: forward and backward on one device. `attend` makes it differentiable.

Shapes: q, out, grad_out (B, Hq, N, D); k, v (B, Hk, M, D), Hk divides Hq; lse (B, Hq, N), float32
or wider.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients; or sums: an output and its log-sum-exp."""

Triple = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""

Queries = tuple[Tensor, Tensor, Tensor, Tensor]
"""grad_out, q, out, and the lse of the softmax over all keys: the inputs of a backward pass."""

Mask = Tensor | None
"""Visible pairs (Nq, Nk); None: all of them, or a triangle."""

OutputAndLse = tuple[Tensor, Tensor | None]
"""The output, and the log-sum-exp if it was kept."""


def with_dense_rows(t: Tensor) -> Tensor:
    """Return a tensor whose rows (its last dimension) are contiguous: itself, or a copy.

    Rows that overlap are copied, too: what `empty_like` makes of them has no such rows.
    """
    is_dense = t.stride(-1) == 1 and not 0 < t.stride(-2) < t.shape[-1]
    return t if is_dense else t.contiguous()


class AttentionKernel(Protocol):
    """Forward and backward of an attention, for tensors whose head_dim is contiguous in memory.

    Kernels don't look at its stride, and would read other memory. Other strides are as they come.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp of the scores."""

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, train: bool) -> Tensor:
    """Return the kernel's output, differentiable if `train`.

    q, k, v, and in a backward pass grad_out, are copied here if their head_dim is not contiguous.
    The measured memory includes the copies.
    """
    q, k, v = map(with_dense_rows, (q, k, v))
    if train:
        apply: Any = _Attend.apply  # torch gives it no type before 2.14
        return cast(Tensor, apply(q, k, v, kernel))
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
    """Raise UnsupportedError in a backward pass with create_graph.

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
        queries = with_dense_rows(grad_out), q, out, lse
        return *ctx.kernel.backward(queries, (k, v)), None
