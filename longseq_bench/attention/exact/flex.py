"""FlexAttention, torch's compiled attention, on compact block masks.

It is compiled once for all lengths during the warm-up, so that no pass is charged with the
compiler's memory or time; the time is a fact of the record.
"""

import time
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, implementation
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.flex_blocks import (
    FlexBlocks,
    attend,
    cache_block_mask,
    causal_block_mask,
    check_head_dim,
    unavailable_reason,
)
from longseq_bench.meta_mode import is_meta
from longseq_bench.patterns.blocks import make_layout
from longseq_bench.patterns.visible_keys import visible_keys

_compile_s: dict[str, float] = {}


@implementation("flex")
class Flex(Attention):
    """torch.nn.attention.flex_attention, compiled."""

    takes_masks = True
    takes_decode = True
    summary = "FlexAttention, compiled by torch (no training on a CPU); compile time is recorded"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        block: Annotated[int, "block size of the causal mask, in tokens"] = 128,
    ) -> None:
        super().__init__(workload, group)
        check_head_dim(workload.head_dim)
        self.block = block
        self._mask: Any = None

    @classmethod
    @override
    def unavailable_reason(cls, device: str) -> str | None:
        return unavailable_reason(device, train=False)

    def prepare(self, device: str) -> None:
        """Compile, and build the causal mask."""
        super().prepare(device)
        w = self.workload
        if reason := unavailable_reason(device, w.train):
            raise UnsupportedError(reason)
        if is_meta():
            raise UnsupportedError("code compiled by torch can't run on meta tensors")
        if w.decode:
            queries, visible = np.asarray(w.queries), visible_keys(w)
            first, stop = map(torch.from_numpy, (visible.first(queries), visible.stop(queries)))
            self._mask = cache_block_mask(first, stop, w.seq_len, self.block, device)
        elif w.mask is not None:
            layout = make_layout(
                "local-window", w.seq_len, self.block, 0.0, w.causal, mask=visible_keys(w)
            )
            self._mask = FlexBlocks([layout]).prepare(device, w.train)
        elif w.causal:
            self._mask = causal_block_mask(w.seq_len, self.block, device, w.train)
        # torch has another kernel for few queries
        kind = f"{device} decode" if w.decode else device
        if kind not in _compile_s:
            start = time.perf_counter()
            # three tensors, contiguous as those of a pass: for views of one it is compiled again
            sizes = (w.heads, len(w.queries)), *[(w.kv_heads, w.seq_len)] * 2
            shapes = [(w.batch, *size, w.head_dim) for size in sizes]
            self(*(torch.zeros(s, dtype=self.torch_dtype, device=device) for s in shapes))
            _compile_s[kind] = time.perf_counter() - start

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, self._mask)
        return out

    @override
    def facts(self) -> dict[str, Any]:
        return {"kernel": "flex (compiled)", "compile_s": max(_compile_s.values(), default=None)}
