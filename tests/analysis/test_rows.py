"""Rows and maxima: the numbers behind all printed output."""

import json
import math
import random
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from longseq_bench.analysis.frames import rows_json, to_frame
from longseq_bench.analysis.labels import find_baseline_label, speeds
from longseq_bench.analysis.row import fields_of
from longseq_bench.analysis.runs import SEVERITY
from longseq_bench.analysis.searches import SearchRow, merge_search, search_rows
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.model import Record, Status
from longseq_bench.core.stats import median_interval
from tests import make

MIB = 2**20


def only(records: list[Record]) -> SweepRow:
    (row,) = sweep_rows(records)
    return row


# the interval of the median


@pytest.mark.parametrize(
    ("n", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (30, 10), (100, 40)]
)
def test_interval_uses_the_order_statistics_of_the_published_table(n: int, rank: int) -> None:
    samples = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(samples)
    assert median_interval(samples)[::2] == (rank, n + 1 - rank)


@pytest.mark.parametrize("samples", [[3.0], [5.0, 2.0], [1.0, 9.0, 4.0, 3.0, 2.0]])
def test_with_few_samples_the_interval_is_their_range(samples: list[float]) -> None:
    assert median_interval(samples)[::2] == (min(samples), max(samples))


# rows


# ranks


def on_three() -> list[Record]:
    """Two rounds of a trial on three ranks; the ranks of the second in another order."""
    first = make.on_ranks(
        {"time": [1.0, 4.0], "compute_time": [0.5, 2.0], "communication_time": [0.1, 0.2],
         "peak": 30.0},
        {"time": [2.0, 3.0], "compute_time": [1.5, 1.0], "communication_time": [0.3, 0.1],
         "peak": 10.0},
        {"time": [3.0, 2.0], "compute_time": [1.0, 1.0], "communication_time": [0.2, 0.4],
         "peak": 20.0},
    )  # fmt: skip
    second = make.on_ranks(
        {"time": [5.0], "compute_time": [3.0], "communication_time": [0.9], "peak": 25.0},
        {"time": [6.0], "compute_time": [4.0], "communication_time": [0.5], "peak": 12.0},
        {"time": [7.0], "compute_time": [2.0], "communication_time": [0.7], "peak": 40.0},
    )
    second = second.model_copy(update={"measurements": second.measurements[::-1]})
    trial = make.trial("ring", 1000, world_size=3, batch=2)
    return [make.record(trial, first), make.record(trial.replace(round=1), second)]


def test_times_over_ranks_are_the_slowest_ranks_of_each_iteration_round_by_round() -> None:
    row = only(on_three())
    full, computing, talking = [3.0, 4.0, 7.0], [1.5, 2.0, 4.0], [0.3, 0.4, 0.9]
    assert (row.time_s, row.samples) == (median(full), 3)
    assert row.compute_time_s == median(computing)
    assert row.communication_time_s == median(talking)
    assert row.exposed_share == 1 - 2.0 / 4.0
    assert row.tokens_per_s == 2 * 1000 / 4.0


def test_with_a_silent_rank_the_trial_has_no_time() -> None:
    """The missing rank may be the slowest."""
    said = {"time": 1.0, "compute_time": 0.5, "peak": 10.0}
    row = only([make.record(make.trial(world_size=3), make.on_ranks(said, {}, said))])
    assert (row.time_s, row.samples, row.tokens_per_s) == (None, 0, None)
    assert (row.compute_time_s, row.exposed_share) == (None, None)
    assert (row.rank_times, row.rank_peaks) == ([1.0, None, 1.0], [10, None, 10])
    assert (row.imbalance, row.peak_bytes) == (None, 10)
    assert (row.tokens_per_rank, row.bytes_sent, row.bytes_unlike) == (None, None, None)


def test_a_failed_trial_on_several_ranks_has_peaks_but_no_times() -> None:
    ok, _ = on_three()
    bad = make.on_ranks({"peak": 50.0}, {"peak": 70.0}, {}, status="oom", reason="rank 1: full")
    row = only([ok, make.record(ok.trial.replace(round=1), bad)])
    times = ("time_s", "compute_time_s", "communication_time_s", "exposed_share", "rank_times",
             "speedup", "efficiency")  # fmt: skip
    assert {getattr(row, name) for name in times} == {None}
    assert (row.status, row.reason) == ("oom", "rank 1: full")
    assert row.rank_peaks == [50, 70, 20]


