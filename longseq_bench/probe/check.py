"""The numerics gate: an output, and its gradients, against a float64 reference.

The reference is one softmax built from the implementation's own pattern, row by row. At short
lengths every row is checked; at long ones the first, the last and some random rows. Gradients stay
checkable at any length because the checked pass is fed an output gradient that is zero outside
those rows: then the whole dK and dV are sums over the checked rows alone.

The error of a row is its largest difference over the reference's largest magnitude in that row:
late rows of causal attention, a hundred times smaller than the first, count as much as it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.model import DType

TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}
GRADIENT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1.5e-2}
"""Three times or more what correct kernels show on random inputs from 1 to 10k tokens: outputs
1.5e-6, 1.5e-2, 2e-3; gradients 2.1e-6, 2.8e-2, 4.3e-3 (docs/decisions/0004)."""

WHOLE_ROWS = 512
SAMPLED_ROWS = 16
KEY_CHUNK = 65_536
_TINY = 1e-30


@dataclass
class Errors:
    """Largest error of each tensor so far."""

    largest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, got: Tensor, want: Tensor, squares: Tensor | None = None) -> None:
        """Rows (tokens, D). NaN or infinity in `got` counts as an infinite error; where the
        reference's row is zero, so must the other be, beside the tensor's largest magnitude.

        squares: sums of squares of the terms of each element before they cancel.
        """
        got = got.detach().cpu().double()
        if not torch.isfinite(got).all():
            self.largest[name] = math.inf
            return
        scale = want.abs().amax(-1)
        if squares is not None:
            scale = scale.maximum(squares.sqrt().amax(-1))
        scale = scale.where(scale > 0, want.abs().max().clamp_min(_TINY))
        error = float(((got - want).abs().amax(-1) / scale).max())
        self.largest[name] = max(self.largest.get(name, 0.0), error)

    @property
    def worst(self) -> float:
        """The largest error of any tensor."""
        return max(self.largest.values(), default=0.0)

    def beyond(self, dtype: DType) -> str | None:
        """Which tensor is further off than its tolerance, in a sentence; None where none is."""
        for name, error in self.largest.items():
            allowed = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
            if not error <= allowed:
                return f"{name} is {error:.2g} off the float64 reference (allowed {allowed:.2g})"
        return None


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
                errors.add("out", out[b, h][rows.to(out.device)], part.out)
                if grads is not None:
                    errors.add("dq", grads[0][b, h][rows.to(out.device)], *part.dq)
            if grads is not None:
                errors.add("dk", grads[1][b, kv], *_summed([p.dk for p in parts]))
                errors.add("dv", grads[2][b, kv], *_summed([p.dv for p in parts]))
    return errors


def zero_rows(out: Tensor) -> float:
    """Share of (batch, head, token) rows whose output is exactly zero."""
    return float((out == 0).all(-1).double().mean())


_Sum = tuple[Tensor, ...]
"""A reference gradient, and for dq and dk the squares of its terms."""


@dataclass(frozen=True)
class _Reference:
    out: Tensor
    dq: _Sum = ()
    dk: _Sum = ()
    dv: _Sum = ()


def _summed(parts: list[_Sum]) -> _Sum:
    """Over the query heads that share a key head."""
    return tuple(torch.stack(list(own)).sum(0) for own in zip(*parts, strict=True))


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
    return _gradients(q_rows, k, v, weights * scale, out, d_out, 1 / scale)


def _gradients(
    q_rows: Tensor, k: Tensor, v: Tensor, scaled: Tensor, out: Tensor, d_out: Tensor, unscale: float
) -> _Reference:
    """Gradients of the rows' share. dS = P (dO·v - dO·out) cancels, between its terms where a row
    sees few keys and within each dot product, so the squares of what is added tell how large a
    rounding may be."""
    inner = (d_out * out).sum(-1, keepdim=True)
    inner_squares = (d_out * out).square().sum(-1, keepdim=True)
    dq, dq_squares = torch.zeros_like(q_rows), torch.zeros_like(q_rows)
    dk, dk_squares, dv = [], [], []
    for (at, keys), (_, values) in zip(_chunks(k), _chunks(v), strict=True):
        d_weights = d_out @ values.T
        d_scores = scaled[:, at] * (d_weights - inner)
        terms = scaled[:, at].square() * (d_out.square() @ values.square().T + inner_squares)
        dq += d_scores @ keys
        dq_squares += terms @ keys.square()
        dk.append(d_scores.T @ q_rows)
        dk_squares.append(terms.T @ q_rows.square())
        dv.append(scaled[:, at].T @ d_out * unscale)
    keys_side = (torch.cat(dk), torch.cat(dk_squares))
    return _Reference(out, (dq, dq_squares), keys_side, (torch.cat(dv),))


def _chunks(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, tensor.shape[0], KEY_CHUNK):
        at = slice(start, min(start + KEY_CHUNK, tensor.shape[0]))
        yield at, tensor[at].cpu().double()
