"""`attend` makes kernels differentiable; pieces of a row merge into one softmax of their keys."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.one_rank import OneCall
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import base, tiling
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock, Tiling
from tests.kernels import plain_attention
from tests.kernels.plain_attention import EXACT

N, HEADS, D = 60, 4, 16
EVERY_HEAD = slice(0, HEADS)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiling, train: bool) -> Tensor:
    return base.attend(q, k, v, tiling.TiledKernel(tiles, EXACT), train)


pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(kv_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, N, D) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def tiling_of(*blocks: RowBlock) -> Tiling:
    return lambda: iter(blocks)


def rows_of(pieces: Sequence[Piece]) -> Tiling:
    return tiling_of(RowBlock(ALL, EVERY_HEAD, tuple(pieces)))


def piece(keys: tiling.Index, rows: tiling.Index = ALL) -> Piece:
    return Piece(rows, keys, EVERY_HEAD)


def assert_tiling(tiles: Tiling, counts: Tensor, qkv: Sequence[Tensor] | None = None) -> None:
    """Check that the tiling gives the softmax of `counts`, and its gradients."""
    qkv = qkv or inputs()
    out = attend(*qkv, tiles, train=True)
    grad_out = torch.randn_like(out)
    expected, _, expected_gradients = plain_attention.gradients(qkv, grad_out, counts)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(attend(*qkv, tiles, train=False), out)
    for got, grad in zip(torch.autograd.grad(out, qkv, grad_out), expected_gradients, strict=True):
        torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=1e-5)


def counts_of(*keys: slice) -> Tensor:
    counts = torch.zeros(N, N, dtype=torch.float64)
    for own in keys:
        counts[:, own] += 1
    return counts


def test_keys_in_two_pieces_count_twice() -> None:
    parts = [slice(0, 40), slice(30, 60), slice(35, 36)]
    assert_tiling(rows_of([piece(own) for own in parts]), counts_of(*parts))
    assert_tiling(rows_of([piece(own) for own in reversed(parts)]), counts_of(*parts))


def test_gradcheck_of_one_call_in_float64() -> None:
    for causal in (False, True):
        qkv = [t.detach()[:, :, :6].double().requires_grad_() for t in inputs(2)]
        run = partial(base.attend, kernel=OneCall(EXACT, causal), train=True)
        assert torch.autograd.gradcheck(run, qkv)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = inputs()
    out = base.attend(q, k, v, OneCall(EXACT, False), True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_autocast_changes_nothing_inside() -> None:
    """Otherwise forward and backward would run in different dtypes."""
    qkv = inputs()
    plain = base.attend(*qkv, OneCall(EXACT, False), True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = base.attend(*qkv, OneCall(EXACT, False), True)
    assert torch.equal(out, plain)


def test_without_train_nothing_is_kept() -> None:
    """There is no graph, even if inputs require gradients."""
    assert not base.attend(*inputs(), OneCall(EXACT, False), train=False).requires_grad


def test_rows_in_no_piece_are_zero_and_have_no_gradient() -> None:
    counts = counts_of(slice(0, 20))
    counts[10:30] = 0
    covered = [piece(slice(0, 20), slice(0, 10)), piece(slice(0, 20), slice(30, 60))]
    assert_tiling(rows_of(covered), counts)
    q, k, v = inputs()
    out = attend(q, k, v, rows_of(covered), train=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out[:, :, 10:30].any()
    assert not dq[:, :, 10:30].any()
    assert not dk[:, :, 20:].any()
    assert not dv[:, :, 20:].any()


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_index_tensors_equal_slices(kv_heads: int) -> None:
    """Gathered rows and keys in random order, in two sets and in one."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    rows, keys, some = order[:30].view(2, 15), order[20:54].view(2, 17), torch.tensor([[0, 7, 3]])
    counts = torch.zeros(N, N, dtype=torch.float64)
    for own_rows, own_keys in zip(rows, keys, strict=True):
        counts[own_rows[:, None], own_keys[None, :]] = 1
    counts[5:9, 50:60] += 1
    counts[some[0][:, None], torch.arange(0, 60, 7)[None, :]] += 1
    parts = [
        piece(keys, rows),
        piece(slice(50, 60), slice(5, 9)),
        piece(torch.arange(0, 60, 7)[None], some),
    ]
    assert_tiling(rows_of(parts), counts, inputs(kv_heads))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_strided_rows_keys_and_heads(kv_heads: int) -> None:
    """As in dilation: heads 1 and 3 see every third token from the second on."""
    odd = Piece(slice(1, None, 3), slice(1, 60, 3), slice(1, HEADS, 2))
    first = Piece(ALL, slice(0, 10), slice(0, 1))
    counts = torch.zeros(HEADS, N, N, dtype=torch.float64)
    counts[1::2, 1::3, 1::3] = 1
    counts[0, :, :10] = 1
    assert_tiling(rows_of([odd, first]), counts, inputs(kv_heads))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_triangles_merge(kv_heads: int) -> None:
    blocks = [
        RowBlock(
            slice(at, at + 20),
            heads,
            (
                *([Piece(ALL, slice(0, at), heads)] if at else []),
                Piece(ALL, slice(at, at + 20), heads, causal=True),
            ),
        )
        for at in range(0, 60, 20)
        for heads in (slice(0, 2), slice(2, 4))
    ]
    triangle = torch.ones(N, N, dtype=torch.float64).tril()
    assert_tiling(tiling_of(*blocks), triangle, inputs(kv_heads))
    whole = Piece(ALL, ALL, EVERY_HEAD, causal=True)
    assert_tiling(rows_of([whole]), triangle, inputs(kv_heads))


