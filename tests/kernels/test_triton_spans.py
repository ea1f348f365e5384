"""The Triton kernels over spans, in Triton's interpreter."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels import spans_reference
from longseq_bench.kernels.merge import merge_part
from tests.kernels import plain_attention
from tests.kernels.test_spans import (
    assert_defined,
    assert_near,
    random_case,
    run,
)
from tests.kernels.triton_interpreter import Interpreted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed"),
]

DIMS = (16, 64, 80, 128, 256)
MOST = 240
"""More than a tile of 150 queries, and more than a block of 128 keys; the interpreter is slow."""


def run_triton(*args: Any) -> dict[str, Tensor]:
    from longseq_bench.kernels import triton_spans

    return run(triton_spans, *args)


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_equals_the_definition(interpreted: Interpreted, seed: int) -> None:
    """Strided tiles and runs, permuted rows, positions unlike rows, tiles without keys."""
    d = random_case(seed, dims=DIMS, most=MOST)
    assert_defined(d, interpreted(run_triton, d))


@pytest.mark.parametrize(
    ("seed", "dtype", "merge"),
    [
        (8, torch.float32, False),
        (20, torch.float32, True),
        (8, torch.bfloat16, True),
        (20, torch.float16, False),
    ],
    ids=str,
)
def test_equals_the_reference_kernel(
    interpreted: Interpreted, seed: int, dtype: torch.dtype, merge: bool
) -> None:
    """Also merged into an earlier softmax, and with the gradient of a bias on each run."""
    d = random_case(seed, dtype, DIMS, MOST)
    expected = run(spans_reference, d, merge)
    got = interpreted(run_triton, d, merge, expected)
    is_rounded = dtype != torch.float32  # weights are rounded before they are multiplied
    assert_near(got["out"], expected["out"], 1e-2 if is_rounded else 1e-5)
    assert_near(got["lse"], expected["lse"], 1e-5)
    if not merge:  # gradients for a random output of the softmax have no bound
        for name in ("dq", "dk", "dv", "bias"):
            assert_near(got[name], expected[name], 1e-2 if is_rounded else 1e-4)


def run_exact(tensors: tuple[Tensor, ...], causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Run the exact kernel at once, and by merging halves of the keys; return both results."""
    from longseq_bench.kernels.exact.base import Use
    from longseq_bench.kernels.exact.spans import Triton

    grad, q, k, v = tensors
    kernel = Triton(Use("cuda", q.dtype, q.shape[3], True))
    out, lse = kernel.forward(q, k, v, causal)
    queries = (grad, q, out, lse)
    whole = [out, lse, *kernel.backward(queries, (k, v), causal)]
    half = k.shape[2] // 2
    merged, merged_lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    dq, dkv = torch.zeros_like(q), (torch.zeros_like(k), torch.zeros_like(v))
    # the queries of each half see their own triangle, and those of the second all first keys
    steps = (
        ((slice(0, half), slice(0, half), True), (slice(half, None), slice(half, None), True),
         (slice(half, None), slice(0, half), False))
        if causal
        else ((slice(None), slice(0, half), False), (slice(None), slice(half, None), False))
    )  # fmt: skip
    for rows, keys, triangle in steps:
        part = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        kernel.merge(*part, merged[:, :, rows], merged_lse[:, :, rows], triangle)
        own = tuple(t[:, :, rows] for t in queries)
        own_dkv = (dkv[0][:, :, keys], dkv[1][:, :, keys])
        kernel.add_gradients(own, part[1:], dq[:, :, rows], own_dkv, triangle)
    return whole, [merged, merged_lse, dq, *dkv]


@pytest.mark.parametrize(("heads", "causal"), [((2, 2), False), ((4, 2), True)])
def test_exact_attention_at_once_and_in_parts(
    interpreted: Interpreted, heads: tuple[int, int], causal: bool
) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(1, h, 150, 16) for h in (heads[0], heads[0], heads[1], heads[1]))
    grad, q, k, v = tensors
    mask = torch.ones(150, 150, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    expected = plain_attention.gradients([q, k, v], grad, mask)
    flat = [expected[0], expected[1], *expected[2]]
    for results in interpreted(run_exact, tensors, causal):
        for own, other in zip(results, flat, strict=True):
            assert_near(own.float(), other.float(), 2e-5)


def run_merges(cases: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    from longseq_bench.kernels.triton_merge import merge

    for case in cases:
        merge(*case)
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_launch_merges_two_softmaxes(interpreted: Interpreted, dtype: torch.dtype) -> None:
    """Also where one side or both have seen no key, and for views of other strides."""
    torch.manual_seed(0)
    out, part = torch.randn(2, 3, 70, 80), torch.randn(2, 70, 3, 80).transpose(1, 2).to(dtype)
    lse, part_lse = torch.randn(2, 3, 70), torch.randn(2, 70, 3).transpose(1, 2)
    for at, sides in (
        (slice(0, 9), (lse,)),
        (slice(5, 20), (part_lse,)),
        (slice(30, 33), (lse, part_lse)),
    ):
        for side in sides:
            side[:, :, at] = -torch.inf
    out = torch.where((lse == -torch.inf)[..., None], 0.0, out)
    expected, expected_lse = out.clone(), lse.clone()
    merge_part(expected, expected_lse, part, part_lse)
    ((got, got_lse, *_),) = interpreted(run_merges, [(out, lse, part, part_lse)])
    torch.testing.assert_close(got_lse, expected_lse)
    torch.testing.assert_close(got, expected)
    assert not got[:, :, 30:33].any()
