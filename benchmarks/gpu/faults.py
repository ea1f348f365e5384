"""Step faults: after each way to fail the next trial runs, and the device's memory is free again.

The implementations with a fault are in tests/plugins.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from benchmarks.gpu.items import Figures, Item, ItemFailed, Session, Step, plain_table
from longseq_bench.core.gpus import read_visible_gpus
from longseq_bench.core.model import Outcome, Trial, Workload

TOKENS = 2048
"""Faults show from this length on; warm-ups are shorter."""
MIB = 2**20
TOLERANCE_BYTES = 64 * MIB
"""Memory of the device that may differ from before."""
FREE_WITHIN_S = 15.0
BUDGET = {"cuda": 2**32, "cpu": 64 * MIB}


@dataclass(frozen=True)
class Fault:
    """A way to fail: the implementation, and the statuses with which its trial may end."""

    implementation: str
    statuses: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


LATE = {"time_budget": 0.2}
FAULTS: dict[str, dict[str, Fault]] = {
    "cuda": {
        "illegal access": Fault("gpu-illegal-access", ("error", "crashed")),
        "allocator out of memory": Fault("gpu-eats", ("oom",)),
        "other out of memory": Fault("gpu-eats-uncached", ("oom",)),
        "timeout": Fault("bad-sleeps", ("timeout",), LATE),
        "SIGSTOP": Fault("bad-stops", ("hang", "timeout"), LATE),
        "kill -9": Fault("bad-kills-itself", ("crashed",)),
        "segmentation fault": Fault("bad-segfault", ("crashed",)),
    },
    "cpu": {
        "out of memory": Fault("bad-eats", ("oom",)),
        "unchecked allocation": Fault("bad-native", ("oom",)),
        "timeout": Fault("bad-sleeps", ("timeout",), LATE),
        "SIGSTOP": Fault("bad-stops", ("hang", "timeout"), LATE),
        "kill -9": Fault("bad-kills-itself", ("crashed",)),
    },
}


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per fault that this device can have."""
    return [
        Item(name, partial(provoke, session, fault))
        for name, fault in FAULTS[session.device].items()
    ]


def provoke(session: Session, fault: Fault, ranks: int = 1) -> Figures:
    """Run a trial with a fault, then a sound one. Raises ItemFailed if the fault left a trace."""
    session.launcher.catalogue()  # starts the fork server, which stays
    before = Trace.now(session.device)
    outcome = run(session, fault.implementation, ranks, **fault.settings)
    following = run(session, "sdpa" if ranks == 1 else "ring", ranks)
    after = Trace.settled(session.device, before)
    figures: Figures = {
        "status": outcome.status, "phase": outcome.phase, "reason": outcome.reason,
        "next_status": following.status, "memory_before": before.used_bytes,
        "memory_after": after.used_bytes, "processes_before": before.processes,
        "processes_after": after.processes,
    }  # fmt: skip
    check_statuses(fault, outcome, following, figures)
    if not after.is_clean(before):
        raise ItemFailed(f"{FREE_WITHIN_S:.0f} s later memory or processes are left", figures)
    return figures


def check_statuses(fault: Fault, outcome: Outcome, following: Outcome, figures: Figures) -> None:
    """Raise ItemFailed for an unexpected status of a trial with a fault, or of the next trial."""
    if outcome.status not in fault.statuses:
        expected = " or ".join(fault.statuses)
        raise ItemFailed(f"{outcome.status} instead of {expected}: {outcome.reason}", figures)
    if following.status != "ok":
        raise ItemFailed(f"the next trial: {following.status}, {following.reason}", figures)


def run(session: Session, name: str, ranks: int, **settings: Any) -> Outcome:
    """Return the outcome of one pass of an implementation."""
    workload = Workload(seq_len=ranks * TOKENS, heads=2, head_dim=64, dtype="float32")
    fields: dict[str, Any] = {"memory_budget": BUDGET[session.device], "repeats": 0, **settings}
    trial = Trial(
        implementation=name, options=session.launcher.catalogue().options(name, {}),
        workload=workload, device=session.device, world_size=ranks, **fields,
    )  # fmt: skip
    return session.launcher.run(trial, lambda phase, part: None).outcome


@dataclass(frozen=True)
class Trace:
    """Things that a trial may leave behind.

    used_bytes: memory of all GPUs that is in use; 0 on a CPU.  processes: below this process.
    """

    used_bytes: int
    processes: int

    @classmethod
    def now(cls, device: str) -> "Trace":
        """Read the present state."""
        used = 0
        if device == "cuda":
            report = read_visible_gpus()
            free = [gpu.free for gpu in report.visible]
            if None in free or not free:
                raise ItemFailed(f"NVML gives no free memory: {report.reason or report.visible}")
            used = -sum(number or 0 for number in free)
        return cls(used, len(psutil.Process().children(recursive=True)))

    @classmethod
    def settled(cls, device: str, before: "Trace") -> "Trace":
        """Wait until nothing is left: the driver frees memory a moment after a process ends."""
        end = time.monotonic() + FREE_WITHIN_S
        while not (trace := cls.now(device)).is_clean(before) and time.monotonic() < end:
            time.sleep(0.1)
        return trace

    def is_clean(self, before: "Trace") -> bool:
        """Return True if nothing is left."""
        more = self.used_bytes - before.used_bytes
        return more <= TOLERANCE_BYTES and self.processes <= before.processes


STEP = Step("faults", list_items, plain_table)