def test_miscounted_bytes_are_found_on_any_rank_in_any_round() -> None:
    def row(*rounds: list[tuple[int, int]]) -> dict[str, Any]:
        return only([
            make.record(
                make.trial(world_size=2, round=i),
                make.on_ranks(*[{"bytes_sent": c, "bytes_formula": f} for c, f in ranks]),
            )
            for i, ranks in enumerate(rounds)
        ])  # fmt: skip

    assert row([(5, 5), (6, 6)], [(5, 5), (6, 6)]).bytes_unlike == []
    swapped = row([(5, 6), (6, 5)])
    assert (swapped.bytes_sent, swapped.bytes_formula) == (6, 6)
    assert swapped.bytes_unlike == [(0, 5, 6), (1, 6, 5)]
    assert row([(5, 5), (6, 6)], [(5, 5), (4, 6)]).bytes_unlike == [(1, 4, 6)]
    less = row([(5, 9), (6, 8)])
    assert (less.bytes_sent, less.bytes_formula) == (6, 9)


def test_a_single_sample_gives_no_bounds() -> None:
    once = make.measured(0.2, samples=1, ranks=2, compute_time=0.1)
    several = make.measured(0.2, ranks=2, compute_time=[0.1, 0.1])
    alone, trial = make.record(), make.trial(world_size=2)
    for first, second, bounded in (
        (alone, several, True),
        (alone, once, False),
        (make.record(came_to=make.measured(samples=1)), several, False),
    ):
        row = sweep_rows([first, make.record(trial, second)])[1]
        assert row.speedup == pytest.approx(0.5)
        assert (row.speedup_low is None, row.speedup_high is None) == (not bounded,) * 2
        assert row.exposed_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"device": "cuda"}, {"threads": 1}, {"seq_len": 512},
     {"options": {"chunk": 2}}, {"memory_budget": 9}, {"implementation": "sdpa"}],
)  # fmt: skip
def test_no_speed_up_over_another_trial(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"implementation": "ring", "options": {"chunk": 1}}
    alone = make.record(make.trial(**settings))
    several = make.record(make.trial(**settings | change, world_size=2), make.measured(ranks=2))
    assert [row.speedup for row in sweep_rows([alone, several])] == [1.0, None]
    same = make.record(make.trial(**settings, world_size=2), make.measured(ranks=2))
    assert [row.speedup for row in sweep_rows([alone, same])] == [1.0, 1.0]
    other_machine = make.record(same.trial, same.outcome, make.environment("beta"))
    assert sweep_rows([alone, other_machine])[1].speedup is None


def test_the_status_is_the_worst_of_the_rounds() -> None:
    base = make.trial()
    for worse, better in pairwise(SEVERITY):
        for order in ((worse, better), (better, worse)):
            records = [
                make.record(base.replace(round=i), make.outcome(status, f"was {status}", "forward"))
                for i, status in enumerate(order)
            ]
            row = only(records)
            assert (row.status, row.reason, row.phase) == (worse, f"was {worse}", "forward")


# relative to dense attention


def sparse_run() -> Record:
    """A causal trial with dense times."""
    trial = make.trial("block-sparse", 1000, causal=True, heads=2, head_dim=4)
    came_to = make.outcome(
        time=(1.0, 2.0, 3.0), dense_time=(6.0, 8.0, 7.0), flops=1e6, density_asked=0.1,
        density_achieved=0.2, peak=1000, facts={"dense": "measured"},
    )  # fmt: skip
    return make.record(trial, came_to)


