"""NATTEN's neighbourhood attention in one dimension: with the causal mask, a sliding window.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, heads_last
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.masks import WINDOW, parse_mask
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("natten")
class Natten(External):
    """`na1d` of NATTEN under `mask: sliding-window:W`; it chooses the kernel."""

    summary = "NATTEN's na1d: a causal sliding window"
    mask_kinds = frozenset({WINDOW})
    equal_heads = True
    copies_heads = True
    library = Library(
        "natten",
        "natten.functional",
        "pip install natten",
        oldest="0.20",
        before="0.22",
        parameters={"na1d": "query key value kernel_size is_causal"},
    )

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        if workload.mask is None:
            # its windows without the causal mask move inwards at both ends, so full is no window
            raise UnsupportedError("natten computes windows; use mask: sliding-window:4k")
        self._window = min(parse_mask(workload.mask).size, workload.seq_len)
        if self._window < 2:
            raise UnsupportedError("natten has no window of 1 token; use 2 or more")

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = heads_last(q, k, v)
        out_BNHD = self.module.na1d(query, key, value, kernel_size=self._window, is_causal=True)
        return out_BNHD.transpose(1, 2)  # type: ignore[no-any-return]
