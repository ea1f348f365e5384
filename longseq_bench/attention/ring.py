"""Ring attention (arXiv 2310.01889): keys and values pass by in chunks, partial results merge.

On one rank it is the same loop over chunks of its own keys and values: memory stays at the floor
plus one chunk, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from longseq_bench.attention.base import ExactAttention, implementation
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.comm.group import Group
from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels.tiles import RowBlock
from longseq_bench.model import Workload


@implementation("ring")
class Ring(TiledAttention, ExactAttention):
    """Exact attention, chunk by chunk, merged by log-sum-exp."""

    summary = "chunks of keys and values merged by log-sum-exp; exact, memory at the floor"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[int, "keys a step, tokens"] = 4 * TILE_ROWS,
    ) -> None:
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError("ring over several ranks is not part of this version")
        self.chunk = chunk

    def tiles(self) -> Iterator[RowBlock]:
        yield from self.exact_tiles(self.chunk)
