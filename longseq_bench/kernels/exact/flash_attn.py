"""The FlashAttention packages 3 (arXiv 2407.08608, Hopper) and 4 (Hopper, Blackwell).

Their functions are called directly. torch can put 3 behind its own operators instead, but for the
whole process: a dense baseline by `flash` would run it too, under another name. Those of 4, which
are written in CuTe, are compiled at the first call with a new dtype, head_dim or mask.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.core.workload import ALL_SCORES
from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import (
    MAX_INDEX,
    capability_reason,
    find_capability,
    half_reason,
    round_up,
)
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.meta_mode import is_meta


class PackageKernel(ExactKernel):
    """A kernel for CUDA and 16 bits of a package that users install.

    A subclass names the package and its functions, which take tensors (B, N, H, D). A plan calls
    none of them: it needs no package, and allocates tensors of the same sizes.
    """

    device = "cuda"
    takes_scores = ALL_SCORES
    package: ClassVar[Package]
    forward_options: ClassVar[dict[str, bool]] = {}
    forward_function: ClassVar[str]
    majors: ClassVar[tuple[int, ...]]
    """Of the compute capabilities that it runs on."""

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self._module: Any = None if is_meta() else self.package.load()

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use)
        missing = None if is_meta() else cls.package.unavailable_reason()
        return reason or capability_reason((8, 0), cls.majors) or missing

    @classmethod
    @override
    def auto_reason(cls, use: Use) -> str | None:
        return cls.package.unavailable_reason() if use.packages else "it is not a kernel of torch"

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        self._check_offsets([q, k, v], q.numel())
        if q.is_meta:
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        given = {"causal": causal} | self.forward_options | self._of_scores(q)
        function = getattr(self._module, self.forward_function)
        out, lse, *_ = function(**transpose(q=q, k=k, v=v), **given)
        return out.transpose(1, 2), lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, _), (k, v) = queries, keys
        self._check_offsets([q, k, v, out, grad_out], max(sum_elements(q), sum_elements(k)))
        if not q.is_meta:
            return self._call_backward(queries, keys, causal)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # float32 buffers: sums of dq, those of dk and dv for grouped heads, two numbers per query
        sums = [q] if q.shape[1] == k.shape[1] else [q, k, k]
        sizes = [*map(sum_elements, sums), 2 * q.shape[:3].numel()]
        _ = [q.new_empty(size, dtype=torch.float32) for size in sizes]
        return gradients

    @abstractmethod
    def _call_backward(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        """Return the gradients; all tensors are (B, H, N, D) here."""

    def _check_offsets(self, tensors: list[Tensor], elements: int) -> None:
        """Raise KernelLimitError for tensors that are too large for the package.

        elements: the size of the largest tensor that the package allocates.
        """

    def _of_scores(self, q: Tensor) -> dict[str, float]:
        scale, cap = self.use.scores.scale_for(q.shape[3]), self.use.scores.soft_cap
        return {"softmax_scale": scale} | ({"softcap": cap} if cap else {})


def transpose(**tensors: Tensor) -> dict[str, Tensor]:
    """Return tensors (B, H, N, D) as a package takes them, (B, N, H, D)."""
    return {name: t.transpose(1, 2) for name, t in tensors.items()}


def sum_elements(t: Tensor) -> int:
    """Return the elements of the sums of a gradient: tokens and head_dim are rounded up."""
    batch, heads, tokens, head_dim = t.shape
    return batch * heads * round_up(tokens, 128) * round_up(head_dim, 32)


FLASH_ATTN_3 = Package(
    distribution="flash_attn_3",
    module="flash_attn_interface",
    install="pip install --no-build-isolation "
    '"git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
    parameters={
        "_flash_attn_forward": "q k v softmax_scale causal",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv softmax_scale is_causal",
    },
)


@exact_kernel("flash-attn-3")
class FlashAttn3(PackageKernel):
    """FlashAttention-3, a package for Hopper GPUs."""

    package = FLASH_ATTN_3
    forward_function = "_flash_attn_forward"
    majors = (9,)

    @override
    def _call_backward(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        tensors = transpose(dout=grad_out, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
        given = {"softmax_lse": lse.contiguous(), "is_causal": causal} | self._of_scores(q)
        self._module._flash_attn_backward(**tensors, **given)
        return dq, dk, dv


FLASH_ATTN_4 = Package(
    distribution="flash-attn-4",
    module="flash_attn.cute.interface",
    install="pip install flash-attn-4",
    parameters={
        "_flash_attn_fwd": "q k v softmax_scale causal return_lse",
        "_flash_attn_bwd": "q k v out dout lse softmax_scale causal",
    },
)


@exact_kernel("flash-attn-4")
class FlashAttn4(PackageKernel):
    """FlashAttention-4, a package for Hopper and Blackwell GPUs."""

    package = FLASH_ATTN_4
    forward_function = "_flash_attn_fwd"
    forward_options: ClassVar = {"return_lse": True}
    majors = (9, 10)
    default_priority = 30

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        found, _ = find_capability()
        fits = found is None or found[0] < 10 or use.head_dim <= 128 or use.head_dim == 256
        words = "it needs a head_dim of at most 128, or 256, on Blackwell GPUs"
        if fits and use.train and use.scores.soft_cap:
            words, fits = "its backward leaves soft_cap out; flash-attn-3 and flex have it", False
        return super().unavailable_reason(use) or (None if fits else words)

    @classmethod
    @override
    def auto_reason(cls, use: Use) -> str | None:
        if not 64 <= use.head_dim <= 128:
            return "auto takes it with a head_dim of 64 to 128, which have been run"
        elements = use.elements // use.head_dim * round_up(use.head_dim, 32)
        return super().auto_reason(use) or index_reason(elements)

    @override
    def _call_backward(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        tensors = transpose(q=q, k=k, v=v, out=out, dout=grad_out)
        dq, dk, dv, *_ = self._module._flash_attn_bwd(
            **tensors, lse=lse.contiguous(), causal=causal, **self._of_scores(q)
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @override
    def _check_offsets(self, tensors: list[Tensor], elements: int) -> None:
        # beyond 32 bits kernels in CuTe have read other memory, at 2M tokens of 8 heads of 128
        # (MSLK#303, flash-attention#2611); a view counts with the memory between its elements
        spans = (zip(t.shape, t.stride(), strict=True) for t in tensors)
        largest = max(elements, *(1 + sum((n - 1) * s for n, s in span) for span in spans))
        if reason := index_reason(largest):
            raise KernelLimitError(f"{self.name}: {reason}")


def index_reason(elements: int) -> str | None:
    """Return why a tensor of so many elements is too large; None if it is not."""
    words = f"a tensor spans {elements:,} elements; kernels written in CuTe index at most"
    return f"{words} {MAX_INDEX:,} reliably" if elements > MAX_INDEX else None
