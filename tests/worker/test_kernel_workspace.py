"""Workspaces of CUDA kernels: the formulas by hand, in a dry run, and on a GPU as allocated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.workspaces import measure_on_cuda
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.memory import KernelWorkspace
from tests.trials import complete

aten: Any = torch.ops.aten

B, HQ, HK, N, D = 2, 4, 2, 70_000, 96
ROWS = 70_016
"""N, rounded up to a multiple of 128."""


def tensors(dtype: torch.dtype, kv_heads: int, dim: int = D) -> tuple[Tensor, Tensor]:
    q = torch.empty(B, HQ, N, dim, dtype=dtype, device="meta")
    return q, torch.empty(B, kv_heads, N, dim, dtype=dtype, device="meta")


def backward_of(name: str, q: Tensor, k: Tensor, out: Tensor, grad_out: Tensor) -> int:
    op = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    bias = (None,) if name == "efficient" else ()
    workspace = KernelWorkspace()
    size = workspace(op.default, (grad_out, q, k, k, *bias, out), {})
    assert not workspace.unknown
    return size


def by_token(q: Tensor) -> Tensor:
    """The same sizes, laid out (B, N, H, D)."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def test_flash_adds_dq_in_float32_and_copies_what_is_not_by_token() -> None:
    q, k = tensors(torch.bfloat16, HQ)
    sums = 4 * B * HQ * ROWS * (D + 1)
    assert backward_of("flash", q, k, by_token(q), by_token(q)) == sums
    assert backward_of("flash", q, k, q, by_token(q)) == sums + q.nbytes
    assert backward_of("flash", q, k, q, q) == sums + 2 * q.nbytes
    # head_dim counts in steps of 32, above 128 in steps of 64
    for dim, counted in ((72, 96), (136, 192)):
        q, k = tensors(torch.bfloat16, HQ, dim)
        sums = 4 * B * HQ * ROWS * (counted + 1)
        assert backward_of("flash", q, k, by_token(q), by_token(q)) == sums


def test_a_short_call_of_flash_has_room_for_its_split_keys(launcher: LocalLauncher) -> None:
    one = complete(
        launcher, "sdpa", 1024, {"backend": "flash"}, heads=1, dtype="bfloat16"
    ).replace(device="cuda")  # fmt: skip
    (estimate,) = launcher.dry_run([one])
    assert estimate.inside_bytes == 4 * 2 * 132 * 64 * (64 + 1)


@pytest.mark.parametrize(
    ("name", "options", "kernel_bytes"),
    [
        # cuDNN and efficient: dQ and its softmax_sum; FlashAttention: a copy of the output, too
        ("sdpa", {}, 4 * 65), ("sdpa", {"backend": "efficient"}, 4 * 65),
        ("sdpa", {"backend": "flash"}, 4 * 65 + 2 * 64),
        ("block-sparse", {"kernel": "triton", "sparsity": 0.9}, 0),
    ],
)  # fmt: skip
def test_a_dry_run_on_cuda_knows_every_kernel(
    launcher: LocalLauncher, name: str, options: dict[str, Any], kernel_bytes: int
) -> None:
    tokens, heads = 2**16, 8
    one = complete(
        launcher, name, tokens, options, heads=heads, mode="train", dtype="bfloat16"
    ).replace(device="cuda")
    (estimate,) = launcher.dry_run([one])
    assert (estimate.unsupported, estimate.untabled) == (None, ())
    assert estimate.inside_bytes == kernel_bytes * tokens * heads


@pytest.mark.cuda
@pytest.mark.parametrize("kv_heads", [HQ, HK])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_the_formula_is_what_the_allocator_hands_out(name: str, dim: int, kv_heads: int) -> None:
    for tokens in (1024, 20_000):
        for backward in (False, True):
            measured, counted = measure_on_cuda(name, backward, tokens, HQ, kv_heads, dim)
            assert measured == pytest.approx(counted, rel=0.03, abs=2**22)
