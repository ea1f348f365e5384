"""The contract of an implementation, held against everything that the package registers.

A new built-in is tested with its default options by being there; what it needs beyond that is a
line in `OPTIONS`. References are float64 softmaxes built from nothing but `multiplicity`.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.cost import floor_bytes, visible_pairs
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.patterns.blocks import PATTERNS, WITH_SPECIAL
from longseq_bench.worker.check import PARAMETERS, TOLERANCE, check
from longseq_bench.worker.inputs import WHOLE_ROWS
from tests.attention.definition import (
    REGISTERED,
    SEGMENTS,
    Options,
    apart,
    counts,
    inputs,
    made,
    output_gradient,
    reference,
)

HEADS, HEAD_DIM, BATCH = 4, 16, 2

OPTIONS: dict[str, list[Options]] = {
    "sdpa": [{}, {"backend": "math"}],
    "ring": [{}, {"chunk": 33}, {"chunk": 128}],
    "collective": [{}, {"chunk": 50}],
    "ddp": [{}, {"inner": "ring"}],
    "dilated": SEGMENTS,
    "hilbert": SEGMENTS,
    "block-sparse-multihead": [{}, {"pattern": "strided", "sparsity": 0.6, "block": 16}],
    "block-sparse-adaptive": [
        {"block": 16, "sparsity": 0.7},
        {"block": 32, "sparsity": 0.5, "scorer": "learned"},
        {"block": 16, "sparsity": 0.5, "scorer": "learned", "kernel": "torch"},
    ],
    "block-sparse": [
        {},
        {"block": 48, "sparsity": 0.0},
        *(
            {"pattern": pattern, "sparsity": sparsity, "block": 16, "seed": 3, "kernel": kernel}
            for pattern in PATTERNS
            for sparsity, kernel in ((0.6, "auto"), (0.8, "torch"))
        ),
    ],
}
COMPILED = {"flex"}
"""Compiled for seconds a dtype, grouping and causality: tested apart, in few combinations."""

NOT_HERE = {
    n: IMPLEMENTATIONS.get(n).unavailable_reason("cpu") for n in REGISTERED if n not in COMPILED
}
NAMES = [name for name in REGISTERED if NOT_HERE.get(name) is None]


pytestmark = pytest.mark.usefixtures("one_thread")


CASES = [
    pytest.param(name, options, id=f"{name}-{'-'.join(str(v) for v in options.values())}")
    for name in NAMES
    if name not in COMPILED
    for options in OPTIONS.get(name, [{}])
]
case = pytest.mark.parametrize(("name", "options"), CASES)
causality = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
grouping = pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2], ids=["own-kv", "grouped"])


def workload(seq_len: int, **fields: Any) -> Workload:
    known = {"batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM}
    return Workload(seq_len=seq_len, **{**known, **fields})


def assert_equals_reference(name: str, options: Options, w: Workload) -> None:
    """Output, and in train gradients, against the reference of this file and against the gate."""
    attention, qkv = made(name, options, w), inputs(w)
    out = attention(*qkv)
    assert out.dtype == qkv[0].dtype
    assert out.shape == qkv[0].shape
    matrices = attention.projections()
    want, leaves = reference(counts(attention), qkv, matrices)
    allowed = TOLERANCE[attention.coarsest_dtype]
    assert apart(out.detach(), want.detach()) < allowed
    rows = torch.arange(w.seq_len)
    if not w.train:
        assert check(attention, qkv, out, rows).beyond(w.dtype) is None
        return
    grad_out = output_gradient(w)
    out.backward(grad_out)
    grads = [t.grad for t in (*qkv, *matrices.values())]
    wanted = torch.autograd.grad(want, list(leaves.values()), grad_out.double())
    # one token alone has no gradient of q and k but roundings; a matrix sums those of all rows
    errors = {
        n: apart(g, x, 0.3 if n.startswith("W") else 0.1)
        for n, g, x in zip(leaves, grads, wanted, strict=True)
        if g is not None
    }
    assert errors.keys() == leaves.keys()
    assert max(errors.values()) < allowed, errors
    if w.seq_len > WHOLE_ROWS:
        return  # the gate would draw rows, and the output gradient be zero elsewhere
    gate = check(attention, qkv, out, rows, grad_out, (grads[0], grads[1], grads[2]))
    assert gate.beyond(w.dtype) is None
    assert gate.largest.keys() == {"out", "dq", "dk", "dv"} | {PARAMETERS[n] for n in matrices}


def test_every_built_in_is_here() -> None:
    assert {"dense", "sdpa", "ring", "collective", "dilated", "hilbert", "block-sparse"} <= {*NAMES}
    assert {"ulysses", "usp", "head-parallel", "ddp"} <= {*NAMES}


def test_what_cannot_run_here_says_why() -> None:
    """Fault 13: nn.DataParallel on a CPU would run, on one device, and be called parallel."""
    assert "on a CPU ddp splits a batch over ranks" in (NOT_HERE["data-parallel"] or "")
    assert all(reason is None or " " in reason for reason in NOT_HERE.values())


@case
@causality
@grouping
@pytest.mark.parametrize("tokens", [1, 2, 127])
def test_output_and_gradients_equal_the_reference(
    name: str, options: Options, causal: bool, kv_heads: int, tokens: int
) -> None:
    w = workload(tokens, causal=causal, kv_heads=kv_heads, mode="train")
    assert_equals_reference(name, options, w)


@case
@causality
def test_longer_than_a_tile(name: str, options: Options, causal: bool) -> None:
    w = workload(1025, causal=causal, heads=3, kv_heads=1, head_dim=8, batch=1, mode="train")
    assert_equals_reference(name, options, w)


@case
@causality
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_equals_the_reference(
    name: str, options: Options, causal: bool, dtype: str
) -> None:
    w = workload(150, causal=causal, kv_heads=2, mode="train", dtype=dtype)
    assert_equals_reference(name, options, w)


@case
@causality
def test_forward_equals_the_forward_of_train(name: str, options: Options, causal: bool) -> None:
    """Forward keeps no log-sum-exp and may take other paths."""
    w = workload(129, causal=causal, kv_heads=2)
    assert_equals_reference(name, options, w)
    train = made(name, options, w.model_copy(update={"mode": "train"}))
    out = made(name, options, w)(*inputs(w))
    torch.testing.assert_close(out, train(*inputs(train.workload)).detach())
    assert not out.requires_grad


@case
@causality
def test_constant_values_come_back(name: str, options: Options, causal: bool) -> None:
    """Fault 2: one softmax a block, summed, returns a multiple of v."""
    w = workload(300, causal=causal, kv_heads=2)
    attention = made(name, options, w)
    q, k, v = inputs(w)
    draw = torch.Generator().manual_seed(2)
    one = torch.randn(v.shape[0], v.shape[1], 1, v.shape[3], generator=draw)
    constant = one.expand_as(v).contiguous()
    out = attention(q, k, constant)
    seen = counts(attention).sum(-1) > 0
    for matrix in [m for n, m in attention.projections().items() if n in ("v", "out")]:
        constant = constant @ matrix.detach()
    want = constant.repeat_interleave(2, 1) * seen[None, :, :, None]
    torch.testing.assert_close(out, want, rtol=1e-5, atol=3e-6)


@case
def test_the_future_never_reaches_the_past(name: str, options: Options) -> None:
    """Fault 3. Bit for bit: an approximate test would hide a small leak."""
    w = workload(300, causal=True, kv_heads=2)
    attention = made(name, options, w)
    before = attention(*inputs(w))
    for token in (1, 150, 299):
        changed = inputs(w)
        for tensor in changed:
            tensor[:, :, token:] = 30 * torch.randn_like(tensor[:, :, token:])
        after = attention(*changed)
        assert torch.equal(after[:, :, :token], before[:, :, :token])
        assert not torch.equal(after[:, :, token:], before[:, :, token:])


@case
@causality
def test_a_token_moves_the_rows_that_see_it_and_no_others(
    name: str, options: Options, causal: bool
) -> None:
    """Fault 1: attention over heads moves the wrong rows. Both batches, every head."""
    w = workload(300, causal=causal, kv_heads=2)
    attention = made(name, options, w)
    before = attention(*inputs(w))
    table = counts(attention)
    for token in (0, 130, 299):
        q, k, v = inputs(w)
        v[:, :, token] += 100
        moved = (attention(q, k, v) != before).any(-1)
        assert torch.equal(moved, (table[:, :, token] > 0).expand_as(moved))


@case
def test_batches_do_not_mix(name: str, options: Options) -> None:
    w = workload(130, kv_heads=2)
    if name == "block-sparse-adaptive":
        pytest.skip("one layout a head, chosen for the whole batch")
    attention = made(name, options, w)
    q, k, v = inputs(w)
    before = attention(q, k, v)
    for tensor in (q, k, v):
        tensor[1] = torch.randn_like(tensor[1])
    after = attention(q, k, v)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@case
@causality
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_cost_is_that_of_the_pairs_seen(
    name: str, options: Options, causal: bool, mode: str
) -> None:
    """Matrix products: scores and values forward; five more backward. Two FLOPs a multiply-add."""
    w = workload(111, causal=causal, kv_heads=2, mode=mode)
    attention = made(name, options, w)
    attention(*inputs(w))  # what looks at its inputs has no pattern before
    pairs = float(counts(attention).sum())
    products = 7 if mode == "train" else 2
    cost = attention.cost()
    flops = 2 * products * pairs * HEAD_DIM * BATCH
    elements = sum(t.numel() for t in (*inputs(w), inputs(w)[0]))
    if attention.projections():
        flops += 2 * HEAD_DIM * elements * (3 if mode == "train" else 1)
    assert cost.flops == pytest.approx(flops, rel=1e-12)
    tensors = 4 * elements
    log_sum_exp = 4 * BATCH * HEADS * 111
    assert cost.floor_bytes == (2 * tensors + log_sum_exp if mode == "train" else tensors)
    assert cost.floor_bytes == floor_bytes(w)
    assert cost.bytes_sent == 0


@case
@causality
def test_shares_equal_enumeration(name: str, options: Options, causal: bool) -> None:
    """Faults 7 and 9: achieved density and uncovered tokens are what the pattern does."""
    w = workload(300, causal=causal, kv_heads=2)
    attention = made(name, options, w)
    out = attention(*inputs(w))
    table, shares = counts(attention), attention.measures()
    if "uncovered" in shares:
        zero = (out == 0).all(-1).double().mean()
        assert shares["uncovered"] == pytest.approx(float(zero), abs=1e-12)
        assert shares["uncovered"] == pytest.approx(float((table.sum(-1) == 0).double().mean()))
    else:
        assert (table.sum(-1) > 0).all()
    if name.startswith("block-sparse"):
        block = options.get("block", 128)
        kept = [kept_blocks(of_head, block, causal) for of_head in table]
        assert shares["density_achieved"] == pytest.approx(sum(kept) / len(kept))
    elif "density_achieved" in shares:
        dense = HEADS * visible_pairs(300, causal)
        assert shares["density_achieved"] == pytest.approx(float(table.sum()) / dense)


def kept_blocks(table: Tensor, block: int, causal: bool) -> float:
    """Share of the visible blocks in which anything is seen."""
    rows = -(-len(table) // block)
    seen = sum(
        bool(table[i * block : (i + 1) * block, j * block : (j + 1) * block].any())
        for i in range(rows)
        for j in range(rows)
    )
    return seen / (rows * (rows + 1) / 2 if causal else rows**2)


@causality
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.97])
def test_asked_density_is_met_within_a_block_a_row(
    pattern: str, sparsity: float, causal: bool
) -> None:
    """Fault 7: a sparsity that nothing uses; density taken for sparsity."""
    block, tokens = 16, 640
    w = workload(tokens, causal=causal, batch=1)
    options: Options = {"pattern": pattern, "sparsity": sparsity, "block": block}
    if pattern in WITH_SPECIAL:
        options["globals"] = block
    attention = made("block-sparse", options, w)
    assert attention.measures()["density_asked"] == pytest.approx(1 - sparsity)
    table = counts(attention)[0]
    first = 1 if pattern == "global-local" else 0
    for i in range(first, tokens // block):
        visible = i + 1 if causal else tokens // block
        kept = table[i * block : (i + 1) * block].any(0).reshape(-1, block).any(-1).sum()
        assert abs(float(kept) - (1 - sparsity) * visible) <= 1


@case
@causality
def test_the_tile_size_changes_nothing(
    name: str, options: Options, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = workload(300, causal=causal, kv_heads=2, batch=1, mode="train")
    whole = passed(name, options, w)
    for module in [m for n, m in sys.modules.items() if n.startswith("longseq_bench.attention.")]:
        if hasattr(module, "TILE_ROWS"):
            monkeypatch.setattr(module, "TILE_ROWS", 40)
        if hasattr(module, "SMALLEST_TILE_BYTES"):
            monkeypatch.setattr(module, "SMALLEST_TILE_BYTES", 1024)
    for one, other in zip(whole, passed(name, options, w), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def passed(name: str, options: Options, w: Workload) -> list[Tensor]:
    """Output and gradients."""
    qkv = inputs(w)
    out = made(name, options, w)(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]


@causality
@grouping
@pytest.mark.parametrize("tokens", [1, 15, 300, 1025])
@pytest.mark.parametrize("segment", [1025, 4096])
def test_hilbert_with_one_segment_is_sdpa(
    tokens: int, causal: bool, kv_heads: int, segment: int
) -> None:
    w = workload(tokens, causal=causal, kv_heads=kv_heads, batch=1, mode="train")
    along = passed("hilbert", {"segments": (segment,), "dilation": (1,)}, w)
    for got, want in zip(along, passed("sdpa", {}, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_hilbert_segments_are_not_those_of_the_sequence() -> None:
    """Or the walk would do nothing."""
    w, options = workload(256), {"segments": (16,), "dilation": (1,)}
    along = counts(made("hilbert", options, w))[0]
    # the first 16 steps fill the 4 x 4 corner of a grid of side 16
    corner = [row * 16 + column for row in range(4) for column in range(4)]
    assert torch.nonzero(along[0]).flatten().tolist() == corner


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMPILED & {*NAMES}))
@causality
def test_compiled_equals_the_reference(name: str, causal: bool) -> None:
    reason = IMPLEMENTATIONS.get(name).unavailable_reason("cpu")
    if reason:
        pytest.skip(reason)
    for tokens in (300, 127, 1025):
        w = workload(tokens, causal=causal, kv_heads=2)
        assert_equals_reference(name, {}, w)
    w = workload(300, causal=causal, kv_heads=2)
    attention = made(name, {}, w)
    before = attention(*inputs(w))
    q, k, v = inputs(w)
    v[:, :, 200] += 100
    moved = (attention(q, k, v) != before).any(-1)
    assert torch.equal(moved, (counts(attention)[:, :, 200] > 0).expand_as(moved))


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_several_ranks_are_done_or_refused_with_a_reason(name: str, world: int) -> None:
    """Never done wrongly in silence. What is done is held against the reference in test_ranks."""
    kind = IMPLEMENTATIONS.get(name)
    w = workload(1024, batch=8, heads=24)
    if kind.many_ranks:
        assert kind(w, Group(world - 1, world)).group.size == world
        return
    with pytest.raises(WorldError, match=rf"^runs on one rank; ddp spreads .* over {world}$"):
        kind(w, Group(world - 1, world))
