"""Attention by its definition in float64, which every implementation is compared to.

Built from nothing but `Attention.multiplicity` and a module's projections. Pure torch.
Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.
"""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.attention.own_function import find_implementation
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

Tensors = tuple[Tensor, Tensor, Tensor]
Options = dict[str, Any]


def find_kind(implementation: str | type[Attention]) -> type[Attention]:
    """Return the class of an implementation. A name is looked up."""
    return (
        find_implementation(implementation) if isinstance(implementation, str) else implementation
    )


def build_attention(
    implementation: str | type[Attention], options: Options, workload: Workload
) -> Attention:
    """Return an implementation on one rank of a CPU, prepared."""
    attention = find_kind(implementation)(workload, Group.alone(), **options)
    attention.prepare("cpu")
    return attention


def make_inputs(workload: Workload, seed: int = 0) -> Tensors:
    """Return normal q (B, Hq, N, D), k (B, Hk, N, D), v (B, Hk, N, Dv); leaves in train.

    In decode q has the new tokens only. With a latent v is a view of k.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, head_dim: int, tokens: int) -> Tensor:
        shape = (workload.batch, heads, tokens, head_dim)
        tensor = torch.randn(shape, generator=generator).to(getattr(torch, workload.dtype))
        return tensor.requires_grad_(workload.train)

    w = workload
    q, k = draw(w.heads, w.head_dim, len(w.queries)), draw(w.kv_heads, w.head_dim, w.seq_len)
    v = k[..., : w.v_head_dim] if w.latent else draw(w.kv_heads, w.v_head_dim, w.seq_len)
    return q, k, v


def make_output_gradient(workload: Workload) -> Tensor:
    """Return a normal gradient of the output, (B, Hq, N, Dv)."""
    generator = torch.Generator().manual_seed(1)
    shape = (workload.batch, workload.heads, workload.seq_len, workload.v_head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, workload.dtype))


def count_pairs(attention: Attention) -> Tensor:
    """Return how often each query sees each key, (Hq, N, N), by `Attention.multiplicity`.

    In decode it is (Hq, new tokens, N).
    """
    w = attention.workload
    queries, keys = np.asarray(w.queries), np.arange(w.seq_len)
    tables = [np.asarray(attention.multiplicity(queries, keys, h)) for h in range(w.heads)]
    return torch.from_numpy(np.stack(tables).astype(np.float64))


_REFERENCES: dict[str, dict[str, Tensor]] = {}


def compute_reference(
    pairs: Tensor, workload: Workload, projections: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the output and, in train, the gradients in float64; once a process for equal cases.

    Inputs are those of `make_inputs`, and the output's gradient is that of `make_output_gradient`.

    pairs: (Hq, N, N), from `count_pairs`.  projections: with the sinks, as `sink`, if there are
    any.  Returns out (B, Hq, N, D), q, k, v, and each projection under its name with the prefix W.
    """
    digest = hashlib.sha256(pairs.to(torch.int16).numpy().tobytes())
    for matrix in projections.values():
        digest.update(matrix.detach().float().numpy().tobytes())
    key = f"{workload.model_dump_json()} {digest.hexdigest()}"
    if key not in _REFERENCES:
        leaves = dict(zip("qkv", make_inputs(workload), strict=True))
        leaves |= {f"W{n}": t for n, t in projections.items()}
        leaves = {n: t.detach().double().requires_grad_(workload.train) for n, t in leaves.items()}
        out = _attend(pairs, leaves, workload.scale, workload.soft_cap)
        _REFERENCES[key] = {"out": out.detach()}
        if workload.train:
            grad_out = make_output_gradient(workload).double()
            gradients = torch.autograd.grad(out, list(leaves.values()), grad_out)
            _REFERENCES[key] |= dict(zip(leaves, gradients, strict=True))
    return _REFERENCES[key]


def _attend(
    pairs: Tensor, leaves: dict[str, Tensor], scale: float, soft_cap: float | None
) -> Tensor:
    """Return softmax over the visible pairs, between projections if there are any."""

    def project(name: str, tensor: Tensor) -> Tensor:
        return tensor @ leaves[f"W{name}"] if "Wout" in leaves else tensor

    q, k, v = (project(name, leaves[name]) for name in "qkv")
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = pairs * torch.exp(scores)
    total = weights.sum(-1, keepdim=True)
    if "Wsink" in leaves:
        total = total + leaves["Wsink"].exp()[:, None, None]
    probabilities = weights / total.where(total > 0, 1.0)
    return project("out", torch.einsum("bhij,bhjd->bhid", probabilities, v))


def relative_error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, divided by the largest magnitude of `want` (at least `least`).

    It is infinite if `got` has a value that is not finite.
    """
    if not torch.isfinite(got).all():
        return math.inf
    scale = max(float(want.abs().max()), least)
    return float((got.double() - want).abs().max()) / (scale or 1.0)
