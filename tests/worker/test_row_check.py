"""Every row of the output and of the gradients, with inputs whose result is known."""

import math
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention, Counts, Positions
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker import verdicts
from longseq_bench.worker.checked_rows import checked_rows, select_checked_rows
from longseq_bench.worker.input_changes import InputChanges
from longseq_bench.worker.known_scores import (
    EQUAL,
    EXCHANGED,
    MATCHING,
    MIXED,
    TWO_LEVEL,
    KnownScores,
)
from longseq_bench.worker.messages import MeasurementLog, MessageSender
from longseq_bench.worker.passes import Pass, draw_inputs, run_forward, run_pass
from longseq_bench.worker.prefix_sums import PrefixSums
from longseq_bench.worker.row_check import EveryRowCheck, find_wrong_rows
from longseq_bench.worker.special_inputs import SpecialInputs
from longseq_bench.worker.verdicts import Verdicts
from tests.attention.test_contract import CASES
from tests.make import trial
from tests.plugins.faulty import Faulty
from tests.ranks import Ranks
from tests.trials import run

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 100_000
ROWS = MATCHING, TWO_LEVEL, EQUAL, MIXED, EXCHANGED


def exact(tokens: int = TOKENS, name: str = "sdpa", **fields: Any) -> Attention:
    w = Workload(seq_len=tokens, **{"heads": 4, "kv_heads": 2, "head_dim": 8, **fields})
    return IMPLEMENTATIONS.get(name)(w, Group.alone())


def drawn(attention: Attention) -> Pass:
    w = attention.workload
    dtype = attention.torch_dtype
    heads = w.heads, w.kv_heads, w.kv_heads
    shapes = [(w.batch, count, w.seq_len, w.head_dim) for count in heads]
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_(w.train) for shape in shapes)
    grad_out = torch.empty_like(q) if w.train else None
    return Pass((q, k, v), grad_out, redraw=lambda _: None, changes=InputChanges(attention, 0))


def filled(expected: SpecialInputs, attention: Attention) -> Pass:
    one = drawn(attention)
    expected.fill(attention, one)
    return one


@pytest.mark.parametrize("causal", [False, True])
def test_a_single_wrong_row_of_100_000_is_found_by_either_input(causal: bool) -> None:
    attention = exact(causal=causal)
    expected = SpecialInputs(attention.workload)
    one = filled(expected, attention)
    one.out = one.inputs[2].repeat_interleave(2, 1)
    assert find_wrong_rows(attention, expected, one) is None
    one.out[0, 2, 77_777, 3] *= 1.001
    assert find_wrong_rows(attention, expected, one) == (
        "1 of 400,000 rows of output are wrong: "
        "token 77,777 of head 2 is 0.00093 off (allowed 6e-05)"
    )
    expected = KnownScores(attention.workload, EQUAL)
    one = filled(expected, attention)
    v = one.inputs[2].double()
    means = v.cumsum(2) / torch.arange(1, TOKENS + 1)[:, None]
    means = means if causal else means[:, :, -1:].expand_as(means)
    one.out = means.repeat_interleave(2, 1).float()
    assert find_wrong_rows(attention, expected, one) is None
    one.out[0, 1, 77_777] -= v[0, 0, 5].float() / (77_778 if causal else TOKENS)  # one key less
    reason = find_wrong_rows(attention, expected, one) or ""
    assert reason.startswith("1 of 400,000 rows of output are wrong: token 77,777 of head 1 is ")


def test_constant_rows_are_where_the_results_are() -> None:
    positions = torch.arange(3, device="meta")
    found = SpecialInputs(exact(500).workload).expected("out", positions)
    assert [t.device.type for t in found] == ["meta", "meta"]


