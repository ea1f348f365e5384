"""Merge two softmaxes over different keys by their log-sum-exp (arXiv 2310.01889), and move rows.

On CUDA each function is one Triton kernel, unless numbers are float64.
An index (S, P, M) has for S sets the rows of M tokens in a tensor (1, H, N, D). Head h has those of
h mod P.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longseq_bench.meta_mode import device_kind

Tensors = Sequence[Tensor]


def merge_part(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, index: Tensor | None = None
) -> None:
    """Merge a softmax into out (B, H, N, D) and lse (B, H, N), in place.

    Both sides are weighted by their shares of the joint denominator: out + sigmoid(part_lse - lse)
    * (part - out) needs no temporary of the output's size. A side at -inf has weight 0; rows with
    both at -inf stay 0. lse is wide.
    index: the rows of part (S, H, M, D) in out, each once.
    """
    if _uses_triton(out):
        _run_triton((lse, out), (part_lse, part), index, "merge")
    elif index is not None:
        at = _rows_at(out, index)
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


def take_rows(tensors: Tensors, index: Tensor) -> list[Tensor]:
    """Return the rows of an index, (S, H, M, D) or (S, H, M), of each tensor."""
    if not _uses_triton(tensors[0]):
        return [t[_rows_at(t, index)] for t in tensors]
    sets, _, rows = index.shape
    taken = [t.new_empty(sets, t.shape[1], rows, *t.shape[3:]) for t in tensors]
    _run_triton(taken, tensors, index, "take")
    return taken


def put_rows(
    totals: Tensors, parts: Tensors, index: Tensor | None = None, add: bool = False
) -> None:
    """Write each part over its total, or add it; with an index over some of its rows, each once."""
    if _uses_triton(totals[0]):
        _run_triton(totals, parts, index, "add" if add else "put")
        return
    for total, part in zip(totals, parts, strict=True):
        if index is None:
            total.add_(part) if add else total.copy_(part)
        else:
            at = _rows_at(total, index)
            total[at] = total[at] + part if add else part.to(total.dtype)


def _uses_triton(t: Tensor) -> bool:
    return device_kind(t) == "cuda" and t.dtype != torch.float64


def _run_triton(targets: Tensors, sources: Tensors, *how: Any) -> None:
    if not targets[0].is_meta:
        from longseq_bench.kernels import triton_merge

        triton_merge.move(targets, sources, *how)


def _rows_at(t: Tensor, index: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return what selects the rows of an index, (S, H, M), in a tensor (1, H, N, ...)."""
    heads = torch.arange(t.shape[1], device=t.device)
    return 0, heads[:, None], index[:, heads % index.shape[1]]
