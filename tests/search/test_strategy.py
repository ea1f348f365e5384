"""Schedules run_stored by hand, and through the runner with a simulated machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longseq_bench.analysis.searches import search_rows
from longseq_bench.core.cost import floor_tokens
from longseq_bench.core.hardware import this_cpu
from longseq_bench.core.model import Outcome, Record, Trial
from longseq_bench.reports.sections.failures import describe_search
from longseq_bench.runner import Watcher, run_schedule
from longseq_bench.search.prediction import Predictor
from longseq_bench.search.rates import RateModel
from longseq_bench.search.strategy import Schedule, Step, maxlen, scaling, sweep
from longseq_bench.store import Store, load
from tests import make
from tests.simulated import SimulatedLauncher

MIB = 2**20
Machine = Callable[[Trial], Outcome]


def by_hand(schedule: Schedule, machine: Machine) -> tuple[list[Step], list[Record]]:
    """Return every step of a schedule, and the records that it returns."""
    steps, step = [], next(schedule)
    while True:
        steps.append(step)
        try:
            step = schedule.send(make.record(step.trial, machine(step.trial), purpose=step.purpose))
        except StopIteration as done:
            return steps, done.value


def visits(steps: list[Step]) -> list[tuple[str, int, int]]:
    return [(s.trial.implementation, s.trial.workload.seq_len, s.trial.round) for s in steps]


def ok(trial: Trial) -> Outcome:
    return make.measured()


def test_compared_trials_are_interleaved() -> None:
    trials = [make.trial(name, n) for n in (1024, 2048) for name in ("dense", "sdpa")]
    steps, records = by_hand(sweep(trials, rounds=2), ok)
    assert visits(steps) == [
        (name, n, visit) for n in (1024, 2048) for visit in (0, 1) for name in ("dense", "sdpa")
    ]
    assert [r.trial for r in records] == [s.trial for s in steps]
    assert len({r.key for r in records}) == 8
    assert {s.purpose for s in steps} == {"measure"}


@pytest.mark.parametrize("status", ["oom", "wrong", "timeout"])
def test_failed_trials_are_not_run_again(status: str) -> None:
    trials = [make.trial("dense"), make.trial("sdpa")]

    def machine(trial: Trial) -> Outcome:
        return make.outcome(status, "so") if trial.implementation == "dense" else ok(trial)  # type: ignore[arg-type]

    steps, records = by_hand(sweep(trials, rounds=3), machine)
    assert visits(steps) == [("dense", 4096, 0), *(("sdpa", 4096, r) for r in range(3))]
    assert records[0].outcome.status == status


def machine_for(tokens: int) -> Machine:
    """A machine whose memory budget is used up at `tokens`."""

    def machine(trial: Trial) -> Outcome:
        n, budget = trial.workload.seq_len, trial.memory_budget or 0
        if n > tokens:
            return make.outcome("oom", "full", "forward")
        return make.outcome(peak=budget * n / tokens, pass_time=1e-9 * n)

    return machine


def test_a_search_confirms_its_winner_as_another_round() -> None:
    trial = make.trial("ring", 7, memory_budget=64 * MIB, repeats=0)
    steps, records = by_hand(maxlen([trial]), machine_for(7000))
    assert steps[-1].purpose == "confirm"
    best = max(r.trial.workload.seq_len for r in records if r.outcome.status == "ok")
    assert 6930 <= best <= 7000
    assert steps[-1].trial == trial.at(best).replace(round=1)
    assert len({r.key for r in records}) == len(records)
    near = next(s for s in steps if s.purpose == "edge")
    assert near.predicted_tokens == pytest.approx(7000, rel=0.01)


def test_after_a_wrong_output_every_run_is_timed_and_so_checked_in_full() -> None:
    def machine(trial: Trial) -> Outcome:
        if (trial.repeats or trial.round) and trial.workload.seq_len > 3000:
            return make.outcome("wrong", "rows of output are wrong", "check")
        return machine_for(7000)(trial)

    trial = make.trial("ring", memory_budget=64 * MIB, repeats=0)
    steps, records = by_hand(maxlen([trial], ceiling=5000), machine)
    first_wrong = [r.outcome.status for r in records].index("wrong")
    assert steps[first_wrong].purpose == "confirm"
    assert not any(s.trial.repeats for s in steps[:first_wrong])
    assert all(s.trial.repeats for s in steps[first_wrong + 1 :])
    assert steps[-1].trial.workload.seq_len <= 3000


def wrong_from(tokens: int, is_seen: Callable[[Trial], bool] = lambda trial: True) -> Machine:
    """A machine with memory for 7,000 tokens, and wrong outputs from `tokens` on, if `is_seen`."""

    def machine(trial: Trial) -> Outcome:
        is_wrong = tokens <= trial.workload.seq_len <= 7000 and is_seen(trial)
        return make.outcome("wrong", "bad", "check") if is_wrong else machine_for(7000)(trial)

    return machine


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize(
    ("machine", "right", "runs"),
    [
        (wrong_from(1), False, 2), (wrong_from(1500), True, 3),
        # only in passes that check every row: the first ones pass
        (wrong_from(1000, lambda trial: bool(trial.repeats or trial.round)), True, 6),
    ],
)  # fmt: skip
def test_two_wrong_outputs_at_lengths_far_apart_end_a_search(
    machine: Machine, right: bool, runs: int, predicts: bool
) -> None:
    trial = make.trial("ring", memory_budget=64 * MIB, repeats=0)
    predictor = simulate()[1] if predicts else None
    steps, records = by_hand(maxlen([trial], 7000, predictor), machine)
    assert len(steps) <= runs
    wrong = sorted(r.trial.workload.seq_len for r in records if r.outcome.status == "wrong")
    assert wrong[-1] >= 2 * wrong[0]
    (row,) = search_rows(records)
    assert row.wrong_tokens == row.first_failure == wrong[0]
    assert (0 < row.max_tokens < wrong[0]) if right else row.max_tokens == 0
    sentence = describe_search(row, {})
    assert sentence.startswith("WRONG from ")
    assert (", right up to " in sentence) == right
    assert sentence.endswith("; bad.")


@pytest.mark.parametrize("predicts", [False, True])
def test_outputs_that_are_wrong_near_the_limit_only_still_close_the_bracket(predicts: bool) -> None:
    trial = make.trial("ring", memory_budget=64 * MIB, repeats=0)
    predictor = simulate()[1] if predicts else None
    _, records = by_hand(maxlen([trial], None, predictor), wrong_from(6000))
    (row,) = search_rows(records)
    assert row.max_tokens < 6000 <= row.wrong_tokens <= row.max_tokens + 64
    assert row.confirmations
    assert "right up to" in describe_search(row, {})


def test_a_search_never_asks_beyond_its_ceiling_or_twice_the_floor() -> None:
    trial = make.trial("ring", memory_budget=64 * MIB)
    floor = floor_tokens(trial.workload, 64 * MIB)
    steps, _ = by_hand(maxlen([trial]), machine_for(10**9))
    assert max(s.trial.workload.seq_len for s in steps) == 2 * floor
    steps, records = by_hand(maxlen([trial], ceiling=5000), machine_for(10**9))
    assert max(s.trial.workload.seq_len for s in steps) == 5000
    assert records[-1].trial.workload.seq_len == 5000


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("edge", [0, 8, 9, 7000])
def test_a_search_requests_at_least_one_token_per_rank(ranks: int, edge: int) -> None:
    """edge: the longest length that fits. Each requested length has a token for every rank."""
    trial = make.trial("ring", memory_budget=64 * MIB, world_size=ranks, repeats=0)
    steps, _ = by_hand(maxlen([trial]), machine_for(edge))
    lengths = [s.trial.workload.seq_len for s in steps]
    assert min(lengths) >= ranks
    passed = [n for n in lengths if n <= edge]
    failed = min(n for n in lengths if n > edge)
    assert failed - max(passed, default=0) <= max(64, edge // 100)


@pytest.mark.parametrize("status", ["unsupported", "error"])
def test_a_status_that_no_shorter_length_changes_ends_the_search(status: str) -> None:
    trial = make.trial("ring", memory_budget=64 * MIB)
    steps, _ = by_hand(maxlen([trial]), lambda t: make.outcome(status, "no"))  # type: ignore[arg-type]
    assert len(steps) == 1


def run_stored(
    schedule: Schedule, launcher: SimulatedLauncher, folder: Path
) -> tuple[list[Record], list[bool]]:
    """Return the records, and which of them were found in the store instead of run."""
    found: list[bool] = []
    watcher = Watcher()
    watcher.ends = lambda step, record, is_found: found.append(is_found)  # type: ignore[method-assign]
    with Store(folder) as store:
        return run_schedule(schedule, launcher, store, make.environment, watcher), found


def small_search() -> Schedule:
    return maxlen([make.trial("ring", memory_budget=64 * MIB, repeats=0)])


def test_an_interrupted_search_resumes_and_a_finished_one_runs_nothing(tmp_path: Path) -> None:
    whole, _ = run_stored(small_search(), SimulatedLauncher(), tmp_path / "whole")

    class Broken(SimulatedLauncher):
        def run(self, trial: Trial, on_phase):  # type: ignore[no-untyped-def]
            if len(self.ran) == 3:
                raise KeyboardInterrupt
            return super().run(trial, on_phase)

    with pytest.raises(KeyboardInterrupt):
        run_stored(small_search(), Broken(), tmp_path / "broken")
    resumed = SimulatedLauncher()
    records, found = run_stored(small_search(), resumed, tmp_path / "broken")
    assert found == [True] * 3 + [False] * (len(whole) - 3)
    assert [r.trial for r in records] == [r.trial for r in whole]
    assert resumed.ran == [r.trial for r in whole[3:]]
    again = SimulatedLauncher()
    assert run_stored(small_search(), again, tmp_path / "broken") == (records, [True] * len(whole))
    assert again.ran == []


@pytest.mark.parametrize("seconds", [float("inf"), -1.0])
def test_a_meter_that_returns_what_cannot_be_is_an_error_that_can_be_read_again(
    tmp_path: Path, seconds: float
) -> None:
    launcher = SimulatedLauncher(dies=lambda t: make.outcome(time=[0.1, seconds]))
    (record,), _ = run_stored(sweep([make.trial()], 1), launcher, tmp_path)
    assert (record.outcome.status, record.outcome.measurements) == ("error", ())
    assert record.outcome.reason == f"a meter is broken: 'time' has the sample {seconds:.6g}"
    assert load(tmp_path).records == [record]


# ---- predictions -------------------------------------------------------------------------------


def simulate(factor: float = 1.0) -> tuple[SimulatedLauncher, Predictor]:
    launcher = SimulatedLauncher(dry_run_factor=lambda t: factor)
    return launcher, Predictor(launcher.dry_run, RateModel(this_cpu("simulated", 2, make.GIB)))


@pytest.mark.parametrize(("factor", "runs"), [(1.0, 4), (3.0, 9), (1 / 3, 9)])
def test_a_search_with_predictions_is_short_and_right_if_they_are_wrong(
    tmp_path: Path, factor: float, runs: int
) -> None:
    launcher, predictor = simulate(factor)
    trial = make.trial("ring", memory_budget=64 * 2**20)
    records, _ = run_stored(maxlen([trial], None, predictor), launcher, tmp_path)
    (row,) = search_rows(records)
    edge = 64 * 2**20 / 1.05 / (2 * 16 * 64 * 4)
    assert row.max_tokens <= edge < row.first_failure
    assert row.first_failure - row.max_tokens <= max(64, 0.01 * edge)
    assert len(records) <= runs
    assert all(r.foreseen and r.foreseen.peak_bytes and r.foreseen.seconds for r in records)


def test_what_time_limits_has_few_runs_and_says_what_memory_would_allow(tmp_path: Path) -> None:
    launcher, predictor = simulate()
    launcher.has_quick_runs = True
    trial = make.trial("ring", memory_budget=2**30, time_budget=1.0)
    records, _ = run_stored(maxlen([trial], None, predictor), launcher, tmp_path)
    (row,) = search_rows(records)
    assert (len(records), records[0].trial.repeats) == (3, 2)
    assert (row.limited_by, row.first_failure, row.confirmations) == ("time", None, 1)
    assert 0.85 < (row.pass_time_s or 0) <= 1.0
    assert row.max_tokens < row.fails_from < 1.2 * row.max_tokens
    (short,) = search_rows(
        [*run_stored(maxlen([trial], 5000, predictor), launcher, tmp_path / "b")[0]]
    )
    assert (short.limited_by, short.max_tokens, short.time_edge) == ("ceiling", 5000, None)
    assert short.fit_predicted_tokens == row.fit_predicted_tokens
    fits = 2**30 / 1.05 / (2 * 16 * 64 * 4)
    assert row.fit_predicted_tokens == pytest.approx(fits, rel=0.001)
    grows = (fits / row.max_tokens) ** 2
    assert row.fit_time_s == pytest.approx((row.pass_time_s or 0) * grows, rel=0.01)
    sentence = describe_search(row, {})
    assert "; limited by time: of 1 s a pass took 9" in sentence
    assert "(predicted; --fit-only runs it)." in sentence
    for other in (replace(row, implementation="sdpa"), replace(row, mode="decode")):
        assert describe_search(other, {}).endswith("a pass (predicted).")
    untimed = describe_search(replace(row, pass_time_s=None, pass_spread=None), {})
    assert f"; limited by time: {row.time_edge:,} would take 1 s." in untimed
    slow = replace(row, pass_spread=0.2)
    assert "±20.0 %: the machine's speed changed" in describe_search(slow, {})


def test_tensors_in_host_memory_are_not_limited_by_the_floor() -> None:
    trial = make.trial("ring", options={"offload": "host"}, memory_budget=2**20)
    steps, _ = by_hand(maxlen([trial], ceiling=2**20), lambda t: make.outcome(peak=1.0))
    assert max(s.trial.workload.seq_len for s in steps) == 2**20


def test_a_scaling_study_times_parts_of_the_shortest_maximum(tmp_path: Path) -> None:
    launcher, predictor = simulate()
    trials = [
        make.trial(name, memory_budget=2**24, repeats=0, world_size=ranks)
        for name in ("ring", "ulysses")
        for ranks in (1, 2)
    ]
    records, _ = run_stored(scaling(trials, 2, predictor), launcher, tmp_path)
    maxima = [r.max_tokens for r in search_rows(records)]
    assert len(maxima) == 4
    timed = sorted({r.trial.workload.seq_len for r in records if r.purpose == "measure"})
    assert timed == [min(maxima) // 8, min(maxima) // 4, min(maxima) // 2]
    worlds = {(r.trial.implementation, r.trial.world_size) for r in records}
    assert len(worlds) == 4
    assert sum(r.purpose == "measure" for r in records) == 3 * 4 * 2
