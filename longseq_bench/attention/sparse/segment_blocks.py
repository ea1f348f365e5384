"""Dilated segments over many ranks: local queries see the runs of a block of keys that is here.

The spans of the whole walk are cut to the steps that a rank holds, once, and for each block to its
keys. So one call of a span kernel computes everything that a rank's queries see in a block.

Example: a run of the keys 0 4 8 12 and a block of the keys 6 to 13. Its keys in the block are 8 and
12, which are the keys 2 and 6 of the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.tiles import Block, LocalShare
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVPair
from longseq_bench.distributed.token_order import TokenOrder, even_span
from longseq_bench.kernels.base import Queries
from longseq_bench.kernels.spans import HeadSpans, SpanKernel, SpanTask, StepMap
from longseq_bench.patterns.spans import Spans

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SegmentBlocks:
    """A BlockAttention of dilated segments, for ranks that hold their tokens in walk order.

    parts: spans of the whole walk, in steps.  walk: the position of each step; None: the step.
    """

    group: Group
    kernel: SpanKernel
    order: TokenOrder
    parts: Sequence[HeadSpans]
    causal: bool
    walk: NDArray[np.int32] | None

    def __post_init__(self) -> None:
        own = self._own
        parts = [HeadSpans(cut_queries(part.spans, own), part.heads) for part in self.parts]
        object.__setattr__(self, "parts", parts)

    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge the block into out and lse."""
        if task := self._task(block):
            self.kernel.forward(q, *kv, out, lse, task)

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv."""
        if task := self._task(block):
            self.kernel.backward(queries, kv, dq, dkv, range(kv[0].shape[1]), task)

    @property
    def _own(self) -> range:
        (own,) = self.order.runs(self.group.rank)
        return own

    def _task(self, block: Block) -> SpanTask | None:
        """Return what local queries see of a block; None if nothing."""
        if not self.group.computes:
            return None
        own, parts = self._own, self.parts
        if isinstance(block, LocalShare):
            rows = range(*even_span(len(own), block.count, block.index))
            parts = [HeadSpans(cut_queries(part.spans, rows, 0), part.heads) for part in parts]
            keys = own
        else:
            (steps,) = self.order.runs(block.owner)
            keys = steps[block.tokens]
        visible = [replace(part, spans=cut_keys(part.spans, keys)) for part in parts]
        visible = [part for part in visible if part.spans.tiles]
        if not visible:
            return None
        steps_of = StepMap(q_at=self._positions(own), k_at=self._positions(keys))
        return SpanTask(visible, self.causal, steps_of if self.causal else StepMap(), merge=True)

    def _positions(self, steps: range) -> NDArray[np.int32]:
        if self.walk is None:
            return np.arange(steps.start, steps.stop, dtype=np.int32)
        return np.ascontiguousarray(self.walk[steps.start : steps.stop])


def cut_queries(spans: Spans, rows: range, first: int | None = None) -> Spans:
    """Return the tiles' queries at steps `rows`, counted from step `first` (None: rows.start)."""
    first = rows.start if first is None else first
    start, step = spans.tile_start.astype(np.int64), spans.tile_step
    begin = np.maximum(-(-(rows.start - start) // step), 0)
    end = np.minimum(-(-(rows.stop - start) // step), spans.tile_count)
    kept = np.flatnonzero(end > begin)
    return _with_tiles(
        replace(
            spans,
            tile_start=(start + begin * step - first).astype(np.int32),
            tile_count=(end - begin).astype(np.int32),
        ),
        kept,
        np.ones(len(spans.start), dtype=np.bool_),
    )


def cut_keys(spans: Spans, keys: range) -> Spans:
    """Return the runs' keys at steps `keys`, counted from keys.start, and tiles that see any."""
    start = spans.start.astype(np.int64)
    step = np.int64(1) if spans.step is None else spans.step.astype(np.int64)
    begin = np.maximum(-(-(keys.start - start) // step), 0)
    end = np.minimum(-(-(keys.stop - start) // step), spans.count)
    visible = end > begin
    cut = replace(
        spans,
        start=(start + begin * step - keys.start).astype(np.int32),
        count=(end - begin).astype(np.int32),
    )
    seen = np.bincount(_tile_of_run(spans)[visible], minlength=spans.tiles)
    return _with_tiles(cut, np.flatnonzero(seen), visible)


def _with_tiles(spans: Spans, tiles: Ints, visible: NDArray[np.bool_]) -> Spans:
    """Return some tiles, ascending, with their visible runs."""
    is_kept = np.zeros(spans.tiles, dtype=np.bool_)
    is_kept[tiles] = True
    tile = _tile_of_run(spans)
    runs = np.flatnonzero(visible & is_kept[tile])
    per_tile = np.bincount(tile[runs], minlength=spans.tiles)[tiles]
    return replace(
        spans,
        tile_start=spans.tile_start[tiles],
        tile_count=spans.tile_count[tiles],
        runs=np.concatenate(([0], np.cumsum(per_tile))).astype(np.int64),
        start=spans.start[runs],
        count=spans.count[runs],
        step=None if spans.step is None else spans.step[runs],
    )


def _tile_of_run(spans: Spans) -> Ints:
    return np.repeat(np.arange(spans.tiles), np.diff(spans.runs))