def test_heads_have_different_constants_and_only_uncovered_rows_may_be_zero() -> None:
    attention = exact(500)
    expected = SpecialInputs(attention.workload)
    one = filled(expected, attention)

    def found(out: Tensor, of: Attention = attention) -> str | None:
        one.out = out
        return find_wrong_rows(of, expected, one)

    out = one.inputs[2].repeat_interleave(2, 1)
    assert "2,000 of 2,000 rows of output are wrong" in (found(out.flip(1)) or "")
    out[:, :, 7] = 0
    assert "4 of 2,000 rows of output are wrong" in (found(out) or "")
    options: Any = {"segments": (64,), "dilation": (2,)}
    sparse = IMPLEMENTATIONS.get("dilated")(attention.workload, Group.alone(), **options)
    assert found(out, sparse) is None
    out[:, :, 7] = torch.nan
    assert "is nan off" in (found(out) or "")


def in_float64(attention: Attention, one: Pass, sink: float = -math.inf) -> Tensor:
    """Set the results of a pass by autograd; return the scores (B, Hq, N, N), -inf where hidden.

    sink: that of all heads."""
    w, group = attention.workload, attention.workload.heads // attention.workload.kv_heads
    q, k, v = (t.detach().double().requires_grad_() for t in one.inputs)
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    every = np.arange(w.seq_len)
    hidden = torch.from_numpy(~attention.multiplicity(every, every, 0))
    scores = q @ keys.transpose(2, 3) / math.sqrt(w.head_dim)
    scores = w.soft_cap * torch.tanh(scores / w.soft_cap) if w.soft_cap else scores
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.nn.functional.pad(scores, (0, 1), value=sink).softmax(-1)[..., :-1] @ values
    one.out = out.detach()
    assert one.grad_out is not None
    one.grads = torch.autograd.grad(out, (q, k, v), one.grad_out.double())
    return scores.detach()


@pytest.mark.parametrize(
    ("mask", "soft_cap"),
    [
        *((mask, None) for mask in ("full", "causal", "sliding-window:20", "prefix:30")),
        *((mask, None) for mask in ("documents:40", "full-documents:7")),
        ("causal", 50.0),
        ("sliding-window:20", 30.0),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [1, 2, 16])
def test_the_closed_form_is_that_of_autograd_in_float64(
    mask: str, soft_cap: float | None, rows: str, head_dim: int
) -> None:
    shape: Any = {"mask": mask, "soft_cap": soft_cap, "head_dim": head_dim, "kv_heads": 2}
    attention = IMPLEMENTATIONS.get("dense")(
        Workload(seq_len=90, mode="train", heads=6, **shape), Group.alone()
    )
    expected = KnownScores(attention.workload, rows)
    one = filled(expected, attention)
    in_float64(attention, one)
    assert one.out is not None
    assert find_wrong_rows(attention, expected, one) is None
    for name, rows_of in {"out": one.out, **one.gradients}.items():
        if name in ("out", *expected.gradients):
            # with a soft cap one column of dk is larger than the others
            change = 0.001 * max(1.0, float(rows_of.abs().max()))
            rows_of[0, 1, 33] += change
            reason = find_wrong_rows(attention, expected, one) or ""
            what = "output" if name == "out" else name
            assert f"1 of {180 * (1 + 2 * (name in ('out', 'dq')))} rows of {what}" in reason
            assert "are wrong: token 33 of head 1 is" in reason
            rows_of[0, 1, 33] -= change
    assert one.grads is not None
    one.grads[1][0, 1, 33] = torch.nan
    assert find_wrong_rows(attention, expected, one)


@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 2), ("sliding-window:20", 16)])
@pytest.mark.parametrize("rows", ROWS)
def test_a_sink_is_in_the_closed_form(mask: str, rows: str, head_dim: int) -> None:
    """It is seen if it is left out, and if it is added on two ranks where scores are near it."""
    attention = exact(90, mask=mask, head_dim=head_dim, mode="train", name="fused", sink=True)
    expected = KnownScores(attention.workload, rows)
    one = filled(expected, attention)
    assert attention.sinks is not None
    assert attention.sinks.tolist() == 4 * [expected.sink]
    in_float64(attention, one, expected.sink)
    assert find_wrong_rows(attention, expected, one) is None
    for wrong in (-math.inf, expected.sink + math.log(2)):
        in_float64(attention, one, wrong)
        reason = find_wrong_rows(attention, expected, one)
        assert (reason is None) == (rows == MATCHING and wrong > 0)


