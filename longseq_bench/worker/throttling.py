"""Timed passes that the GPU slowed down: run again after a pause, or named.

NVML is read by the thread that runs the passes, right after each, so that it disturbs none; its
figures lag behind by more than that.
"""

import time
from dataclasses import dataclass, field
from statistics import median

from longseq_bench.core.gpus import Clocks
from longseq_bench.distributed.group import Group
from longseq_bench.meters.clock import Clock
from longseq_bench.meters.own_gpu import own_gpu
from longseq_bench.worker.messages import MeasurementLog, MessageSender
from longseq_bench.worker.verdicts import agree

PAUSES_S = 1, 2, 4, 8, 15
"""Pauses of a round, 30 s in all: what a short load has heated cools down in seconds. A GPU that is
still throttled then will be so for as long as it works."""


@dataclass
class Throttling:
    """The clocks of this rank's GPU after each timed pass. is_watched: on CUDA, on every rank."""

    group: Group
    is_watched: bool
    last: Clocks | None = None
    kept: list[Clocks] = field(default_factory=list)
    dense: list[Clocks] = field(default_factory=list)
    pauses: int = 0

    def read(self) -> None:
        """Note the clocks of the pass that has just ended."""
        self.last = own_gpu.handle.read_clocks() if self.is_watched and own_gpu.handle else None

    def read_dense(self) -> None:
        """Note the clocks of a pass of the dense baseline, which does not run again."""
        self.read()
        self.dense += [self.last] if self.last else []

    def drop_sample(self, clock: Clock, sender: MessageSender) -> float:
        """Drop the last sample if any rank was throttled, and pause; return the seconds, or 0."""
        if not self.is_watched:
            return 0.0
        is_throttled = float(bool(self.last and self.last.slowdown))
        if self.group.all_max(is_throttled)[0] and self.pauses < len(PAUSES_S):
            pause_s = PAUSES_S[self.pauses]
            self.pauses += 1
            del clock.wall[-1], clock.cpu[-1]
            sender.start_phase("check", f"throttled, {pause_s} s of pause")
            time.sleep(pause_s)
            return pause_s
        self.kept += [self.last] if self.last else []
        return 0.0

    def add_to(self, log: MeasurementLog) -> None:
        """Log the clocks of the passes that count, and a sentence if some were throttled."""
        kept, own = self.kept, None
        if kept:
            log.add("sm_clock", "Hz", *(1e6 * one.sm_mhz for one in kept))
            log.facts["clocks"] = {
                "highest_mhz": kept[0].highest_mhz,
                "celsius": max(one.celsius for one in kept),
                "watts": max(one.watts for one in kept),
                "limited_by": sorted({name for one in kept for name in one.limits}),
                "repeated": self.pauses,
            }
        timed = kept + self.dense
        if slow := [one for one in timed if one.slowdown]:
            mhz, hottest = median(one.sm_mhz for one in slow), max(one.celsius for one in slow)
            of = f"{mhz:,.0f} of {slow[0].highest_mhz:,.0f} MHz, {hottest:.0f} °C"
            own = (
                f"{len(slow)} of {len(timed)} passes throttled ({slow[0].slowdown}): SM clock {of}"
            )
        if self.is_watched and (reason := agree(own, self.group)):
            log.facts["throttled"] = reason
