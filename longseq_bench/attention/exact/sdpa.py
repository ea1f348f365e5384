"""Exact attention on one rank in one call: dense, torch's sdpa, FlexAttention, and any kernel."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.one_rank import exact_call, visible_pairs_of
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.core.workload import ALL_SCORES
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import flex_blocks
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO, Use
from longseq_bench.kernels.exact.torch_fused import NO_CUDNN
from longseq_bench.meta_mode import device_for, is_meta, refuse_limited_loops
from longseq_bench.patterns.blocks import make_layout
from longseq_bench.patterns.visible_keys import visible_keys


@implementation("fused")
class Fused(Attention):
    """One call of a kernel of exact attention, on one rank."""

    takes_masks = takes_v_head_dim = takes_sinks = True
    summary = "exact attention in one kernel call; sdpa calls torch's kernels only"

    def __init__(self, workload: Workload, group: Group, *, kernel: KernelOption = AUTO) -> None:
        self.exact_name = kernel
        super().__init__(workload, group)

    @override
    def build_kernel(self) -> AttentionKernel:
        return exact_call(self.exact, self.workload)


@implementation("dense")
class Dense(Attention):
    """softmax(q kᵀ / √D) v with the scores (B, Hq, N, N) materialised."""

    takes_masks = takes_v_head_dim = takes_sinks = True
    takes_scores = ALL_SCORES
    summary = "standard attention: all scores are in memory, O(n²)"

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        refuse_limited_loops()
        B, Hq, N, D = q.shape
        Hk = k.shape[1]
        # query heads that share a key head are adjacent, so k and v need no repeated copy
        q_grouped = q.reshape(B, Hk, Hq // Hk * N, D)
        scores = (q_grouped @ k.transpose(-1, -2)).reshape(B, Hk, Hq // Hk, N, N)
        scale = self.workload.scores.scale_for(D)
        scores = scores * scale if scores.requires_grad else scores.mul_(scale)
        scores = self.workload.scores.of(scores)
        if self.workload.causal and self.workload.mask is None:
            later = torch.ones(N, N, dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill(later, -math.inf)
        if self.workload.mask is not None:
            scores = scores.masked_fill(~visible_pairs_of(self.workload, q.device), -math.inf)
        if self.sinks is not None:
            column = self.sinks.to(scores.dtype).reshape(1, Hk, -1, 1, 1).expand(B, -1, -1, N, 1)
            scores = torch.cat([scores, column], -1)
        shares = torch.softmax(scores, -1)[..., :N]
        return (shares.reshape(B, Hk, Hq // Hk * N, N) @ v).reshape(B, Hq, N, v.shape[3])


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@implementation("sdpa")
class Sdpa(Attention):
    """torch.nn.functional.scaled_dot_product_attention."""

    takes_masks = takes_v_head_dim = takes_decode = takes_latent = True
    summary = "torch's fused attention; the backend that ran is recorded"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        backend: Annotated[
            Literal["auto", "flash", "efficient", "cudnn", "math"],
            "kernel of torch; auto: torch chooses",
        ] = "auto",
    ) -> None:
        super().__init__(workload, group)
        self._v_differs = workload.v_head_dim != workload.head_dim and not workload.latent
        if backend == "flash" and self._v_differs:
            raise UnsupportedError(
                "backend=flash needs a v_head_dim equal to the head_dim; use backend=auto"
            )
        self.backend = backend
        self._ran: str = backend
        self._mask: Tensor | None = None

    def prepare(self, device: str) -> None:
        """In meta mode, choose a kernel whose memory is that of torch's choice."""
        super().prepare(device)
        w = self.workload
        # torch aligns its causal mask with the first key, so it is wrong for the new tokens of a
        # cache; one new token sees every key
        if w.mask is not None or (w.causal and w.new_tokens > 1):
            visible = visible_pairs_of(w, device_for(device))
            self._mask = visible.repeat(w.heads, 1) if w.latent else visible
        if is_meta():
            if self.backend == "math":
                raise UnsupportedError("backend=math can't run on meta tensors")
            if self._v_differs and self.backend != "efficient":
                raise UnsupportedError("torch's kernel for such a v_head_dim is not in the table")
            self.select_exact("aten-flash-cpu" if device == "cpu" else self.backend)
        elif self.backend == "cudnn" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            raise UnsupportedError(f"backend=cudnn: {NO_CUDNN}")

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.workload.latent:
            return self._attend(q, k, v)
        # its kernels want one head_dim, and one head reads k once for many of its rows
        B, Hq, m, D = q.shape
        out = self._attend(q.reshape(B, 1, Hq * m, D), k, k)
        return out[..., : v.shape[3]].reshape(B, Hq, m, v.shape[3])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_meta:
            # the kernel of the device, not the one that torch has for meta tensors
            return self.exact.forward(q, k, v, self._causal, self._mask, q.requires_grad)[0]
        refuse_limited_loops()
        if self._ran == "auto":
            self._ran = self._find_backend(q, k, v)
        backend: AbstractContextManager[Any] = (
            nullcontext() if self.backend == "auto" else sdpa_kernel(_BACKENDS[self.backend])
        )
        grouped, scale = q.shape[1] != k.shape[1], self.workload.scale
        with backend:
            return scaled_dot_product_attention(
                q, k, v, self._mask, is_causal=self._causal, scale=scale, enable_gqa=grouped
            )

    @property
    def _causal(self) -> bool:
        return self.workload.causal and self._mask is None and not self.workload.decode

    @property
    @override
    def kernel_use(self) -> Use:
        return replace(super().kernel_use, masked=self._mask is not None, packages=False)

    def _find_backend(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        grouped = q.shape[1] != k.shape[1]
        choice = torch._fused_sdp_choice(
            q, k, v, self._mask, is_causal=self._causal, enable_gqa=grouped
        )
        return {b.value: name for name, b in _BACKENDS.items()}.get(choice, "unknown")

    @override
    def facts(self) -> dict[str, Any]:
        return {"backend": self._ran}


_compile_s: dict[str, float] = {}


@implementation("flex")
class Flex(Attention):
    """torch.nn.attention.flex_attention on compact block masks, compiled.

    It is compiled once for all lengths during the warm-up, so that no pass is charged with the
    compiler's memory or time; the time is a fact of the record.
    """

    takes_masks = takes_sinks = True
    takes_scores = ALL_SCORES
    summary = "FlexAttention, compiled by torch (no training on a CPU); compile time is recorded"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        block: Annotated[int, "block size of the causal mask, in tokens"] = 128,
    ) -> None:
        super().__init__(workload, group)
        flex_blocks.check_head_dim(workload.head_dim)
        self.block = block
        self._mask: Any = None

    @classmethod
    @override
    def unavailable_reason(cls, device: str) -> str | None:
        return flex_blocks.unavailable_reason(device, train=False)

    def prepare(self, device: str) -> None:
        """Compile, and build the causal mask."""
        super().prepare(device)
        w = self.workload
        if reason := flex_blocks.unavailable_reason(device, w.train):
            raise UnsupportedError(reason)
        if w.sink and device == "cpu":
            raise UnsupportedError("a sink needs the log-sum-exp, which flex has on CUDA only")
        if is_meta():
            raise UnsupportedError("code compiled by torch can't run on meta tensors")
        if w.mask is not None:
            layout = make_layout(
                "local-window", w.seq_len, self.block, 0.0, w.causal, mask=visible_keys(w)
            )
            self._mask = flex_blocks.FlexBlocks([layout]).prepare(device, w.train)
        elif w.causal:
            self._mask = flex_blocks.causal_block_mask(w.seq_len, self.block, device, w.train)
        if device not in _compile_s:
            start = time.perf_counter()
            # three tensors, contiguous as those of a pass: for views of one it is compiled again
            shapes = [(w.batch, h, w.seq_len, w.head_dim) for h in (w.heads, *[w.kv_heads] * 2)]
            self(*(torch.zeros(s, dtype=self.torch_dtype, device=device) for s in shapes))
            _compile_s[device] = time.perf_counter() - start

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        given = q, k, v, self._mask, self.workload.scores
        if self.sinks is None:
            out: Tensor = flex_blocks.attend(*given)
            return out
        out, more = flex_blocks.attend(*given, return_aux=AuxRequest(lse=True))
        shares = torch.sigmoid(more.lse - self.sinks[:, None])
        return (out * shares[..., None]).to(q.dtype)

    @override
    def facts(self) -> dict[str, Any]:
        return {"kernel": "flex (compiled)", "compile_s": max(_compile_s.values(), default=None)}