def test_rows_differ_in_maximum_temperature_and_the_key_that_they_find() -> None:
    """Maxima spread over 200 and more and lie below |q||k|; two-level rows have long tails."""
    attention = exact(2000, head_dim=64, heads=1, kv_heads=1, mode="train", causal=True)
    maxima, found = [], []
    for rows in (MIXED, EXCHANGED):
        one = filled(KnownScores(attention.workload, rows), attention)
        scores = in_float64(attention, one)[0, 0, 1000:]
        q, k, _ = (t.detach() for t in one.inputs)
        best, at = scores.max(1)
        bound = q.norm(dim=-1)[0, 0, 1000:] * k.norm(dim=-1).max() / 8
        is_two_level = scores[:, :1000].abs().amax(1) < 4
        assert 400 < int(is_two_level.sum()) < 600
        assert ((scores[is_two_level] > best[is_two_level, None] - 0.1).sum(1) > 20).all()
        assert len(best[is_two_level].unique()) > 10
        maxima.append(best[~is_two_level])
        found.append(at[~is_two_level])
        assert float((bound[~is_two_level] - best[~is_two_level]).max()) > 104
    every = torch.cat(maxima)
    assert every.max() - every.min() > 200
    assert every.min() < -60
    places = torch.cat(found)
    assert len(places) == 1000
    assert len(places.unique()) > 700


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("head_dim", [1, 7, 64, 128])
def test_every_dtype_has_the_inputs_exactly(dtype: Any, sink: bool, head_dim: int) -> None:
    w = Workload(seq_len=700, heads=2, head_dim=head_dim, mode="train", dtype=dtype, sink=sink)
    positions = torch.arange(700)
    for rows in ROWS:
        inputs = KnownScores(w, rows)
        for name in ("q", "k", "v", "grad_out"):
            exactly = inputs.inputs(name, positions).double()
            assert torch.equal(exactly.to(getattr(torch, dtype)).double(), exactly)


