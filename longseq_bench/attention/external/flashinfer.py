"""FlashInfer: decoding over a paged KV cache, and attention over the blocks of a layout.

Not run on a GPU by this project yet.
Letters: B batch, Hq heads, Hk kv_heads, m new tokens, N tokens, P tokens of a page, D head_dim.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.masks import WINDOW
from longseq_bench.core.model import Workload
from longseq_bench.core.workload import Scores
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.patterns.block_layout import BlockLayout

LIBRARY = Library(
    "flashinfer-python",
    "flashinfer",
    "pip install 'flashinfer-python>=0.7.2'",
    versions=("0.7.2", "0.8"),
)
_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends


@implementation("flashinfer-decode")
class FlashInferDecode(External):
    """`BatchDecodeWithPagedKVCacheWrapper` of FlashInfer, planned in `prepare`."""

    summary = "FlashInfer's decoding over a paged KV cache, with windows"
    takes_decode = True
    takes_scores = ("soft_cap",)
    dtypes = ("bfloat16", "float16")
    mask_kinds = frozenset({WINDOW})
    library = LIBRARY

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        page: Annotated[int, "tokens of a page; it divides the tokens of the cache"] = 16,
    ) -> None:
        super().__init__(workload, group)
        w = workload
        if not w.decode:
            raise UnsupportedError("it computes steps of decoding only; use mode=decode")
        if page < 1 or w.seq_len % page:
            raise UnsupportedError(f"page={page} does not divide the {w.seq_len} cached tokens")
        if w.seq_len * w.head_dim >= 2**32:
            raise UnsupportedError(
                "FlashInfer has 32 bits for strides; use fewer than 2^32 / head_dim tokens"
            )
        if w.new_tokens > 1 and not w.causal:
            raise UnsupportedError("several new tokens are causal in FlashInfer; use causal=true")
        self.page = page

    def prepare(self, device: str) -> None:
        """Plan: FlashInfer splits the pages among thread blocks."""
        super().prepare(device)
        w, pages = self.workload, self.workload.seq_len // self.page
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=True
        )
        sequences = torch.arange(w.batch, dtype=torch.int32, device=device)
        # between the pages of two sequences lie those of the other KV heads: see _pages
        first = sequences[:, None] * (pages * w.kv_heads)
        indices = first + torch.arange(pages, dtype=torch.int32, device=device)
        self._wrapper.plan(
            indptr=torch.arange(w.batch + 1, dtype=torch.int32, device=device) * pages,
            indices=indices.flatten(),
            last_page_len=torch.full_like(sequences, self.page),
            num_qo_heads=w.heads,
            num_kv_heads=w.kv_heads,
            head_dim=w.head_dim,
            page_size=self.page,
            q_len_per_req=w.new_tokens,
            # keys before a query's own that it sees; -1: all
            window_left=self.mask.size - 1 if self.mask.kind == WINDOW else -1,
            logits_soft_cap=w.soft_cap,
            q_data_type=self.torch_dtype,
            kv_data_type=self.torch_dtype,
        )

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, Hq, m, D = q.shape
        rows = q.transpose(1, 2).reshape(B * m, Hq, D)
        out: Tensor = self._wrapper.run(rows, (self._pages(k), self._pages(v)))
        return out.reshape(B, m, Hq, D).transpose(1, 2)

    def _pages(self, cache_BHND: Tensor) -> Tensor:
        """Return (pages, Hk, P, D), a view of the cache, which is copied if it is not contiguous.

        Page p starts p * P tokens after the first token of the first KV head. Head h of it lies h
        * N tokens further, so pages overlap, and sequence b begins at page b * Hk * N / P.
        """
        B, Hk, N, D = cache_BHND.shape
        P = self.page
        pages = ((B - 1) * Hk + 1) * N // P
        return cache_BHND.contiguous().as_strided((pages, Hk, P, D), (P * D, N * D, D, 1))

    @override
    def facts(self) -> dict[str, Any]:
        kernel = f"FlashInfer {self._wrapper.resolved_backend}"
        layout = f"pages of {self.page} tokens are views of k and v; nothing is copied"
        return super().facts() | {"kernel": kernel, "layout": layout}


class FlashInferBlocks:
    """An AttentionKernel over one layout or one per KV head: `VariableBlockSparseAttentionWrapper`.

    Its causal mask is a triangle at the end of the keys that a row keeps, where every row of a
    causal layout has its own block. Sequences of a batch are given as further heads.
    """

    def __init__(self, layouts: Sequence[BlockLayout], scores: Scores) -> None:
        """Import the library. Raises UnsupportedError without it, and in a prediction."""
        if reason := LIBRARY.unavailable_reason():
            raise UnsupportedError(f"kernel=flashinfer: {reason}")
        self._module = LIBRARY.load()
        self._layouts, self._scores = layouts, scores
        self._wrapper: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D), and no log-sum-exp. The first call plans."""
        if self._wrapper is None:
            self._wrapper = self._plan(q, k)
        out: Tensor = self._wrapper.run(*(t.flatten(0, 1) for t in (q, k, v)))
        return out.view(q.shape), None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Raise UnsupportedError."""
        raise UnsupportedError("FlashInfer has no backward")

    def _plan(self, q: Tensor, k: Tensor) -> Any:
        """Return the wrapper for these shapes. It has lists of all kept keys, on the device."""
        (B, Hq, _, D), Hk, layout = q.shape, k.shape[1], self._layouts[0]
        kept = np.zeros((len(self._layouts), layout.rows, layout.rows), dtype=bool)
        for of_head, one in zip(kept, self._layouts, strict=True):
            of_head[np.repeat(np.arange(one.rows), one.row_lengths), one.indices] = True
        sizes = torch.from_numpy(layout.block_sizes).to(q.device, torch.int32).expand(B * Hk, -1)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = self._module.VariableBlockSparseAttentionWrapper(workspace)
        blocks = torch.from_numpy(kept).to(q.device).expand(Hk, -1, -1).repeat(B, 1, 1)
        scores = {"logits_soft_cap": self._scores.soft_cap, "sm_scale": self._scores.scale_for(D)}
        shape = B * Hq, B * Hk, D, layout.causal
        wrapper.plan(blocks, sizes, sizes, *shape, q_data_type=q.dtype, **scores)
        return wrapper
