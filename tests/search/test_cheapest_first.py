"""Runs within a time: the cheapest first, the rest predicted from them."""

from pathlib import Path

import pytest

from longseq_bench.core.cost import attention_flops
from longseq_bench.core.hardware import this_cpu
from longseq_bench.core.model import DryRunEstimate, Record, Trial
from longseq_bench.runner import run_schedule
from longseq_bench.search.cheapest_first import cheapest_first
from longseq_bench.search.prediction import Predictor, RateModel
from longseq_bench.search.strategy import Schedule
from longseq_bench.store import Store
from tests import make
from tests.simulated import SimulatedLauncher

ASKED = (8192, 32768)
FLOPS_PER_S = {"quick": 1e12, "slow": 1e10}


def seconds(trial: Trial, tokens: int | None = None) -> float:
    w = trial.at(tokens or trial.workload.seq_len).workload
    return attention_flops(w) / FLOPS_PER_S[trial.implementation]


def trials(*names: str, memory: int = 2**30) -> list[Trial]:
    return [
        make.trial(name, n, memory_budget=memory, time_budget=20.0, repeats=3)
        for name in names
        for n in ASKED
    ]


def predictor(launcher: SimulatedLauncher) -> Predictor:
    return Predictor(launcher.dry_run, RateModel(this_cpu("simulated", 2, make.GIB)))


def run_all(schedule: Schedule, dies_at: int = 2**40) -> list[Record]:
    """Run each step on a machine where a run takes 1 s and ten passes."""
    launcher = SimulatedLauncher(seconds=seconds)
    step = next(schedule)
    while True:
        trial, foreseen = step.trial, step.predict()
        outcome = launcher.run(trial, lambda phase, part: None).outcome
        if outcome.status == "ok":
            outcome = make.measured(seconds(trial), flops=attention_flops(trial.workload))
        if trial.workload.seq_len >= dies_at:
            outcome = make.outcome("wrong", "bad", "check")
        more = {"wall_s": 1 + 10 * seconds(trial), "foreseen": foreseen}
        try:
            step = schedule.send(make.record(trial, outcome, **more))
        except StopIteration as done:
            found: list[Record] = done.value
            return found


def runs(records: list[Record]) -> list[tuple[str, int]]:
    return [(r.trial.implementation, r.trial.workload.seq_len) for r in records]


def test_the_cheapest_run_first_and_no_more_than_end_in_time() -> None:
    grid = trials("slow", "quick")
    predicts = predictor(SimulatedLauncher())
    every = run_all(cheapest_first(grid, predicts, 1e6))
    first = [("slow", 2048), ("quick", 2048), ("quick", 8192), ("quick", 32768), ("slow", 8192)]
    assert runs(every) == first  # a pass of `slow` at 32k takes longer than the time budget
    limit = sum(record.wall_s for record in every[:4])
    records = run_all(cheapest_first(grid, predicts, limit + 10))
    assert runs(records) == first[:4]
    assert sum(record.wall_s for record in records) <= limit + 10


def test_records_predict_each_length_that_was_asked_for() -> None:
    records = run_all(cheapest_first(trials("slow"), predictor(SimulatedLauncher()), 1e6))
    last = records[1]
    assert last.foreseen
    assert [*last.foreseen.asked] == [*ASKED]
    for tokens, (time, share) in last.foreseen.asked.items():
        assert time == pytest.approx(seconds(last.trial, tokens), rel=0.02)
        assert share == pytest.approx(1)
    assert last.foreseen.fits_tokens == pytest.approx(2**30 / 1.05 / 8192, rel=0.01)


def test_what_does_not_fit_is_not_run() -> None:
    few = trials("quick", memory=100 * 2**20)  # 12k tokens
    found = runs(run_all(cheapest_first(few, predictor(SimulatedLauncher()), 1e6)))
    assert found == [("quick", 2048), ("quick", 8192)]


def test_after_a_failure_no_longer_length_runs() -> None:
    schedule = cheapest_first(trials("quick"), predictor(SimulatedLauncher()), 1e6)
    assert runs(run_all(schedule, dies_at=8192)) == [("quick", 2048), ("quick", 8192)]


class Unpredictable(SimulatedLauncher):
    def dry_run(self, trials: list[Trial], *args: object, **more: object) -> list[DryRunEstimate]:  # type: ignore[override]
        return [DryRunEstimate(unsupported="no dry run")] * len(trials)


def test_without_a_dry_run_times_grow_as_the_square_of_the_length() -> None:
    records = run_all(cheapest_first(trials("slow"), predictor(Unpredictable()), 1e6))
    assert runs(records) == [("slow", 2048), ("slow", 8192)]
    assert records[0].foreseen is None
    assert records[1].foreseen
    time, share = records[1].foreseen.asked[32768]
    assert time == pytest.approx(seconds(records[1].trial, 32768))
    assert share is None


def test_a_second_call_takes_all_runs_from_the_folder(tmp_path: Path) -> None:
    launcher = SimulatedLauncher(seconds=seconds)
    for _ in range(2):
        schedule = cheapest_first(trials("quick", "slow"), predictor(launcher), 1e3)
        with Store(tmp_path) as store:
            run_schedule(schedule, launcher, store, make.environment)
    keys = [trial.key for trial in launcher.ran]
    assert len(keys) == len({*keys}) > 4


def test_the_mask_of_one_length_has_no_shorter_runs() -> None:
    trial = make.trial("quick", 8192, memory_budget=2**30, repeats=3, mask="documents:4096,4096")
    records = run_all(cheapest_first([trial], predictor(SimulatedLauncher()), 1e6))
    assert runs(records) == [("quick", 8192)]
