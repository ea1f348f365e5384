"""Timed passes, and over ranks what of a pass is computing and what communicating.

Every rank starts a pass when all are there; that wait is in no sample. A pass takes as long as on
its slowest rank. Over ranks three kinds take turns, so that drift meets all alike: whole passes,
passes that only compute, passes that only communicate. A sparse attention takes turns with dense
attention, by which its time is judged.
"""

from __future__ import annotations

import time

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import Trial
from longseq_bench.core.stats import settled
from longseq_bench.meters.clock import Clock, clock_for
from longseq_bench.worker.dense_baseline import dense_baseline_for
from longseq_bench.worker.inputs import Pass
from longseq_bench.worker.measurement_log import MeasurementLog
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.passes import run_pass

TIMED_WARM_UPS = 1
SETTLED_WITHIN = 0.02


def timed(
    attention: Attention, one: Pass, trial: Trial, sender: MessageSender, log: MeasurementLog
) -> None:
    """Passes until the slowest rank's median is known to 2 % or the cap is reached; every rank
    keeps every sample of its own. What `one` held of outputs is dropped.

    `log` say whether the attention is sparse; passes of the dense yardstick don't count for the
    cap, so that a sparse attention is timed as often as any other.
    """
    group = attention.group
    one.out = one.grads = None
    one.aside = False
    if one.grad_out is not None:
        one.grad_out.normal_()
    whole, halves = clock_for(trial.device), _Halves(attention, one, trial.device)
    warm_ups = TIMED_WARM_UPS if trial.repeats > 1 else 0
    dense = dense_baseline_for(attention, one, trial.device, warm_ups, trial.time_cap, log)
    for _ in range(warm_ups):
        sender.start_phase("time", "warm-up")
        run_pass(attention, one)
        one.out = one.grads = None
    planned: list[float] = []
    end = time.perf_counter() + trial.time_cap
    while len(whole.wall) < trial.repeats:
        _one(attention, one, whole, sender, f"pass {len(whole.wall) + 1}")
        planned += [attention.layout_s] if attention.layout_s else []
        if group.size > 1:
            halves.one(sender)
        if dense:
            end += dense.turn(sender, whole.wall[-1])
        late = time.perf_counter() > end
        slowest, stop = group.all_max(whole.wall[-1], float(late))
        log.slowest.append(slowest)
        if settled(log.slowest, SETTLED_WITHIN) or stop:
            break
    log.extend(whole.measurements())
    if planned:
        log.add("plan_time", "s", *planned)
    if group.size > 1:
        halves.onto(log)
    if dense:
        dense.onto(log)
        sender.start_phase("time")
    log.facts["timer"] = whole.name


class _Halves:
    """Passes with one half switched off. Their output is no output and is dropped."""

    def __init__(self, attention: Attention, one: Pass, device: str) -> None:
        self._attention, self._one = attention, one
        self._compute, self._communicate = clock_for(device), clock_for(device)

    def one(self, sender: MessageSender) -> None:
        """A pass of each kind."""
        only = self._attention.group.only
        part = f"{{}} of pass {len(self._compute.wall) + 1}"
        with only(communicate=False):
            _one(self._attention, self._one, self._compute, sender, part.format("computing"))
        with only(compute=False):
            _one(self._attention, self._one, self._communicate, sender, part.format("transfers"))

    def onto(self, log: MeasurementLog) -> None:
        """Keep all samples."""
        log.add("compute_time", "s", *self._compute.wall)
        log.add("communication_time", "s", *self._communicate.wall)


def _one(attention: Attention, one: Pass, clock: Clock, sender: MessageSender, part: str) -> None:
    """All ranks meet, then the clock starts."""
    sender.start_phase("time", part)
    attention.group.barrier()
    with clock:
        run_pass(attention, one)
    one.out = one.grads = None
