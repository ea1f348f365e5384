"""Which kernel a sparse pattern runs on, said and never hidden.

native   compiled C++, on a CPU where there is a compiler: two to three times as fast as plain torch
triton   on CUDA, block layouts only
torch    torch's own fused kernels on gathered keys, or, of spans, piece by piece; anywhere
flex     FlexAttention compiled by torch, block layouts only; for comparison, never chosen by auto
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import flex_blocks, native, spans_reference
from longseq_bench.kernels.spans import SpanKernel
from longseq_bench.meta_mode import is_meta

Kernel = Literal["auto", "native", "triton", "flex", "torch"]
SpansOf = Literal["auto", "native", "torch"]

FASTEST = ("native", "triton", "torch")
"""What auto tries, in turn."""


@dataclass(frozen=True)
class Blocks:
    """Layouts whose rows are whole here: what kernels of blocks ask of them."""

    block: int
    head_dim: int
    train: bool


def choose(asked: str, device: str, dtype: str, blocks: Blocks | None = None) -> str:
    """The kernel's name; what `auto` means here.

    blocks: None where what is seen comes in spans. Raises UnsupportedError where the one asked for
    is not to be had, with the reason.
    """
    reasons = _reasons(device, dtype, blocks)
    if asked == "auto":
        return next(name for name in FASTEST if reasons[name] is None)
    if reason := reasons[asked]:
        raise UnsupportedError(f"kernel={asked}: {reason}")
    return asked


def said(
    name: str, device: str, dtype: str, asked: str, way: str, blocks: Blocks | None = None
) -> dict[str, str]:
    """What a record keeps: the kernel, and why not a faster one.

    way: how torch's kernels are used, where it is those: gathered, spans, tiles.
    """
    facts = {"kernel": native.name() if name == "native" else name}
    if name == "torch":
        facts["kernel"] = f"torch ({way})"
    faster = {"cpu": "native", "cuda": "triton"}[device]
    reason = _reasons(device, dtype, blocks)[faster]
    if asked == "auto" and name != faster and reason:
        facts[f"not_{faster}"] = reason
    return facts


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def span_kernel(name: str) -> SpanKernel:
    """The kernel of spans of that name: the compiled one, or its plain twin."""
    return native if name == "native" else spans_reference


def _reasons(device: str, dtype: str, blocks: Blocks | None) -> dict[str, str | None]:
    """Why each kernel can't be used; None where it can."""
    spans = "keys come in spans here, which only native and torch take"
    return {
        "native": _why_not_native(device, dtype),
        "triton": _why_not_triton(device, dtype, blocks) if blocks else spans,
        "flex": flex_blocks.unavailable_reason(device, blocks.train) if blocks else spans,
        "torch": None,
    }


def _why_not_native(device: str, dtype: str) -> str | None:
    if device != "cpu":
        return "the compiled kernel is for CPUs"
    return native.unavailable_reason(getattr(torch, dtype))


def _why_not_triton(device: str, dtype: str, blocks: Blocks) -> str | None:
    if device != "cuda":
        return "Triton kernels are for CUDA"
    try:
        from longseq_bench.kernels import triton_blocks
    except ImportError as error:
        if is_meta():
            return None  # of hardware that is not here
        return f"{type(error).__name__}: {error}"
    return triton_blocks.unavailable_reason(blocks.block, blocks.head_dim, getattr(torch, dtype))
