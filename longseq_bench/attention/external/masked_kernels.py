"""Kernels with masks of their own, on one rank: xformers, NATTEN and MagiAttention.

Not run on a GPU by this project yet. Letters: B batch, H heads (Hq of q, Hk of k and v), N tokens,
D head_dim.
"""

import importlib
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import HALF, External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.masks import CAUSAL, DOCUMENTS, FULL, FULL_DOCUMENTS, WINDOW
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("xformers")
class XFormers(External):
    """`memory_efficient_attention` of xformers; it chooses the kernel."""

    summary = "xformers' memory_efficient_attention, with documents and windows"
    mask_kinds = frozenset({WINDOW, DOCUMENTS, FULL_DOCUMENTS})
    library = Library(
        "xformers",
        "xformers.ops",
        "pip install xformers",
        versions=("0.0.28", "0.1"),
        parameters={"memory_efficient_attention": "query key value attn_bias"},
    )

    def prepare(self, device: str) -> None:
        """Build the mask as an object of xformers; None for the full one."""
        super().prepare(device)
        mask = self.mask
        biases = importlib.import_module("xformers.ops.fmha.attn_bias")
        self._bias: Any = None
        if mask.kind == CAUSAL:
            self._bias = biases.LowerTriangularMask()
        elif mask.kind == WINDOW:
            window = {"window_left": mask.size - 1, "window_right": 0}
            self._bias = biases.LocalAttentionFromBottomRightMask(**window)
        elif mask.kind != FULL:
            name = "BlockDiagonalCausalMask" if mask.is_causal else "BlockDiagonalMask"
            self._bias = getattr(biases, name).from_seqlens(list(self.documents))

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, N, Hq, D = q.shape
        Hk = k.shape[2]
        if Hk != Hq:
            # five dimensions: groups of query heads, each with one KV head, which is not copied
            q = q.reshape(B, N, Hk, Hq // Hk, D)
            k, v = (t[:, :, :, None].expand(B, N, Hk, Hq // Hk, D) for t in (k, v))
        if self.mask.has_documents:
            q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        out: Tensor = self.module.memory_efficient_attention(q, k, v, attn_bias=self._bias)
        return out


@implementation("natten")
class Natten(External):
    """`na1d` of NATTEN, neighbourhood attention in one dimension; it chooses the kernel."""

    summary = "NATTEN's na1d: a causal sliding window"
    mask_kinds = frozenset({WINDOW})
    equal_heads = True
    library = Library(
        "natten",
        "natten.functional",
        "pip install natten",
        versions=("0.20", "0.22"),
        parameters={"na1d": "query key value kernel_size is_causal"},
    )

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        if self.mask.is_plain:
            # its windows without the causal mask move inwards at both ends, so full is no window
            raise UnsupportedError("natten computes windows; use mask: sliding-window:4k")
        self._window = min(self.mask.size, workload.seq_len)
        if self._window < 2:
            raise UnsupportedError("natten has no window of 1 token; use 2 or more")

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.module.na1d(q, k, v, kernel_size=self._window, is_causal=True)
        return out


@implementation("magi-attention")
class MagiAttention(External):
    """`flex_flash_attn_func` of MagiAttention: a mask is ranges of queries and keys.

    Its own distribution over ranks moves tokens by a solver and is not measured here.
    """

    summary = "MagiAttention's kernel, with documents; on one rank"
    mask_kinds = frozenset({DOCUMENTS, FULL_DOCUMENTS})
    dtypes = HALF
    library = Library(
        "magi-attention",
        "magi_attention.api",
        'pip install --no-build-isolation "git+https://github.com/SandAI-org/MagiAttention"',
        versions=("1.0.4", "2"),
        parameters={"flex_flash_attn_func": "q k v q_ranges k_ranges attn_type_map"},
    )

    def prepare(self, device: str) -> None:
        """Build the ranges: one for each document of each sequence."""
        super().prepare(device)
        ranges = list(pairwise(accumulate(self.documents, initial=0)))
        self._ranges = torch.tensor(ranges, dtype=torch.int32, device=device)
        # its types of a range: 0 full, 1 causal
        self._kinds = torch.full_like(self._ranges[:, 0], int(self.mask.is_causal))

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out: Tensor = self.module.flex_flash_attn_func(
            *flat, q_ranges=self._ranges, k_ranges=self._ranges, attn_type_map=self._kinds
        )[0]
        return out
