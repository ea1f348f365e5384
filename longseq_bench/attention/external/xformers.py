"""xformers' memory_efficient_attention, with its masks of documents and windows.

Not run on a GPU by this project yet. Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

import importlib
from typing import Any

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.masks import CAUSAL, DOCUMENTS, FULL, FULL_DOCUMENTS, WINDOW, parse_mask


@implementation("xformers")
class XFormers(External):
    """`memory_efficient_attention` of xformers; it chooses the kernel."""

    summary = "xformers' memory_efficient_attention, with documents and windows"
    mask_kinds = frozenset({WINDOW, DOCUMENTS, FULL_DOCUMENTS})
    copies_heads = True
    library = Library(
        "xformers",
        "xformers.ops",
        "pip install xformers",
        oldest="0.0.28",
        before="0.1",
        parameters={"memory_efficient_attention": "query key value attn_bias"},
    )

    def prepare(self, device: str) -> None:
        """Build the mask."""
        super().prepare(device)
        self._bias = self._build_bias()

    def _build_bias(self) -> Any:
        """Return the mask as an object of xformers; None for the full one."""
        biases = importlib.import_module("xformers.ops.fmha.attn_bias")
        w = self.workload
        mask = parse_mask(w.mask or (CAUSAL if w.causal else FULL))
        if mask.kind == FULL:
            return None
        if mask.kind == CAUSAL:
            return biases.LowerTriangularMask()
        if mask.kind == WINDOW:
            return biases.LocalAttentionFromBottomRightMask(
                window_left=mask.size - 1, window_right=0
            )
        kind = biases.BlockDiagonalMask
        if mask.kind == DOCUMENTS:
            kind = biases.BlockDiagonalCausalMask
        return kind.from_seqlens(list(mask.document_lengths(w.seq_len)) * w.batch)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, Hq, N, D = q.shape
        Hk = k.shape[1]
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        if Hk != Hq:
            # five dimensions: groups of query heads, each with one KV head, which is not copied
            q = q.reshape(B, N, Hk, Hq // Hk, D)
            k, v = (t[:, :, :, None].expand(B, N, Hk, Hq // Hk, D) for t in (k, v))
        if self._has_documents:
            q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        out = self.module.memory_efficient_attention(q, k, v, attn_bias=self._bias)
        return out.reshape(B, N, Hq, D).transpose(1, 2)  # type: ignore[no-any-return]

    @property
    def _has_documents(self) -> bool:
        mask = self.workload.mask
        return mask is not None and parse_mask(mask).has_documents