def test_two_pieces_are_summed_in_16_bits_as_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they need no wide tensor: each part is rounded already, and their sum once."""
    tiles = tiling_of(
        *(
            RowBlock(rows, EVERY_HEAD, (piece(slice(0, 40)), piece(slice(30, 60))))
            for rows in (slice(0, 40), slice(40, 60))
        )
    )
    qkv = [t.detach().bfloat16().requires_grad_() for t in inputs()]
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(tiling, "device_kind", lambda _, kind=device: kind)
        out = attend(*qkv, tiles, train=True)
        found.append([out, *torch.autograd.grad(out, qkv, torch.ones_like(out))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masked_pieces_merge(kv_heads: int) -> None:
    """Two masked pieces and a full one; the second has rows without keys, the last repeats keys."""
    generator = torch.Generator().manual_seed(5)
    first = torch.rand(N, 30, generator=generator) < 0.5
    second = torch.rand(20, 20, generator=generator) < 0.3
    second[::3] = False
    counts = torch.zeros(N, N, dtype=torch.float64)
    counts[:, :30] += first
    counts[0:60:3, 30:50] += second
    counts[:, 20:40] += 1
    pieces = [
        Piece(ALL, slice(0, 30), EVERY_HEAD, mask=first),
        Piece(slice(0, 60, 3), slice(30, 50), EVERY_HEAD, mask=second),
        piece(slice(20, 40)),
    ]
    assert_tiling(rows_of(pieces), counts, inputs(kv_heads))


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_scores_do_not_overflow(size: float) -> None:
    """Scores of ±1e4 in one piece and of 0 in the other."""
    q, k, v = inputs()
    with torch.no_grad():
        q[:] = 0
        q[..., 0] = math.sqrt(D)
        k[:] = 0
        k[:, :, :30, 0] = size
    out = attend(q, k, v, rows_of([piece(slice(0, 30)), piece(slice(30, 60))]), train=True)
    largest = slice(0, 30) if size > 0 else slice(30, 60)
    expected = v[:, :, largest].mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for grad in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert torch.isfinite(grad).all()