@pytest.mark.parametrize(
    ("mhz", "share"), [([1300], 1.5), ([1365, 1300, 900], 1.5), ([1910], 1.0), ([], 1.0)]
)
def test_the_share_of_peak_is_at_the_clock_of_the_passes(mhz: list[int], share: float) -> None:
    """The rate is measured at 1,950 MHz. 2 % make no difference."""
    clocks = {"sm_clock": [1e6 * one for one in mhz]} if mhz else {}
    rate = {"flops": 1.0, "matmul_rate": 80.0, "matmul_sm_clock": 1950e6}
    row = only([make.record(came_to=make.measured(time=0.1, **rate, **clocks))])
    assert row.share_of_peak == pytest.approx(share * 10 / 80)
    assert row.matmul_rate == 80


DENSE_TIMES = ("dense_time_s", "dense_low_s", "dense_high_s", "dense_source", "speed_over_dense",
               "share_of_ideal", "share_low", "share_high")  # fmt: skip


@pytest.mark.parametrize("status", ["wrong", "timeout"])
def test_a_failed_trial_has_no_dense_time(status: Status) -> None:
    bad = sparse_run()
    bad = make.record(bad.trial, bad.outcome.model_copy(update={"status": status}))
    row = only([bad])
    assert [getattr(row, n) for n in DENSE_TIMES] == [None] * len(DENSE_TIMES)
    assert (row.memory_reduction, row.effective_flops) == (None, None)


def test_standard_memory_is_measured_if_dense_ran_on_the_workload() -> None:
    sparse = sparse_run()

    def swept(status: Status = "ok", where: str = "alpha", **change: Any) -> dict[str, Any]:
        shape = {"causal": True, "heads": 2, "head_dim": 4, **change}
        came_to = make.outcome(status, peak=50_000)
        dense = make.record(
            make.trial("dense", 1000, **shape), came_to, where=make.environment(where)
        )
        return sweep_rows([sparse, dense])[0]

    row = swept()
    assert (row.dense_peak_bytes, row.dense_memory_source) == (50_000, "measured")
    assert row.memory_reduction == 50.0
    # another budget or a timeout does not change the peak
    assert swept(memory_budget=2**20).dense_memory_source == "measured"
    assert swept("timeout").dense_memory_source == "measured"
    others = [swept("oom"), swept("crashed"), swept(where="beta"), swept(causal=False),
              swept(mode="train"), swept(dtype="bfloat16"), swept(batch=2)]  # fmt: skip
    for other in others:
        assert other.dense_memory_source == "computed"


# speed relative to a baseline


@pytest.mark.parametrize("bad", ["dense", "sdpa"])
def test_no_speed_for_or_relative_to_a_wrong_output(bad: str) -> None:
    wrong = make.measured().model_copy(update={"status": "wrong"})
    records = [
        make.record(make.trial(name), wrong if name == bad else make.measured())
        for name in ("dense", "sdpa")
    ]
    found = sweep_rows(records)
    assert speeds(found, "dense")[1] is None
    (row,) = [row for row in found if row.status == "wrong"]
    assert (row.time_s, row.tokens_per_s, row.max_error) == (None, None, 1e-6)


def test_an_unknown_or_ambiguous_baseline_is_an_error() -> None:
    several = sweep_rows([make.record(make.trial("ring", options={"chunk": c})) for c in (1, 2)])
    labels = [row.label for row in several]
    with pytest.raises(UserError, match=r"ambiguous: 'ring chunk 1', 'ring chunk 2'; name"):
        find_baseline_label(several, labels, "ring")
    assert find_baseline_label(several, labels, "ring chunk=2") == labels[1]
    assert speeds(several, labels[1]) == [1.0, 1.0]
    with pytest.raises(UnknownNameError, match=r"unknown baseline 'rung'.*did you mean 'ring'"):
        find_baseline_label(several, labels, "rung")


# maxima


def test_a_maximum_is_a_bracket_and_a_limit() -> None:
    records = [
        make.step(1024, predicted_tokens=None),
        make.step(4096, "oom", phase="backward", predicted_tokens=2000, processes=2),
        make.step(2048, peak=3 * MIB, predicted_tokens=2100, purpose="edge"),
        make.step(2049, "oom", phase="plan", reason="no room", purpose="edge"),
        make.step(2048, peak=3 * MIB + 8, purpose="confirm"),
        make.step(2048, peak=3 * MIB - 8, purpose="confirm"),
    ]
    found = merge_search(records)
    assert (found.max_tokens, found.first_failure) == (2048, 2049)
    assert (found.limited_by, found.failure_phase) == ("memory", "plan")
    assert found.failure_reason == "no room"
    assert (found.peak_bytes, found.confirmations) == (3 * MIB + 8, 2)
    assert found.bytes_per_token == (3 * MIB + 8) / 2048
    assert (found.predicted_tokens, found.runs, found.wall_s) == (2000, 7, 9.0)


