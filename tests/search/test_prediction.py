"""Predictions by hand: what is foreseen is made up, the arithmetic is not."""

from collections.abc import Sequence
from typing import Any

import pytest

from longseq_bench.core.cost import attention_flops, floor_bytes_per_token
from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import Hardware, this_cpu
from longseq_bench.core.model import DryRunEstimate, Record, Trial, TrialPrediction
from longseq_bench.search.prediction import (
    ROUGH_GUESS,
    ROUGH_RECORD,
    TOUCHES,
    Curve,
    Predictor,
    RateModel,
    dry_run_curve,
    find_accuracy,
    find_edge,
    find_longest_fit,
    find_smallest_world,
    predict,
    predict_times,
)
from tests import make

MIB = 2**20
CPU = this_cpu("a processor", 2, 2**34)
NETWORK = Hardware.model_validate(
    CPU.model_dump()
    | {
        "per_node": 2,
        "inside": {"latency": 1e-3, "bandwidth": 1e6},
        "between": {"latency": 2e-3, "bandwidth": 1e5},
    }
)


def asked(seq_len: int = 4096, **fields: Any) -> Trial:
    return make.trial("ring", seq_len, memory_budget=64 * MIB, **fields)


def dry_run(trials: Sequence[Trial], fixed: int = 0, factor: float = 1.0) -> list[DryRunEstimate]:
    """A floor's worth of memory a rank, and some that does not grow."""
    return [
        DryRunEstimate(
            peak_bytes=int(fixed + factor * floor_bytes_per_token(t.workload) * t.workload.seq_len)
            // t.world_size,
            flops=attention_flops(t.workload) / t.world_size,
        )
        for t in trials
    ]


# ---- curves ------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_straight_between_and_beyond() -> None:
    found = Curve(
        (
            (100, DryRunEstimate(peak_bytes=1000, flops=1e4)),
            (200, DryRunEstimate(peak_bytes=3000, flops=4e4)),
            (400, DryRunEstimate(peak_bytes=4000, flops=16e4)),
        )
    )
    assert [found.peak(n) for n in (100, 150, 200, 300, 400)] == [1000, 2000, 3000, 3500, 4000]
    assert (found.peak(500), found.peak(75), found.peak(1)) == (4500, 500, 0)
    for n in (50, 100, 133, 400, 900):
        assert found.at(n).flops == pytest.approx(n**2)
    falling = Curve(((100, DryRunEstimate(peak_bytes=1000)), (110, DryRunEstimate(peak_bytes=990))))
    assert falling.peak(220) == 1485


def test_the_edge_is_the_longest_length_in_the_budget() -> None:
    found = Curve(((1, DryRunEstimate(peak_bytes=107)), (1001, DryRunEstimate(peak_bytes=7107))))
    for budget, longest in ((7100, 1000), (7106, 1000), (7107, 1001), (99, 0), (10**9, 5000)):
        assert find_edge(found, budget, 5000) == longest


