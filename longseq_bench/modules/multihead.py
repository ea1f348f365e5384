"""A drop-in for torch.nn.MultiheadAttention in which queries see only some blocks of keys.

Padded keys are removed from the runs of keys that a kernel reads, so they are excluded before the
softmax, and values at padded positions never enter. Adjacent rows of the batch with the same
padding are computed together.

Shapes: B batch, N tokens, E embed_dim, Hq heads, Hk kv_heads, D head_dim = E / Hq.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from longseq_bench.attention.sparse.block_sparse import BlockSparse, PatternName
from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel, SplitKernel, Triple, attend
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask
from longseq_bench.patterns.blocks import check_lengths
from longseq_bench.patterns.spans import Spans, spans_of

T = TypeVar("T")
Padded = NDArray[np.bool_]
CACHED = 4
"""Shapes whose layouts are kept."""


class RecentCache(Generic[T]):
    """A cache of the most recently used values. A copy or a pickle of it starts empty."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of a key; build it if it is not in the cache."""
        if key not in self._values:
            self._values[key] = build()
            if len(self._values) > CACHED:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return RecentCache, ()


def make_workload(dtype: torch.dtype, **fields: Any) -> Workload:
    """Return a workload. Raises UserError for impossible values, and a dtype without a kernel."""
    try:
        return Workload(dtype=str(dtype).removeprefix("torch."), **fields)
    except ValidationError as error:
        wrong = (f"{' '.join(map(str, e['loc']))} {e['input']}: {e['msg']}" for e in error.errors())
        raise UserError("; ".join(wrong)) from None


