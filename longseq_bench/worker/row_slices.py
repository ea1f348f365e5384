"""Walk over a tensor a few rows at a time, so that a check needs little memory of its own.

A pass may leave almost no free memory on a device. A check that allocates a temporary of the
output's size would then run out of memory, and a length that fits would count as too long.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_ROWS = 32_768
"""Rows of a slice, so few that they stay in a CPU's cache."""

MAX_BYTES = 2**24
"""Bytes of a slice. Temporaries of a check take up to four times that, 64 MiB."""


def row_slices(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows (n, D) of each head of a tensor (B, H, N, D), as views."""
    tensor = tensor.detach()
    row_bytes = max(1, tensor.shape[-1] * tensor.element_size())
    rows = max(1, min(MAX_ROWS, MAX_BYTES // row_bytes))
    # not flatten(0, 1): it copies a tensor whose heads are next to its tokens
    for heads in tensor:
        for head in heads:
            yield from head.split(rows)


def is_finite(tensor: Tensor) -> bool:
    """Return True if every number of a tensor (B, H, N, D) is finite."""
    # a sum is not finite if a term is not, and is much cheaper; it may overflow, though
    return all(
        bool(torch.isfinite(part.sum()) or torch.isfinite(part).all())
        for part in row_slices(tensor)
    )
