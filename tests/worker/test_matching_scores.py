"""Matching scores: every row has a value of its own, and scores are hard."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention, Counts, Positions
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.worker import row_check
from longseq_bench.worker.passes import Pass, draw_inputs
from longseq_bench.worker.special_inputs import MatchingScores
from tests.plugins import faulty
from tests.plugins.faulty import Faulty
from tests.worker.test_row_check import drawn, judge

pytestmark = pytest.mark.usefixtures("one_thread")


def matching(name: str = "sdpa", **fields: Any) -> tuple[Attention, Pass, MatchingScores]:
    w = Workload(**{"seq_len": 90, "heads": 6, "kv_heads": 2, "head_dim": 16, **fields})
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone())
    one, expected = drawn(attention), MatchingScores(w)
    expected.fill(attention, one)
    return attention, one, expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 7, 64])
def test_the_closed_form_is_that_of_autograd_in_float64(causal: bool, head_dim: int) -> None:
    attention, one, expected = matching(head_dim=head_dim, causal=causal, mode="train")
    q, k, v = (t.detach().double().requires_grad_() for t in one.inputs)
    keys, values = (t.repeat_interleave(3, 1) for t in (k, v))
    scores = q @ keys.transpose(2, 3) / math.sqrt(head_dim)
    assert 100 < scores.abs().max() < 400
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1) if causal else torch.zeros(1).bool()
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    one.out = out.detach()
    assert one.grad_out is not None
    one.grads = torch.autograd.grad(out, (q, k, v), one.grad_out.double())
    assert expected.has_unique_codes == (head_dim > 6)
    assert row_check.find_wrong_rows(attention, expected, one) is None
    one.out[0, 4, 33] += 0.01
    reason = row_check.find_wrong_rows(attention, expected, one) or ""
    assert reason.startswith("1 of 540 rows of output are wrong: token 33 of head 4 is")
    one.out[0, 4, 33] -= 0.01
    if expected.has_unique_codes:
        one.grads[2][0, 1, 33] += 0.01
        reason = row_check.find_wrong_rows(attention, expected, one) or ""
        assert reason.startswith("1 of 180 rows of dv are wrong: token 33 of head 1 is")
        one.grads[2][0, 1, 33] -= 0.01
    one.grads[1][0, 1, 33] = torch.nan
    reason = row_check.find_wrong_rows(attention, expected, one) or ""
    assert reason == "a gradient has values that are not finite"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_row_of_100_000_that_is_its_neighbour_is_found_in_every_dtype(dtype: Any) -> None:
    attention, one, expected = matching(seq_len=100_000, heads=2, dtype=dtype, causal=True)
    one.out = one.inputs[2].clone()
    assert row_check.find_wrong_rows(attention, expected, one) is None
    one.out[0, 1, 77_777] = one.out[0, 1, 77_776]
    reason = row_check.find_wrong_rows(attention, expected, one) or ""
    assert reason.startswith("1 of 200,000 rows of output are wrong: token 77,777 of head 1 is")


@pytest.mark.parametrize("kind", ["no maximum subtracted", "scores clipped at 20", "none"])
def test_a_softmax_that_only_mild_scores_suit_is_wrong(kind: str) -> None:
    w = Workload(seq_len=300, heads=4, kv_heads=2, head_dim=32, causal=True, dtype="bfloat16")
    reason = judge(IMPLEMENTATIONS.get("faulty")(w, Group.alone(), kind=kind))
    assert (reason is None) == (kind == "none")


class Windowed(Faulty):
    """The same faults behind a mask: a query sees itself and the 40 keys before it."""

    sees_itself = True

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        queries, keys = map(torch.from_numpy, (q_positions, k_positions))
        return in_window(queries[:, None], keys).numpy()

    def measures(self) -> dict[str, float]:
        return {"uncovered": 0.0}

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = in_window(self.rows[:, None], torch.arange(self.workload.seq_len))
        scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(self.workload.head_dim)
        weigh = faulty.WEIGHTS.get(self.kind, lambda a, scores: scores.softmax(-1))
        return (weigh(self, scores.masked_fill(~seen, -math.inf)) @ v.float()).to(v)


def in_window(queries: Tensor, keys: Tensor) -> Tensor:
    return (keys <= queries) & (keys >= queries - 40)


@pytest.mark.parametrize(("mode", "dtype"), [("forward", "float32"), ("train", "bfloat16")])
@pytest.mark.parametrize(
    "kind", ["scores clipped at 20", "one row of all", "dv of one row", "none"]
)
def test_every_row_of_sparse_attention_returns_its_own_value(
    kind: str, mode: Any, dtype: Any
) -> None:
    w = Workload(seq_len=700, heads=2, head_dim=32, causal=True, dtype=dtype, mode=mode)
    reason = judge(Windowed(w, Group.alone(), kind=kind)) or ""
    if kind == "none" or (kind == "dv of one row" and mode == "forward"):
        assert not reason
    else:
        assert reason.startswith("with matching scores, ")
        assert ("2 of 1,400 rows of" in reason) == ("one row" in kind)


def test_queries_of_the_constant_check_are_hard_and_restored() -> None:
    w = Workload(seq_len=200, head_dim=64, mode="train")
    attention = IMPLEMENTATIONS.get("sdpa")(w, Group.alone())
    one = draw_inputs(attention, "cpu", 0, torch.arange(200))
    q, before = one.inputs[0], [t.clone() for t in one.inputs]
    with row_check.EveryRowCheck(attention).warm_up(one):
        assert (q @ one.inputs[1].transpose(2, 3)).abs().max() / 8 > 200
        one.out = attention(*one.inputs)
    assert all(map(torch.equal, one.inputs, before))
