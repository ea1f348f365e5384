"""FlashMLA: decoding over a paged cache of latents (arXiv 2405.04434).

Not run on a GPU by this project yet.
Letters: B batch, Hq heads, m new tokens, N tokens, P tokens of a page, D elements of a latent.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact._cuda import capability_reason

_PAGE, _RANK, _ELEMENTS = 64, 512, 576  # the only ones of its kernel for a cache in 16 bits


@implementation("flash-mla-decode")
class FlashMlaDecode(External):
    """`flash_mla_with_kvcache` over pages that are views of the cache."""

    summary = "FlashMLA's decoding over a paged cache of latents"
    takes_decode = takes_latent = True
    dtypes = ("bfloat16", "float16")
    library = Library(
        "flash_mla",
        "flash_mla",
        "pip install git+https://github.com/deepseek-ai/FlashMLA",
        versions=("1.0", "2"),
    )

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        w = workload
        if not w.latent or (w.v_head_dim, w.head_dim) != (_RANK, _ELEMENTS):
            raise UnsupportedError("FlashMLA decodes with a latent of 512+64 only")
        if w.seq_len % _PAGE:
            raise UnsupportedError(
                f"its pages of {_PAGE} don't divide the {w.seq_len} cached tokens"
            )
        if w.new_tokens > 1 and not w.causal:
            raise UnsupportedError("several new tokens need causal=true here")

    def prepare(self, device: str) -> None:
        """Make the table of pages. FlashMLA plans in its first call, which is not timed."""
        super().prepare(device)
        if device == "cuda" and (reason := capability_reason((9, 0), majors=(9,))):
            raise UnsupportedError(reason)
        w = self.workload
        tokens = torch.full((w.batch,), w.seq_len, dtype=torch.int32, device=device)
        pages = torch.arange(w.batch * w.seq_len // _PAGE, dtype=torch.int32, device=device)
        self._table = pages.view(w.batch, -1), tokens
        self._schedule = self.module.get_mla_metadata(tokens, w.new_tokens * w.heads, 1)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w, pages_P1D = self.workload, k.reshape(-1, _PAGE, 1, k.shape[3])
        given = q.transpose(1, 2).contiguous(), pages_P1D, *self._table, w.v_head_dim
        out_BmHD: Tensor = self.module.flash_mla_with_kvcache(
            *given, *self._schedule, softmax_scale=w.scale, causal=w.new_tokens > 1
        )[0]
        return out_BmHD.transpose(1, 2)

    @override
    def facts(self) -> dict[str, Any]:
        layout = f"pages of {_PAGE} tokens are views of k, which has v; nothing is copied"
        return super().facts() | {"kernel": "FlashMLA", "layout": layout}
