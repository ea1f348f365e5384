"""What is chosen by looking: which blocks, when it is planned, and what a scorer learns from."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from longseq_bench.attention.sparse.block_sparse_adaptive import AdaptiveBlockSparse
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.patterns import topk
from longseq_bench.testing.definition import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16


def adaptive(w: Workload, **options: Any) -> AdaptiveBlockSparse:
    made = AdaptiveBlockSparse(w, Group.alone(), block=BLOCK, **{"sparsity": 0.7, **options})
    made.prepare("cpu")
    return made


def workload(**fields: Any) -> Workload:
    shape = {"seq_len": 200, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Workload(**{**shape, **fields})


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_the_highest_scores_are_kept(causal: bool) -> None:
    """Against every score written out, each head its own."""
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


def test_later_queries_do_not_choose_for_earlier_ones() -> None:
    """Fault 3 by the back door: a mean of queries would let the future pick for the past."""
    w = workload(causal=True)
    q, k, v = make_inputs(w)
    attention = adaptive(w)
    before = attention(q, k, v)
    for token in (5, 100, 121, 199):
        q2, k2, v2 = (t.clone() for t in (q, k, v))
        for t in (q2, k2, v2):
            t[:, :, token:] = 30 * torch.randn(w.head_dim)
        after = attention(q2, k2, v2)
        assert torch.equal(after[:, :, :token], before[:, :, :token])


def test_the_same_inputs_choose_the_same() -> None:
    w = workload()
    first, again = adaptive(w), adaptive(w)
    out, repeated = first(*make_inputs(w)), again(*make_inputs(w))
    assert torch.equal(out, repeated)
    for one, other in zip(first.layouts, again.layouts, strict=True):
        assert np.array_equal(one.indices, other.indices)


def test_planning_is_part_of_the_call_and_told_apart() -> None:
    w = workload(seq_len=2000)
    attention = adaptive(w)
    assert attention.layout_s == 0
    attention(*make_inputs(w))
    assert attention.layout_s > 0


def test_scores_of_all_blocks_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "CHUNK", 50)
    w = workload()
    attention, asked = adaptive(w), []
    choose = topk.top_layout

    def watched(scores: Any, *args: Any) -> Any:
        def seen(start: int, stop: int) -> Any:
            asked.append(stop - start)
            return scores(start, stop)

        return choose(seen, *args)

    monkeypatch.setattr("longseq_bench.attention.sparse.block_sparse_adaptive.top_layout", watched)
    attention(*make_inputs(w))
    assert max(asked) == 50 // 13
    assert sum(asked) == 13 * w.heads


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_a_learned_scorer_gets_the_gradient_of_a_bias(causal: bool, kernel: str) -> None:
    """Attention written out, each kept block's scores raised by (score - its own value): autograd
    of that is the gradient which the scorer must get."""
    w = workload(causal=causal, mode="train")
    q, k, v = make_inputs(w)
    attention = adaptive(w, scorer="learned", kernel=kernel, sparsity=0.5)
    out = attention(q, k, v)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad)
    leaves = [m.detach().double().requires_grad_() for m in attention.matrices]
    rows = -(-w.seq_len // BLOCK)
    cut = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(rows)]
    pooled_k = torch.stack([k[:, :, c].mean(2) for c in cut], 2).double().detach()
    whole_q = torch.stack([q[:, :, c].mean(2) for c in cut], 2).double().detach()
    pooled_q = q[:, :, ::BLOCK].double().detach() if causal else whole_q
    of_block = torch.arange(w.seq_len) // BLOCK
    steps = np.arange(w.seq_len)
    loss = torch.zeros((), dtype=torch.float64)
    for h in range(w.heads):
        raised = (pooled_q[:, h] @ leaves[0]) @ (pooled_k[:, h // 2] @ leaves[1]).mT
        raised = raised.mean(0) / math.sqrt(w.head_dim)
        bias = (raised - raised.detach())[of_block][:, of_block]
        scores = (q[:, h] @ k[:, h // 2].mT).double().detach() / math.sqrt(w.head_dim) + bias
        seen = torch.from_numpy(attention.multiplicity(steps, steps, h))
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        loss = loss + (weights @ v[:, h // 2].double().detach() * grad[:, h].double()).sum()
    for got, want in zip(attention.matrices, torch.autograd.grad(loss, leaves), strict=True):
        assert got.grad is not None
        assert want.abs().max() > 0.01
        torch.testing.assert_close(got.grad.double(), want, rtol=1e-4, atol=1e-4)


def test_a_learned_scorer_learns_what_matters() -> None:
    """Values of one far block are what the target needs: following the gradient, its score rises
    until it is kept."""
    torch.manual_seed(0)
    w = workload(seq_len=128, batch=1, heads=1, kv_heads=1, mode="train")
    mark = torch.nn.functional.one_hot(torch.tensor(2), w.head_dim).float()
    q, k, v = (0.1 * torch.randn(1, 1, 128, 8) for _ in range(3))
    k[:, :, 32:48] += 2 * mark
    q += 2 * torch.nn.functional.one_hot(torch.tensor(5), w.head_dim).float()
    v[:, :, 32:48] += 1.0
    attention = adaptive(w, scorer="learned", sparsity=0.5)
    moved = torch.optim.SGD(attention.matrices, lr=3.0)

    def kept() -> int:
        return sum(2 in attention.layouts[0].row(i) for i in range(8))

    attention(q, k, v)
    first = kept()
    for _ in range(40):
        moved.zero_grad()
        loss = -attention(*(t.clone().requires_grad_() for t in (q, k, v))).mean()
        loss.backward()
        moved.step()
    assert kept() > first
    assert kept() == 8


@pytest.mark.parametrize("scorer", ["means", "learned"])
def test_autocast_plans_and_computes_as_without(scorer: str) -> None:
    w = workload()
    attention = adaptive(w, scorer=scorer)
    q, k, v = make_inputs(w)[:3]
    plain = attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v), plain)


def test_bad_input_is_named() -> None:
    w = workload()
    with pytest.raises(UserError, match=r"sparsity 1 is outside \[0, 1\)"):
        AdaptiveBlockSparse(w, Group.alone(), sparsity=1.0)
    with pytest.raises(UserError, match="kernel=flex can't train scorer=learned"):
        AdaptiveBlockSparse(w, Group.alone(), scorer="learned", kernel="flex")
    with pytest.raises(RuntimeError, match="only after a call"):
        AdaptiveBlockSparse(w, Group.alone()).measures()
