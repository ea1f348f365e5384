"""Attention over spans on CUDA, in Triton: the host side. A SpanKernel, as native.py is on a CPU.

One launch computes all tiles of a part: `dilated`, `hilbert` and rows spread over ranks need a few
launches a pass. Needs triton: import it where it is used. Under TRITON_INTERPRET=1, set before
triton is imported, the same kernels run on CPU tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import triton_span_kernels
from longseq_bench.kernels.base import Pair, Queries, check_strides
from longseq_bench.kernels.spans import SPAN_ARRAYS, STEP_ARRAYS, HeadSpans, SpanTask
from longseq_bench.kernels.triton_tiles import (
    Shape,
    capability_of,
    grid_of,
    on_device,
    run_fitting,
    select_shape,
    unavailable_reason,
    with_dense_rows,
)
from longseq_bench.meta_mode import are_loops_limited, device_kind

LARGEST_TILE = 128
"""Queries and keys of a program, at most; dilated patterns make tiles of as many queries."""

_on_device: weakref.WeakKeyDictionary[Any, dict[Any, Mapping[str, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Copies of arrays on devices; they live as long as their owner, a part or a map of steps."""

_tiles: dict[tuple[Any, ...], Shape] = {}
"""Tiles that fit, by kernel, head_dim, dtype and device: later launches try no others."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, task: SpanTask
) -> None:
    """See SpanKernel.forward.

    Raises UnsupportedError for a dtype, head_dim or device that the kernel does not support.
    """
    _check(q, k, v)
    strides = [t.stride()[:3] for t in (q, k, v, out)]
    strides.append((0, 0, 0) if lse is None else lse.stride())
    for part in task.parts:
        arrays = _arrays(part, task, q.device)
        fixed = _constants(q, k, task, arrays) | {"KEEP_LSE": lse is not None}
        heads = arrays["heads"]
        tensors = (q, k, v, out, q if lse is None else lse)
        _launch("forward", q, part, arrays, heads, tensors, strides, (), fixed)


def backward(
    queries: Queries, keys: Pair, dq: Tensor, sums: Pair, kv_heads: range, task: SpanTask
) -> None:
    """See SpanKernel.backward.

    Sums are added in no fixed order, so their last bits differ from run to run.
    """
    (grad_out, q, out, lse), (k, v) = queries, keys
    _check(q, k, v)
    grad_out, out = with_dense_rows(grad_out), with_dense_rows(out)
    group = q.shape[1] // k.shape[1]
    for i, part in enumerate(task.parts):
        used = [h for h in part.heads if h // group in kv_heads]
        if not used:
            continue
        arrays = _arrays(part, task, q.device)
        heads = torch.tensor(used, dtype=torch.int32, device=q.device)
        bias = _bias_like(task, i, used, q.device)
        tensors = (q, k, v, out, lse, grad_out, dq, *sums, bias)
        strides = [t.stride()[:3] for t in tensors]
        fixed = _constants(q, k, task, arrays) | {"HAS_BIAS": bool(task.bias)}
        _launch("backward", q, part, arrays, heads, tensors, strides, (kv_heads.start,), fixed)
        if task.bias:
            index = [list(part.heads).index(h) for h in used]
            task.bias[i][:, index] += bias.cpu().numpy()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if reason := unavailable_reason(16, q.shape[-1], q.dtype):
        raise UnsupportedError(reason)
    if device_kind(q) != "cuda" and not triton.knobs.runtime.interpret:
        raise UnsupportedError(f"the Triton kernels need a CUDA device, not {q.device.type}")
    check_strides("the Triton kernel", q, k, v)


def _arrays(part: HeadSpans, task: SpanTask, device: torch.device) -> Mapping[str, Tensor]:
    """Return the arrays of a part and of the steps on a device; only those that are given."""
    spans = _copied(part, device, part.spans, SPAN_ARRAYS)
    steps = _copied(task.steps, device, task.steps, STEP_ARRAYS)
    heads = _copied(part, (device, "heads"), part, ("head",))["head"]
    return {**spans, **steps, "heads": heads}


def _copied(owner: Any, key: Any, source: Any, names: tuple[str, ...]) -> Mapping[str, Tensor]:
    """Return copies of a source's arrays on a device; key: the device, or begins with it."""
    copies = _on_device.setdefault(owner, {})
    if key not in copies:
        device = key[0] if isinstance(key, tuple) else key
        arrays = {name: getattr(source, name) for name in names}
        copies[key] = {
            name: torch.from_numpy(array).to(device)
            for name, array in arrays.items()
            if array is not None
        }
    return copies[key]


