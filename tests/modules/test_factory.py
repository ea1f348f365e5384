"""Block-sparse attention by the name of its variant."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench import create_block_sparse_attention as create
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.modules.block_sparse import VARIANTS, MultiheadBlockSparse
from longseq_bench.testing.definition import build_attention, make_inputs, make_output_gradient
from tests.ranks import Ranks

BLOCKS: dict[str, Any] = {"sparsity": 0.6, "block": 16}

pytestmark = pytest.mark.usefixtures("one_thread")


def workload(**fields: Any) -> Workload:
    known = {"seq_len": 150, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mode": "train"}
    return Workload(**{**known, **fields})


def run_pass(attend: Any, w: Workload) -> list[Tensor]:
    """Return the output and the gradients."""
    qkv = make_inputs(w)
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, make_output_gradient(w))]


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("variant", ["base", "adaptive"])
def test_a_variant_equals_its_implementation(variant: str, causal: bool) -> None:
    attend = create(variant, causal=causal, **BLOCKS)
    for fields in ({}, {"seq_len": 33}, {"heads": 2, "batch": 1}):
        w = workload(causal=causal, **fields)
        implementation = build_attention(VARIANTS[variant], BLOCKS, w)
        torch.testing.assert_close(run_pass(attend, w), run_pass(implementation, w))
        assert attend.attention.facts()["kernel"] == implementation.facts()["kernel"]
    assert not attend(*make_inputs(workload(mode="forward"))).requires_grad


def test_a_learned_scorer_is_the_same_for_all_shapes() -> None:
    attend = create("adaptive", scorer="learned", **BLOCKS)
    assert attend.parameters() == ()
    attend.prepare(64, heads=4, head_dim=16)
    learned = attend.parameters()
    assert [tuple(m.shape) for m in learned] == [(16, 16)] * 2
    for n in (64, 150):
        for matrix in learned:
            matrix.grad = None
        attend(*make_inputs(workload(seq_len=n, mode="forward"))).sum().backward()
        assert all(float(m.grad.abs().max()) > 0 for m in learned)
    w = workload()
    before = attend(*make_inputs(w)).detach()
    with torch.no_grad():
        learned[0].neg_()
    assert not torch.equal(attend(*make_inputs(w)), before)
    assert create(**BLOCKS).parameters() == ()


def test_multihead_returns_the_module() -> None:
    module = create("multihead", embed_dim=32, num_heads=4, causal=True, globals=0, **BLOCKS)
    assert isinstance(module, MultiheadBlockSparse)
    assert module.causal


# ---- distributed -------------------------------------------------------------------------------


def share(group: Group, w: Workload, options: dict[str, Any]) -> list[Any]:
    """Return this rank's positions, output and gradients: twice, and for a smaller batch."""
    attend = create("distributed", **options)
    shape = {"batch": w.batch, "heads": w.heads, "kv_heads": w.kv_heads, "head_dim": w.head_dim}
    shard = attend.prepare(w.seq_len, **shape, train=True)
    assert attend.attention.shard is shard
    own = torch.from_numpy(shard.queries)
    found: list[Any] = [shard.queries]
    for batch in (w.batch, w.batch, 1):
        qkv = [t.detach()[:batch, :, own].requires_grad_() for t in make_inputs(w)]
        out = attend(*qkv)
        grads = torch.autograd.grad(out, qkv, make_output_gradient(w)[:batch, :, own])
        found.append([t.detach().numpy() for t in (out, *grads)])
    assert attend.attention.group.size == group.size
    return found


@pytest.mark.parametrize(("world", "options"), [(2, {}), (3, {"placement": "load-balanced"})])
def test_joined_ranks_equal_the_single_process(
    ranks: Ranks, world: int, options: dict[str, Any]
) -> None:
    w = workload(seq_len=130, causal=True)
    common = {**BLOCKS, "causal": True}
    expected = run_pass(create(**common), w)
    rows = ranks(world, share, w, common | options)
    positions = np.concatenate([row[0] for row in rows])
    assert sorted(positions.tolist()) == list(range(130))
    order = torch.from_numpy(np.argsort(positions))
    for call, batch in ((1, 2), (2, 2), (3, 1)):
        for i, whole in enumerate(expected):
            parts = [torch.from_numpy(row[call][i]) for row in rows]
            joined = torch.cat(parts, 2)[:, :, order]
            torch.testing.assert_close(joined, whole[:batch], rtol=1e-4, atol=1e-5)


def test_distributed_needs_the_ranks_to_be_connected() -> None:
    with pytest.raises(UserError, match=r"call torch\.distributed\.init_process_group on every"):
        create("distributed")


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("adaptve", {}, "unknown variant 'adaptve'; did you mean 'adaptive'?"),
        ("base", {"pattern": "stride"}, "unknown pattern 'stride' in variant=base; did you mean"),
        ("base", {"block": 0}, "block=0 in variant=base is not a whole number from 1 up"),
        ("base", {"causal": "x"}, "causal='x' in variant=base is neither true nor false"),
        ("base", {"sparsity": 99}, "sparsity 99 is outside"),
        ("base", {"sparsity_ratio": 0.05}, "'sparsity_ratio' in variant=base: it meant density"),
        ("base", {"globals": 16}, "globals=16 is not supported by pattern=local-window"),
    ],
)
def test_bad_options_say_what_is_wrong(variant: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        create(variant, **options)


@pytest.mark.parametrize(
    ("kv_heads", "keys", "message"),
    [
        (3, 8, "heads 4 is not divisible by kv_heads 3"),
        (4, 9, r"q must be .*; got \(2, 4, 8, 16\)"),
    ],
)
def test_wrong_shapes_are_refused(kv_heads: int, keys: int, message: str) -> None:
    k = torch.zeros(2, kv_heads, keys, 16)
    with pytest.raises((UserError, ValueError), match=message):
        create()(torch.zeros(2, 4, 8, 16), k, k)
