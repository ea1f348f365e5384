"""Merge two softmaxes over different keys by their log-sum-exp (arXiv 2310.01889)."""

import torch
from torch import Tensor

from longseq_bench.meta_mode import device_kind


def merge_part(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, index: Tensor | None = None
) -> None:
    """Merge a softmax into out (B, H, N, D) and lse (B, H, N), in place.

    Both sides are weighted by their shares of the joint denominator: out + sigmoid(part_lse - lse)
    * (part - out) needs no temporary of the output's size. A side at -inf has weight 0; rows with
    both at -inf stay 0. lse is wide. On CUDA one Triton kernel does it in float32.
    index: the rows of part (S, H, M, D) in out (1, H, N, D), each once, (S, H or 1, M).
    """
    if device_kind(out) == "cuda" and out.dtype != torch.float64:
        if not out.is_meta:
            from longseq_bench.kernels import triton_merge

            triton_merge.merge(out, lse, part, part_lse, index)
    elif index is not None:
        at = 0, torch.arange(part.shape[1], device=out.device)[:, None], index
        own, own_lse = out[at], lse[at]
        merge_part(own, own_lse, part, part_lse)
        out[at], lse[at] = own, own_lse
    elif out.is_meta:
        # allocate the temporaries only: each operation on meta tensors takes a millisecond
        torch.empty_like(part_lse), part.to(lse.dtype), out.to(lse.dtype)
    else:
        weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0).unsqueeze(-1)
        sums = out.to(lse.dtype).lerp_(part.to(lse.dtype), weight)
        if sums is not out:
            out.copy_(sums)
        torch.logaddexp(lse, part_lse, out=lse)
