"""Block-sparse attention on CUDA over compressed block layouts, in Triton: the host side.

triton_kernels.py has the kernels, work_items.py the lists that each program walks. One program sums
each gradient in one order, without atomics, so every run gives the same bits. In the list of a row
or column at most two blocks need a mask: the causal diagonal and the short last block.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim; S slots of split rows.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1, set before triton is imported,
the same kernels run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels import triton_kernels, triton_merge
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.spans import check_shapes
from longseq_bench.kernels.triton_tiles import (
    BLOCKS,
    Launch,
    Shape,
    capability_of,
    on_device,
    run_fitting,
    select_shape,
    unavailable_reason,
)
from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout

_JOINED_ROWS = 32
"""Tokens of a program that joins slots."""

_KERNELS = {
    "forward": triton_kernels.forward,
    "dq": triton_kernels.backward_queries,
    "dkv": triton_kernels.backward_keys,
}


class TritonBlocks:
    """An AttentionKernel over one layout, or over one layout per query head.

    q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq, any strides between batches, heads and
    tokens. Out and gradients are contiguous; the log-sum-exp is natural, float32.

    Raises UnsupportedError with the reason for a block, head_dim, dtype, device or shape that the
    kernels don't support, KernelLimitError for a launch that is too large.
    """

    def __init__(self, layouts: Sequence[BlockLayout], scores: Scores = PLAIN_SCORES) -> None:
        self.layouts, self._scores = tuple(layouts), scores
        one, *_ = layouts  # an attention makes all of its layouts with the same sizes
        self.seq_len, self.block, self.causal = one.seq_len, one.block, one.causal
        if self.block not in BLOCKS:
            raise UnsupportedError(str(unavailable_reason(self.block, 16, torch.float32)))
        self._rows: dict[torch.device, WorkItems] = {}
        self._columns: dict[tuple[torch.device, int], WorkItems] = {}
        self._shapes: dict[tuple[str, int, torch.dtype], Shape] = {}
        self._launches: dict[Any, Launch] = {}

    def rows(self, device: torch.device) -> WorkItems:
        """Return the lists of rows on a device; they are copied there once."""
        if device not in self._rows:
            self._rows[device] = WorkItems.of_rows(self.layouts, device)
        return self._rows[device]

    def columns(self, device: torch.device, group: int) -> WorkItems:
        """Return the lists of columns, which a backward pass needs; see `rows`.

        group: query heads per KV head.
        """
        if (device, group) not in self._columns:
            self._columns[device, group] = WorkItems.of_columns(self.layouts, group, device)
        return self._columns[device, group]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        self._check(q, k, v)
        items = self.rows(q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3] if keep_lse else (1,), dtype=torch.float32, device=q.device)
        parts = self._slots(q, items)
        parts_lse = parts.new_empty((*q.shape[:2], items.slots * self.block))

        tensors = (q, k, v, out, lse, parts, parts_lse)
        self._launch("forward", tensors, items, KEEP_LSE=keep_lse)
        self._join(triton_merge.reduce_softmax, (out, lse, parts, parts_lse), items, keep_lse)
        return out, lse if keep_lse else None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v.

        out and lse may belong to a softmax over more keys than these. The gradients of rows with an
        lse of -inf are zeros.
        """
        (grad_out, q, out, lse), (k, v) = queries, keys
        self._check(q, k, v)
        rows = self.rows(q.device)
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))

        # dq writes the delta that dkv reads
        parts = self._slots(q, rows)
        self._launch("dq", (q, k, v, out, grad_out, lse, delta, dq, parts), rows)
        self._join(triton_merge.reduce_sum, (dq, parts), rows)
        del parts
        columns = self.columns(q.device, q.shape[1] // k.shape[1])
        dk_parts, dv_parts = self._slots(k, columns), self._slots(k, columns)
        tensors = (q, k, v, grad_out, lse, delta, dk, dv, dk_parts, dv_parts)
        self._launch("dkv", tensors, columns)
        self._join(triton_merge.reduce_sum, (dk, dk_parts), columns)
        self._join(triton_merge.reduce_sum, (dv, dv_parts), columns)
        return dq, dk, dv

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if reason := unavailable_reason(self.block, q.shape[-1], q.dtype):
            raise UnsupportedError(reason)
        heads = q.shape[1] if len(self.layouts) == 1 else len(self.layouts)
        check_shapes(q, k, v, heads, self.seq_len)
        if q.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise UnsupportedError(f"the Triton kernels need a CUDA device, not {q.device.type}")

    def _slots(self, owner: Tensor, items: WorkItems) -> Tensor:
        """Return room for the partial results of split rows, (B, H, S, BLOCK, D) float32."""
        shape = (*owner.shape[:2], items.slots, self.block, owner.shape[3])
        return torch.empty(shape, dtype=torch.float32, device=owner.device)

    def _launch(
        self, name: str, tensors: Sequence[Tensor], items: WorkItems, **constants: Any
    ) -> None:
        """Run a kernel with the largest tile that fits the device's shared memory.

        tensors: q, k and others in the order of the kernel's parameters.
        """
        q, k, *_ = tensors
        lists = items.places, items.bounds, items.indices
        strides = [t.stride()[:3] for t in tensors if t.dim() == 4]
        counts = items.count, items.slots, *constants.values()
        key = (name, q.device, q.dtype, q.shape, k.shape, *strides, *counts)
        with on_device(q):
            if key in self._launches:
                self._launches[key](*tensors, *lists)
                return
            scale, cap = self._scores.factors(q.shape[3])
            sizes = (q.shape[2], q.shape[1], items.count, items.slots, scale)
            is_short = self.seq_len % self.block != 0
            fixed = self._constants(q) | constants | {"GROUP": q.shape[1] // k.shape[1], "CAP": cap}
            fixed |= {"SPLIT": items.slots > 0, "CAUSAL": self.causal, "TAIL": is_short}

            def run(tile: Shape) -> None:
                tokens, owner = (tile.keys, k) if name == "dkv" else (tile.queries, q)
                programs = items.count * (self.block // tokens) * owner.shape[0] * owner.shape[1]
                of_tile = {"M": tile.queries, "N": tile.keys, **tile.options}
                launch = Launch(_KERNELS[name], programs, (*strides, *sizes), fixed | of_tile)
                launch(*tensors, *lists)
                self._launches[key] = launch

            of_shape = (name, q.shape[3], q.dtype)
            tile = self._shapes.get(of_shape) or select_shape(
                name, self.block, q.shape[3], q.dtype, capability_of(q), is_short, self.causal
            )
            self._shapes[of_shape] = run_fitting(tile, run)

    def _join(
        self, kernel: Any, tensors: Sequence[Tensor], items: WorkItems, keep_lse: bool | None = None
    ) -> None:
        """Join the slots of split rows; tensors: the result, and others that the kernel takes."""
        if not items.slots:
            return
        total, tokens = tensors[0], min(self.block, _JOINED_ROWS)
        rows = items.splits.shape[1]
        key = (total.device, total.dtype, total.shape, keep_lse, rows, items.slots)
        if key not in self._launches:
            sizes = (total.stride()[:3], total.shape[2], rows, total.shape[1], items.slots)
            constants = self._constants(total) | {"M": tokens}
            constants |= {} if keep_lse is None else {"KEEP_LSE": keep_lse}
            programs = rows * (self.block // tokens) * total.shape[0] * total.shape[1]
            self._launches[key] = Launch(kernel, programs, sizes, constants)
        with on_device(total):
            self._launches[key](*tensors, items.splits)

    def _constants(self, owner: Tensor) -> dict[str, Any]:
        dim = owner.shape[3]
        wide = triton.next_power_of_2(dim)
        return {"SHARED": len(self.layouts) == 1, "BLOCK": self.block, "DIM": dim, "WIDE": wide}
