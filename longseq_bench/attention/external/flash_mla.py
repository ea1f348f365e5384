"""FlashMLA: decoding over a paged cache of latents. Not run on a GPU by this project yet."""

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact._cuda import capability_reason

_PAGE, _SHAPE = 64, (512, 576)  # tokens of a page, and the only latent of its kernel


@implementation("flash-mla-decode")
class FlashMlaDecode(External):
    """`flash_mla_with_kvcache` over pages that are views of the cache."""

    summary = "FlashMLA's decoding over a paged cache of latents"
    takes_decode = takes_latent = True
    dtypes = ("bfloat16", "float16")
    install = "pip install git+https://github.com/deepseek-ai/FlashMLA"
    library = Library("flash_mla", "flash_mla", install, versions=("1.0", "2"))

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        w = workload
        if not w.latent or (w.v_head_dim, w.head_dim) != _SHAPE or w.seq_len % _PAGE:
            raise UnsupportedError(
                f"FlashMLA decodes with a latent of 512+64 and a multiple of {_PAGE} tokens only"
            )

    def prepare(self, device: str) -> None:
        """Make the table of pages. FlashMLA plans in its first call."""
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
        w, pages = self.workload, k.reshape(-1, _PAGE, 1, k.shape[3])
        given = q.transpose(1, 2).contiguous(), pages, *self._table, w.v_head_dim, *self._schedule
        scores = {"softmax_scale": w.scale, "causal": w.causal}
        out: Tensor = self.module.flash_mla_with_kvcache(*given, **scores)[0]
        return out.transpose(1, 2)
