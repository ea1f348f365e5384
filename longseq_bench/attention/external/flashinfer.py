"""FlashInfer's prefill over ragged keys and values: sequences and documents one after the other.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import (
    External,
    Library,
    cumulative,
    heads_last,
)
from longseq_bench.core.masks import DOCUMENTS, FULL_DOCUMENTS, WINDOW, parse_mask

_WORKSPACE_BYTES = 128 * 2**20  # what its documentation allocates


@implementation("flashinfer")
class FlashInfer(External):
    """`BatchPrefillWithRaggedKVCacheWrapper` of FlashInfer, planned in `prepare`."""

    summary = "FlashInfer's ragged prefill, with documents and windows; forward only"
    mask_kinds = frozenset({WINDOW, DOCUMENTS, FULL_DOCUMENTS})
    dtypes = ("bfloat16", "float16")
    train_reason = "it has no backward"
    copies_heads = True
    library = Library(
        "flashinfer-python",
        "flashinfer",
        "pip install flashinfer-python",
        oldest="0.2.3",
        before="1",
        parameters={"BatchPrefillWithRaggedKVCacheWrapper": "float_workspace_buffer kv_layout"},
    )

    def prepare(self, device: str) -> None:
        """Plan: FlashInfer divides the work among thread blocks. Its workspace stays allocated."""
        super().prepare(device)
        w = self.workload
        mask = parse_mask(w.mask) if w.mask is not None else None
        documents = mask is not None and mask.has_documents
        lengths = mask.document_lengths(w.seq_len) if mask and documents else (w.seq_len,)
        ends = cumulative(lengths, w.batch, device)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD")
        self._wrapper.plan(
            qo_indptr=ends, kv_indptr=ends, num_qo_heads=w.heads, num_kv_heads=w.kv_heads,
            head_dim_qk=w.head_dim, causal=mask.is_causal if mask else w.causal,
            window_left=mask.size - 1 if mask and mask.kind == WINDOW else -1,
            q_data_type=self.torch_dtype,
        )  # fmt: skip

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, N, D = q.shape
        ragged = (t.flatten(0, 1) for t in heads_last(q, k, v))
        return self._wrapper.run(*ragged).reshape(B, N, H, D).transpose(1, 2)  # type: ignore[no-any-return]
