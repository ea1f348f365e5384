"""The estimate of a sweep, from invented dry runs, against arithmetic by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from longseq_bench.core.cost import attention_flops
from longseq_bench.core.hardware import this_cpu
from longseq_bench.core.model import DryRunEstimate, Trial
from longseq_bench.search.estimate import OTHER_PASSES, START_S, SweepEstimate, estimate_sweep
from longseq_bench.search.rates import RateModel
from tests import make

MIB = 2**20
CPU = this_cpu("a processor", 2, 2**34)
FLOPS = CPU.rate("float32", "forward")
BYTES_PER_TOKEN = 8192


class DryRuns:
    """Dry runs in which a token takes BYTES_PER_TOKEN; `asked` keeps their trials."""

    def __init__(self, **refused: str) -> None:
        self.refused, self.asked = refused, list[Trial]()

    def __call__(self, trials: Sequence[Trial], limit: float, **_: Any) -> list[DryRunEstimate]:
        self.asked += trials
        return [
            DryRunEstimate(
                peak_bytes=BYTES_PER_TOKEN * t.workload.seq_len,
                flops=attention_flops(t.workload),
                unsupported=self.refused.get(t.implementation),
            )
            for t in trials
        ]


def of(trials: Sequence[Trial], rounds: int = 1, runs: DryRuns | None = None) -> SweepEstimate:
    return estimate_sweep(trials, rounds, runs or DryRuns(), {"cpu": RateModel(CPU)})


def trial(seq_len: int = 4096, name: str = "sdpa", **fields: Any) -> Trial:
    return make.trial(name, seq_len, **{"memory_budget": 1024 * MIB, "repeats": 3, **fields})


def seconds(one: Trial, timed: int = 3) -> float:
    return START_S + (OTHER_PASSES + timed) * attention_flops(one.workload) / FLOPS


def test_runs_time_and_peak_are_those_of_the_rule() -> None:
    trials = [trial(n, time_cap=1e9) for n in (1024, 4096)]
    found = of(trials, rounds=2)
    assert found.runs == 4
    assert found.seconds == pytest.approx(2 * sum(map(seconds, trials)))
    assert found.peak_bytes == 4096 * BYTES_PER_TOKEN
    assert found.sentence().startswith("4 runs, about ")
    assert found.sentence().endswith(", at most 32 MiB")
    assert found.as_json()["text"] == found.sentence()


def test_the_time_cap_ends_the_timed_passes() -> None:
    one = trial(65536, time_cap=1e-6, repeats=1000)
    assert of([one]).seconds == pytest.approx(seconds(one, timed=1), rel=1e-4)


def test_a_trial_that_exceeds_its_budget_runs_once_and_counts_up_to_the_budget() -> None:
    found = of([trial(4096, memory_budget=16 * MIB)], rounds=5)
    assert (found.seconds, found.peak_bytes) == (START_S, 16 * MIB)
    late = of([trial(65536, time_budget=0.001)], rounds=5)
    assert late.seconds == pytest.approx(START_S + 0.001)


def test_only_the_longest_length_of_a_kind_has_a_dry_run() -> None:
    runs = DryRuns()
    kinds = [{"options": {"chunk": c}, "heads": h} for c in (1, 2) for h in (4, 8)]
    of([trial(n, **kind) for n in (256, 1024, 512) for kind in kinds], runs=runs)
    assert [t.workload.seq_len for t in runs.asked] == [1024] * 4


def test_what_can_not_be_predicted_is_said() -> None:
    runs = DryRuns(dilated="it compiles code")
    some = of([trial(), trial(name="dilated")], runs=runs)
    assert some.sentence().endswith("; without 1 of the trials (dilated: it compiles code)")
    none = of([trial(name="dilated")], runs=runs)
    assert none.sentence() == "no estimate: dilated: it compiles code"
    assert none.as_json()["seconds"] is None