def test_a_curve_reaches_to_the_floor_and_not_beyond_the_ceiling() -> None:
    trial, lengths = asked(), []

    def spy(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        lengths.extend(t.workload.seq_len for t in trials)
        assert {(t.repeats, t.round) for t in trials} == {(0, 0)}
        return dry_run(trials)

    assert isinstance(dry_run_curve(trial, 64 * MIB, spy, 10**9), Curve)
    floor = 64 * MIB // floor_bytes_per_token(trial.workload)
    assert max(lengths) == floor
    lengths.clear()
    dry_run_curve(trial, 64 * MIB, spy, 1000)
    assert max(lengths) == 1000


def test_why_nothing_can_be_foreseen_is_kept() -> None:
    def no(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return [DryRunEstimate(unsupported="not on one rank")] * len(trials)

    assert dry_run_curve(asked(), 64 * MIB, no, 10**9) == "not on one rank"
    assert predict(asked(), no, RateModel(CPU)) == "not on one rank"
    assert find_longest_fit(asked(), no, RateModel(CPU), 10**9) == "not on one rank"
    outlook = Predictor(no, RateModel(CPU))
    assert outlook.length_model(asked(), 10**9) is None
    assert outlook.foreseen([asked()]) == [None]


# ---- how fast ----------------------------------------------------------------------------------


def ran(seq_len: int, rate: float, **fields: Any) -> Record:
    trial = asked(seq_len, **fields)
    flops = attention_flops(trial.workload)
    took = flops / trial.world_size / rate
    each = {"time": [took] * 3, "flops": flops}
    return make.record(trial, make.on_ranks(*[each] * trial.world_size))


def test_a_rate_comes_from_the_nearest_record_that_is_alike() -> None:
    records = [
        ran(1024, 1e9),
        ran(16384, 2e9),
        ran(4096, 9e9, heads=4),
        ran(4096, 8e9, causal=True),
    ]
    pace = RateModel(CPU, records)
    for tokens, rate in ((512, 1e9), (1024, 1e9), (2048, 1e9), (9000, 2e9), (10**6, 2e9)):
        found = pace.rate(asked(tokens))
        assert found.flops == pytest.approx(rate)
        assert (found.rough, found.source[:11]) == (ROUGH_RECORD, "2 record(s)")


def test_a_rate_of_ranks_is_that_of_one() -> None:
    pace = RateModel(CPU, [ran(1024, 1e9, world_size=2)])
    assert pace.rate(asked(1024, world_size=2)).flops == pytest.approx(1e9)
    assert pace.rate(asked(1024)).source.startswith("profile of")


def test_what_did_not_end_ok_teaches_nothing() -> None:
    late = make.record(asked(1024), make.outcome("timeout", "late", time=[1.0], flops=1.0))
    found = RateModel(CPU, [late]).rate(asked(1024))
    assert (found.rough, found.flops) == (ROUGH_GUESS, CPU.rate("float32", "forward"))


def test_a_pass_takes_the_longer_of_computing_and_moving_and_what_communication_adds() -> None:
    pace = RateModel(NETWORK)
    rate, moved = CPU.rate("float32", "forward"), CPU.bandwidth
    heavy = predict_times(asked(), DryRunEstimate(flops=3 * rate, peak_bytes=int(moved)), pace)
    assert (heavy.compute, heavy.memory, heavy.exposed) == (3.0, TOUCHES, 0.0)
    assert (heavy.total, heavy.limit) == (3.0, "compute")
    light = predict_times(asked(), DryRunEstimate(flops=rate, peak_bytes=int(moved)), pace)
    assert (light.total, light.limit) == (TOUCHES, "memory bandwidth")


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 10e-3 + 4.0), (3, 20e-3 + 40.0)])
def test_transfers_take_their_latency_and_their_bytes(ranks: int, seconds: float) -> None:
    seen = DryRunEstimate(flops=CPU.rate("float32", "forward"), bytes_sent=4_000_000, transfers=10)
    trial = asked(world_size=ranks)
    hidden = predict_times(trial, seen, RateModel(NETWORK))
    assert hidden.transfers == pytest.approx(seconds)
    assert hidden.exposed == pytest.approx(max(seconds - 1, seconds / 10))
    shown = predict_times(trial, seen.model_copy(update={"overlaps": False}), RateModel(NETWORK))
    assert shown.exposed == pytest.approx(seconds)
    assert (shown.total, shown.limit) == (pytest.approx(1 + seconds), "communication")


def test_all_but_the_first_transfer_hides_behind_computing() -> None:
    seen = DryRunEstimate(flops=100 * CPU.rate("float32", "forward"), bytes_sent=10**6, transfers=4)
    made = predict_times(asked(world_size=2), seen, RateModel(NETWORK))
    assert made.exposed == pytest.approx(made.transfers / 4)


def test_what_communication_added_to_a_pass_grows_with_its_bytes_and_not_with_its_work() -> None:
    trial = asked(1024, world_size=2)
    flops = attention_flops(trial.workload)
    each = {"time": [1.0], "compute_time": [0.6], "communication_time": [0.5], "flops": flops,
            "bytes_sent": 1e6}  # fmt: skip
    pace = RateModel(NETWORK, [make.record(trial, make.on_ranks(each, each))])
    for work, sent, seconds in ((1, 1e6, 1.0), (4, 2e6, 4 * 0.6 + 2 * 0.4)):
        seen = DryRunEstimate(
            flops=work * flops / 2, bytes_sent=int(sent), transfers=3, busiest=1.9
        )
        assert predict_times(trial, seen, pace).total == pytest.approx(seconds)


def test_a_profile_waits_for_the_busiest_rank() -> None:
    seen = DryRunEstimate(flops=CPU.rate("float32", "forward"), busiest=1.5)
    assert predict_times(asked(world_size=2), seen, RateModel(NETWORK)).compute == pytest.approx(
        1.5
    )


def test_the_network_of_records_is_believed() -> None:
    record = make.record(
        asked(1024, world_size=2),
        make.on_ranks(
            {"time": [1.0], "flops": 1.0, "bytes_sent": 5e6, "communication_time": [0.5]},
            {"time": [1.0], "communication_time": [0.1]},
        ),
    )
    assert RateModel(NETWORK, [record]).bandwidth(2) == pytest.approx(1e7)
    assert RateModel(NETWORK).bandwidth(2) == 1e6