def test_a_failure_below_a_passed_length_does_not_lower_the_maximum() -> None:
    records = [make.step(1000), make.step(1500, "crashed"), make.step(2000), make.step(3000, "oom")]
    found = merge_search(records)
    assert (found.max_tokens, found.first_failure) == (2000, 3000)
    assert found.limited_by == "memory"


def test_a_length_that_failed_once_did_not_pass() -> None:
    records = [
        make.step(1000),
        make.step(2000),
        make.step(2000, "oom", purpose="confirm"),
        make.step(1990, purpose="edge"),
        make.step(3000, "timeout"),
    ]
    found = merge_search(records)
    assert (found.max_tokens, found.first_failure) == (1990, 2000)
    assert (found.limited_by, found.confirmations) == ("memory", 0)


def test_probes_and_timed_confirmations_are_one_search_and_budgets_are_not() -> None:
    base = make.trial(memory_budget=64 * MIB, repeats=0)
    same = [
        make.step(1024, of=base),
        make.step(
            2048, of=base.replace(seed=3, round=1, repeats=30, time_cap=9.0), purpose="confirm"
        ),
    ]
    assert [m.max_tokens for m in search_rows(same)] == [2048]
    other = make.step(4096, of=base.replace(memory_budget=32 * MIB))
    assert [m.max_tokens for m in search_rows([*same, other])] == [2048, 4096]
    with pytest.raises(ValueError, match="one search"):
        merge_search([*same, other])
    with pytest.raises(ValueError, match="one search"):
        merge_search([make.record()])


# frames and JSON


def test_frames_have_the_rows() -> None:
    records = [make.record(), make.record(make.trial("dense"), make.outcome("oom", "full"))]
    rows = sweep_rows(records)
    frame = to_frame(rows, SweepRow)
    assert list(frame.tokens) == [row.tokens for row in rows]
    assert list(frame.status) == ["ok", "oom"]
    (row,) = search_rows([make.step(1024), make.step(2048, "oom")])
    (search,) = to_frame([row], SearchRow).to_dict("records")
    assert {name: getattr(row, str(name)) for name in search} == search
    assert list(to_frame([], SweepRow).columns) == list(frame.columns)


def test_an_error_that_is_not_finite_is_null_in_json() -> None:
    bad = make.outcome("wrong", "nan", max_error=math.nan)
    worse = make.outcome("wrong", "inf", max_error=math.inf)
    records = [make.record(make.trial(seq_len=n), o) for n, o in ((1, bad), (2, worse))]
    said = rows_json(sweep_rows([*records, make.record()]), "rows")
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert [row["max_error"] for row in said["rows"]] == [None, None, 1e-6]
    fields = fields_of(SweepRow).keys() - {"speed"}
    assert all(set(row) == fields for row in said["rows"])


# ---- settings that keep rows apart -------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"keep": "nothing"}, {"world_size": 2}, {"memory_budget": 2**27}, {"options": {"chunk": 3}}],
)
def test_fits_tokens_are_of_the_same_search(other: dict[str, Any]) -> None:
    def search(tokens: int, **fields: Any) -> list[Record]:
        of = make.trial("ring", **{"memory_budget": 2**26, "repeats": 0, **fields})
        return [make.step(tokens, of=of), make.step(tokens + 64, "oom", of=of)]

    whole = search(4000, time_budget=1.0)
    rows = search_rows([*search(8000, fit_only=True), *whole])
    assert [row.fits_tokens for row in rows] == [None, 8000]
    rows = search_rows([*search(8000, fit_only=True, **other), *whole])
    assert [row.fits_tokens for row in rows] == [None, None]
