"""All-gather attention: every rank holds all keys and values and computes its own query rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from longseq_bench.attention.base import ExactAttention, implementation
from longseq_bench.attention.tiled import TiledAttention
from longseq_bench.comm.group import Group
from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels.tiles import ALL, Piece, RowBlock
from longseq_bench.model import Workload


@implementation("collective")
class Collective(TiledAttention, ExactAttention):
    """Exact attention of own query rows to gathered keys and values."""

    summary = "all keys and values gathered, own query rows; on one rank nothing is gathered"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[int | None, "gather this many tokens at a time; none: all at once"] = None,
    ) -> None:
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError("collective over several ranks is not part of this version")
        self.chunk = chunk

    def tiles(self) -> Iterator[RowBlock]:
        w = self.workload
        if self.chunk is None:
            heads = slice(0, w.heads)
            yield RowBlock(ALL, heads, (Piece(ALL, ALL, heads, w.causal),))
            return
        yield from self.exact_tiles(self.chunk)
