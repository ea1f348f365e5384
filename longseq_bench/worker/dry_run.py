"""Predict the memory and work of a trial without running it: its pass runs on `meta` tensors.

The layout is prepared for real, and the pass dispatches its real operators, so each storage counts
while it is referenced (meta_mode.py, meters/memory.py). The workspace of a fused kernel is not
visible and comes from a table (memory.py).

A block layout with a fixed sparsity grows with the square of the length: for 16M tokens in blocks
of 128 it takes minutes and many GB. So it is extrapolated from two small layouts. On several ranks
they have the same tokens in larger blocks, which changes what a rank holds, fetches and sends by
rounding only. On one rank they have fewer tokens in the same blocks, because kernels depend on the
size of a block; tensors are a line in the tokens. Lists of the layout (tensors of integers) are a
multiple of the tokens plus a multiple of the kept blocks, whose number is known without the layout.
FLOPs are in proportion to the visible pairs.
"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

import numpy as np
import psutil
import torch

from longseq_bench import meta_mode
from longseq_bench.attention.base import Attention
from longseq_bench.attention.own_function import find_implementation, find_place
from longseq_bench.attention.sparse.block_sparse import LayoutAttention
from longseq_bench.core.errors import KernelLimitError, LongseqError, UnsupportedError
from longseq_bench.core.model import DryRunEstimate, Trial
from longseq_bench.core.registry import is_own
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import host_memory
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.meters.memory import HeapPeak, StoragePeak
from longseq_bench.worker import memory
from longseq_bench.worker.check import Array
from longseq_bench.worker.memory import KernelWorkspace
from longseq_bench.worker.passes import (
    WARM_UP_TOKENS,
    build_layers,
    bytes_sent_by_formula,
    draw_layers,
    run_pass,
)

FREE_SHARE = 0.5
"""The share of the free memory that layouts may take."""

MAX_KEPT_BLOCKS = 2**20
"""Blocks of the larger of the two layouts: a fifth of a second."""

EXTRAPOLATED_FROM = 2**22
"""Layouts with more blocks than this are extrapolated."""


def dry_run(
    trials: Sequence[Trial], capability: tuple[int, int] | None = None
) -> list[DryRunEstimate]:
    """Predict the memory, work and communication of each trial on the rank that needs most.

    Call it in a process of its own: afterwards its memory is limited.

    capability: of the GPU; None: any.
    """
    if any(trial.device == "cpu" for trial in trials):
        memory.use_exact_heap()  # for HeapPeak; it makes large arrays five times as slow
    memory.limit_heap(int(psutil.virtual_memory().available * FREE_SHARE))
    threads = torch.get_num_threads()
    estimates = []
    for trial in trials:
        smaller = () if is_own(trial.implementation) else smaller_trials(trial)
        with meta_mode.standing_for(trial.device, capability):
            found = [_predict(one, threads) for one in smaller or [trial]]
        estimates.append(extrapolate(trial, smaller, found) if smaller else found[0])
    return estimates


def _refuse_to_compile(*args: Any) -> None:
    # what a compiled graph keeps in memory is not that of the operators it replaces
    raise UnsupportedError(
        "it calls torch.compile, whose memory can't be predicted; measure it with maxlen, or "
        "predict it without torch.compile"
    )


def _predict(trial: Trial, threads: int) -> DryRunEstimate:
    # ranks on one host share its cores
    torch.set_num_threads(trial.threads or max(1, threads // trial.world_size))
    try:
        make = find_implementation(trial.implementation, trial.source)
        if not make.__module__.startswith("longseq_bench."):
            # none of ours compiles here, and this imports torch's compiler, which takes 0.7 s
            torch.compiler.set_stance("default", force_backend=_refuse_to_compile)
        if reason := trial.unsupported_reason:
            return DryRunEstimate(unsupported=reason)
        if trial.device == "cpu" and (reason := make.unavailable_reason(trial.device)):
            return DryRunEstimate(unsupported=reason)
        # a short layout of the same kind first, so that no rank is charged for one-time costs
        short = trial.at(min(trial.workload.seq_len, WARM_UP_TOKENS * trial.world_size))
        with suppress(UnsupportedError):
            make(short.workload, Group(0, trial.world_size), **trial.options).prepare(trial.device)
        ranks = [
            build_layers(make, trial.workload, Group(r, trial.world_size), trial.options)
            for r in sorted({0, trial.world_size - 1})
        ]
        busiest = max(rank[0].work_share() for rank in ranks)
        if not isinstance(ranks[0][0], LayoutAttention):
            # in a block layout, ranks with as many tokens may fetch different blocks
            ranks = [max(ranks, key=lambda rank: rank[0].shard.tokens)]
        estimates = []
        while ranks:
            # a layout takes memory while it exists, so one rank after the other
            estimates.append(_predict_rank(ranks.pop(0), trial))
    except MemoryError:
        return DryRunEstimate(unsupported="its layout alone takes more memory than is available")
    except Exception as error:
        # torch.compile wraps an error of ours
        own = getattr(error, "inner_exception", error)
        if isinstance(own, LongseqError):
            too_long = isinstance(own, KernelLimitError)
            return DryRunEstimate(unsupported=str(own), too_long=too_long)
        # from a plug-in, or from an operator or a compiler that doesn't support meta tensors
        first, *_ = str(error).splitlines() or [type(error).__name__]
        where = f" ({place})" if (place := find_place(error)) else ""
        return DryRunEstimate(unsupported=f"can't run without data: {first[:200]}{where}")
    fullest = max(estimates, key=lambda e: e.peak_bytes)
    # the rank with the highest peak is not always the one that sends most
    sends_most = max(estimates, key=lambda e: e.bytes_sent)
    return fullest.model_copy(
        update={
            "flops": fullest.flops / trial.world_size,
            "busiest": max(1.0, busiest * trial.world_size),
            **sends_most.model_dump(include={"bytes_sent", "transfers", "overlaps", "peers"}),
        }
    )


def _predict_rank(layers: Sequence[Attention], trial: Trial) -> DryRunEstimate:
    attention, workspace = layers[0], KernelWorkspace()
    meter = StoragePeak("meta", workspace)
    # the heap of the host includes the layout, so add it if the trial is measured by the heap
    heap = HeapPeak() if trial.device == "cpu" and not HeapPeak.unavailable_reason() else None
    host_memory.usage.restart()
    with meter:
        rows = torch.zeros(1, dtype=torch.long)
        pass_ = draw_layers(layers, "meta", trial.seed, rows, trial.keep)
        with heap or nullcontext():
            for one in dict.fromkeys(layers):
                one.prepare(trial.device)
        prepared = meter.current + (heap.peak if heap else 0)
        run_pass(attention, pass_)
    costs, group, name = [a.cost() for a in layers], attention.group, attention.comparable_kernel
    # published rates of dense attention don't apply to a sparse one
    kernel = name if attention.is_exact else f"sparse {name}"
    # by communicator; that of all ranks always exists
    peers = {(): set[int]()} | group.traffic.peers if group.size > 1 else {}
    sent = sum(bytes_sent_by_formula(one, trial) for one in layers)
    return DryRunEstimate(
        peak_bytes=max(prepared, meter.peak + (heap.kept if heap else 0)),
        inside_bytes=meter.peak_workspace,
        index_bytes=meter.peak_indices,
        most_index_bytes=meter.most_indices[0],
        peak_at_most_index=meter.most_indices[1],
        host_bytes=host_memory.usage.peak,
        untabled=tuple(sorted(workspace.unknown)),
        flops=sum(one.flops for one in costs),
        floor_bytes=sum(one.floor_bytes for one in costs),
        bytes_sent=sent,
        transfers=round(group.traffic.transfers * sent / (group.traffic.bytes_sent or 1)),
        overlaps=attention.overlaps,
        kernel="" if name == AUTO else kernel,
        peers=tuple(map(len, peers.values())),
    )


def smaller_trials(trial: Trial) -> Sequence[Trial]:
    """Return the two trials from which to extrapolate; none if the trial has its own dry run.

    On a CPU the layout is part of the peak; with a mask its rows are not alike: it is built.
    """
    is_built = trial.device == "cpu" or trial.workload.mask is not None
    if is_built or _kept(trial) <= EXTRAPOLATED_FROM:
        return ()

    def shrink(factor: int) -> Trial:
        block = _block(trial)
        if trial.world_size > 1:
            return trial.replace(options=trial.options | {"block": factor * block})
        # whole blocks: a short last block is a list more
        return trial.at(max(1, trial.workload.seq_len // (factor * block)) * block)

    factor = 1
    while _kept(shrink(factor)) > MAX_KEPT_BLOCKS:
        factor += 1 + factor // 8
    return shrink(factor), shrink(2 * factor)


def extrapolate(
    trial: Trial, smaller: Sequence[Trial], estimates: Sequence[DryRunEstimate]
) -> DryRunEstimate:
    """Return the estimate of a trial from those of `smaller_trials`."""
    if refused := next((one for one in estimates if one.unsupported), None):
        return refused
    sizes = [(one.workload.seq_len, _block(one), _kept(one)) for one in (*smaller, trial)]
    tokens, block, kept = np.array(sizes, dtype=np.float64).T
    at = block if trial.world_size > 1 else tokens

    def on_line(name: str) -> float:
        """Extrapolate by a line in the size of a block, or in the tokens."""
        a, b = (float(getattr(one, name)) for one in estimates)
        return a + (a - b) / float(at[0] - at[1]) * float(at[2] - at[0])

    def from_terms(name: str, *terms: Array) -> float:
        """Extrapolate a sum of terms with unknown factors."""
        values = [float(getattr(one, name)) for one in estimates]
        # scaled by the first; terms that depend on each other get the smallest factors
        known = np.stack([term / term[0] for term in terms], 1)
        return float(np.linalg.lstsq(known[:2], values, rcond=None)[0] @ known[2])

    def peak(name: str, of_lists: str) -> tuple[int, int]:
        lists = from_terms(of_lists, tokens, kept)
        return round(on_line(name) - on_line(of_lists) + lists), round(lists)

    # lists grow most, so the moment with most lists may become the peak
    moments = peak("peak_bytes", "index_bytes"), peak("peak_at_most_index", "most_index_bytes")
    peak_bytes, index_bytes = max(moments)
    lines = ("host_bytes", "floor_bytes", "bytes_sent", "transfers", "inside_bytes")
    return estimates[0].model_copy(
        update={name: round(on_line(name)) for name in lines}
        | {
            "peak_bytes": peak_bytes,
            "index_bytes": index_bytes,
            "peak_at_most_index": moments[1][0],
            "most_index_bytes": moments[1][1],
            # a causal diagonal block has half of its pairs
            "flops": from_terms("flops", tokens * block, kept * block**2),
            "smaller_layouts": tuple((n, size) for n, size, _ in sizes[:2]),
        }
    )


def _kept(trial: Trial) -> int:
    """Return the kept blocks; 0 of an implementation that is missing, as the dry run explains."""
    with suppress(LongseqError):
        return find_implementation(trial.implementation).kept_blocks(
            trial.workload, **trial.options
        )
    return 0


def _block(trial: Trial) -> int:
    # every implementation with kept_blocks has this option
    return cast("int", trial.options["block"])
