"""Checks of dtype, head_dim and compute capability, and figures, for kernels on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.core.hardware import KernelRate, find_profile
from longseq_bench.meta_mode import is_meta

if TYPE_CHECKING:
    from longseq_bench.kernels.exact.base import Use

HALF = (torch.bfloat16, torch.float16)

MAX_INDEX = 2**31 - 1
"""The largest offset in 32 bits, in elements."""


def half_reason(use: Use, largest: int = 256) -> str | None:
    """Return why a half-precision kernel can't take this dtype or head_dim; None if it can.

    torch pads other head sizes before it calls its kernels; a direct call has to refuse them.
    """
    if use.dtype not in HALF:
        return f"it supports bfloat16 and float16, not {str(use.dtype)[6:]}"
    if use.head_dim % 8 or use.head_dim > largest:
        return f"it needs a head_dim of at most {largest}, a multiple of 8"
    return None


def capability_reason(least: tuple[int, int], majors: tuple[int, ...] = ()) -> str | None:
    """Return why the GPU can't run a kernel; None if it can, or if it is unknown in meta mode.

    majors: of the compute capabilities of the only generations for which the kernel is.
    """
    found, reason = find_capability()
    if found is None or (found >= least and (not majors or found[0] in majors)):
        return reason
    names = " or ".join(f"{m}.x" for m in majors) or f"{least[0]}.{least[1]}"
    return f"it needs compute capability {names}; this GPU has {found[0]}.{found[1]}"


def find_capability() -> tuple[tuple[int, int] | None, str | None]:
    """Return the GPU's compute capability, or None and the reason if there is no GPU."""
    if is_meta():
        return meta_mode.capability(), None
    if not torch.cuda.is_available():
        return None, "there is no CUDA device"
    return torch.cuda.get_device_capability(), None


def find_figures(use: Use) -> dict[str, KernelRate]:
    """Return the figures of kernels for this task on this GPU by name; empty without any."""
    found, _ = find_capability()
    if use.device != "cuda" or use.dtype not in HALF or found is None:
        return {}
    gpu = find_profile("" if is_meta() else torch.cuda.get_device_name(), found)
    return gpu.figures(use.train, use.head_dim, use.causal) if gpu else {}


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple of a number that is not smaller."""
    return -(-number // multiple) * multiple


def repeat_heads(q: Tensor, k: Tensor) -> Tensor:
    """Return k with each KV head repeated for its query heads; k itself without grouped heads."""
    repeat = q.shape[1] // k.shape[1]
    return k if repeat == 1 else k.repeat_interleave(repeat, 1)


def sum_groups(grad: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of repeated heads, summed over the query heads of each KV head."""
    if grad.shape[1] == k.shape[1]:
        return grad
    batch, kv_heads, tokens, dim = k.shape
    return grad.reshape(batch, kv_heads, -1, tokens, dim).sum(2)
