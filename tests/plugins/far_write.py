"""A Triton kernel that writes outside of every allocation."""

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def write_far_away(pointer: tensor) -> None:
    """Write a number terabytes behind a tensor."""
    tl.store(pointer + (1 << 40), 1.0)
