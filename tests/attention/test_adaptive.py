"""Adaptive patterns: the chosen blocks, the time of the choice, and gradients of a scorer."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from longseq_bench.attention.sparse.block_sparse_adaptive import AdaptiveBlockSparse
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.testing.definition import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16


def adaptive(w: Workload, **options: Any) -> AdaptiveBlockSparse:
    attention = AdaptiveBlockSparse(w, Group.alone(), block=BLOCK, **{"sparsity": 0.7, **options})
    attention.prepare("cpu")
    return attention


def workload(**fields: Any) -> Workload:
    shape = {"seq_len": 200, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Workload(**{**shape, **fields})


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_the_highest_scores_are_kept(causal: bool) -> None:
    """Compared with all scores, computed one by one for each head."""
    w = workload(causal=causal)
    q, k, v = make_inputs(w)
    attention = adaptive(w)
    attention(q, k, v)
    rows = -(-w.seq_len // BLOCK)
    blocks = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(rows)]
    assert len(attention.layouts) == w.heads
    assert len({layout.indices.tobytes() for layout in attention.layouts}) == w.heads
    for head, layout in enumerate(attention.layouts):
        for i in range(rows):
            query = q[:, head, i * BLOCK] if causal else q[:, head, blocks[i]].mean(1)
            visible = range(i + 1 if causal else rows)
            scores = {j: float((query * k[:, head // 2, blocks[j]].mean(1)).sum()) for j in visible}
            scores[i] = math.inf
            kept = max(1, round(0.3 * len(visible)))
            best = sorted(scores, key=lambda j: -scores[j])[:kept]
            assert layout.row(i).tolist() == sorted(best)


def test_the_choice_is_part_of_the_call_and_timed_separately() -> None:
    w = workload(seq_len=2000)
    attention = adaptive(w)
    assert attention.layout_s == 0
    attention(*make_inputs(w))
    assert attention.layout_s > 0


@pytest.mark.parametrize(("causal", "kernel"), [(False, "torch"), (True, "torch"), (True, "auto")])
def test_a_learned_scorer_gets_the_gradient_of_a_bias(causal: bool, kernel: str) -> None:
    """The reference adds (score - its value) to the scores of each kept block, and takes the
    gradient by autograd."""
    w = workload(causal=causal, mode="train")
    q, k, v = make_inputs(w)
    attention = adaptive(w, scorer="learned", kernel=kernel, sparsity=0.5)
    out = attention(q, k, v)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad)
    leaves = [m.detach().double().requires_grad_() for m in attention.matrices]
    rows = -(-w.seq_len // BLOCK)
    slices = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(rows)]
    pooled_k = torch.stack([k[:, :, c].mean(2) for c in slices], 2).double().detach()
    whole_q = torch.stack([q[:, :, c].mean(2) for c in slices], 2).double().detach()
    pooled_q = q[:, :, ::BLOCK].double().detach() if causal else whole_q
    block_of = torch.arange(w.seq_len) // BLOCK
    steps = np.arange(w.seq_len)
    loss = torch.zeros((), dtype=torch.float64)
    for h in range(w.heads):
        block_scores = (pooled_q[:, h] @ leaves[0]) @ (pooled_k[:, h // 2] @ leaves[1]).mT
        block_scores = block_scores.mean(0) / math.sqrt(w.head_dim)
        bias = (block_scores - block_scores.detach())[block_of][:, block_of]
        scores = (q[:, h] @ k[:, h // 2].mT).double().detach() / math.sqrt(w.head_dim) + bias
        visible = torch.from_numpy(attention.multiplicity(steps, steps, h))
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
        loss = loss + (weights @ v[:, h // 2].double().detach() * grad[:, h].double()).sum()
    for got, expected in zip(attention.matrices, torch.autograd.grad(loss, leaves), strict=True):
        assert got.grad is not None
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(got.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_bad_input_is_named() -> None:
    w = workload()
    with pytest.raises(UserError, match=r"sparsity 1 is outside \[0, 1\)"):
        AdaptiveBlockSparse(w, Group.alone(), sparsity=1.0)
    with pytest.raises(UserError, match="kernel=flex can't train scorer=learned"):
        AdaptiveBlockSparse(w, Group.alone(), scorer="learned", kernel="flex")
