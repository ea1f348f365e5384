"""Linear attention of flash-linear-attention up to the call: a fake computes token by token."""

from typing import Any

import pytest
import torch

from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.testing.contract import make_workload
from longseq_bench.testing.definition import make_inputs
from longseq_bench.worker.check import check
from longseq_bench.worker.known_scores import EQUAL, MIXED
from tests.plugins.recurrent import Recurrent, by_token
from tests.trials import run

pytestmark = pytest.mark.usefixtures("one_thread")

each = pytest.mark.parametrize("recurrence", ["gated-deltanet", "kda", "mamba-2"])


def build(recurrence: str, tokens: int = 150, dtype: str = "bfloat16", **fields: Any) -> Any:
    w = make_workload(tokens, causal=True, dtype=dtype, **fields)
    attention = Recurrent(w, Group.alone(), recurrence=recurrence)
    attention.prepare("cpu")
    return attention


@each
def test_the_reference_of_blocks_is_the_recurrence_by_token(recurrence: str) -> None:
    """In three blocks of tokens, the last one short, with values of another head_dim."""
    attention = build(recurrence, v_head_dim=8)
    inputs = make_inputs(attention.workload)
    rows = torch.tensor([0, 5, 63, 64, 127, 128, 149])
    got = attention.reference_rows(inputs, rows)
    q, k, v, g, *beta = (
        t.double() for t in (*(x.transpose(1, 2) for x in inputs), *attention.gates.values())
    )
    if beta:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    expected = by_token(q, k, v, g if g.dim() == 4 else g[..., None], *beta)
    assert got.shape == (2, 4, len(rows), 8)
    torch.testing.assert_close(got, expected.transpose(1, 2)[:, :, rows], rtol=1e-10, atol=1e-12)


@each
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_check_sees_other_decays_and_a_missing_delta_rule(recurrence: str, dtype: str) -> None:
    attention = build(recurrence, dtype=dtype, head_dim=32)
    inputs, rows = make_inputs(attention.workload), torch.arange(150)

    def reason() -> str | None:
        errors = check(attention, inputs, attention(*inputs), rows)
        return errors.over_tolerance(attention.workload.dtype)

    assert reason() is None
    attention.decay = 1.1
    assert "off the float64 reference" in (reason() or "")
    if "beta" in attention.gates:
        attention.decay, reference = 1.0, attention.reference_rows(inputs, rows)
        attention.reference_rows = lambda *_: reference
        attention.gates["beta"] = attention.gates["beta"] / 2
        assert "off the float64 reference" in (reason() or "")


def test_a_whole_trial_is_judged_by_the_recurrence_alone(launcher: LocalLauncher) -> None:
    shape = {"dtype": "bfloat16", "causal": True, "repeats": 3}
    outcome = run(launcher, "recurrent", 300, {"recurrence": "kda"}, **shape)
    assert (outcome.status, outcome.reason) == ("ok", None)
    skipped = dict.fromkeys((MIXED, EQUAL), "their results are those of a softmax")
    assert outcome.facts["every_row_skipped"] == skipped
    assert "every_row_checked" not in outcome.facts
    assert outcome.facts["kernel"] == "fla chunk_kda"
    assert outcome.facts["passes_with_new_scores"] == 1


def test_work_and_floor_are_those_of_a_state() -> None:
    attention = build("gated-deltanet", 100)
    w, cost = attention.workload, attention.cost()
    states = 2 * 4 * 16 * 16
    assert cost.flops == 2 * 3 * states * 100
    assert cost.floor_bytes == floor_bytes(w) + 2 * 4 * 100 * (4 + 2) + 4 * states


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"causal": False}, "a recurrence is causal"),
        ({"mode": "train"}, "no float64 reference"),
        ({"kv_heads": 2}, "each head has a state"),
        ({"head_dim": 512}, "above 256"),
        ({"mode": "decode"}, "mode decode"),
        ({"dtype": "float32"}, "bfloat16 and float16"),
    ],
)
def test_refusals(fields: dict[str, Any], reason: str) -> None:
    w = make_workload(64, **{"causal": True, "dtype": "bfloat16", **fields})
    with pytest.raises(UnsupportedError, match=reason):
        Recurrent(w, Group.alone())
