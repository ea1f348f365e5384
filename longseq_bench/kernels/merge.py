"""Merge two softmaxes over different keys by their log-sum-exp (arXiv 2310.01889)."""

import torch
from torch import Tensor

from longseq_bench.meta_mode import device_kind


def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a softmax into out (B, H, N, D) and lse (B, H, N), in place.

    Both sides are weighted by their shares of the joint denominator: out + sigmoid(part_lse - lse)
    * (part - out) needs no temporary of the output's size. A side at -inf has weight 0; rows with
    both at -inf stay 0. out and lse are wide. On CUDA one Triton kernel does it in float32.
    """
    if device_kind(out) == "cuda" and out.dtype == torch.float32:
        if not out.is_meta:
            from longseq_bench.kernels.triton_merge import merge

            merge(out, lse, part, part_lse)
        return
    if out.is_meta:
        # allocate the temporaries only: each operation on meta tensors takes a millisecond
        torch.empty_like(part_lse), part.to(out.dtype)
        return
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0).unsqueeze(-1)
    out.lerp_(part if part.dtype == out.dtype else part.to(out.dtype), weight)
    torch.logaddexp(lse, part_lse, out=lse)
