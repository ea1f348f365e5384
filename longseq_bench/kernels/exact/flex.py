"""FlexAttention (arXiv 2412.05496), torch's compiled attention, for CUDA.

torch differentiates its output and its log-sum-exp, but only for the softmax over the given keys.
The gradients of these keys' part of a larger softmax follow from those: see `own_gradients`.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels import flex_blocks
from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import HALF, capability_reason
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.kernels.exact.torch_fused import hide_empty_rows
from longseq_bench.meta_mode import is_meta

BLOCK = 128
"""Tokens of a block of the causal mask."""

_causal_mask = lru_cache(maxsize=16)(flex_blocks.causal_block_mask)


@exact_kernel("flex")
class Flex(ExactKernel):
    """FlexAttention, compiled by torch; its backward runs the forward again."""

    device = "cuda"

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        if reason := super().unavailable_reason(use):
            return reason
        if use.dtype not in (*HALF, torch.float32):
            return f"it supports bfloat16, float16 and float32, not {str(use.dtype)[6:]}"
        if use.head_dim < flex_blocks.MIN_HEAD_DIM:
            return f"it needs a head_dim of at least {flex_blocks.MIN_HEAD_DIM}"
        if is_meta():
            return "code compiled by torch can't run on meta tensors"
        return capability_reason((7, 0))

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if keep_lse:
                return _attend_with_lse(q, k, v, _block_mask(q, causal, train=False))
            out: Tensor = flex_blocks.attend(q, k, v, _block_mask(q, causal, train=False))
            return out, q.new_empty(0, dtype=torch.float32)

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        q, k, v = (t.detach().requires_grad_() for t in (queries[1], *keys))
        with torch.enable_grad():
            own = _attend_with_lse(q, k, v, _block_mask(q, causal, train=True))
        grads = own_gradients(queries, own[0].detach(), own[1].detach())
        dq, dk, dv = torch.autograd.grad(own, (q, k, v), grads)
        return dq, dk, dv


def own_gradients(queries: Queries, own_out: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of own_out and own_lse that stand for the gradient of the whole softmax.

    own_out (B, Hq, Nq, D), own_lse (B, Hq, Nq): the softmax over the keys of one part. queries has
    the output and the log-sum-exp over all keys.

    A score s of this part has the weight p = w p', where p' is its weight in the part's own softmax
    and w = exp(own_lse - lse). The whole softmax has dv = p dO and ds = p (dO·v - dO·out). The
    part's own backward, given G and h, returns dv = p' G and ds = p' (G·v - G·own_out + h). Both
    are equal for G = w dO and h = w dO·(own_out - out).
    """
    grad_out, _, out, lse = queries
    weight = torch.exp(own_lse - hide_empty_rows(lse))
    products = own_out.to(lse.dtype, copy=True).sub_(out).mul_(grad_out)
    grad_own_lse = products.sum(-1).mul_(weight)
    del products  # it is as large as a float32 output
    grad_own_out = torch.empty_like(own_out)
    torch.mul(grad_out, weight.unsqueeze(-1), out=grad_own_out)
    return grad_own_out, grad_own_lse


def _attend_with_lse(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    out, more = flex_blocks.attend(q, k, v, block_mask, return_aux=AuxRequest(lse=True))
    return out, more.lse


def _block_mask(q: Tensor, causal: bool, train: bool) -> Any:
    return _causal_mask(q.shape[2], BLOCK, q.device, train) if causal else None
