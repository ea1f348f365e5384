"""A quantised KV cache: int8 or fp8 numbers, and a float32 scale for KV_BLOCK tokens of a KV head.

A scale is the largest magnitude of its numbers over the largest number of the dtype. fp8 is e4m3
(arXiv 2209.05433). Letters: B batch, Hk kv_heads, N tokens, D head_dim of keys or of values.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from longseq_bench.core.cost import KV_BLOCK
from longseq_bench.kernels.base import Triple

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Quantised(Tensor):
    """Keys or values (B, Hk, N, D): an int8 or fp8 tensor, whose numbers are to be scaled.

    Operations of torch don't scale them, and return plain tensors.

    scale: (B, Hk, blocks of KV_BLOCK tokens), float32.
    is_redrawn: `rows_of` returns the numbers before they were quantised, drawn again.
    """

    scale: Tensor
    is_redrawn = False
    # as in torch.nn.Parameter
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def empty(shape: tuple[int, ...], kv_dtype: str, device: str | torch.device) -> Quantised:
        """Return a cache of any numbers."""
        cache = torch.empty(shape, dtype=DTYPES[kv_dtype], device=device).as_subclass(Quantised)
        cache.scale = torch.ones(*shape[:2], -(-shape[2] // KV_BLOCK), device=device)
        return cache

    def fill_from(self, draw: Callable[..., object], dtype: torch.dtype) -> None:
        """Quantise numbers of a dtype, a part of a head after the other.

        draw(part, i, j, start) sets tokens (n, D) of sequence i and KV head j, from `start` on.
        """
        self._draw, self._dtype, (batch, heads, tokens, dim) = draw, dtype, self.shape
        for i, j, start in product(range(batch), range(heads), range(0, tokens, self.part)):
            numbers = self.draw(i, j, start).float()
            numbers[tokens - start :] = 0
            blocks = numbers.view(-1, KV_BLOCK * dim)
            # no copy; 18 times as fast as aminmax, or abs
            largest = blocks.amax(1, keepdim=True).maximum(-blocks.amin(1, keepdim=True))
            scale = largest.clamp_min(1e-30) / _LARGEST[self.dtype]
            blocks /= scale
            if self.dtype == torch.int8:
                blocks.round_()
            self[i, j, start : start + self.part] = numbers[: tokens - start]
            own = self.scale[i, j, start // KV_BLOCK :][: len(scale)]
            own[:] = scale[: len(own), 0]

    @property
    def part(self) -> int:
        """Tokens of a head that are quantised together: few exist in another dtype at a time."""
        return KV_BLOCK * (512 if self.is_cuda else 4)

    def draw(self, i: int, j: int, start: int) -> Tensor:
        """Return a part (tokens, D) before it is quantised; it may go on after the last token."""
        part = torch.empty(self.part, self.shape[3], dtype=self._dtype, device=self.device)
        self._draw(part, i, j, start)
        return part


def before_quantisation(inputs: Triple) -> Triple:
    """Return q, k and v with caches whose rows are those before they were quantised."""
    q, k, v = (t.as_subclass(type(t)) for t in inputs)
    for cache, given in zip((k, v), inputs[1:], strict=True):
        vars(cache).update(vars(given), is_redrawn=True)
    return q, k, v


def rows_of(tensor: Tensor, i: Any, j: Any, at: slice) -> Tensor:
    """Return tokens (n, D) of sequence i and KV head j, or of slices; scaled if Quantised."""
    if not isinstance(tensor, Quantised):
        return tensor[i, j, at]
    if tensor.is_redrawn:
        starts = range(at.start // tensor.part * tensor.part, at.stop, tensor.part)
        rows = torch.cat([tensor.draw(i, j, start) for start in starts])
        return rows[at.start - starts.start : at.stop - starts.start]
    blocks = torch.arange(at.start, at.stop, device=tensor.device) // KV_BLOCK
    return tensor[i, j, at].float().double() * tensor.scale[i, j][..., blocks, None]
