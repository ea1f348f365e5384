"""What a trial would take, known without running it: its pass is walked on `meta` tensors.

Memory is that of the implementation itself: its plan is made for real, its operations are
dispatched as they would be, and each storage is counted while somebody holds it (meta_mode.py,
meters/storage_peak.py). What a fused kernel allocates inside itself is not visible and comes from
a table (data/workspaces.yaml).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType

import numpy as np
import psutil
import torch

from longseq_bench import meta_mode
from longseq_bench.attention.base import IMPLEMENTATIONS, Attention, ExactAttention
from longseq_bench.attention.sparse.block_layout_attention import LayoutAttention
from longseq_bench.core.cost import visible_pairs
from longseq_bench.core.errors import LongseqError, UnsupportedError
from longseq_bench.core.model import Foresight, Trial
from longseq_bench.distributed.group import Group
from longseq_bench.meters.heap_peak import HeapPeak
from longseq_bench.meters.storage_peak import StoragePeak
from longseq_bench.worker import limits
from longseq_bench.worker.inputs import draw
from longseq_bench.worker.kernel_workspace import KernelWorkspace
from longseq_bench.worker.passes import (
    WARM_UP_TOKENS,
    bytes_sent_by_formula,
    run_pass,
    unsupported_setting,
)


def dry_run(trials: Sequence[Trial]) -> list[Foresight]:
    """What each trial would take on its fullest rank. For a process of its own: from now on this
    one computes nothing, and its plans may take a share of the memory that is free and no more."""
    _compile_nothing()
    limits.exact_heap()
    limits.limit_heap(int(psutil.virtual_memory().available * FREE_SHARE))
    threads = torch.get_num_threads()
    return [_dry_run(trial, threads) for trial in trials]


def _compile_nothing() -> None:
    """torch imports its compiler in the first operation without data, only to keep it out of there:
    0.7 s, and a folder that stays behind. Here nothing is ever compiled."""
    name = "torch._dynamo"
    if name not in sys.modules:
        stand_in = ModuleType(name)
        vars(stand_in)["disable"] = lambda function, *rest, **more: function
        sys.modules[name] = vars(torch)["_dynamo"] = stand_in


def _dry_run(trial: Trial, threads: int) -> Foresight:
    meta_mode.enable(trial.device)
    # ranks of a CPU share its cores
    torch.set_num_threads(trial.threads or max(1, threads // trial.world_size))
    make = None
    try:
        make = IMPLEMENTATIONS.get(trial.implementation)
        if reason := unsupported_setting(trial):
            return Foresight(unsupported=reason)
        if trial.device == "cpu" and (reason := make.unavailable_reason(trial.device)):
            return Foresight(unsupported=reason)
        _plan_once(make, trial)
        ends = _ends(make, trial)
        busiest = max(_share(one) for one in ends)
        ends, seen = _fullest(ends), []
        while ends:
            # one after the other: a plan takes memory for as long as it is there
            seen.append(_of_rank(ends.pop(0), trial))
    except LongseqError as error:
        return Foresight(unsupported=str(error))
    except MemoryError:
        return Foresight(unsupported="its plan alone takes more memory than is free here")
    except Exception as error:
        # of a plug-in, or of operations that meta tensors don't have
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Foresight(unsupported=f"can't be walked without data: {first[:200]}")
    fullest = max(seen, key=lambda one: one.peak_bytes)
    # where peaks are as good as equal, which is the fullest says nothing of who sends most
    sends = max(seen, key=lambda one: one.bytes_sent)
    ranks = trial.world_size
    return fullest.model_copy(
        update={
            "flops": fullest.flops / ranks,
            "busiest": max(1.0, busiest * ranks),
            **sends.model_dump(include={"bytes_sent", "transfers", "overlaps"}),
        }
    )


def _plan_once(make: type[Attention], trial: Trial) -> None:
    """A short plan of the same kind, so that what is loaded once is not charged to the first."""
    short = trial.at(min(trial.workload.seq_len, WARM_UP_TOKENS * trial.world_size))
    with suppress(UnsupportedError):
        make(short.workload, Group(0, trial.world_size), **trial.options).prepare(trial.device)


def _fullest(ends: list[Attention]) -> list[Attention]:
    """Ranks that may need most: the one with most tokens of the first and the last. Where tokens
    are as many, what is fetched may not be, so a layout's ranks are both looked at."""
    if isinstance(ends[0], LayoutAttention):
        return ends
    return [max(ends, key=lambda one: len(one.shard.queries))]


def _ends(make: type[Attention], trial: Trial) -> list[Attention]:
    """The first rank's and the last one's."""
    ranks = sorted({0, trial.world_size - 1})
    return [make(trial.workload, Group(r, trial.world_size), **trial.options) for r in ranks]


def _of_rank(attention: Attention, trial: Trial) -> Foresight:
    inside, heap = KernelWorkspace(torch.get_num_threads()), _PlanHeap(trial.device)
    meter = StoragePeak("meta", inside)
    with meter:
        rows = torch.zeros(1, dtype=torch.long)
        one = draw(attention, "meta", trial.seed, rows, trial.keep)
        heap.around(lambda: attention.prepare(trial.device))
        planned = meter.now + heap.peak
        run_pass(attention, one)
    cost, traffic = attention.cost(), attention.group.traffic
    sent = bytes_sent_by_formula(attention, trial)
    return Foresight(
        peak_bytes=max(planned, meter.peak + heap.kept),
        inside_bytes=meter.at_peak_inside,
        untabled=tuple(sorted(inside.untabled)),
        flops=cost.flops,
        floor_bytes=cost.floor_bytes,
        bytes_sent=sent,
        transfers=round(traffic.transfers * sent / traffic.bytes_sent) if traffic.bytes_sent else 0,
        overlaps=attention.overlaps,
    )


def _share(attention: Attention) -> float:
    """Of the whole work, what one rank does."""
    w, own = attention.workload, attention.shard
    rows = len(own.queries) / w.seq_len
    if w.causal and isinstance(attention, ExactAttention):
        # a row sees as many keys as stand before it
        rows = float(np.add(own.queries, 1, dtype=np.float64).sum()) / visible_pairs(
            w.seq_len, True
        )
    return rows * len(own.batch) * len(own.heads) / (w.batch * w.heads)


FREE_SHARE = 0.5
"""Of the free memory: what plans may take."""


class _PlanHeap:
    """What planning takes of the host's memory, where that is what the trial is measured by."""

    def __init__(self, device: str) -> None:
        self.peak = self.kept = 0
        self._meter = (
            HeapPeak() if device == "cpu" and HeapPeak.unavailable_reason() is None else None
        )

    def around(self, plan: Callable[[], None]) -> None:
        if self._meter is None:
            plan()
            return
        with self._meter:
            plan()
        self.peak, self.kept = self._meter.peak, self._meter.kept
