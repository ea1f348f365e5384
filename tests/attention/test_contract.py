"""The contract of an implementation, held against everything that the package registers.

A new built-in is tested with its default options by being there; what it needs beyond that is a
line in `OPTIONS`. References are float64 softmaxes built from nothing but `multiplicity`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.comm.group import Group
from longseq_bench.cost import floor_bytes, visible_pairs
from longseq_bench.errors import UnsupportedError
from longseq_bench.model import Workload
from longseq_bench.patterns.blocks import PATTERNS
from longseq_bench.probe.check import TOLERANCE, WHOLE_ROWS, check

Tensors = tuple[Tensor, Tensor, Tensor]
Options = dict[str, Any]

HEADS, HEAD_DIM, BATCH = 4, 16, 2
GLOBALS = 20

_SEGMENTS: list[Options] = [
    {},
    {"segments": (64,), "dilation": (1,)},
    {"segments": (32, 128), "dilation": (1, 4)},
    {"segments": (24, 100), "dilation": (1, 3)},
    {"segments": (40, 64, 4096), "dilation": (2, 1, 7)},
    {"segments": (64, 48), "dilation": (2, 5)},
    {"segments": (16, 64), "dilation": (1, 2), "mix": "groups"},
    {"segments": (30, 70, 256), "dilation": (2, 3, 5), "mix": "groups"},
]
OPTIONS: dict[str, list[Options]] = {
    "sdpa": [{}, {"backend": "math"}],
    "ring": [{}, {"chunk": 33}, {"chunk": 128}],
    "collective": [{}, {"chunk": 50}],
    "dilated": _SEGMENTS,
    "hilbert": _SEGMENTS,
    "block-sparse": [
        {},
        {"block": 48, "sparsity": 0.0},
        *(
            {"pattern": pattern, "sparsity": sparsity, "block": 16, "globals": GLOBALS, "seed": 3}
            for pattern in PATTERNS
            for sparsity in (0.5, 0.9)
        ),
    ],
}
COMPILED = {"flex"}
"""Compiled for seconds a dtype, grouping and causality: tested apart, in few combinations."""


pytestmark = pytest.mark.usefixtures("one_thread")


def built_in(name: str) -> bool:
    return IMPLEMENTATIONS.why_not(name) is None and IMPLEMENTATIONS.get(
        name
    ).__module__.startswith("longseq_bench.")


NAMES = [name for name in IMPLEMENTATIONS.names() if built_in(name)]
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


def made(name: str, options: Options, w: Workload) -> Attention:
    """A planned implementation on one rank."""
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.plan("cpu")
    return attention


def inputs(w: Workload, seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (w.batch, heads, w.seq_len, w.head_dim)
        tensor = torch.randn(shape, generator=draw).to(getattr(torch, w.dtype))
        return tensor.requires_grad_(w.train)

    return normal(w.heads), normal(w.kv_heads), normal(w.kv_heads)


def counts(attention: Attention) -> Tensor:
    """How often each query sees each key, (Hq, N, N), asked of the implementation."""
    w = attention.workload
    steps = np.arange(w.seq_len)
    tables = [np.asarray(attention.multiplicity(steps, steps, h)) for h in range(w.heads)]
    return torch.from_numpy(np.stack(tables).astype(np.float64))


def reference(attention: Attention, qkv: Tensors) -> tuple[Tensor, Tensors]:
    """Output by the definition, in float64, with the leaves to differentiate it by."""
    q, k, v = (t.detach().double().requires_grad_() for t in qkv)
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeat, 1) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, keys) / math.sqrt(q.shape[-1])
    weights = counts(attention) * torch.exp(scores)
    total = weights.sum(-1, keepdim=True)
    shares = weights / total.where(total > 0, 1.0)
    return torch.einsum("bhij,bhjd->bhid", shares, values), (q, k, v)


def apart(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude; infinite where `got` is not finite."""
    if not torch.isfinite(got).all():
        return math.inf
    scale = float(want.abs().max())
    return float((got.double() - want).abs().max()) / (scale or 1.0)


def assert_equals_reference(name: str, options: Options, w: Workload) -> None:
    """Output, and in train gradients, against the reference of this file and against the gate."""
    attention, qkv = made(name, options, w), inputs(w)
    out = attention(*qkv)
    assert out.dtype == qkv[0].dtype
    assert out.shape == qkv[0].shape
    want, leaves = reference(attention, qkv)
    allowed = TOLERANCE[w.dtype]
    assert apart(out.detach(), want.detach()) < allowed
    rows = torch.arange(w.seq_len)
    if not w.train:
        assert check(attention, qkv, out, rows).beyond(w.dtype) is None
        return
    draw = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=draw).to(out.dtype)
    grads = torch.autograd.grad(out, qkv, grad_out)
    wanted = torch.autograd.grad(want, leaves, grad_out.double())
    # one token alone has no gradient of q and k but roundings
    scales = [max(float(g.abs().max()), 0.1) for g in wanted]
    errors = [
        float((g.double() - x).abs().max()) / s
        for g, x, s in zip(grads, wanted, scales, strict=True)
    ]
    assert max(errors) < allowed, dict(zip(("dq", "dk", "dv"), errors, strict=True))
    if w.seq_len > WHOLE_ROWS:
        return  # the gate would draw rows, and the output gradient be zero elsewhere
    gate = check(attention, qkv, out, rows, grad_out, grads)
    assert gate.beyond(w.dtype) is None
    assert set(gate.largest) == {"out", "dq", "dk", "dv"}


def test_every_built_in_is_here() -> None:
    assert {"dense", "sdpa", "ring", "collective", "dilated", "hilbert", "block-sparse"} <= {*NAMES}


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
    constant = torch.randn(v.shape[0], v.shape[1], 1, v.shape[3]).expand_as(v).contiguous()
    out = attention(q, k, constant)
    seen = counts(attention).sum(-1) > 0
    want = constant.repeat_interleave(2, 1) * seen[None, :, :, None]
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)


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
    pairs = float(counts(attention).sum())
    products = 7 if mode == "train" else 2
    cost = attention.cost()
    assert cost.flops == pytest.approx(2 * products * pairs * HEAD_DIM * BATCH, rel=1e-12)
    tensors = sum(t.numel() * t.element_size() for t in (*inputs(w), inputs(w)[0]))
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
    table, shares = counts(attention), attention.measures()
    if "uncovered" in shares:
        zero = (attention(*inputs(w)) == 0).all(-1).double().mean()
        assert shares["uncovered"] == pytest.approx(float(zero), abs=1e-12)
        assert shares["uncovered"] == pytest.approx(float((table.sum(-1) == 0).double().mean()))
    else:
        assert (table.sum(-1) > 0).all()
    if name == "block-sparse":
        block = options.get("block", 128)
        assert shares["density_achieved"] == pytest.approx(kept_blocks(table[0], block, causal))
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
    options = {"pattern": pattern, "sparsity": sparsity, "block": block, "globals": block}
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
    reason = IMPLEMENTATIONS.get(name).unavailable("cpu")
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


@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_are_done_or_refused_with_a_reason(name: str) -> None:
    """Never done wrongly in silence: what can't take a shard says so before anything runs."""
    if getattr(IMPLEMENTATIONS.get(name), "__module__", "").endswith((".dense", ".sdpa")):
        pytest.skip("takes what it is given; the launcher gives it one rank")
    with pytest.raises(UnsupportedError, match=r"rank"):
        IMPLEMENTATIONS.get(name)(workload(256), Group(0, 2))