def _items(part: HeadSpans, device: torch.device, queries: int) -> Tensor:
    """Return tile and first query of each program, (programs, 2) int32."""
    copies = _on_device.setdefault(part, {})
    key = (device, queries)
    if key not in copies:
        programs = -(-part.spans.tile_count // queries)
        tile = np.repeat(np.arange(part.spans.tiles, dtype=np.int32), programs)
        first = np.cumsum(programs) - programs
        offset = (np.arange(len(tile)) - first[tile]) * queries
        # the longest first, so that none is left when all others have finished
        keys = np.add.reduceat(np.append(part.spans.count, 0), part.spans.runs[:-1])
        keys = np.where(np.diff(part.spans.runs) > 0, keys, 0)
        order = np.argsort(-keys[tile], kind="stable")
        items = np.stack([tile, offset], axis=1)[order].astype(np.int32)
        copies[key] = {"items": torch.from_numpy(items).to(device)}
    return copies[key]["items"]


def _constants(
    q: Tensor, k: Tensor, task: SpanTask, arrays: Mapping[str, Tensor]
) -> dict[str, Any]:
    given = {f"HAS_{name.upper()}": name in arrays for name in ("step", *STEP_ARRAYS)}
    dim = q.shape[3]
    return {
        "GROUP": q.shape[1] // k.shape[1], "DIM": dim, "WIDE": triton.next_power_of_2(dim),
        "CAUSAL": task.causal, "MERGE": task.merge, **given,
    }  # fmt: skip


def _bias_like(task: SpanTask, part: int, heads: list[int], device: torch.device) -> Tensor:
    """Return zeros for the sums of score gradients, (B, heads, runs); empty if not wanted."""
    if not task.bias:
        return torch.zeros(1, 1, 1, device=device)
    batch, _, runs = task.bias[part].shape
    return torch.zeros(batch, len(heads), runs, device=device)


def _launch(
    name: str, q: Tensor, part: HeadSpans, arrays: Mapping[str, Tensor], heads: Tensor,
    tensors: tuple[Tensor, ...], strides: list[Any], sizes: tuple[int, ...],
    fixed: dict[str, Any],
) -> None:  # fmt: skip
    """Run a kernel over all tiles of a part with the largest tile that fits the device."""
    key = (name, q.shape[3], q.dtype, q.device)
    tile = _tiles.get(key) or select_shape(
        f"spans {name}", LARGEST_TILE, q.shape[3], q.dtype, capability_of(q)
    )
    items = _items(part, q.device, tile.queries)
    if are_loops_limited() or not len(items):
        return
    lists = [arrays.get(name, items) for name in (*SPAN_ARRAYS, *STEP_ARRAYS)]
    scale = q.shape[3] ** -0.5

    def run(tile: Shape) -> None:
        items = _items(part, q.device, tile.queries)
        programs = len(items) * len(heads) * q.shape[0]
        getattr(triton_span_kernels, name)[grid_of(programs)](
            *tensors, items, heads, *lists, *strides, part.spans.tile_step, len(items),
            len(heads), *sizes, scale, **fixed, M=tile.queries, N=tile.keys, **tile.options,
        )  # fmt: skip

    with on_device(q):
        _tiles[key] = run_fitting(tile, run)
