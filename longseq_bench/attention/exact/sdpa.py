"""torch's fused attention: the fast exact baseline."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from longseq_bench.attention.base import Attention, implementation
from longseq_bench.attention.masked import visible_pairs_of
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact.base import Use
from longseq_bench.meta_mode import is_meta, refuse_limited_loops

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@implementation("sdpa")
class Sdpa(Attention):
    """torch.nn.functional.scaled_dot_product_attention."""

    takes_masks = True
    takes_v_head_dim = True
    takes_decode = True
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
        self._is_equal = workload.v_head_dim == workload.head_dim
        if backend == "flash" and not self._is_equal:
            raise UnsupportedError(
                "backend=flash needs a v_head_dim equal to the head_dim; use backend=auto"
            )
        self.backend = backend
        self._ran: str = backend
        self._mask: Tensor | None = None

    def prepare(self, device: str) -> None:
        """In meta mode, choose a kernel whose memory is that of torch's choice."""
        super().prepare(device)
        if self._needs_pairs:
            self._mask = visible_pairs_of(self.workload, "meta" if is_meta() else device)
        if is_meta():
            if self.backend == "math":
                raise UnsupportedError("backend=math can't run on meta tensors")
            if not self._is_equal and self.backend != "efficient":
                raise UnsupportedError("torch's kernel for such a v_head_dim is not in the table")
            self.select_exact("aten-flash-cpu" if device == "cpu" else self.backend)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_meta():
            # the kernel of the device, not the one that torch has for meta tensors
            return self.exact.forward(q, k, v, self._causal, self._mask, q.requires_grad)[0]
        refuse_limited_loops()
        if self._ran == "auto":
            self._ran = self._find_backend(q, k, v)
        backend: AbstractContextManager[Any] = (
            nullcontext() if self.backend == "auto" else sdpa_kernel(_BACKENDS[self.backend])
        )
        with backend:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=self._mask, is_causal=self._causal,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

    @property
    def _needs_pairs(self) -> bool:
        """True if a tensor says which pairs are visible.

        torch aligns its causal mask with the first key, so it is wrong for the new tokens of a
        cache; one new token sees every key.
        """
        w = self.workload
        return w.mask is not None or (w.causal and w.new_tokens > 1)

    @property
    def _causal(self) -> bool:
        return self.workload.causal and self._mask is None and not self.workload.decode

    @property
    @override
    def kernel_use(self) -> Use:
        return replace(super().kernel_use, masked=self._mask is not None)

    def _find_backend(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return the backend that torch chooses for these tensors."""
        grouped = q.shape[1] != k.shape[1]
        choice = torch._fused_sdp_choice(
            q, k, v, self._mask, is_causal=self._causal, enable_gqa=grouped
        )
        return {b.value: name for name, b in _BACKENDS.items()}.get(choice, "unknown")

    @override
    def facts(self) -> dict[str, Any]:
        return {"backend": self._ran}