class MultiheadBlockSparse(nn.Module):
    """torch.nn.MultiheadAttention over the blocks of a layout, for self-attention.

    Parameters have the names and layout of nn.MultiheadAttention (in_proj_weight (E + 2 Hk D, E):
    rows of q, k, v; in_proj_bias; out_proj). With as many KV heads as heads, a state_dict of one
    loads into the other. With an attn_mask that equals the layout, both return the same, except for
    a query whose visible keys are all padded: nn.MultiheadAttention returns NaN, this module a row
    of zeros (without out_proj's bias) with zero gradient. Attention weights are never computed.

    Attributes:
        ran: facts of the last call: the kernel, and the share of queries without a key
            (`uncovered`).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        num_kv_heads: int | None = None,
        batch_first: bool = False,
        pattern: PatternName = "local-window",
        sparsity: float = 0.9,
        block: int = 128,
        globals: Annotated[int | None, 0] = None,
        window: int | None = None,
        seed: Annotated[int, 0] = 0,
        causal: bool = False,
        kernel: sparse_selection.Kernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Pattern and kernel are options of `block-sparse`; num_kv_heads None: as many as heads.

        Raises:
            UserError: a value is impossible.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = embed_dim, num_heads, kv_heads
        if min(sizes) < 1 or embed_dim % num_heads or num_heads % kv_heads:
            raise UserError(
                "num_heads must divide embed_dim, and num_kv_heads num_heads; got "
                f"embed_dim={embed_dim}, num_heads={num_heads}, num_kv_heads={kv_heads}"
            )
        if dropout:
            raise UserError(f"dropout={dropout:g} is not supported (no attention weights); use 0")
        check_lengths(1, block)
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.batch_first, self.causal = embed_dim // num_heads, batch_first, causal
        self.dropout, self.kernel = 0.0, kernel
        # if this were True, torch's encoder layer would call its own dense kernel instead
        self._qkv_same_embed_dim = False
        self._options: dict[str, Any] = {"pattern": pattern, "sparsity": sparsity, "block": block}
        self._options |= {"globals": globals, "window": window, "seed": seed, "kernel": kernel}
        self._build(max(block, globals or 0), torch.float32)  # raises for impossible options
        self._layouts: RecentCache[BlockSparse] = RecentCache()
        self.ran: dict[str, Any] = {}
        self._make_parameters(bias, {"device": device, "dtype": dtype})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return (output, None), the pair of nn.MultiheadAttention; arguments are in its order.

        query, key, value: (N, B, E), with batch_first (B, N, E), or (N, E); so is the output.
        key_padding_mask: (B, N) or (N,), True for a key to ignore; or floats, 0 and -inf.
        average_attn_weights has no effect.

        Raises:
            UserError: shapes do not match, or there is no kernel for the dtype.
            UnsupportedError: need_weights, attn_mask, or is_causal without `causal`.
        """
        refused = {
            "need_weights=True: attention weights are never computed": need_weights,
            "attn_mask: the pattern is the mask; use key_padding_mask": attn_mask is not None,
            "is_causal=True: it was created with causal=False": is_causal and not self.causal,
        }
        for reason, is_given in refused.items():
            if is_given:
                raise UnsupportedError(f"not supported: {reason}")
        shapes = [tuple(t.shape) for t in (query, key, value)]
        is_known = query.dim() in (2, 3) and query.shape[-1] == self.embed_dim and query.numel()
        if not is_known or len({*shapes}) > 1:
            raise UserError(
                f"query, key and value need one shape with E={self.embed_dim} and tokens (this is "
                f"self-attention); got {', '.join(map(str, shapes))}"
            )
        inputs = [self._batch_first(t) for t in (query, key, value)]
        q, k, v = self._project(inputs)
        padded = _padded_keys(key_padding_mask, query.dim() == 2, inputs[1])
        kernel, without_keys = self._kernel_for(q, padded)
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        heads = attend(q, k, v, kernel, train)
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if without_keys is not None:
            self.ran["uncovered"] = float(without_keys.mean())
            out = out.masked_fill(torch.from_numpy(without_keys).to(out.device).unsqueeze(-1), 0.0)
        if query.dim() == 2:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def extra_repr(self) -> str:
        """Return the options for repr."""
        options = ", ".join(f"{n}={v}" for n, v in self._options.items() if v is not None)
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"embed_dim={self.embed_dim}, {heads}, causal={self.causal}, {options}"

    def _make_parameters(self, bias: bool, kind: dict[str, Any]) -> None:
        """Draw parameters in the order of nn.MultiheadAttention: equal seeds give equal ones."""
        embed = self.embed_dim
        self._rows = [embed, *[self.num_kv_heads * self.head_dim] * 2]
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self._rows), embed, **kind))
        self.in_proj_bias = nn.Parameter(torch.zeros(sum(self._rows), **kind)) if bias else None
        self.out_proj = nn.Linear(embed, embed, bias=bias, **kind)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def _batch_first(self, t: Tensor) -> Tensor:
        if t.dim() == 2:
            return t.unsqueeze(0)
        return t if self.batch_first else t.transpose(0, 1)

    def _project(self, inputs: list[Tensor]) -> Triple:
        """(B, N, E) each -> (B, Hq, N, D) and twice (B, Hk, N, D)."""
        weights = torch.split(self.in_proj_weight, self._rows)
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else torch.split(bias, self._rows)
        q, k, v = (
            torch.unflatten(nn.functional.linear(t, w, b), -1, (-1, self.head_dim)).transpose(1, 2)
            for t, w, b in zip(inputs, weights, biases, strict=True)
        )
        return q, k, v

    def _build(self, seq_len: int, dtype: torch.dtype, device: str = "") -> BlockSparse:
        """Return the attention; with a device prepared for it."""
        heads = {"heads": self.num_heads, "kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        w = make_workload(dtype, seq_len=seq_len, causal=self.causal, mode="train", **heads)
        attention = BlockSparse(w, Group.alone(), **self._options)
        if device:
            attention.prepare(device)
        return attention

    def _kernel_for(
        self, q: Tensor, padded: Padded | None
    ) -> tuple[AttentionKernel, Padded | None]:
        """Return the kernel of all rows, and the queries (B, N) that see no key, if any."""
        if padded is not None and self.kernel in sparse_selection.FLEX:
            raise UnsupportedError(f"kernel={self.kernel} does not support padding; use auto")
        tokens = q.shape[2]
        attention = self._layouts.get(
            (tokens, q.dtype, q.device), lambda: self._build(tokens, q.dtype, q.device.type)
        )
        self.ran = attention.facts()
        if padded is None:
            return attention.build_kernel(), None
        dtype = attention.workload.dtype
        name, _ = sparse_selection.choose(self.kernel, q.device.type, dtype, q.shape[-1])
        self.ran["kernel_of_padded"] = "torch (spans)" if name == "torch" else name
        span_kernel = sparse_selection.span_kernel(name)
        spans, kernels, start = spans_of(attention.layout), [], 0
        without_keys = np.zeros_like(padded)
        by_padding = {b"": (attention.build_kernel(), np.zeros(tokens, dtype=np.bool_))}
        for key, equal_rows in groupby(row.tobytes() if row.any() else b"" for row in padded):
            if key not in by_padding:
                visible = _remove_padded(spans, padded[start])
                task = SpanTask([HeadSpans(visible, range(self.num_heads))], self.causal)
                row_kernel = SpanAttention(span_kernel, task, (self.num_heads, tokens))
                by_padding[key] = row_kernel, _find_queries_without_keys(visible, self.causal)
            rows = slice(start, start + len(list(equal_rows)))
            kernel, without_keys[rows] = by_padding[key]
            kernels.append((rows, rows, kernel))
            start = rows.stop
        return SplitKernel(kernels), without_keys if without_keys.any() else None


def _padded_keys(mask: Tensor | None, unbatched: bool, keys: Tensor) -> Padded | None:
    """Return the keys to ignore, (B, N); None if there are none. Synchronises with the device."""
    if mask is None:
        return None
    mask = mask.unsqueeze(0) if unbatched else mask
    if mask.shape != keys.shape[:2]:
        expected = tuple(keys.shape[:2])
        raise UserError(f"key_padding_mask {tuple(mask.shape)} is not (B, N) = {expected}")
    ignored = mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool and not bool((ignored | (mask == 0)).all()):
        raise UserError("key_padding_mask must be bool (True: ignored), or floats 0 and -inf")
    padded: Padded = ignored.detach().cpu().numpy()
    return padded if padded.any() else None


def _remove_padded(spans: Spans, padded: Padded) -> Spans:
    """Return the same tiles with padded keys (N,) removed from their runs.

    Example: the run 4 ... 11, with key 6 padded, becomes the runs 4 5 and 7 ... 11.
    """
    edges = np.diff(padded.astype(np.int8), prepend=1, append=1)
    kept_start, kept_stop = np.flatnonzero(edges == -1), np.flatnonzero(edges == 1)
    start = spans.start.astype(np.int64)
    stop = start + spans.count
    first = np.searchsorted(kept_stop, start, side="right")
    pieces = np.searchsorted(kept_start, stop, side="left") - first
    piece_ends = np.concatenate(([0], np.cumsum(pieces)))
    run = np.repeat(np.arange(len(start)), pieces)
    kept = np.arange(piece_ends[-1]) - piece_ends[run] + first[run]
    piece_start = np.maximum(start[run], kept_start[kept]).astype(np.int32)
    piece_stop = np.minimum(stop[run], kept_stop[kept]).astype(np.int32)
    runs = piece_ends[spans.runs]
    return replace(spans, runs=runs, start=piece_start, count=piece_stop - piece_start)


def _find_queries_without_keys(spans: Spans, causal: bool) -> Padded:
    """Return the queries (N,) that see no key.

    Tiles cover the sequence in order, and the runs of a tile are in order too.
    """
    n = int(spans.tile_count.sum())
    first_key = np.full(spans.tiles, n)
    has_runs = np.diff(spans.runs) > 0
    first_key[has_runs] = spans.start[spans.runs[:-1][has_runs]]
    last_visible = np.arange(n) if causal else n - 1
    without_keys: Padded = np.repeat(first_key, spans.tile_count) > last_visible
    return without_keys
