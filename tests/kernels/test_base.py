"""`attend` makes every kernel differentiable."""

from functools import partial

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple, attend
from longseq_bench.kernels.exact.base import OneCall
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock, TiledKernel
from tests.kernels import plain_attention as plain
from tests.kernels.torch_kernel import EXACT

N, HEADS, D = 12, 4, 16
EVERY_HEAD = slice(0, HEADS)

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, N, D) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.double).to(dtype) for s in shapes]


def one_call(causal: bool) -> AttentionKernel:
    return OneCall(EXACT, causal)


def tiles(causal: bool) -> AttentionKernel:
    """The same attention as two tiles of keys, or one triangle."""
    halves = (slice(0, 5), slice(5, N))
    pieces = [Piece(ALL, keys, EVERY_HEAD) for keys in halves]
    if causal:
        pieces = [Piece(ALL, ALL, EVERY_HEAD, causal=True)]
    return TiledKernel(lambda: iter([RowBlock(ALL, EVERY_HEAD, tuple(pieces))]), EXACT)


class Recorder:
    """A kernel that records its arguments and returns distinct numbers."""

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.arguments: tuple[Tensor, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        self.kept.append(keep_lse)
        return q + 1, q.new_full(q.shape[:3], 7.0)

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        self.arguments = (*keys, *queries)
        return 2 * queries[1], 3 * keys[0], 4 * keys[1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", [one_call, tiles])
def test_output_and_gradients_equal_the_reference(make: type, causal: bool, kv_heads: int) -> None:
    qkv = [t.requires_grad_() for t in inputs(kv_heads)]
    leaves = [t.detach().double().requires_grad_() for t in qkv]
    out = attend(qkv[0], qkv[1], qkv[2], make(causal), train=True)
    expected, _ = plain.forward(leaves[0], leaves[1], leaves[2], causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grad_out = torch.randn_like(out)
    expected_gradients = torch.autograd.grad(expected, leaves, grad_out.double())
    for got, grad in zip(torch.autograd.grad(out, qkv, grad_out), expected_gradients, strict=True):
        torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=1e-5)


def test_gradcheck_of_the_fused_kernel_in_float64() -> None:
    for causal in (False, True):
        qkv = [t[:1, :2, :5].requires_grad_() for t in inputs(2, torch.float64)]
        run = partial(attend, kernel=one_call(causal), train=True)
        assert torch.autograd.gradcheck(run, qkv)


def test_gradients_are_those_of_the_kernel() -> None:
    kernel = Recorder()
    q, k, v = (t.requires_grad_() for t in inputs(2))
    out = attend(q, k, v, kernel, train=True)
    grad_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    assert torch.equal(dq, 2 * q)
    assert torch.equal(dk, 3 * k)
    assert torch.equal(dv, 4 * v)
    for argument, expected in zip(kernel.arguments, (k, v, grad_out, q, q + 1), strict=False):
        assert torch.equal(argument, expected)
    assert kernel.arguments[-1].eq(7).all()
    assert kernel.kept == [True]


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, one_call(False), True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_autocast_changes_nothing_inside() -> None:
    """Otherwise forward and backward would run in different dtypes."""
    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    plain = attend(q, k, v, one_call(False), True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, one_call(False), True)
    assert torch.equal(out, plain)


def test_without_train_nothing_is_kept() -> None:
    """There is no log-sum-exp and no graph, even if inputs require gradients."""
    kernel = Recorder()
    q, k, v = (t.requires_grad_() for t in inputs())
    out = attend(q, k, v, kernel, train=False)
    assert not out.requires_grad
    assert kernel.kept == [False]
    assert kernel.arguments == ()
