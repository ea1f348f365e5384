"""Kernels with masks of their own, on one rank: xformers, NATTEN, parallel_nsa.

Not run on a GPU by this project yet. Letters: B batch, H heads (Hq of q, Hk of k and v), N tokens,
D head_dim, S blocks.
"""

import importlib
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Booleans, Counts, implementation
from longseq_bench.attention.external._library import HALF, External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.masks import CAUSAL, DOCUMENTS, FULL, FULL_DOCUMENTS, WINDOW
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout


@implementation("xformers")
class XFormers(External):
    """`memory_efficient_attention` of xformers; it chooses the kernel."""

    summary = "xformers' memory_efficient_attention, with documents and windows"
    mask_kinds = frozenset({WINDOW, DOCUMENTS, FULL_DOCUMENTS})
    library = Library(
        "xformers",
        "xformers.ops",
        "pip install xformers",
        versions=("0.0.28", "0.1"),
    )

    def prepare(self, device: str) -> None:
        """Build the mask as an object of xformers; None for the full one."""
        super().prepare(device)
        mask = self.mask
        biases = importlib.import_module("xformers.ops.fmha.attn_bias")
        self._bias: Any = None
        if mask.kind == CAUSAL:
            self._bias = biases.LowerTriangularMask()
        elif mask.kind == WINDOW:
            window = {"window_left": mask.size - 1, "window_right": 0}
            self._bias = biases.LocalAttentionFromBottomRightMask(**window)
        elif mask.kind != FULL:
            name = "BlockDiagonalCausalMask" if mask.is_causal else "BlockDiagonalMask"
            self._bias = getattr(biases, name).from_seqlens(list(self.documents))

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, N, Hq, D = q.shape
        Hk = k.shape[2]
        if Hk != Hq:
            # five dimensions: groups of query heads, each with one KV head, which is not copied
            q = q.reshape(B, N, Hk, Hq // Hk, D)
            k, v = (t[:, :, :, None].expand(B, N, Hk, Hq // Hk, D) for t in (k, v))
        if self.mask.has_documents:
            q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        out: Tensor = self.module.memory_efficient_attention(q, k, v, attn_bias=self._bias)
        return out


@implementation("natten")
class Natten(External):
    """`na1d` of NATTEN, neighbourhood attention in one dimension; it chooses the kernel."""

    summary = "NATTEN's na1d: a causal sliding window"
    mask_kinds = frozenset({WINDOW})
    equal_heads = True
    library = Library(
        "natten",
        "natten.functional",
        "pip install natten",
        versions=("0.20", "0.22"),
    )

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        if self.mask.is_plain:
            # its windows without the causal mask move inwards at both ends, so full is no window
            raise UnsupportedError("natten computes windows; use mask: sliding-window:4k")
        self._window = min(self.mask.size, workload.seq_len)
        if self._window < 2:
            raise UnsupportedError("natten has no window of 1 token; use 2 or more")

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.module.na1d(q, k, v, kernel_size=self._window, is_causal=True)
        return out


# ---- native sparse attention ---------------------------------------------------------------------
# The whole module adds three softmaxes with gates from the model, and selects blocks by the inputs.
# This row gives the library `block_indices` and no gates: it then computes the selected branch
# alone, over declared blocks, so that it can be checked. The selection is not measured.

_LEAST_GROUP = 16  # query heads per KV head are the rows of its tile


@implementation("native-sparse-attention")
class NativeSparseAttention(External):
    """`parallel_nsa` of flash-linear-attention, with blocks that this row selects.

    Blocks: the first one, and the nearest ones up to the query's own. They include the three that
    the library always selects (the first, the previous, the own).
    """

    summary = "native sparse attention of flash-linear-attention: fixed selected blocks"
    dtypes = HALF
    sees_itself = True
    library = Library(
        "fla-core",
        "fla.ops.nsa",
        "pip install 'fla-core[cuda]==0.6.0'",
        versions=("0.6", "0.7"),
    )

    blocks = 16
    """Blocks that each query sees, a power of 2 from 4 up; the default of the library."""

    block = 64
    """Tokens of a block, a power of 2 from 16 up."""

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        w, group_heads = workload, workload.heads // workload.kv_heads
        if not w.causal:
            raise UnsupportedError("parallel_nsa computes the causal mask only; use causal=true")
        if group_heads < _LEAST_GROUP or group_heads & (group_heads - 1):
            raise UnsupportedError(
                f"parallel_nsa needs {_LEAST_GROUP}, 32, 64, ... query heads per KV head, not "
                f"{group_heads}; use heads=64 kv_heads=4"
            )
        if w.head_dim > 256:
            raise UnsupportedError(f"parallel_nsa has a head_dim up to 256, not {w.head_dim}")

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
    def may_see(self, q_positions: Positions, k_positions: Positions, head: int) -> Booleans:
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
