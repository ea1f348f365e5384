"""MagiAttention's kernel flex_flash_attn_func: masks as ranges of queries and keys, on one rank.

Its own distribution over ranks moves tokens by a solver and is not measured here.
Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, heads_last
from longseq_bench.core.masks import DOCUMENTS, FULL_DOCUMENTS, parse_mask

_FULL, _CAUSAL = 0, 1  # its types of a range


@implementation("magi-attention")
class MagiAttention(External):
    """`flex_flash_attn_func` of MagiAttention."""

    summary = "MagiAttention's kernel, with documents; on one rank"
    mask_kinds = frozenset({DOCUMENTS, FULL_DOCUMENTS})
    dtypes = ("bfloat16", "float16")
    copies_heads = True
    library = Library(
        "magi-attention",
        "magi_attention.api",
        'pip install --no-build-isolation "git+https://github.com/SandAI-org/MagiAttention"',
        oldest="1.0.4",
        before="2",
        parameters={"flex_flash_attn_func": "q k v q_ranges k_ranges attn_type_map"},
    )

    def prepare(self, device: str) -> None:
        """Build the ranges: one for each document of each sequence."""
        super().prepare(device)
        w = self.workload
        mask = parse_mask(w.mask) if w.mask is not None else None
        lengths = mask.document_lengths(w.seq_len) if mask else (w.seq_len,)
        ends = list(accumulate(lengths * w.batch, initial=0))
        ranges = list(pairwise(ends))
        kind = _CAUSAL if (mask.is_causal if mask else w.causal) else _FULL
        self._ranges = torch.tensor(ranges, dtype=torch.int32, device=device)
        self._kinds = torch.full((len(ranges),), kind, dtype=torch.int32, device=device)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, N, D = q.shape
        flat = (t.flatten(0, 1) for t in heads_last(q, k, v))
        out: Tensor = self.module.flex_flash_attn_func(
            *flat, q_ranges=self._ranges, k_ranges=self._ranges, attn_type_map=self._kinds
        )[0]
        return out.reshape(B, N, H, D).transpose(1, 2)
