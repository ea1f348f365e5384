"""The numerics gate: an output, and its gradients, against a float64 reference.

The reference is one softmax built from the implementation's own pattern, row by row. At short
lengths every row is checked; at long ones the first, the last and some random rows. Gradients stay
checkable at any length because the checked pass is fed an output gradient that is zero outside
those rows: then the whole dK and dV are sums over the checked rows alone.

The error of a tensor is its largest difference over the reference's largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Several times what correct kernels show (random inputs, 1k to 64k tokens); see docs/decisions."""

WHOLE_ROWS = 512
SAMPLED_ROWS = 16
KEY_CHUNK = 65_536


@dataclass
class Errors:
    """Largest error of each tensor so far."""

    largest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, got: Tensor, want: Tensor, scale: float) -> None:
        """NaN or infinity in `got` counts as an infinite error."""
        if not torch.isfinite(got).all():
            difference = math.inf
        else:
            difference = float((got.double() - want).abs().max()) if got.numel() else 0.0
        error = difference / scale if scale else difference
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.largest.items(), key=lambda item: item[1])


def checked_rows(seq_len: int, seed: int) -> Tensor:
    """Query positions to check: all of a short sequence, else first, last and random ones."""
    if seq_len <= WHOLE_ROWS:
        return torch.arange(seq_len)
    draw = torch.Generator().manual_seed(seed)
    middle = torch.randint(1, seq_len - 1, (SAMPLED_ROWS - 2,), generator=draw)
    return torch.unique(torch.cat([torch.tensor([0, seq_len - 1]), middle]))  # type: ignore


def check(
    attention: Attention,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Errors:
    """Errors of out (B, Hq, N, D) at `rows`, and of dq (at rows), dk, dv where grads are given.

    grad_out must be zero outside `rows`. Everything is brought to the CPU in float64.
    """
    errors = Errors()
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for kv in range(k.shape[1]):
            heads = range(kv * group, (kv + 1) * group)
            parts = [
                _one_head(attention, h, (q[b, h], k[b, kv], v[b, kv]), rows,
                          None if grad_out is None else grad_out[b, h])
                for h in heads
            ]  # fmt: skip
            for h, part in zip(heads, parts, strict=True):
                _compare(errors, "out", out[b, h], rows, part.out)
                if grads is not None and part.dq is not None:
                    _compare(errors, "dq", grads[0][b, h], rows, part.dq)
            if grads is not None:
                for name, got, own in (
                    ("dk", grads[1][b, kv], [p.dk for p in parts]),
                    ("dv", grads[2][b, kv], [p.dv for p in parts]),
                ):
                    want = torch.stack([o for o in own if o is not None]).sum(0)
                    errors.add(name, got.detach().cpu(), want, float(want.abs().max()))
    return errors


def zero_rows(out: Tensor) -> float:
    """Share of (batch, head, token) rows whose output is exactly zero."""
    return float((out == 0).all(-1).double().mean())


@dataclass(frozen=True)
class _Reference:
    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def _compare(errors: Errors, name: str, got: Tensor, rows: Tensor, want: Tensor) -> None:
    errors.add(name, got[rows.to(got.device)].detach().cpu(), want, float(want.abs().max()))


def _one_head(
    attention: Attention, head: int, qkv: tuple[Tensor, ...], rows: Tensor, grad_out: Tensor | None
) -> _Reference:
    """One head's reference at `rows`, keys taken a chunk at a time. Softmax by its definition:
    weight multiplicity · exp(score), over the sum of the weights."""
    q, k, v = (t.detach() for t in qkv)
    scale = 1 / math.sqrt(q.shape[-1])
    q_rows = q[rows.to(q.device)].cpu().double()
    weights = torch.empty(len(rows), k.shape[0], dtype=torch.float64)
    for at, keys in _chunks(k):
        count = attention.multiplicity(rows.numpy(), np.arange(at.start, at.stop), head)
        seen = torch.from_numpy(np.ascontiguousarray(count))
        scores = q_rows @ keys.T * scale
        weights[:, at] = scores + seen.double().log()
    largest = weights.amax(-1, keepdim=True)
    weights = (weights - largest.nan_to_num(neginf=0.0)).exp_()
    total = weights.sum(-1, keepdim=True)
    weights /= total.where(total > 0, 1.0)
    out = sum((weights[:, at] @ values for at, values in _chunks(v)), torch.zeros_like(q_rows))
    if grad_out is None:
        return _Reference(out)
    d_out = grad_out[rows.to(q.device)].cpu().double()
    inner = (d_out * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q_rows), [], []
    for (at, keys), (_, values) in zip(_chunks(k), _chunks(v), strict=True):
        d_scores = weights[:, at] * (d_out @ values.T - inner) * scale
        dq += d_scores @ keys
        dk.append(d_scores.T @ q_rows)
        dv.append(weights[:, at].T @ d_out)
    return _Reference(out, dq, torch.cat(dk), torch.cat(dv))


def _chunks(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, tensor.shape[0], KEY_CHUNK):
        at = slice(start, min(start + KEY_CHUNK, tensor.shape[0]))
        yield at, tensor[at].cpu().double()
