"""Choice of the kernel for a sparse pattern, and the reason if the fastest one is not used.

native  compiled C++ on a CPU with a compiler: two to three times as fast as plain torch
triton  block layouts on CUDA
torch   exact attention of gathered tiles, by torch's kernel or the fastest one on CUDA
flex    FlexAttention compiled by torch, for comparison; never chosen by auto
flashinfer  the library, for comparison; never chosen by auto

triton, flex and flashinfer know block layouts only, torch also masks and parts of layouts, native
any spans.

Patterns that are tiles of exact attention also run on any kernel of kernels/exact, by its name.
"""

import importlib.util
from typing import Literal

import torch

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import flex_blocks, native, torch_spans
from longseq_bench.kernels.spans import SpanKernel
from longseq_bench.meta_mode import is_meta

Kernel = Literal["auto", "native", "triton", "flex", "flashinfer", "torch"]

_FASTEST = "triton 1.48 ms, flex 1.91 (forward, 95 %, 65,536 tokens, 8×64, H100)"
_NO_BLOCK_LAYOUT = "it needs a block layout: one rank, no mask but causal, no learned scorer"


def choose(
    requested: str,
    device: str,
    dtype: str,
    head_dim: int,
    block: int | None = None,
    train: bool = False,
) -> tuple[str, dict[str, str]]:
    """Return the name of the kernel to use, and facts for the record: why not a faster one.

    block: tokens of a block; None if the pattern has no block layout. Raises UnsupportedError with
    the reason if the requested kernel can't be used.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    fits = device == "cuda" and torch_dtype.itemsize == 2 and not train
    not_cpu = None if device == "cpu" else "the compiled kernel is for CPUs"
    reasons = {
        "native": not_cpu or native.unavailable_reason(torch_dtype),
        "triton": triton_reason(device, torch_dtype, head_dim, block or 0),
        "flex": flex_blocks.unavailable_reason(device, block is not None and train),
        "flashinfer": None if fits else "FlashInfer computes a forward in 16 bits on CUDA",
        "torch": None,
    }
    if block is None:
        for other in ("triton", "flex", "flashinfer"):
            reasons[other] = (device == "cpu" and reasons[other]) or _NO_BLOCK_LAYOUT
    name = requested
    if requested == "auto":
        name = next(n for n in ("native", "triton", "torch") if reasons[n] is None)
    elif reason := reasons[requested]:
        raise UnsupportedError(f"kernel={requested}: {reason}")
    facts = {"kernel": "torch (spans)" if name == "torch" else name}
    if name == "native":
        facts["kernel"] = native.name()
    if requested == "auto" and name == "triton":
        facts["kernel_choice"] = _FASTEST
    faster = {"cpu": "native", "cuda": "triton"}[device]
    if requested == "auto" and (reason := reasons[faster]):
        facts[f"not_{faster}"] = reason
    return name, facts


def has_triton() -> bool:
    """Return True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def span_kernel(name: str) -> SpanKernel:
    """Return the kernel of spans of this name; for names that have none that of torch."""
    return native if name == "native" else torch_spans


def triton_reason(device: str, dtype: torch.dtype, head_dim: int, block: int = 128) -> str | None:
    """Return the reason why the Triton kernels can't be used; None if they can."""
    if device != "cuda":
        return "Triton kernels are for CUDA"
    try:
        from longseq_bench.kernels import triton_tiles
    except ImportError as error:
        if is_meta():
            return None  # planning for other hardware
        return f"{type(error).__name__}: {error}"
    return triton_tiles.unavailable_reason(block, head_dim, dtype)