# ---- how far -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [0, 5 * MIB])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_longest_is_where_the_peak_meets_the_budget(fixed: int, ranks: int) -> None:
    trial = asked(world_size=ranks)

    def seer(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return dry_run(trials, fixed, 1.2)

    made = find_longest_fit(trial, seer, RateModel(CPU), 2**30)
    assert not isinstance(made, str)
    tokens = made.trial.workload.seq_len
    exact = (ranks * 64 * MIB - fixed) / 1.2 / floor_bytes_per_token(trial.workload)
    assert made.fits
    assert tokens == pytest.approx(exact, rel=0.002)
    floor = ranks * 64 * MIB / floor_bytes_per_token(trial.workload)
    assert made.fraction_of_floor == pytest.approx(tokens / floor)


def test_a_peak_that_bends_between_two_looks_is_not_overshot() -> None:
    def bent(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return [
            one.model_copy(update={"peak_bytes": int(one.peak_bytes * 1.01)})
            if t.workload.seq_len % 10
            else one
            for t, one in zip(trials, dry_run(trials), strict=True)
        ]

    made = find_longest_fit(asked(), bent, RateModel(CPU), 2**30)
    assert not isinstance(made, str)
    assert made.fits


def test_a_length_over_the_budget_does_not_fit_and_the_smallest_world_is_found() -> None:
    trial = asked(100_000)
    made = predict(trial, dry_run, RateModel(CPU))
    assert not isinstance(made, str)
    assert not made.fits
    world = find_smallest_world(trial, dry_run, RateModel(CPU), 64)
    assert world is not None
    assert (world.trial.world_size, world.fits) == (13, True)
    assert find_smallest_world(trial, dry_run, RateModel(CPU), 8) is None
    assert not isinstance(
        fewer := predict(trial.replace(world_size=12), dry_run, RateModel(CPU)), str
    )
    assert not fewer.fits


def test_a_dtype_that_hardware_has_not_is_refused() -> None:
    half = Hardware.model_validate(CPU.model_dump() | {"flops": {"float32": 1e9}})
    with pytest.raises(UserError, match="has no bfloat16"):
        predict(asked(dtype="bfloat16"), dry_run, RateModel(half))


# ---- for a plan, and how well ------------------------------------------------------------------


def test_a_search_is_told_the_fraction_of_each_limit() -> None:
    trial = asked(time_budget=2.0)
    ahead = Predictor(dry_run, RateModel(CPU, [ran(4096, 1e9)])).length_model(trial, 2**30)
    assert ahead is not None
    tokens = 10_000
    flops = attention_flops(trial.at(tokens).workload)
    told = ahead.loads(tokens)
    assert told["memory"] == pytest.approx(tokens * 2 * 16 * 64 * 4 / (64 * MIB), rel=0.01)
    assert told["time"] == pytest.approx(flops / 1e9 / 2.0, rel=0.01)
    assert ahead.rough == {"time": ROUGH_RECORD}
    kept = ahead.foreseen(tokens)
    assert kept.peak_bytes == pytest.approx(told["memory"] * 64 * MIB, abs=1)
    assert kept.seconds == pytest.approx(told["time"] * 2.0)
    unlimited = Predictor(dry_run, RateModel(CPU)).length_model(asked(), 2**30)
    assert unlimited is not None
    assert set(unlimited.loads(100)) == {"memory"}


def test_errors_are_predicted_over_measured_less_one_by_kind() -> None:
    def kept(peak: int, seconds: float | None, status: Any = "ok", **fields: Any) -> Record:
        outcome = make.outcome(status, None if status == "ok" else "x", peak=200, time=[2.0, 1.0])
        made = make.record(asked(**fields), outcome)
        foreseen = TrialPrediction(peak_bytes=peak, seconds=seconds)
        return made.model_copy(update={"foreseen": foreseen})

    records = [
        kept(190, 3.0), kept(220, None), kept(100, 1.5, mode="train"), kept(1, 1.0, "oom"),
        make.record(asked()),
    ]  # fmt: skip
    forward, train = find_accuracy(records)
    assert (forward.implementation, forward.mode, forward.world_size) == ("ring", "forward", 1)
    assert forward.memory_errors == pytest.approx((-0.05, 0.1))
    assert forward.time_errors == pytest.approx((1.0,))
    assert (train.mode, train.memory_errors, train.time_errors) == ("train", (-0.5,), (0.0,))
