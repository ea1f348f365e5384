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
from longseq_bench.patterns import topk
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


def test_later_queries_do_not_choose_for_earlier_ones() -> None:
    """Fault 3: with a mean of queries the future would choose blocks for the past."""
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


def test_equal_inputs_choose_equal_blocks() -> None:
    w = workload()
    first, again = adaptive(w), adaptive(w)
    out, repeated = first(*make_inputs(w)), again(*make_inputs(w))
    assert torch.equal(out, repeated)
    for one, other in zip(first.layouts, again.layouts, strict=True):
        assert np.array_equal(one.indices, other.indices)


def test_the_choice_is_part_of_the_call_and_timed_separately() -> None:
    w = workload(seq_len=2000)
    attention = adaptive(w)
    assert attention.layout_s == 0
    attention(*make_inputs(w))
    assert attention.layout_s > 0


def test_scores_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "CHUNK", 50)
    w = workload()
    attention, chunks = adaptive(w), []
    top_layout = topk.top_layout

    def recorded(scores: Any, *args: Any) -> Any:
        def chunk_scores(start: int, stop: int) -> Any:
            chunks.append(stop - start)
            return scores(start, stop)

        return top_layout(chunk_scores, *args)

    monkeypatch.setattr("longseq_bench.attention.sparse.block_sparse_adaptive.top_layout", recorded)
    attention(*make_inputs(w))
    assert max(chunks) == 50 // 13
    assert sum(chunks) == 13 * w.heads


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
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


def test_a_learned_scorer_learns_a_useful_block() -> None:
    """The loss falls with the values of one block: gradient steps raise its score until all rows
    keep it."""
    torch.manual_seed(0)
    w = workload(seq_len=128, batch=1, heads=1, kv_heads=1, mode="train")
    mark = torch.nn.functional.one_hot(torch.tensor(2), w.head_dim).float()
    q, k, v = (0.1 * torch.randn(1, 1, 128, 8) for _ in range(3))
    k[:, :, 32:48] += 2 * mark
    q += 2 * torch.nn.functional.one_hot(torch.tensor(5), w.head_dim).float()
    v[:, :, 32:48] += 1.0
    attention = adaptive(w, scorer="learned", sparsity=0.5)
    optimizer = torch.optim.SGD(attention.matrices, lr=3.0)

    def kept() -> int:
        return sum(2 in attention.layouts[0].row(i) for i in range(8))

    attention(q, k, v)
    first = kept()
    for _ in range(40):
        optimizer.zero_grad()
        loss = -attention(*(t.clone().requires_grad_() for t in (q, k, v))).mean()
        loss.backward()
        optimizer.step()
    assert kept() > first
    assert kept() == 8


@pytest.mark.parametrize("scorer", ["means", "learned"])
def test_autocast_changes_neither_blocks_nor_output(scorer: str) -> None:
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
    for kernel in ("flex", "flex-flash"):
        with pytest.raises(UserError, match=f"kernel={kernel} can't train scorer=learned"):
            AdaptiveBlockSparse(w, Group.alone(), scorer="learned", kernel=kernel)
    with pytest.raises(RuntimeError, match="only after a call"):
        AdaptiveBlockSparse(w, Group.alone()).measures()
