"""Predictions from invented dry runs, against arithmetic by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from longseq_bench.core.cost import attention_flops, floor_bytes_per_token
from longseq_bench.core.hardware import Hardware, profiles, this_cpu
from longseq_bench.core.model import DryRunEstimate, Record, Trial
from longseq_bench.search.memory_curve import Curve, add_outside, dry_run_curve
from longseq_bench.search.prediction import (
    MOVES_PER_BYTE,
    Predictor,
    find_longest_fit,
    find_smallest_world,
    predict,
    predict_best,
    predict_times,
)
from longseq_bench.search.rates import PROFILE_UNCERTAINTY, RECORD_UNCERTAINTY, Rate, RateModel
from longseq_bench.search.strategy import result_of
from tests import make

MIB = 2**20
CPU = this_cpu("a processor", 2, 2**34)
FLOPS = CPU.rate("float32", "forward")
NETWORK = Hardware.model_validate(
    CPU.model_dump()
    | {
        "per_node": 2,
        "shared": False,
        "inside": {"latency": 1e-3, "bandwidth": 1e6},
        "between": {"latency": 2e-3, "bandwidth": 1e5},
    }
)


def ring_trial(seq_len: int = 4096, **fields: Any) -> Trial:
    return make.trial("ring", seq_len, memory_budget=64 * MIB, **fields)


def dry_run(trials: Sequence[Trial], fixed: int = 0, factor: float = 1.0) -> list[DryRunEstimate]:
    """A dry run whose peak is a rank's share of `factor` times the floor, plus `fixed` bytes."""
    return [
        DryRunEstimate(
            peak_bytes=int(fixed + factor * floor_bytes_per_token(t.workload) * t.workload.seq_len)
            // t.world_size,
            flops=attention_flops(t.workload) / t.world_size,
        )
        for t in trials
    ]


