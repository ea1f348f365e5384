"""Values with another head_dim than keys, for kernels that know one head_dim only.

Zeros are added to v, and in a backward to the output and its gradient: they change no score and no
product. The columns of the output and of dv that belong to them are dropped. The padded copies are
part of the measured memory.

Shapes: as in kernels/exact/base.py; Dv head_dim of v and the output, at most D.
"""

from torch import Tensor
from torch.nn.functional import pad

from longseq_bench.kernels.base import Pair, Queries, Triple


def is_narrow(q: Tensor, v: Tensor) -> bool:
    """Return True if v has fewer elements per head than q."""
    return v.shape[3] < q.shape[3]


def pad_to(t: Tensor, head_dim: int) -> Tensor:
    """Return a tensor (B, H, N, Dv) with zeros up to head_dim: (B, H, N, D)."""
    return pad(t, (0, head_dim - t.shape[3]))


def pad_backward(queries: Queries, keys: Pair) -> tuple[Queries, Pair]:
    """Return the inputs of a backward pass with v, the output and its gradient padded."""
    (grad_out, q, out, lse), (k, v) = queries, keys
    d = q.shape[3]
    return (pad_to(grad_out, d), q, pad_to(out, d), lse), (k, pad_to(v, d))


def cut(t: Tensor, v: Tensor) -> Tensor:
    """Return a tensor (B, H, N, D) without the padding of v, (B, H, N, Dv)."""
    return t[..., : v.shape[3]].contiguous()


def cut_gradients(grads: Triple, v: Tensor) -> Triple:
    """Return gradients of q, k and v, the last without its padding."""
    return grads[0], grads[1], cut(grads[2], v)
