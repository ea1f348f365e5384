"""Triton kernel that merges two softmaxes over different keys in one launch; see merge.py.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1 it runs on CPU tensors.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from longseq_bench.kernels.triton_kernels import jit
from longseq_bench.kernels.triton_launch import grid_of, on_device, with_dense_rows

ROWS = 32
"""Rows of a program."""


@jit
def _merge(
    out: tensor, lse: tensor, part: tensor, part_lse: tensor, out_strides: tl.tuple,
    lse_strides: tl.tuple, part_strides: tl.tuple, part_lse_strides: tl.tuple, seq_len: tensor,
    heads: tensor, tiles: tensor, DIM: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr,
) -> tensor:  # fmt: skip
    """Merge M rows of one head."""
    program = tl.program_id(0)
    rows = (program % tiles).to(tl.int64) * M + tl.arange(0, M)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    inside = rows < seq_len
    lse += batch * lse_strides[0] + head * lse_strides[1]
    part_lse += batch * part_lse_strides[0] + head * part_lse_strides[1]
    old = tl.load(lse + rows * lse_strides[2], mask=inside, other=float("-inf"))
    new = tl.load(part_lse + rows * part_lse_strides[2], mask=inside, other=float("-inf"))
    dims = tl.arange(0, WIDE)
    mask = inside[:, None] & (dims < DIM)[None, :]
    out += batch * out_strides[0] + head * out_strides[1]
    part += batch * part_strides[0] + head * part_strides[1]
    at = out + rows[:, None] * out_strides[2] + dims[None, :]
    sums = tl.load(at, mask=mask, other=0.0)
    own = tl.load(part + rows[:, None] * part_strides[2] + dims[None, :], mask=mask, other=0.0)
    larger = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
    # rows without any key stay 0 and -inf
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    old_weight, new_weight = tl.exp(old - shift), tl.exp(new - shift)
    total = old_weight + new_weight
    share = tl.where(total == 0, 0.0, new_weight / total)
    # several warps load the same rows, and one of them stores: not before all have loaded
    tl.debug_barrier()
    tl.store(lse + rows * lse_strides[2], shift + tl.log(total), mask=inside)
    tl.store(at, sums + share[:, None] * (own.to(tl.float32) - sums), mask=mask)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge part (B, H, N, D) and part_lse (B, H, N) into out and lse, float32, in place."""
    batch, heads, tokens, dim = out.shape
    part = with_dense_rows(part)
    tiles = -(-tokens // ROWS)
    programs = batch * heads * tiles
    if not programs:
        return
    strides = (out.stride()[:3], lse.stride(), part.stride()[:3], part_lse.stride())
    with on_device(out):
        _merge[grid_of(programs)](
            out, lse, part, part_lse, *strides, tokens, heads, tiles,
            DIM=dim, WIDE=triton.next_power_of_2(dim), M=ROWS,
        )  # fmt: skip
