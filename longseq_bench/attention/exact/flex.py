"""FlexAttention, torch's compiled attention, on compact block masks.

It is compiled once for all lengths during the warm-up, so that no pass is charged with the
compiler's memory or time; the time is a fact of the record. The causal mask is given as blocks,
full ones except for the diagonal, in strided views of O(n / block) numbers: to build it from a
function of positions would take 10 n² bytes.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, implementation
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.flex_blocks import attend, causal_mask_mod, unavailable_reason
from longseq_bench.meta_mode import is_meta

_compile_s: dict[str, float] = {}


@implementation("flex")
class Flex(Attention):
    """torch.nn.attention.flex_attention, compiled."""

    summary = "FlexAttention, compiled by torch (no training on a CPU); compile time is recorded"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        block: Annotated[int, "block size of the causal mask, in tokens"] = 128,
    ) -> None:
        super().__init__(workload, group)
        if workload.head_dim < 16:
            raise UnsupportedError(f"FlexAttention needs head_dim >= 16, not {workload.head_dim}")
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
        if w.causal:
            self._mask = self._causal_mask(device)
        if device not in _compile_s:
            start = time.perf_counter()
            # three tensors, contiguous as those of a pass: for views of one it is compiled again
            shapes = [(w.batch, h, w.seq_len, w.head_dim) for h in (w.heads, *[w.kv_heads] * 2)]
            self(*(torch.zeros(s, dtype=self.torch_dtype, device=device) for s in shapes))
            _compile_s[device] = time.perf_counter() - start

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, self._mask)
        return out

    @override
    def facts(self) -> dict[str, Any]:
        return {"kernel": "flex (compiled)", "compile_s": max(_compile_s.values(), default=None)}

    def _causal_mask(self, device: str) -> Any:
        """Return a mask whose row i has blocks 0 to i - 1 in full and block i in part.

        The tables are views: the compiler wants them as wide as there are rows, but they hold few
        different numbers. Those of a backward, by columns, are given too: torch would compute them
        with dense tables of rows² numbers, 24 GB for ten million tokens.
        """
        from torch.nn.attention.flex_attention import BlockMask

        n, rows = self.workload.seq_len, -(-self.workload.seq_len // self.block)
        steps = torch.arange(2 * rows, dtype=torch.int32, device=device)

        def table(row_step: int, first: int = 0) -> Tensor:
            """Return a table whose row i counts from first + i * row_step on."""
            return steps.as_strided((1, 1, rows, rows), (0, 0, row_step, 1), first)

        ones = torch.ones(1, 1, rows, dtype=torch.int32, device=device)
        counts, diagonal = steps[:rows].reshape(1, 1, rows), table(1)
        by_column: tuple[Tensor | None, ...] = (None,) * 4
        if self.workload.train:
            # rows i + 1 to the last see block i in full
            by_column = ones, diagonal, counts.flip(-1), table(1, first=1)
        make: Callable[..., Any] = BlockMask
        by_row = ones, diagonal, counts, table(0)
        blocks = self.block, self.block
        return make((n, n), *by_row, *by_column, blocks, causal_mask_mod)
