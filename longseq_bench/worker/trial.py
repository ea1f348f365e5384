"""One trial in its own process: build, warm up, one pass under the budget, check, time.

`_run_steps` is the life of a trial; read it first. memory.py runs the pass under the budget, which
gives the peak; verdicts.py judges its time and its output, and turns an exception into an outcome.
A native crash reports nothing here; the parent reads it from the exit status
(launchers/exit_status.py).

A step of a search (repeats 0) has no timed passes. Far from the budget an upper bound of the peak
is enough. Every row is checked only if the length runs again (round > 0), which confirms it.

All ranks agree on every decision about the next pass, so that no rank waits for a pass that
another one skips.
"""

from functools import partial

import torch

from longseq_bench.attention.base import Attention
from longseq_bench.attention.own_function import find_implementation
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.core.ranks import WARMING_UP, RankInfo
from longseq_bench.distributed.group import Group
from longseq_bench.meters.own_gpu import own_gpu
from longseq_bench.worker import memory
from longseq_bench.worker.check import TINY, row_slices
from longseq_bench.worker.checked_rows import select_checked_rows
from longseq_bench.worker.dense_baseline import dense_flops
from longseq_bench.worker.memory import FirstPass
from longseq_bench.worker.messages import MeasurementLog, MessageSender
from longseq_bench.worker.passes import (
    Pass,
    TrialRun,
    build_layers,
    bytes_sent_by_formula,
    wait_for_all_ranks,
    warm_up,
)
from longseq_bench.worker.repeat_check import RepeatCheck
from longseq_bench.worker.row_check import EveryRowCheck
from longseq_bench.worker.timing import (
    measure_copy_bandwidth,
    measure_matmul_rate,
    run_timed_passes,
)
from longseq_bench.worker.verdicts import Verdicts, outcome_of_exception


def run_trial(
    trial: Trial, sender: MessageSender, group: Group | None = None, place: RankInfo | None = None
) -> Outcome:
    """Run a trial on this rank and return its outcome. It never raises an Exception.

    group: the ranks of the trial; this process alone if None.
    place: what an earlier trial measured, and the file of a profile.
    """
    group = Group.alone() if group is None else group
    log = MeasurementLog(group.rank)
    try:
        outcome = _run_steps(trial, sender, group, log, place or RankInfo())
    except Exception as error:
        memory.lift_heap_limit()
        outcome = memory.name_other_processes(outcome_of_exception(error, sender.phase), trial)
    return log.attach_to(outcome)


def _run_steps(
    trial: Trial, sender: MessageSender, group: Group, log: MeasurementLog, place: RankInfo
) -> Outcome:
    # build, warm up
    attention, *others = _build(trial, group)
    sender.start_phase("start", WARMING_UP)
    for _, one_layer in trial.workload.of_kinds():
        warm_up(type(attention), trial.replace(workload=one_layer), group)
    rows = select_checked_rows(attention, trial.seed, trial.round, trial.options)
    run = TrialRun(trial, attention, rows, sender, log, place, others)
    first, verdicts = FirstPass(**vars(run)), Verdicts(**vars(run))

    # one pass under the memory budget
    if trial.fit_only:
        return first.check_fit()
    pass_ = first.run_quick() if first.is_far_from_budget() else first.run_exact()
    if failure := first.over_budget():
        return failure
    must_time_again = verdicts.must_time_again()
    if not must_time_again and (failure := verdicts.judge_pass_time()):
        return failure
    _log_cost(run)

    # check
    if failure := verdicts.check(pass_):
        return failure
    _log_wire_error(run, pass_)

    # time
    if must_time_again:
        pass_.out, pass_.grads, pass_.keep_output = None, None, False
        pass_.change_inputs()
        run.time_pass(pass_, part="again")
        if failure := verdicts.judge_pass_time():
            return failure
    every_row = EveryRowCheck(attention)
    if trial.repeats:
        repeats = RepeatCheck(run, pass_)
        every_row = repeats.every_row
        run_timed_passes(run, pass_, repeats)
        _log_device_rates(run)
        if failure := verdicts.check_repeats(repeats) or verdicts.over_time_budget():
            return failure
    return verdicts.check_every_row(every_row, pass_) or Outcome(status="ok")


def _build(trial: Trial, group: Group) -> list[Attention]:
    """Build each layer and set up the allocator; may raise UnsupportedError."""
    if trial.threads:
        torch.set_num_threads(trial.threads)
    make = find_implementation(trial.implementation, trial.source)
    layers = build_layers(make, trial.workload, group, trial.options)
    if trial.device == "cuda":
        memory.use_allocator(trial.allocator)
    else:
        memory.use_exact_heap()
    return layers


def _log_cost(run: TrialRun) -> None:
    """Log FLOPs, floor and bytes by formula, and the shares and facts of the implementation."""
    attention, log = run.attention, run.log
    layers, shares = (attention, *run.others), attention.measures()
    log.add("flops", "FLOP", sum(one.cost().flops for one in layers))
    log.add("floor", "B", sum(one.cost().floor_bytes for one in layers))
    if run.trial.workload.decode:
        log.add("bytes_to_read", "B", sum(one.bytes_to_read() for one in layers))
    if attention.counts_traffic:
        sent = sum(bytes_sent_by_formula(one, run.trial) for one in layers)
        log.add("bytes_formula", "B", sent)
    for name, share in shares.items():
        log.add(name, "1", share)
    if "density_achieved" in shares:
        log.add("dense_flops", "FLOP", sum(map(dense_flops, layers)))
    log.facts |= attention.facts()
    if (w := run.trial.workload).latent:
        log.facts["latent"] = f"v is k[..., :{w.v_head_dim}], a view; scores are {w.scale:.6g} q·k"


def _log_device_rates(run: TrialRun) -> None:
    """Log the rate of matrix products in the workload's dtype; for decoding also that of copies.

    A rate that an earlier trial of the run has measured is not measured again.
    """
    group, device, w = run.attention.group, run.trial.device, run.trial.workload
    measures = {"matmul_rate": ("FLOP/s", partial(measure_matmul_rate, group, device, w.dtype))}
    if w.decode:
        measures["copy_bandwidth"] = "B/s", partial(measure_copy_bandwidth, group, device)
    for name, (unit, measure) in measures.items():
        if (rate := run.place.rates.get(name)) is None:
            run.sender.start_phase("check", name)
            rate = measure()
            clocks = own_gpu.handle.read_clocks() if own_gpu.handle else None
            clock_hz = 1e6 * clocks.sm_mhz if clocks else None
        else:
            run.log.facts[name] = "measured by an earlier trial of the run"
            clock_hz = run.place.rates.get("matmul_sm_clock")
        run.log.add(name, unit, rate)
        if name == "matmul_rate" and clock_hz:
            run.log.add("matmul_sm_clock", "Hz", clock_hz)


def _log_wire_error(run: TrialRun, pass_: Pass) -> None:
    """Log how much a compressed transfer changes the output, over the magnitude of its row."""
    uncompressed = run.attention.uncompressed()
    if uncompressed is None:
        return
    assert pass_.out is not None
    uncompressed.prepare(run.trial.device)
    with torch.no_grad():
        wait_for_all_ranks(run.attention.group)
        exact = uncompressed(*pass_.original_inputs)
        worst = 0.0
        for got, expected in zip(row_slices(pass_.out), row_slices(exact), strict=True):
            scale = expected.float().abs().amax(-1).clamp_min(TINY)
            error = (got.float() - expected.float()).abs().amax(-1) / scale
            worst = max(worst, float(error.max()))
    run.log.add("wire_error", "1", run.attention.group.all_max(worst)[0])
