"""Trials of decoding in their own processes, and the rates to which passes are compared."""

from pathlib import Path

import pytest
import torch

from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.attention.own_source import find_file
from longseq_bench.core.model import Workload
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.special_inputs import EqualScores
from tests.make import record
from tests.trials import complete, run_trial

CACHE = 2 * 2 * 3000 * 64 * 4
"""Bytes of k and v: two heads of 64 in float32."""


def test_a_trial_is_checked_and_has_its_share_of_bandwidth(launcher: LocalLauncher) -> None:
    of = complete(launcher, "ring", 3000, mode="decode", new_tokens=2, causal=True, repeats=3)
    outcome = run_trial(launcher, of)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.largest("checked_rows") == 2
    assert outcome.largest("own_tokens") == 3000
    assert outcome.facts["every_row_checked"] == ["matching scores", "equal scores"]
    assert outcome.largest("floor") == outcome.largest("bytes_to_read") == CACHE
    (row,) = sweep_rows([record(of, outcome)])
    assert (row.mode, row.new_tokens, row.tokens) == ("decode", 2, 3000)
    assert row.time_s
    assert row.copy_bandwidth
    assert row.tokens_per_s == pytest.approx(2 / row.time_s)
    assert row.share_of_bandwidth == pytest.approx(CACHE / row.time_s / row.copy_bandwidth)


def test_ranks_share_a_cache(launcher: LocalLauncher) -> None:
    of = complete(launcher, "ring", 3000, mode="decode", repeats=2, world_size=2)
    outcome = run_trial(launcher, of)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.samples("own_tokens") == (1500, 1500)
    sent = 2 * (64 + 1) * 4
    assert outcome.samples("bytes_sent") == outcome.samples("bytes_formula") == (sent, sent)


def test_a_sparse_step_is_compared_with_a_dense_one(launcher: LocalLauncher) -> None:
    options = {"pattern": "sink-window", "window": 256, "globals": 128}
    of = complete(launcher, "block-sparse", 3000, options, mode="decode", repeats=2)
    outcome = run_trial(launcher, of)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.facts["dense"] == "measured"
    assert outcome.largest("dense_time")
    # the last block has 56 tokens
    assert outcome.largest("bytes_to_read") == CACHE // 3000 * (128 + 128 + 56)


ALIGNED_WITH_THE_FIRST_KEY = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa
def f(q, k, v, causal, new_tokens):
    return sdpa(q, k, v, is_causal=causal)
"""


def test_a_wrong_mask_of_the_new_tokens_is_seen(launcher: LocalLauncher, tmp_path: Path) -> None:
    """torch aligns its causal mask with the first key, not with the last one."""
    path = tmp_path / "own.py"
    path.write_text(ALIGNED_WITH_THE_FIRST_KEY)
    name = f"{path}:f"
    shape = {"mode": "decode", "new_tokens": 3, "source": find_file(name).source}
    assert run_trial(launcher, complete(launcher, name, 600, **shape)).status == "ok"
    causal = run_trial(launcher, complete(launcher, name, 600, causal=True, **shape))
    assert causal.status == "wrong"
    assert causal.phase == "check"


def test_kept_inputs_are_refused(launcher: LocalLauncher) -> None:
    of = complete(launcher, "ring", 600, mode="decode", keep="nothing")
    outcome = run_trial(launcher, of)
    assert outcome.status == "unsupported"
    assert outcome.reason == (
        "keep=nothing has no meaning with mode=decode: the cache stays as it is"
    )


@pytest.mark.parametrize("mask", [None, "sliding-window:40", "documents:31"])
def test_equal_scores_of_few_rows_are_those_of_all(mask: str | None) -> None:
    shape = {"seq_len": 300, "head_dim": 16, "heads": 1, "mask": mask, "causal": mask is None}
    whole = EqualScores(Workload(**shape))
    step = EqualScores(Workload(mode="decode", new_tokens=4, **shape))
    positions = Workload(mode="decode", new_tokens=4, **shape).queries
    rows = torch.arange(positions.start, 300).numpy()
    for expected, got in zip(whole.expected("out", rows), step.expected("out", rows), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(expected))
