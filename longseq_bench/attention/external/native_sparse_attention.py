"""Native sparse attention of flash-linear-attention: its branch of selected blocks, `parallel_nsa`.

The whole module adds three softmaxes (compressed, selected, window) with gates from the model, and
selects blocks by the inputs. Neither is one softmax over a known pattern. This row gives the
library `block_indices` and no gates: it then computes the selected branch alone, over blocks that
are declared, so the output is checked in float64. The selection itself is not measured.

Blocks: the first one, and the nearest ones up to the query's own. They include the three that the
library always selects (the first, the previous, the own); the others it would choose by score.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim, S blocks.
"""

from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Counts, Mask, Positions, implementation
from longseq_bench.attention.external._library import HALF, External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout

_LEAST_GROUP = 16  # query heads per KV head are the rows of its tile


@implementation("native-sparse-attention")
class NativeSparseAttention(External):
    """`parallel_nsa` of flash-linear-attention, with blocks that this row selects."""

    summary = "native sparse attention of flash-linear-attention: fixed selected blocks"
    dtypes = HALF
    sees_itself = True
    library = Library(
        "fla-core",
        "fla.ops.nsa",
        "pip install 'fla-core[cuda]==0.6.0'",
        versions=("0.6", "0.7"),
        parameters={"parallel_nsa": "q k v block_indices block_counts block_size"},
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        blocks: Annotated[int, "blocks that each query sees, a power of 2 from 4 up"] = 16,
        block: Annotated[int, "tokens of a block, a power of 2 from 16 up"] = 64,
    ) -> None:
        super().__init__(workload, group)
        w, group_heads = workload, workload.heads // workload.kv_heads
        if not w.causal:
            raise UnsupportedError("parallel_nsa computes the causal mask only; use causal=true")
        if group_heads < _LEAST_GROUP or not _is_power_of_2(group_heads):
            raise UnsupportedError(
                f"parallel_nsa needs {_LEAST_GROUP}, 32, 64, ... query heads per KV head, not "
                f"{group_heads}; use heads=64 kv_heads=4"
            )
        if w.head_dim > 256:
            raise UnsupportedError(f"parallel_nsa has a head_dim up to 256, not {w.head_dim}")
        for name, value, least in (("blocks", blocks, 4), ("block", block, 16)):
            if value < least or not _is_power_of_2(value):
                raise UnsupportedError(f"{name}={value} is not a power of 2 from {least} up")
        self.blocks, self.block = blocks, block

    @cached_property
    def _layout(self) -> BlockLayout:
        tokens, block = self.workload.seq_len, self.block
        window = (self.blocks - 1) * block
        return make_layout(
            "sink-window", tokens, block, 0.0, True, special=min(block, tokens), window=window
        )

    def prepare(self, device: str) -> None:
        """Build the list of blocks of every token, (B, N, Hk, S) int64; it stays allocated."""
        super().prepare(device)
        w, lengths = self.workload, self._layout.row_lengths
        table = np.full((self._layout.rows, self.blocks), -1)  # -1: none
        table[np.arange(self.blocks) < lengths[:, None]] = self._layout.indices
        rows = torch.arange(w.seq_len, device=device) // self.block
        of_tokens = torch.from_numpy(table).to(device)[rows]
        shape = (w.batch, w.seq_len, w.kv_heads, self.blocks)
        self._indices = of_tokens[None, :, None].expand(shape).contiguous()

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = {"block_indices": self._indices, "block_counts": self.blocks}
        out: Tensor = self.module.parallel_nsa(q, k, v, **blocks, block_size=self.block)
        return out

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self._layout.multiplicity(q_positions, k_positions)

    @override
    def may_see(self, q_positions: Positions, k_positions: Positions, head: int) -> Mask:
        return self._layout.may_see(q_positions, k_positions)

    @override
    def kept_pairs(self) -> float:
        return self._layout.visible_pairs

    @override
    def measures(self) -> dict[str, float]:
        return {"density_achieved": self._layout.block_density, "uncovered": 0.0}

    @override
    def facts(self) -> dict[str, Any]:
        pattern = "selected blocks are given: the first, and the nearest up to the query's own"
        return super().facts() | {"pattern": pattern}


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0
