"""Attention with all scores in memory and a plain softmax: the reference of all kernels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longseq_bench.kernels.exact.base import Use, select
from longseq_bench.kernels.tiling import wide
from longseq_bench.patterns.block_layout import BlockLayout

EXACT = select("aten-flash-cpu", Use("cpu", torch.float32, 16, True))[0]
"""torch's kernel for a CPU, for tests of code that calls any kernel."""

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare relative to the largest number, with the tolerance of a dtype."""
    assert got.shape == expected.shape
    got, expected = got.detach(), expected.detach()
    scale = max(float(expected.abs().max()), 0.5)
    assert float((got.double() - expected.double()).abs().max()) < ALLOWED[dtype] * scale


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    counts: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp, in the dtype of the inputs.

    q (B, Hq, Nq, D); k, v (B, Hk, Nk, D) with Hk dividing Hq; causal needs Nq == Nk.
    counts: how often each query sees each key, (Nq, Nk) or (Hq, Nq, Nk).
    Returns out (B, Hq, Nq, D) and the log-sum-exp of the scaled scores (B, Hq, Nq); 0 and -inf for
    rows that see nothing.
    """
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if counts is None:
        counts = torch.ones(scores.shape[-2:])
    counts = counts.to(scores.device)
    if causal:
        counts = counts.tril()
    scores = scores.masked_fill(counts == 0, -math.inf)
    row_max = scores.amax(-1, keepdim=True).detach().nan_to_num(neginf=0.0)
    weights = counts * torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1.0) @ v, (total.log() + row_max).squeeze(-1)


def gradients(
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    counts: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return output, log-sum-exp and gradients of q, k and v in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    out, lse = forward(q, k, v, counts=counts, soft_cap=soft_cap)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return out.detach(), lse.detach(), grads


def masks(layouts: Sequence[BlockLayout]) -> Tensor:
    """Return True where a query sees a key, (layouts, N, N)."""
    tokens = np.arange(layouts[0].seq_len)
    return torch.from_numpy(np.stack([one.multiplicity(tokens, tokens) > 0 for one in layouts]))


class PassResult(NamedTuple):
    out: Tensor
    lse: Tensor
    grads: Sequence[Tensor]


def inputs(
    tokens: int,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    batch: int = 1,
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, h, tokens, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, grad_out = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return [q, k, v], grad_out


def assert_passed(
    got: PassResult,
    layouts: Sequence[BlockLayout],
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    soft_cap: float | None = None,
    like: torch.dtype = torch.float32,
) -> None:
    """Compare a pass with its definition; like: whose tolerance the log-sum-exp has."""
    dtype = grad_out.dtype
    expected = PassResult(*gradients(tensors, grad_out, masks(layouts), soft_cap))
    assert (got.out.dtype, got.lse.dtype) == (dtype, wide(grad_out))
    assert_near(got.out, expected.out, dtype)
    assert_near(got.lse, expected.lse, like)
    for own, expected_grad in zip(got.grads, expected.grads, strict=True):
        assert own.dtype == dtype
        assert_near(own, expected_grad, dtype)


def draw_grouped(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return grad_out, q, k and v of two batch rows, 4 query heads and 2 KV heads of 16."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 16)] * 2 + [(2, 2, keys, 16)] * 2
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