@pytest.mark.parametrize("mask", [None, "sliding-window:40", "documents:31"])
def test_two_level_scores_of_few_rows_are_those_of_all(mask: str | None) -> None:
    shape: Any = {"seq_len": 300, "head_dim": 16, "heads": 1, "mask": mask, "causal": mask is None}
    step = Workload(mode="decode", new_tokens=4, **shape)
    rows = torch.tensor(step.queries)
    whole = KnownScores(Workload(**shape), TWO_LEVEL).expected("out", rows)
    few = KnownScores(step, TWO_LEVEL).expected("out", rows)
    torch.testing.assert_close(few, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("from_end", [False, True])
def test_sums_of_a_block_at_a_time_are_those_of_all_positions(from_end: bool) -> None:
    terms = torch.randn(100, 3, dtype=torch.float64)
    asked: list[int] = []

    def of(positions: Tensor) -> Tensor:
        asked.extend(positions.tolist())
        return terms[positions]

    sums = PrefixSums(of, 100, 7, from_end)
    for ends in (torch.randperm(101), torch.arange(101)):
        expected = [(terms[end:] if from_end else terms[:end]).sum(0) for end in ends.tolist()]
        torch.testing.assert_close(sums(ends), torch.stack(expected), rtol=1e-12, atol=1e-12)
    asked.clear()
    # two blocks are kept: a window asks for two ends in turn
    for end in range(30, 70):
        sums(torch.tensor([end])), sums(torch.tensor([end - 2]))
    assert len(asked) < 2 * 60


@pytest.mark.parametrize("mask", ["sliding-window:100", "prefix:90", "documents:130"])
def test_a_mask_that_is_one_key_off_is_wrong_in_every_row(mask: str) -> None:
    """A window with a key more, a prefix with one more, documents that begin a token later."""
    kind, size = mask.split(":")
    w = Workload(seq_len=700, heads=2, head_dim=16, mask=mask)
    other = w.model_copy(update={"mask": f"{kind}:{int(size) + 1}"})
    wrong = IMPLEMENTATIONS.get("dense")(other, Group.alone())
    wrong.prepare("cpu")
    attention = IMPLEMENTATIONS.get("dense")(w, Group.alone())
    attention.prepare("cpu")
    assert judge(attention) is None
    attention.__class__ = type("Wrong", (type(attention),), {"__call__": lambda _, *t: wrong(*t)})
    assert "rows of output are wrong" in (judge(attention) or "")


@pytest.mark.parametrize(("kind", "inputs", "count"), [
    ("one row of all", MIXED, "2 of 6,000 rows of output"),
    ("scores of one row scaled by 1.5", MIXED, "1 of 6,000 rows of output"),
    ("last row of each block misses a key", MIXED, "23 of 6,000 rows of output"),
    ("every 1,000th row scaled by 1.02", MIXED, "6 of 6,000 rows of output"),
    ("dq of every 128th row", TWO_LEVEL, "46 of 6,000 rows of dq"),
])  # fmt: skip
def test_every_row_is_seen(kind: str, inputs: str, count: str) -> None:
    mode: Any = "train" if kind.startswith("dq") else "forward"
    w = Workload(seq_len=3000, heads=2, head_dim=64, causal=True, mode=mode)
    attention = IMPLEMENTATIONS.get("faulty")(w, Group.alone(), kind=kind)
    assert (judge(attention) or "").startswith(f"with {inputs}, {count} are wrong: ")


@pytest.mark.parametrize(
    ("ranks", "kind", "wrong", "reason"),
    [
        (1, "one row of all", 653,
         "with matching and two-level scores, 2 of 2,600 rows of output are wrong: "),
        (2, "one row on the last rank", 1290,
         "every rank: with matching and two-level scores, 2 of 1,300 rows of output are wrong: "
         "token 1,290 of head 0 is "),
    ],
)  # fmt: skip
def test_a_row_that_was_not_sampled_is_wrong(
    launcher: LocalLauncher, ranks: int, kind: str, wrong: int, reason: str
) -> None:
    seed = next(s for s in range(999) if wrong not in checked_rows(1300, s).tolist())
    fields = {"causal": True, "seed": seed, "world_size": ranks, "repeats": 2}
    outcome = run(launcher, "faulty", 1300, {"kind": kind}, **fields)
    assert (outcome.status, outcome.phase) == ("wrong", "check")
    assert (outcome.reason or "").startswith(reason)
    assert ranks == 1 or (outcome.reason or "").endswith("(on rank 1)")


def test_the_record_says_which_inputs_checked_every_row(launcher: LocalLauncher) -> None:
    exact = [MIXED]
    assert run(launcher, "sdpa", 1000, repeats=3).facts["every_row_checked"] == exact
    assert run(launcher, "sdpa", 1000, repeats=0, round=1).facts["every_row_checked"] == exact
    of_one_head = run(launcher, "sdpa", 1000, repeats=3, heads=1).facts["every_row_checked"]
    assert of_one_head == [MIXED, EXCHANGED]
    training = run(launcher, "sdpa", 1000, repeats=3, mode="train").facts["every_row_checked"]
    assert training == [MIXED, TWO_LEVEL, MATCHING]
    assert "every_row_checked" not in run(launcher, "sdpa", 1000, repeats=0).facts
    sparse = run(launcher, "block-sparse", 1000, repeats=3).facts
    assert sparse["every_row_checked"] == [MATCHING]
    training = run(launcher, "block-sparse", 1000, repeats=3, mode="train").facts
    assert training["every_row_checked"] == [MATCHING]


# ---- what decides if every row is checked ------------------------------------------------------


def facts_of_check(attention: Attention) -> dict[str, Any]:
    """Return the facts of a timed trial without a warm-up."""
    of = trial(repeats=1).model_copy(update={"workload": attention.workload})
    rows, log = select_checked_rows(attention, 0), MeasurementLog()
    judge = Verdicts(of, attention, rows, MessageSender(MagicMock()), log)
    one = draw_inputs(attention, "cpu", 0, rows)
    outcome = judge.check_every_row(EveryRowCheck(attention), one)
    return log.facts | {"reason": outcome and outcome.reason}


def test_a_pass_of_much_work_has_no_further_ones_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = exact(700)
    limit = attention.cost().flops / 3
    monkeypatch.setitem(verdicts.MAX_EXTRA_FLOPS, "cpu", (limit, limit))
    facts = facts_of_check(attention)
    assert facts["every_row_checked"] == []
    assert facts["every_row_skipped"] == dict.fromkeys([MIXED], "its FLOPs are 3 times the limit")


def skip_on_rank_one(group: Group) -> dict[str, Any]:
    """Return the facts of a rank; the second rank's host has slow cores."""
    w = Workload(seq_len=600, heads=2, head_dim=16)
    attention = IMPLEMENTATIONS.get("ring")(w, group)
    attention.prepare("cpu")
    limit = attention.cost().flops * (1e6 if group.rank == 0 else 0.1)
    with patch.dict(verdicts.MAX_EXTRA_FLOPS, {"cpu": (limit, limit)}):
        return facts_of_check(attention)


def test_all_ranks_skip_the_same(ranks: Ranks) -> None:
    first, second = ranks(2, skip_on_rank_one)
    assert first == second
    assert list(first["every_row_skipped"]) == [MIXED]


def test_a_declaration_that_widens_the_check_is_in_the_record(launcher: LocalLauncher) -> None:
    compressed = run(launcher, "ring", 600, {"wire_dtype": "bfloat16"}, repeats=2).facts
    assert compressed["judged_as"] == "bfloat16"
    assert "judged_as" not in run(launcher, "ring", 600, repeats=2).facts
    attention = exact(700)
    attention.__class__ = type("Blind", (type(attention),), {"sees_itself": False})
    assert facts_of_check(attention)["every_row_checked"] == [MIXED]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_right_implementations_pass(name: str, options: dict[str, Any], dtype: Any) -> None:
    w = Workload(
        seq_len=519, heads=4, kv_heads=2, head_dim=16, causal=True, dtype=dtype, mode="train"
    )
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.prepare("cpu")
    assert judge(attention) is None
    check, one = EveryRowCheck(attention), drawn(attention)
    with check.check(one, SpecialInputs(w)):
        run_forward(attention, one)
    assert check.reason is None


def judge(attention: Attention, warm_up_only: bool = False) -> str | None:
    """What the check says of an implementation."""
    check, one = EveryRowCheck(attention), drawn(attention)
    with check.warm_up(one):
        run_forward(attention, one)
    for inputs in () if warm_up_only else check.remaining:
        with check.check(one, inputs):
            run_pass(attention, one)
    return check.reason


# ---- matching scores: every row has a value of its own, and scores are hard --------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_row_of_100_000_that_is_its_neighbour_is_found_in_every_dtype(dtype: Any) -> None:
    attention = exact(heads=2, kv_heads=2, head_dim=32, dtype=dtype, causal=True)
    expected = KnownScores(attention.workload, MATCHING)
    one = filled(expected, attention)
    one.out = one.inputs[2].clone()
    assert find_wrong_rows(attention, expected, one) is None
    one.out[0, 1, 77_777] = one.out[0, 1, 77_776]
    reason = find_wrong_rows(attention, expected, one) or ""
    assert reason.startswith("1 of 200,000 rows of output are wrong: token 77,777 of head 1 is")


NO_MAXIMUM = "no maximum subtracted", "one maximum for a whole head", "‖q‖‖k‖ as the maximum"
LIMITED = "scores clipped at 9", "scores clipped at 20"
DOCUMENTS = "first token of a document sees the one before"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("kind", [*NO_MAXIMUM, *LIMITED, DOCUMENTS, "none"])
def test_the_warm_up_pass_alone_sees_it(kind: str, mode: Any, dtype: Any) -> None:
    """A trial of long passes has no others that check every row."""
    mask = "documents:50" if kind == DOCUMENTS else "causal"
    w = Workload(seq_len=600, heads=4, kv_heads=2, head_dim=32, mask=mask, dtype=dtype, mode=mode)
    reason = judge(IMPLEMENTATIONS.get("faulty")(w, Group.alone(), kind=kind), warm_up_only=True)
    assert (reason is None) == (kind == "none")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "mask", "row", "head"),
    [
        ("scores of one row scaled by 1.5", "full", 303, 0),
        ("last token of a prefix sees one key too many", "prefix:300", 299, 1),
    ],
)
def test_one_row_that_is_a_little_wrong_is_seen(
    kind: str, mask: str, row: int, head: int, dtype: Any
) -> None:
    """In the head in which it has two levels of scores; the next pass sees it in the other one."""
    w = Workload(seq_len=600, heads=2, head_dim=64, dtype=dtype, mask=mask)
    reason = judge(IMPLEMENTATIONS.get("faulty")(w, Group.alone(), kind=kind)) or ""
    assert f"1 of 1,200 rows of output are wrong: token {row} of head {head} is" in reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("b", "head", "of"), [(0, 1, 0), (1, 2, 3), (1, 5, 4), (0, 8, 0)])
