"""Block-sparse attention on a compressed layout: each query block to the key blocks it keeps.

Over ranks, rows of the layout are spread with their keys (`placement`), and each rank fetches the
key blocks that its rows see, or has all come by in a ring (`exchange`); see block_ranks.py.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np

from longseq_bench.attention.base import implementation
from longseq_bench.attention.sparse.block_layout_attention import LayoutAttention
from longseq_bench.attention.sparse.block_sparse_distributed import (
    BlockRing,
    Fetched,
    Held,
    sees_nearly_all,
)
from longseq_bench.core.cost import Cost, key_bytes_per_token
from longseq_bench.core.errors import UnsupportedError, UserError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.kernels import sparse_selection
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import WITH_SPECIAL, check_asked, check_window, make_layout
from longseq_bench.patterns.placement import Placement, place_rows

PatternName = Literal[
    "local-window", "dilated-sparse", "global-local", "hierarchical", "strided", "sink-window",
    "random",
]  # fmt: skip
GLOBALS = 128
"""Tokens, where a pattern has some and none were named."""


@implementation("block-sparse")
class BlockSparse(LayoutAttention):
    """Attention over the blocks of a layout."""

    summary = "each block of queries sees some blocks of keys, by a named pattern"
    many_ranks = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        pattern: Annotated[PatternName, "which blocks are kept"] = "local-window",
        sparsity: Annotated[float, "fraction of the visible blocks skipped, in [0, 1)"] = 0.9,
        block: Annotated[int, "tokens a block"] = 128,
        globals: Annotated[
            int | None, "global or sink tokens (global-local, sink-window); default 128", 0
        ] = None,
        window: Annotated[
            int | None, "tokens of the window, in place of what sparsity gives it"
        ] = None,
        seed: Annotated[int, "draw of pattern=random", 0] = 0,
        kernel: Annotated[
            sparse_selection.Kernel, "what computes it; auto: the fastest here"
        ] = "auto",
        placement: Annotated[Placement, "how rows lie on ranks"] = "node-local",
        ranks_per_node: Annotated[int, "of placement=hierarchical; 0: this host's", 0] = 0,
        exchange: Annotated[
            Literal["auto", "fetch", "ring"], "how keys of other ranks come"
        ] = "auto",
    ) -> None:
        check_asked(pattern, sparsity)
        check_window(pattern, block, window)
        w, self.block = workload, block
        special = _special(pattern, globals, w.seq_len)
        self._make = (pattern, w.seq_len, block, sparsity, w.causal, seed, special, window)
        self._spread = (placement, ranks_per_node or _ranks_here(group.size), exchange)
        self._layout: BlockLayout | None = None
        # the window alone decides, but of strided, which spends the rest on its columns
        self.asked = None if window and pattern != "strided" else 1 - sparsity
        if group.size > -(-w.seq_len // block):
            raise WorldError(
                f"{w.seq_len} tokens in blocks of {block} can't be shared by {group.size} ranks"
            )
        super().__init__(workload, group, kernel)

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Made when first needed: by `plan`, so that its time and memory are the plan's."""
        if self._layout is None:
            try:
                self._layout = make_layout(*self._make)
            except UserError as error:
                # of this length; at others the same options may do
                raise UnsupportedError(str(error)) from None
        return (self._layout,)

    def prepare(self, device: str) -> None:
        # a shard may have needed the layout before: it is made again, for its time to be the plan's
        self._layout = None
        vars(self).pop("_held", None)
        vars(self).pop("_over_ranks", None)
        if self.group.size == 1:
            super().prepare(device)
            return
        if self.requested_kernel not in ("auto", "native", "torch"):
            raise UnsupportedError(f"kernel={self.requested_kernel} runs on one rank; auto on many")
        self.device = device
        self.kernel_name = sparse_selection.choose(
            self.requested_kernel, device, self.workload.dtype
        )
        self._built = self._over_ranks

    @property
    def kernel_blocks(self) -> sparse_selection.Blocks | None:
        return super().kernel_blocks if self.group.size == 1 else None

    def cost(self) -> Cost:
        whole = super().cost()
        if self.group.size == 1:
            return whole
        token = key_bytes_per_token(self.workload)
        sent = self._over_ranks.bytes_sent(token, self.workload.train)
        return Cost(whole.flops, whole.floor_bytes, sent)

    def facts(self) -> dict[str, Any]:
        said = {**super().facts(), **self._unused()}
        if self.group.size == 1:
            return said
        ringed = isinstance(self._over_ranks, BlockRing)
        return {**said, "exchange": "ring" if ringed else "fetch"}

    def _unused(self) -> dict[str, str]:
        """What was asked for and has no effect, or less than it says."""
        pattern, _, block, *_, special, window = self._make
        found = {}
        if self.asked is None:
            found["sparsity"] = f"not used: window={window} says what is kept"
        wanted, kept = -(-special // block), int(np.median(self.layouts[0].row_lengths))
        if wanted >= kept and pattern in WITH_SPECIAL:
            found["globals"] = (
                f"most rows keep {kept} block(s), {kept - 1} of them global of {wanted} asked for"
            )
        return found

    def _shard(self) -> Shard:
        if self.group.size == 1:
            return Shard.full(self.workload)
        held = self._held
        return Shard.of_tokens(self.workload, held.tokens(held.rows(self.group.rank)))

    @cached_property
    def _held(self) -> Held:
        placement, per_node, _ = self._spread
        layout = self.layouts[0]
        owners = place_rows(placement, layout.row_lengths, self.group.size, per_node)
        return Held(layout, owners, self.group.rank, self.group.size)

    @cached_property
    def _over_ranks(self) -> Fetched | BlockRing:
        exchange = self._spread[2]
        if exchange == "auto":
            exchange = "ring" if sees_nearly_all(self._held) else "fetch"
        make = Fetched if exchange == "fetch" else BlockRing
        kernel = sparse_selection.span_kernel(self.kernel_name)
        return make(self._held, self.group, kernel, self.workload.causal)


def _special(pattern: str, asked: int | None, seq_len: int) -> int:
    """Global or sink tokens. Raises UserError where a pattern has none, UnsupportedError where the
    sequence is shorter."""
    if pattern not in WITH_SPECIAL:
        if asked:
            raise UserError(
                f"globals={asked} with pattern={pattern}, which has none: "
                f"{' and '.join(WITH_SPECIAL)} do"
            )
        return 0
    if asked is None:
        return min(GLOBALS, seq_len)
    if asked > seq_len:
        raise UnsupportedError(f"globals={asked} is more than the sequence's {seq_len} tokens")
    return asked


def _ranks_here(ranks: int) -> int:
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdigit() and int(here) else ranks
