"""Which kernel a sparse pattern runs on, said and never hidden.

native   compiled C++, on a CPU where there is a compiler: two to three times as fast as plain torch
triton   on CUDA, block layouts only
flex     FlexAttention compiled by torch, block layouts only; for comparison
torch    torch's own fused kernels on gathered keys, anywhere
"""

from __future__ import annotations

from typing import Literal

import torch

from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels import native, plain_spans
from longseq_bench.kernels.spans import SpanKernel

Kernel = Literal["auto", "native", "triton", "flex", "torch"]
SpansOf = Literal["auto", "native", "torch"]


def choose(asked: str, device: str, dtype: str) -> str:
    """The kernel's name; what `auto` means here.

    Raises UnsupportedError where the one asked for is not to be had, with the reason.
    """
    reasons = {
        "native": why_not_native(device, dtype),
        "triton": _why_not_triton(device),
        "flex": None,
        "torch": None,
    }
    if asked == "auto":
        return next(name for name in ("native", "triton", "torch") if reasons[name] is None)
    if reason := reasons[asked]:
        raise UnsupportedError(f"kernel={asked}: {reason}")
    return asked


def choose_spans(asked: str, device: str, dtype: str) -> str:
    """The same where only kernels of spans will do."""
    if asked == "auto":
        return "native" if why_not_native(device, dtype) is None else "torch"
    return choose(asked, device, dtype)


def span_kernel(name: str) -> SpanKernel:
    """The kernel of spans of that name: the compiled one, or its plain twin."""
    return native if name == "native" else plain_spans


def why_not_native(device: str, dtype: str) -> str | None:
    """Why the compiled kernel can't be used; None where it can."""
    if device != "cpu":
        return "the compiled kernel is for CPUs"
    if getattr(torch, dtype) not in native.DTYPES:
        return f"the compiled kernel takes no {dtype}"
    return native.why_not()


def said(name: str, device: str, dtype: str, asked: str) -> dict[str, str]:
    """What a record keeps: the kernel, and why not the fastest one."""
    kernel = native.name() if name == "native" else name
    facts = {"kernel": kernel}
    if asked == "auto" and name != "native" and device == "cpu":
        facts["not_native"] = why_not_native(device, dtype) or ""
    return facts


def _why_not_triton(device: str) -> str | None:
    if device != "cuda":
        return "Triton kernels are for CUDA"
    try:
        import longseq_bench.kernels.triton_blocks  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None
