"""Learnable sinks: a number of each query head that is in its softmax, but has no value.

Row i of head h has p_ij = exp(z_ij) / (exp(s_h) + Σ_k exp(z_ik)) over its keys (gpt-oss, arXiv
2508.10925). A kernel without sinks computes it, by its output and its log-sum-exp L:

    L' = log(exp(L) + exp(s))     out' = out exp(L - L')     ds = -Σ_i exp(s - L'_i) dO_i · out'_i

Given out' and L', the gradients of q, k and v are those of the kernel. A row that sees no key is 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple
from longseq_bench.meta_mode import device_kind, limited

PART_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
"""Elements of the output that are scaled together: a CPU copies those of 16 bits to float32."""


class SinkKernel:
    """An AttentionKernel with sinks. A backward pass adds to `sinks.grad`, as autograd does.

    inner: a kernel without sinks, whose results are tensors of their own.
    sinks: those of all query heads, (Hq,) float32.  heads: those of the kernel's q.
    """

    def __init__(self, inner: AttentionKernel, sinks: Tensor, heads: slice) -> None:
        self._inner, self._sinks, self._heads = inner, sinks, heads
        self._own = sinks.detach()[heads, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp with the sinks."""
        out, lse = self._inner.forward(q, k, v, True)
        assert lse is not None, f"{type(self._inner).__name__} keeps no log-sum-exp"
        for rows in _parts(out):
            of_keys = lse[:, :, rows]
            total = torch.logaddexp(of_keys, self._own.to(lse))
            out[:, :, rows].mul_((of_keys - total).exp_()[..., None])
            of_keys.copy_(total)
        return out, lse if keep_lse else None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        grad_out, _, out, lse = queries
        if self._sinks.grad is None:
            self._sinks.grad = torch.zeros_like(self._sinks)
        for rows in _parts(out):
            # dO·out' is called delta, as in FlashAttention-2
            delta = (grad_out[:, :, rows].to(lse.dtype) * out[:, :, rows]).sum(-1)
            weights = (self._own - lse[:, :, rows]).exp_()
            self._sinks.grad[self._heads] -= (weights * delta).sum((0, 2))
        return self._inner.backward(queries, keys)


def _parts(out: Tensor) -> Iterator[slice]:
    """Yield the tokens whose rows are computed together."""
    batch, heads, tokens, dim = out.shape
    step = max(1, PART_ELEMENTS[device_kind(out)] // (batch * heads * dim))
    yield from (slice(start, start + step) for start in limited(range(0, tokens, step)))