@pytest.mark.parametrize("share", [0.01, 0.4], ids=["below-the-grid", "between-its-lengths"])
def test_a_plan_ends_at_the_limit_of_the_kernel(share: float) -> None:
    """Not at the last length of the grid that the kernel takes; see GRID."""
    trial = ring_trial()
    assert trial.memory_budget
    limit = int(share * trial.memory_budget / floor_bytes_per_token(trial.workload))

    def limited(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        refused = DryRunEstimate(unsupported="32 bits", too_long=True)
        return [
            estimate if one.workload.seq_len <= limit else refused
            for one, estimate in zip(trials, dry_run(trials), strict=True)
        ]

    found = find_longest_fit(trial, limited, RateModel(CPU), 10**9)
    assert not isinstance(found, str)
    assert 0.998 * limit - 1 <= found.trial.workload.seq_len <= limit
    assert found.length_limit == ("kernel limit", "32 bits")


def test_a_plan_names_the_limit_of_its_length() -> None:
    """Memory, the last length that is tried, or a reason for which no longer one has a dry run."""

    def without(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        late = DryRunEstimate(unsupported="over 10 s")
        return [
            estimate if one.workload.seq_len <= 5_000 else late
            for one, estimate in zip(trials, dry_run(trials), strict=True)
        ]

    found = [
        find_longest_fit(ring_trial(), run, RateModel(CPU), ceiling)
        for run, ceiling in ((dry_run, 10**9), (dry_run, 5_000), (without, 10**9))
    ]
    assert [one if isinstance(one, str) else one.length_limit for one in found] == [
        ("memory", ""), ("longest length tried", ""), ("dry run", "over 10 s"),
    ]  # fmt: skip


# ---- curves ------------------------------------------------------------------------------------


def test_a_curve_interpolates_and_extrapolates_linearly() -> None:
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


def test_a_prediction_that_is_impossible_gives_its_reason() -> None:
    def refuse(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return [DryRunEstimate(unsupported="not on one rank")] * len(trials)

    assert dry_run_curve(ring_trial(), 64 * MIB, refuse, 10**9) == "not on one rank"
    assert predict(ring_trial(), refuse, RateModel(CPU)) == "not on one rank"
    assert find_longest_fit(ring_trial(), refuse, RateModel(CPU), 10**9) == "not on one rank"
    predictor = Predictor(refuse, RateModel(CPU))
    assert predictor.length_model(ring_trial(), 10**9) is None


# ---- rates and times ---------------------------------------------------------------------------


def timed_record(seq_len: int, rate: float, **fields: Any) -> Record:
    trial = ring_trial(seq_len, **fields)
    flops = attention_flops(trial.workload)
    each = {"time": [flops / trial.world_size / rate] * 3, "flops": flops}
    return make.record(trial, make.on_ranks(*[each] * trial.world_size))


def test_a_rate_comes_from_the_record_of_the_same_workload_at_the_nearest_length() -> None:
    records = [timed_record(1024, 1e9), timed_record(16384, 2e9)]
    records += [timed_record(4096, 9e9, heads=4), timed_record(4096, 8e9, causal=True)]
    records.append(timed_record(4096, 3e8, timing="cold"))
    late = make.outcome("timeout", "late", time=[1.0], flops=1.0)
    rates = RateModel(CPU, [*records, make.record(ring_trial(4096), late)])
    for tokens, rate in ((512, 1e9), (1024, 1e9), (2048, 1e9), (9000, 2e9), (10**6, 2e9)):
        found = rates.rate(ring_trial(tokens))
        assert found.flops == pytest.approx(rate)
        assert (found.uncertainty, found.source[:11]) == (RECORD_UNCERTAINTY, "2 record(s)")
    assert RateModel(CPU).rate(ring_trial(1024)).uncertainty == PROFILE_UNCERTAINTY


def test_compute_bound_and_memory_bound_passes() -> None:
    rates = RateModel(NETWORK)
    peak = int(CPU.bandwidth)
    heavy = predict_times(ring_trial(), DryRunEstimate(flops=3 * FLOPS, peak_bytes=peak), rates)
    assert (heavy.compute, heavy.memory, heavy.exposed) == (3.0, MOVES_PER_BYTE, 0.0)
    assert (heavy.total, heavy.limit) == (3.0, "compute")
    light = predict_times(ring_trial(), DryRunEstimate(flops=FLOPS, peak_bytes=peak), rates)
    assert (light.total, light.limit) == (MOVES_PER_BYTE, "memory bandwidth")


def test_a_step_of_decoding_reads_what_it_sees_of_the_cache_once() -> None:
    rates, peak = RateModel(NETWORK), int(CPU.bandwidth)
    trial = ring_trial(mode="decode")
    flops = attention_flops(trial.workload)
    whole = predict_times(trial, DryRunEstimate(flops=flops, peak_bytes=peak), rates)
    assert (whole.total, whole.limit) == (1.0, "memory bandwidth")
    part = predict_times(trial, DryRunEstimate(flops=flops / 4, peak_bytes=peak), rates)
    assert part.memory == pytest.approx(0.25)
    # of two ranks one sees all of its part, the other one nothing
    split = DryRunEstimate(flops=flops / 4, busiest=2.0, peak_bytes=peak)
    ranks = ring_trial(mode="decode", world_size=2)
    assert predict_times(ranks, split, rates).memory == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ranks", "compute", "seconds"), [(2, 1, 10e-3 + 4.0), (3, 1, 20e-3 + 40.0), (2, 100, 4.01)]
)
def test_transfers_except_the_first_overlap_with_compute(
    ranks: int, compute: int, seconds: float
) -> None:
    """They take their latency and their bytes."""
    estimate = DryRunEstimate(flops=compute * FLOPS, bytes_sent=4_000_000, transfers=10)
    trial = ring_trial(world_size=ranks)
    hidden = predict_times(trial, estimate, RateModel(NETWORK))
    assert hidden.transfers == pytest.approx(seconds)
    assert hidden.exposed == pytest.approx(max(seconds - compute, seconds / 10))
    estimate = estimate.model_copy(update={"overlaps": False})
    shown = predict_times(trial, estimate, RateModel(NETWORK))
    assert shown.exposed == pytest.approx(seconds)
    assert shown.total == pytest.approx(compute + seconds)
    assert shown.limit == ("communication" if seconds > compute else "compute")


def test_ranks_of_a_cpu_share_its_cores_and_hide_no_transfers() -> None:
    estimate = DryRunEstimate(flops=FLOPS, bytes_sent=10**9, transfers=10)
    two, four = (
        predict_times(ring_trial(world_size=ranks), estimate, RateModel(CPU)) for ranks in (2, 4)
    )
    link = CPU.link(2)
    assert two.compute == 2.0
    assert two.exposed == pytest.approx(10 * link.latency + 10**9 / link.bandwidth)
    # two ranks on each of the two cores
    assert (four.compute, four.exposed) == (4.0, pytest.approx(2 * two.exposed))


# ---- longest lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [0, 5 * MIB])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_longest_fit_is_where_the_peak_reaches_the_budget(fixed: int, ranks: int) -> None:
    trial = ring_trial(world_size=ranks)

    def larger_dry_run(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return dry_run(trials, fixed, 1.2)

    prediction = find_longest_fit(trial, larger_dry_run, RateModel(CPU), 2**30)
    assert not isinstance(prediction, str)
    tokens = prediction.trial.workload.seq_len
    exact = (ranks * 64 * MIB - fixed) / 1.2 / floor_bytes_per_token(trial.workload)
    assert prediction.fits
    assert tokens == pytest.approx(exact, rel=0.002)
    floor = ranks * 64 * MIB / floor_bytes_per_token(trial.workload)
    assert prediction.fraction_of_floor == pytest.approx(tokens / floor)


def test_a_length_over_the_budget_does_not_fit_and_the_smallest_world_is_found() -> None:
    trial = ring_trial(100_000)
    prediction = predict(trial, dry_run, RateModel(CPU))
    assert not isinstance(prediction, str)
    assert not prediction.fits
    world = find_smallest_world(trial, dry_run, RateModel(CPU), above=1, max_ranks=64)
    assert world is not None
    assert (world.trial.world_size, world.fits) == (13, True)
    assert find_smallest_world(trial, dry_run, RateModel(CPU), above=1, max_ranks=8) is None
    fewer = predict(trial.replace(world_size=12), dry_run, RateModel(CPU))
    assert not isinstance(fewer, str)
    assert not fewer.fits


@pytest.mark.parametrize(
    ("given", "per_node", "fits", "shown", "fewest"),
    [
        (1, 8, 3, 3, 3),  # in a node one at a time
        (1, 8, 9, 16, 16),  # then whole nodes
        (1, 8, 17, 24, 24),
        (16, 8, 9, 16, None),  # one node is too few
        (32, 8, 9, 32, 16),
        (8, 8, 3, 8, 3),
    ],
)
def test_the_fewest_ranks_of_a_target(
    given: int, per_node: int, fits: int, shown: int, fewest: int | None
) -> None:
    hardware = Hardware.model_validate(NETWORK.model_dump() | {"per_node": per_node})
    trial = ring_trial(20_000, world_size=given)
    assert trial.memory_budget
    factor = fits * trial.memory_budget / floor_bytes_per_token(trial.workload) / 20_000

    def run(trials: Sequence[Trial], **limits: Any) -> list[DryRunEstimate]:
        return dry_run(trials, factor=factor * 0.999)

    found = predict_best(trial, run, RateModel(hardware), 20_000)
    assert not isinstance(found, str)
    assert (found.trial.world_size, found.fewest) == (shown, fewest or shown)


def test_the_rest_of_a_model_limits_the_length_and_a_request_alone_is_longer() -> None:
    """By hand: 64 MiB for 4 MiB of weights, the floor, and as much again for each token."""
    trial = ring_trial(1, mode="decode", batch=3, head_dim=64, heads=2)
    each = floor_bytes_per_token(trial.workload)
    lengths: list[int] = []

    def run(trials: Sequence[Trial], **limits: Any) -> list[DryRunEstimate]:
        lengths.extend(one.workload.seq_len for one in trials)
        return dry_run(trials)

    def rest(one: Trial) -> int:
        return 4 * MIB + floor_bytes_per_token(one.workload) * one.workload.seq_len

    found = predict_best(trial, run, RateModel(CPU), None, rest=rest)
    assert not isinstance(found, str)
    assert found.tokens == pytest.approx(60 * MIB / 2 / each, rel=0.005)
    assert found.alone == pytest.approx(3 * found.tokens, rel=0.005)
    assert len(lengths) <= 10


def test_what_lies_outside_tensors_is_taken_from_the_device() -> None:
    fields = {"context": 8 * MIB, "libraries": 2 * MIB, "connection": 3 * MIB, "network": 5 * MIB}
    hardware = Hardware.model_validate(NETWORK.model_dump() | {"outside": fields})

    def sending(trials: Sequence[Trial]) -> list[DryRunEstimate]:
        return [e.model_copy(update={"peers": (0, 1)}) for e in dry_run(trials)]

    rates, of_device = RateModel(hardware), add_outside(sending, hardware)
    # one peer on the same node; with a third rank two communicators leave the node
    for ranks, outside in ((1, 10), (2, 13), (3, 23)):
        trial = ring_trial(world_size=ranks)
        found = find_longest_fit(trial, of_device, rates, 2**30)
        assert not isinstance(found, str)
        exact = ranks * (64 - outside) * MIB / floor_bytes_per_token(trial.workload)
        assert found.trial.workload.seq_len == pytest.approx(exact, rel=0.002)
        assert found.estimate.outside_bytes == outside * MIB
        over = predict(trial.at(round(1.01 * exact)), of_device, rates)
        assert not isinstance(over, str)
        assert not over.fits


def plan_rate(gpu: str, kernel: str, **fields: Any) -> Rate:
    trial = ring_trial(device="cuda", **{"dtype": "bfloat16", "head_dim": 128} | fields)
    estimate = dry_run([trial])[0].model_copy(update={"kernel": kernel})
    found = predict(trial, lambda trials: [estimate], RateModel(profiles()[gpu]))
    assert not isinstance(found, str)
    assert found.times.compute == pytest.approx(estimate.flops / found.rate.flops)
    return found.rate


def test_the_rate_of_a_plan_is_that_of_its_kernel() -> None:
    found = plan_rate("h100", "cudnn")
    assert found.flops == 636e12
    words = "profile of NVIDIA H100 SXM: cudnn, head_dim 128, full: 636 TFLOP/s forward (H100 SXM"
    assert found.source.startswith(words)
    trained = plan_rate("h100", "flash", mode="train").flops
    assert trained == pytest.approx(7 / (2 / 346e12 + 5 / 314e12))
    assert "cudnn, head_dim 64, full" in plan_rate("h100", "cudnn", head_dim=80).source
    usual = profiles()["h100"].rate("bfloat16", "forward")
    none = plan_rate("h100", "efficient", head_dim=32)
    assert (none.flops, none.figure) == (usual, None)
    assert none.source.endswith("has no figure for efficient, forward, bfloat16, head_dim 32")
    assert plan_rate("h100", "flash", dtype="float32").figure is None
    assert plan_rate("h100", "cudnn", mode="decode").figure is None
    assert plan_rate("h100", "").source == "profile of NVIDIA H100 SXM"


def test_a_plan_has_the_published_rate_within_a_tenth() -> None:
    """NVIDIA/cudnn-frontend, 2026-09-28; with 16k tokens flash-attention#2605."""
    full = {("b200", "cudnn"): 1558, ("b200", "flash-attn-4"): 1401, ("a100", "flash"): 201}
    causal = {("b200", "cudnn"): 1593, ("b200", "flash-attn-4"): 1611, ("h200", "cudnn"): 619}
    for figures, masked in ((full, False), (causal, True)):
        for (gpu, kernel), published in figures.items():
            found = plan_rate(gpu, kernel, causal=masked).flops
            assert found == pytest.approx(published * 1e12, rel=0.1), (gpu, kernel, masked)


# ---- predictions for schedules, and their errors -----------------------------------------------


def test_a_length_model_gives_the_fraction_of_each_limit() -> None:
    trial = ring_trial(time_budget=2.0)
    model = Predictor(dry_run, RateModel(CPU, [timed_record(4096, 1e9)])).length_model(trial, 2**30)
    assert model is not None
    tokens = 10_000
    flops = attention_flops(trial.at(tokens).workload)
    loads = model.loads(tokens)
    assert loads["memory"] == pytest.approx(tokens * 2 * 16 * 64 * 4 / (64 * MIB), rel=0.01)
    assert loads["time"] == pytest.approx(flops / 1e9 / 2.0, rel=0.01)
    assert model.uncertainty == {"time": RECORD_UNCERTAINTY}
    prediction = model.predict_run(tokens)
    assert prediction.peak_bytes == pytest.approx(loads["memory"] * 64 * MIB, abs=1)
    assert prediction.seconds == pytest.approx(loads["time"] * 2.0)
    unlimited = Predictor(dry_run, RateModel(CPU)).length_model(ring_trial(), 2**30)
    assert unlimited is not None
    assert set(unlimited.loads(100)) == {"memory"}


def test_a_budget_counts_what_lies_outside_tensors() -> None:
    """As limits.limit_cuda does: the allocator gets what the context and NCCL leave."""
    outside = {"context": 6 * MIB, "libraries": 2 * MIB, "connection": 0, "network": 0}
    gpu = Hardware.model_validate(CPU.model_dump() | {"outside": outside})
    of_device, plain = (Predictor(dry_run, RateModel(one)) for one in (gpu, CPU))
    trial = ring_trial(8000)
    models = [one.length_model(trial, 2**30) for one in (of_device, plain)]
    loads = [model.loads(8000)["memory"] for model in models if model]
    assert loads[0] - loads[1] == pytest.approx(8 / 64)
    assert models[0]
    tensors, one = dry_run([trial])[0].peak_bytes, models[0].predict_run(8000)
    assert (one.peak_bytes, one.outside_bytes) == (pytest.approx(tensors, rel=1e-3), 8 * MIB)
    outcome = make.outcome(peak=32 * MIB, outside_allocator=8 * MIB)
    assert result_of(make.record(ring_trial(), outcome)).loads["memory"] == (32 + 8) / 64
