"""A step of decoding: a few new tokens against a KV cache, on one rank or over ranks.

Every rank has all new tokens and its part of the cache. It computes the softmax over its own keys;
the ranks exchange these small results and merge them by log-sum-exp, so that every rank has the
whole output (tree attention, arXiv 2408.04093). No key is sent.

Letters: B batch, Hq heads, Hk kv_heads, m new tokens, N keys of this rank, D head_dim, Dv
v_head_dim, p ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.exact.ring import Ring
from longseq_bench.core.cost import mask_pairs
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Runs
from longseq_bench.kernels import decode, sparse_selection
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.decode import SeenKeys, merge_partials
from longseq_bench.kernels.exact.base import AUTO, ExactKernel, Use, select
from longseq_bench.meta_mode import device_for
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.visible_keys import VisibleKeys, visible_keys

CacheKernel = Callable[
    [Tensor, Tensor, Tensor, tuple[SeenKeys, ...], torch.dtype], tuple[Tensor, Tensor]
]
"""Returns the output (B, Hq, m, Dv) in a dtype and the log-sum-exp (B, Hq, m) in float32, over sets
of keys that do not overlap."""

SPLIT_KV = "split-kv"
_COMPILED = {"cpu": "native", "cuda": "triton"}
_READS = (
    "it reads at 1.01 of a copy (8 new tokens: 0.99), cuDNN at 1.02 (0.12) (results/h100/decode)"
)


def seen_keys(visible: VisibleKeys, queries: range, keys: Runs) -> SeenKeys:
    """Return which of a rank's keys, in ascending runs, each new token sees."""
    first, stop = (find(np.asarray(queries)) for find in (visible.first, visible.stop))

    def count_before(ends: Ints, run: range) -> Ints:
        return np.clip(-((run.start - ends) // run.step), 0, len(run))

    counts = (np.sum([count_before(ends, run) for run in keys], 0) for ends in (first, stop))
    return SeenKeys(*counts)


def choose_kernel(requested: str, use: Use, w: Workload) -> tuple[CacheKernel, dict[str, str]]:
    """Return a kernel for a step of decoding, and facts for the record.

    requested: auto: the split-KV kernel of the device, else a kernel of exact attention; the name
    of the compiled kernel (native, triton): split-KV; any other one: that exact kernel.  Raises
    UnsupportedError if the requested kernel can't run here.
    """
    use = replace(use, masked=w.new_tokens > 1 or w.mask is not None)
    scores = replace(use.scores, scale=w.scale)
    is_cpu, compiled = use.device == "cpu", _COMPILED[use.device]
    if requested not in (AUTO, compiled):
        if w.latent:
            raise UnsupportedError(f"kernel={requested} can't scale a latent; use kernel=auto")
        if w.kv_dtype:
            raise UnsupportedError(f"kernel={requested}: only {SPLIT_KV} reads {w.kv_dtype} caches")
        exact, facts = select(requested, use)
        return _over_cache(exact), {"kernel": exact.name, **facts}
    if is_cpu:
        reason = decode.unavailable_reason(torch.float32 if w.kv_dtype else use.dtype)
    else:
        rows, dim, most = w.heads // w.kv_heads * w.new_tokens, w.head_dim, decode.MAX_HEAD_DIM
        if w.latent:  # in two tiles, its value and the rest, for blocks of rows
            rows, dim, most = 1, dim - w.v_head_dim, decode.MAX_LATENT
        reason = decode.cuda_limit_reason(rows, max(dim, w.v_head_dim), use.dtype, most)
        reason = reason or sparse_selection.triton_reason(use.device, use.dtype, dim)
    if reason and (requested == compiled or w.latent or w.kv_dtype):
        raise UnsupportedError(f"kernel={requested}: {reason}")
    if reason:
        exact, facts = select(AUTO, use)
        return _over_cache(exact), {"kernel": exact.name, f"not_{SPLIT_KV}": reason, **facts}
    facts = {"kernel": f"{SPLIT_KV} ({compiled})"}
    facts |= {} if is_cpu or w.latent or requested != AUTO else {"kernel_choice": _READS}
    if is_cpu or not sparse_selection.has_triton():
        # Triton is missing in meta mode only; the compiled kernel needs about the same memory there
        return _over_parts(partial(decode.forward, scores=scores)), facts
    from longseq_bench.kernels import triton_decode

    return partial(triton_decode.forward, scores=scores), facts


def _over_parts(kernel: Callable[..., tuple[Tensor, Tensor]]) -> CacheKernel:
    """Return a CacheKernel of calls kernel(q, k, v, part) with results in float32."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, parts: tuple[SeenKeys, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        outs, lses = zip(*(kernel(q, k, v, part) for part in parts), strict=True)
        out, lse = outs[0], lses[0]
        if len(parts) > 1:
            out, lse = merge_partials(torch.stack(outs), torch.stack(lses))
        return out.to(dtype).contiguous(), lse

    return attend


def _over_cache(exact: ExactKernel) -> CacheKernel:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: SeenKeys) -> tuple[Tensor, Tensor]:
        keys = np.arange(seen.begin, seen.end)
        visible = (keys >= seen.first[:, None]) & (keys < seen.stop[:, None])
        if not len(keys):
            out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float32)
            return out, out.new_full(q.shape[:3], -torch.inf)
        mask = None if visible.all() else torch.from_numpy(visible).to(q.device)
        k, v = (t[:, :, seen.begin : seen.end] for t in (k, v))
        out, lse = exact.forward(q, k, v, False, mask)
        return out.float(), lse.float()

    return _over_parts(attend)


def over_lists(
    kernel: CacheKernel, layouts: Sequence[BlockLayout], w: Workload, device: str
) -> CacheKernel:
    """Return a CacheKernel over the blocks that layouts list: one for each KV head, or for all.

    New tokens are causal. A pass copies the listed keys together, because `kernel` reads runs.
    """
    queries, parts = np.asarray(w.queries), []
    first_of_head = np.arange(w.kv_heads)[:, None] * w.seq_len
    borders = np.flatnonzero(np.diff(queries // layouts[0].block)) + 1
    for own in np.split(queries, borders):
        keys = np.stack([layout.keys_seen(own) for layout in layouts])
        # the own block is the last one of a list
        stop = keys.shape[1] - (own[-1] - own)
        new = slice(own[0] - queries[0], own[-1] + 1 - queries[0])
        in_cache = torch.from_numpy(first_of_head + keys).to(device_for(device))
        parts.append((new, in_cache, (SeenKeys(0 * stop, stop),)))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, _: tuple[SeenKeys, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        found = []
        for new, keys, seen in parts:
            # values of a latent stay a part of its keys
            tensors = (k,) if decode.is_latent(k, v) else (k, v)
            # as fast as a copy; an index of two dimensions takes twice as long
            rows = [t.flatten(1, 2).index_select(1, keys.flatten()) for t in tensors]
            kept = [torch.unflatten(t, 1, keys.shape) for t in rows]
            own_v = kept[-1][..., : v.shape[3]]
            found.append(kernel(q[:, :, new], kept[0], own_v, seen, dtype))
        out, lse = (torch.cat(tensors, 2) for tensors in zip(*found, strict=True))
        return out, lse

    return attend


@dataclass(frozen=True, eq=False)
class CacheAttention:
    """An AttentionKernel of a step of decoding; it has no backward.

    parts: sets of keys of this rank that do not overlap.
    """

    kernel: CacheKernel
    parts: tuple[SeenKeys, ...]
    group: Group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output over the keys of all ranks, and its log-sum-exp."""
        if self.group.size == 1:
            out, lse = self.kernel(q, k, v, self.parts, q.dtype)
            return out, lse if keep_lse else None
        # the last element of a row is its log-sum-exp
        own = torch.empty(*q.shape[:3], v.shape[3] + 1, dtype=torch.float32, device=q.device)
        if self.group.computes:
            own[..., :-1], own[..., -1] = self.kernel(q, k, v, self.parts, own.dtype)
        every = torch.empty(self.group.size, *own.shape, dtype=own.dtype, device=own.device)
        # sends this rank's result while it receives those of the others
        self.group.all_gather(every, own).wait()
        out, lse = merge_partials(every[..., :-1], every[..., -1])
        return out.to(q.dtype).contiguous(), lse if keep_lse else None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Raise UnsupportedError: no step of decoding is trained."""
        raise UnsupportedError("a step of decoding has no backward")


class DecodeRing(Ring):
    """All new tokens on every rank, against its part of the cache."""

    @override
    def refuse(self, w: Workload, group: Group) -> None:
        defaults = {"chunk": None, "queries": "partitioned", "transport": "p2p"}
        for name, default in (defaults | {"wire": None, "offload": "none"}).items():
            if (value := getattr(self, name)) != default:
                option = "wire_dtype" if name == "wire" else name
                raise UnsupportedError(
                    f"{option}={value} has no meaning with mode decode: every rank has the new "
                    "tokens, and no key is sent"
                )

    @cached_property
    def _seen(self) -> SeenKeys:
        w = self.workload
        return seen_keys(visible_keys(w), w.queries, self.order.runs(self.group.rank))

    def prepare(self, device: str) -> None:
        """Choose the kernel of a step of decoding."""
        self.device, w = device, self.workload
        kernel, self._kernel_facts = choose_kernel(self.exact_name or AUTO, self.kernel_use, w)
        self._kernel = CacheAttention(kernel, (self._seen,), self.group)

    def build_kernel(self) -> AttentionKernel:
        """Return attention to the cache of all ranks."""
        return self._kernel

    @override
    def work_share(self) -> float:
        return int((self._seen.stop - self._seen.first).sum()) / mask_pairs(self.workload)

    @override
    def bytes_sent(self) -> int:
        # its output and log-sum-exp in float32, to each other rank
        w, others = self.workload, self.group.size - 1
        return others * w.batch * w.heads * w.new_tokens * (w.v_head_dim + 1) * 4

    @override
    def facts(self) -> dict[str, Any]:
        return self._kernel_facts
