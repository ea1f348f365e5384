"""Attention by its definition, in float64: what every implementation is held against.

Built from nothing but `multiplicity` and, of a module, its projections. Pure torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

Tensors = tuple[Tensor, Tensor, Tensor]
Options = dict[str, Any]

SEGMENTS: list[Options] = [
    {},
    {"segments": (64,), "dilation": (1,)},
    {"segments": (32, 128), "dilation": (1, 4)},
    {"segments": (24, 100), "dilation": (1, 3)},
    {"segments": (40, 64, 4096), "dilation": (2, 1, 7)},
    {"segments": (64, 48), "dilation": (2, 5)},
    {"segments": (16, 64), "dilation": (1, 2), "mix": "groups"},
    {"segments": (30, 70, 256), "dilation": (2, 3, 5), "mix": "groups"},
]


def built_in(name: str) -> bool:
    """Registered by the package itself."""
    return IMPLEMENTATIONS.unavailable_reason(name) is None and IMPLEMENTATIONS.get(
        name
    ).__module__.startswith("longseq_bench.")


REGISTERED = [name for name in IMPLEMENTATIONS.names() if built_in(name)]


def made(name: str, options: Options, w: Workload) -> Attention:
    """A planned implementation on one rank."""
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.prepare("cpu")
    return attention


def inputs(w: Workload, seed: int = 0) -> Tensors:
    """q, k and v of all ranks together."""
    draw = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (w.batch, heads, w.seq_len, w.head_dim)
        tensor = torch.randn(shape, generator=draw).to(getattr(torch, w.dtype))
        return tensor.requires_grad_(w.train)

    return normal(w.heads), normal(w.kv_heads), normal(w.kv_heads)


def output_gradient(w: Workload) -> Tensor:
    """Gradient of the whole output."""
    draw = torch.Generator().manual_seed(1)
    shape = (w.batch, w.heads, w.seq_len, w.head_dim)
    return torch.randn(shape, generator=draw).to(getattr(torch, w.dtype))


def counts(attention: Attention) -> Tensor:
    """How often each query sees each key, (Hq, N, N), asked of the implementation."""
    w = attention.workload
    steps = np.arange(w.seq_len)
    tables = [np.asarray(attention.multiplicity(steps, steps, h)) for h in range(w.heads)]
    return torch.from_numpy(np.stack(tables).astype(np.float64))


def reference(
    seen: Tensor, qkv: Tensors, projections: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output in float64, with the leaves to differentiate it by: q, k, v, and the projections'
    names with a W before them."""
    leaves = dict(zip("qkv", qkv, strict=True)) | {f"W{n}": t for n, t in projections.items()}
    leaves = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}

    def projected(name: str, tensor: Tensor) -> Tensor:
        return tensor @ leaves[f"W{name}"] if projections else tensor

    q, k, v = (projected(name, leaves[name]) for name in "qkv")
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = seen * torch.exp(scores)
    total = weights.sum(-1, keepdim=True)
    shares = weights / total.where(total > 0, 1.0)
    return projected("out", torch.einsum("bhij,bhjd->bhid", shares, v)), leaves


def apart(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Largest difference over the largest magnitude, or `least`; infinite where `got` is not
    finite."""
    if not torch.isfinite(got).all():
        return math.inf
    scale = max(float(want.abs().max()), least)
    return float((got.double() - want).abs().max()) / (scale or 1.0)