def test_one_row_of_another_head_is_seen(b: int, head: int, of: int, dtype: Any) -> None:
    """Also of one with the same keys, and of one eight further."""
    w = Workload(seq_len=600, batch=2, heads=9, kv_heads=3, head_dim=64, dtype=dtype, causal=True)

    def call(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(attention, q, k, v).clone()
        out[b, head, 303] = out[b, of, 303]
        return out

    sdpa = IMPLEMENTATIONS.get("sdpa")
    attention, right = sdpa(w, Group.alone()), sdpa.__call__
    attention.prepare("cpu")
    assert judge(attention) is None
    with patch.object(sdpa, "__call__", call):
        assert f"token 303 of head {head} is" in (judge(attention) or "")


def test_a_key_that_no_row_sees_is_missed_by_the_rows_that_look_for_it_in_bfloat16() -> None:
    w = Workload(seq_len=3000, heads=2, head_dim=64, dtype="bfloat16")
    kind = "every 256th key dropped"
    reason = judge(IMPLEMENTATIONS.get("faulty")(w, Group.alone(), kind=kind), warm_up_only=True)
    assert "rows of output are wrong" in (reason or "")


class Windowed(Faulty):
    """The same faults behind a mask: a query sees itself and the 40 keys before it."""

    sees_itself = True

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        queries, keys = map(torch.from_numpy, (q_positions, k_positions))
        distance = queries[:, None] - keys
        return ((distance >= 0) & (distance <= 40)).numpy()

    def measures(self) -> dict[str, float]:
        return {"uncovered": 0.0}


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
        assert (", 2 of 1,400 rows of" in reason) == ("one row" in kind)


def test_queries_of_the_constant_check_are_hard_and_restored() -> None:
    w = Workload(seq_len=200, head_dim=64, mode="train")
    attention = type("NotItself", (Windowed,), {"sees_itself": False})(w, Group.alone())
    one = draw_inputs(attention, "cpu", 0, torch.arange(200))
    q, before = one.inputs[0], [t.clone() for t in one.inputs]
    with EveryRowCheck(attention).warm_up(one):
        assert (q @ one.inputs[1].transpose(2, 3)).abs().max() / 8 > 200
        one.out = attention(*one.inputs)
    assert all(map(torch.equal, one.inputs, before))
