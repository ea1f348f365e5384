"""The row of flash-linear-attention on a CPU: a fake of the library with recurrences by token."""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from longseq_bench.attention.external._library import Library
from longseq_bench.attention.external.fla import FlashLinearAttention


def by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return out (B, N, H, Dv) in float64 of q, k (B, N, H, D), v, g (B, N, H, 1 or D), beta.

    The equations of the papers, one token after the other.
    """
    state, out = torch.zeros(()), []
    for t in range(q.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None]
        state = g[:, t, :, :, None].exp() * state
        if beta is not None:
            value = beta[:, t, :, None, None] * (value - (key * state).sum(-2, keepdim=True))
        state = state + key * value
        out.append((q[:, t, :, :, None] * state).sum(-2) / q.shape[3] ** 0.5)
    return torch.stack(out, 1)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False
) -> tuple[Tensor, None]:
    assert beta.shape == q.shape[:3]
    if use_qk_l2norm_in_kernel:
        q, k = (normalize(t.double(), dim=-1) for t in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    tensors = (t.double() for t in (q, k, v, g, beta))
    return by_token(*tensors).to(v), None


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, None]:
    assert g is not None
    assert g.shape == q.shape[:3]
    return by_token(*(t.double() for t in (q, k, v, g[..., None]))).to(v), None


FAKE = SimpleNamespace(
    chunk_gated_delta_rule=delta_rule, chunk_kda=delta_rule, chunk_simple_gla=chunk_simple_gla
)


class Fake(Library):
    """The library with the functions above."""

    version = "0.6.0"

    def load(self) -> Any:
        sys.modules["fla.ops"] = FAKE  # type: ignore[assignment]
        return super().load()


class Recurrent(FlashLinearAttention):
    """The row with the fake; decay: a factor of the decays that the fake gets."""

    library = Fake(**vars(FlashLinearAttention.library))
    decay = 1.0

    @classmethod
    def unavailable_reason(cls, device: str) -> str | None:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.gates, own = self.gates | {"g": self.gates["g"] * self.decay}, self.gates
        out = super().__call__(q, k, v)
        self.gates = own
        return out
