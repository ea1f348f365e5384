"""The contract of an implementation, for all implementations that the package registers.

A new built-in is tested with its default options without a change here; other options are a line
in `OPTIONS`.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention import tiles
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.exact import sdpa
from longseq_bench.attention.sparse.block_sparse import build_layout_kernel
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact.base import KERNELS
from longseq_bench.kernels.sparse_selection import has_triton
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from longseq_bench.testing import ImplementationContract
from longseq_bench.testing.contract import (
    assert_equals_reference,
    both_groupings,
    both_masks,
    make_workload,
)
from longseq_bench.testing.definition import Options, build_attention, count_pairs, make_inputs
from tests.attention.definition import REGISTERED, SEGMENTS

OPTIONS: dict[str, list[Options]] = {
    "ring": [{"chunk": 33}],
    "collective": [{"chunk": 50}],
    "ddp": [{"inner": "ring"}],
    "dilated": SEGMENTS[1::2],
    "hilbert": SEGMENTS[2::2],
    "block-sparse-multihead": [{"pattern": "strided", "sparsity": 0.6, "block": 16}],
    "block-sparse-adaptive": [
        {"block": 16, "sparsity": 0.7},
        {"block": 16, "sparsity": 0.5, "scorer": "learned", "kernel": "torch"},
    ],
    "block-sparse": [
        # random is drawn as indices are; tests/kernels/test_torch_spans.py has every pattern
        *(
            {"pattern": p, "sparsity": 0.6, "block": 16, "seed": 3}
            for p in PATTERNS
            if p != "random"
        ),
        {"pattern": "random", "sparsity": 0.8, "block": 16, "seed": 3, "kernel": "torch"},
    ],
}
COMPILED = {"flex"}
"""Compilation takes seconds per dtype, grouping and mask: a separate test has few cases."""

UNAVAILABLE = {
    n: IMPLEMENTATIONS.get(n).unavailable_reason("cpu") for n in REGISTERED if n not in COMPILED
}
NAMES = [name for name in REGISTERED if UNAVAILABLE.get(name) is None]
CASES = [
    (name, options) for name in NAMES if name not in COMPILED for options in OPTIONS.get(name, [{}])
]

pytestmark = pytest.mark.usefixtures("one_thread")


class TestBuiltIns(ImplementationContract):
    cases = CASES

    def expected_density(
        self, implementation: Any, options: Options, pairs: Tensor, causal: bool
    ) -> float:
        if not implementation.startswith("block-sparse"):
            return super().expected_density(implementation, options, pairs, causal)
        kept = [kept_blocks(head_pairs, options.get("block", 128), causal) for head_pairs in pairs]
        return sum(kept) / len(kept)

    @both_masks
    def test_the_tile_size_changes_nothing(
        self, implementation: str, options: Options, causal: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        w = make_workload(300, causal=causal, kv_heads=2, batch=1, mode="train")
        untiled = run_pass(implementation, options, w)
        small = replace(tiles.SIZES["cpu"], rows=40, chunk=160, min_bytes=1024)
        monkeypatch.setitem(tiles.SIZES, "cpu", small)
        for one, other in zip(untiled, run_pass(implementation, options, w), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


def kept_blocks(table: Tensor, block: int, causal: bool) -> float:
    """Return the share of the visible blocks that have a visible pair."""
    rows = -(-len(table) // block)
    kept = sum(
        bool(table[i * block : (i + 1) * block, j * block : (j + 1) * block].any())
        for i in range(rows)
        for j in range(rows)
    )
    return kept / (rows * (rows + 1) / 2 if causal else rows**2)


def run_pass(name: str, options: Options, w: Workload) -> list[Tensor]:
    """Return the output and the gradients."""
    qkv = make_inputs(w)
    out = build_attention(name, options, w)(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]


CALL_A_KERNEL = ("fused", "ring", "collective", "ulysses", "usp", "head-parallel", "dilated")
CPU_KERNELS = [name for name in KERNELS.names() if KERNELS.get(name).device == "cpu"]


@both_masks
@both_groupings
@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("implementation", CALL_A_KERNEL)
def test_every_exact_kernel_equals_the_reference(
    implementation: str, kernel: str, causal: bool, kv_heads: int
) -> None:
    w = make_workload(150, causal=causal, kv_heads=kv_heads, mode="train")
    attention = build_attention(implementation, {"kernel": kernel}, w)
    if reason := KERNELS.get(kernel).unavailable_reason(attention.kernel_use):
        pytest.skip(reason)
    assert_equals_reference(implementation, {"kernel": kernel}, w)
    attention(*make_inputs(w))
    assert str(attention.facts()["kernel"]).startswith(kernel)


def test_unavailable_implementations_have_a_reason() -> None:
    """Fault 13: nn.DataParallel on a CPU would run on one device, without an error."""
    assert "on a CPU use ddp" in (UNAVAILABLE["data-parallel"] or "")
    assert all(reason is None or " " in reason for reason in UNAVAILABLE.values())


@pytest.mark.parametrize("name", [n for n in REGISTERED if not IMPLEMENTATIONS.get(n).many_ranks])
def test_implementations_of_one_rank_name_ddp(name: str) -> None:
    w = make_workload(1024, batch=8, heads=24)
    with pytest.raises(WorldError, match=r"^runs on one rank, not 3; .*ddp "):
        IMPLEMENTATIONS.get(name)(w, Group(2, 3))


@pytest.mark.parametrize(
    ("kernel", "head_dim", "causal"),
    [("native", 80, True), ("torch", 128, True), ("native", 64, False)],
)
def test_query_heads_of_a_kv_head_share_its_list(kernel: str, head_dim: int, causal: bool) -> None:
    options: Options = {"pattern": "indices", "sparsity": 0.7, "block": 16, "kernel": kernel}
    w = make_workload(203, causal=causal, kv_heads=2, mode="train", head_dim=head_dim)
    assert_equals_reference("block-sparse", options, w)
    pairs = count_pairs(build_attention("block-sparse", options, w))
    assert torch.equal(pairs[0], pairs[1])
    assert not torch.equal(pairs[1], pairs[2])
    assert torch.equal(pairs[2], pairs[3])


def test_block_kernels_get_a_layout_for_each_query_head() -> None:
    one, other = (make_layout("indices", 100, 16, 0.5, True, seed) for seed in (0, 1))
    for name in ("flex", "triton") if has_triton() else ("flex",):
        kernel: Any = build_layout_kernel(name, (one, other), 4)
        assert kernel.layouts == (one, one, other, other)
        assert build_layout_kernel(name, (one,), 4).layouts == (one,)  # type: ignore[attr-defined]


def test_hilbert_segments_are_not_those_of_the_sequence() -> None:
    """Otherwise the walk would have no effect."""
    w, options = make_workload(256), {"segments": (16,), "dilation": (1,)}
    visible = count_pairs(build_attention("hilbert", options, w))[0]
    # the first 16 steps fill the 4 x 4 corner of a grid of side 16
    corner = [row * 16 + column for row in range(4) for column in range(4)]
    assert torch.nonzero(visible[0]).flatten().tolist() == corner


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMPILED & {*NAMES}))
def test_compiled_equals_the_reference(name: str) -> None:
    """Compiled before the first pass, which must not be charged with the compiler's work."""
    reason = IMPLEMENTATIONS.get(name).unavailable_reason("cpu")
    if reason:
        pytest.skip(reason)
    sdpa._compile_s.clear()
    w = make_workload(300, causal=True, kv_heads=2)
    attention = build_attention(name, {}, w)
    with torch.compiler.set_stance("fail_on_recompile"):
        before = attention(*make_inputs(w))
    assert_equals_reference(name, {}, w)
    q, k, v = make_inputs(w)
    v[:, :, 200] += 100
    moved = (attention(q, k, v) != before).any(-1)
    assert torch.equal(moved, (count_pairs(attention)[:, :, 200] > 0).expand_as(moved))


def test_a_row_of_one_key_has_an_output_beside_a_sink_at_any_length() -> None:
    """Also in float16, whose smallest number is 6e-8."""
    for tokens in (300, 10**7):
        w = Workload(seq_len=tokens, heads=64, causal=True, sink=True)
        sinks = IMPLEMENTATIONS.get("ring")(w, Group.alone()).sinks
        assert sinks is not None
        assert sinks.max() < math.log(2**-11 / 6e-8)
        assert abs(float(sinks.mean()) - math.log(min(tokens / 2, 1024))) < 0.3
