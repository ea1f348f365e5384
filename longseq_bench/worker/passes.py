"""One pass of an attention, and the short warm-up pass before it, which no budget covers."""

import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import host_memory
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.sparse_selection import torch_kernel
from longseq_bench.meters.clock import wait_for_device
from longseq_bench.worker.inputs import Pass, draw_inputs
from longseq_bench.worker.messages import MeasurementLog, MessageSender

WARM_UP_TOKENS = 1024
"""Tokens of each rank in a warm-up pass.

Libraries keep memory that they allocate in the first pass: MKL 4 MiB per thread from 768 query rows
up, oneDNN a compiled kernel per shape (so the warm-up has the same remainder modulo this number),
connections their threads. The warm-up allocates it, so that no trial is charged for it."""


@dataclass
class TrialRun:
    """A trial on this rank, and what was measured of it.

    rows: global query positions that are checked, the same on all ranks.
    """

    trial: Trial
    attention: Attention
    rows: Tensor
    sender: MessageSender
    log: MeasurementLog

    def time_pass(self, one: Pass, log: MeasurementLog | None = None, part: str = "") -> None:
        """Run a pass that all ranks begin together; its time is that of the slowest rank."""
        log = log or self.log
        wait_for_all_ranks(self.attention.group, self.sender)
        with CompileWatch() as watch:
            start = time.perf_counter()
            run_pass(self.attention, one, self.sender, part)
            synchronize(self.trial.device)
            log.own_pass_s = time.perf_counter() - start
        log.pass_s, compiled = self.attention.group.all_max(log.own_pass_s, float(watch.compiled))
        log.compiled = bool(compiled)


def run_pass(
    attention: Attention, one: Pass, sender: MessageSender | None = None, part: str = ""
) -> None:
    """Run forward, and in train mode backward.

    The output and the gradients of q, k, v are stored in `one`, those of a module's matrices in
    `.grad`. part: a detail of the phase, for progress output.
    """
    for matrix in attention.projections().values():
        matrix.grad = None
    if sender:
        sender.start_phase("forward", part)
    if one.keep == "all":
        one.out = attention(*one.inputs)
    else:
        run_forward(attention, one)
    if one.grad_out is None:
        return
    if one.keep != "all":
        # in a model the next layer has used the output by then; the check has a copy on the host
        assert one.out is not None
        one.out = host_memory.copy(one.out, one.out.device.type) if one.keep_output else None
    if sender:
        sender.start_phase("backward", part)
    _run_backward(attention, one, one.grad_out)


def _run_backward(attention: Attention, one: Pass, grad_out: Tensor) -> None:
    if one.keep != "all":
        one.grads = attention.backward_recompute(grad_out, *one.inputs, one.keep == "nothing")
        if one.grads is not None:
            return
        one.out = attention(*one.inputs)
    assert one.out is not None
    if attention.projections():
        # the hooks that sum gradients over ranks run in a backward that accumulates
        torch.autograd.backward(one.out, grad_out)
        dq, dk, dv = (cast("Tensor", t.grad) for t in one.inputs)
        for t in one.inputs:
            t.grad = None
    else:
        dq, dk, dv = torch.autograd.grad(one.out, one.inputs, grad_out)
    one.grads = dq, dk, dv
    one.out = one.out.detach()


def run_forward(attention: Attention, one: Pass) -> None:
    """Run a forward that keeps nothing for a backward, and store its output."""
    with torch.no_grad():
        inplace = one.keep == "nothing" and one.grad_out is None
        one.out = (attention.forward_inplace if inplace else attention)(*one.inputs)


def bytes_sent_by_formula(attention: Attention, trial: Trial) -> int:
    """Return the bytes that a rank sends in a pass. If nothing is kept, forward runs twice."""
    sent = attention.cost().bytes_sent
    if trial.keep == "all" or not trial.workload.train or attention.group.size == 1:
        return sent
    forward_only = trial.workload.model_copy(update={"mode": "forward"})
    forward = type(attention)(forward_only, attention.group, **trial.options)
    forward.prepare(trial.device)
    return sent + forward.cost().bytes_sent


def wait_for_all_ranks(group: Group, sender: MessageSender | None = None) -> None:
    """Wait until every rank is ready, so that all start together. This wait is never timed."""
    if group.size == 1:
        return
    if sender:
        sender.start_phase("communication", "waiting for all ranks")
    group.barrier()


def warm_up(make: type[Attention], trial: Trial, group: Group) -> None:
    """Run a short pass of the same kind: it starts threads, libraries, connections and caches."""
    attention = _prepare_short(make, trial, group)
    rows = torch.zeros(1, dtype=torch.long)
    one = draw_inputs(attention, trial.device, trial.seed, rows, trial.keep)
    if trial.device == "cuda":
        # a kernel takes device memory from its first use on; those of the check are not the trial's
        one.protect_inputs()
    run_pass(attention, one)
    if trial.device == "cpu":
        _allocate_library_buffers(attention.workload)
    synchronize(trial.device)
    attention.multiplicity(torch.arange(1).numpy(), torch.arange(1).numpy(), 0)
    group.all_sum(torch.zeros(group.size, dtype=torch.float64))
    group.all_max(0.0)


def _prepare_short(make: type[Attention], trial: Trial, group: Group) -> Attention:
    """Return the trial's attention, prepared, at the shortest length that its options allow."""
    shape = trial.workload.model_dump() | {"batch": min(trial.workload.batch, group.size)}
    complete, short = trial.workload.seq_len, group.size * WARM_UP_TOKENS
    tokens = max(min(complete, short + complete % short), trial.workload.new_tokens)
    while True:
        small = Workload.model_validate(shape | {"seq_len": tokens})
        try:
            attention = make(small, group, **trial.options)
            attention.prepare(trial.device)
        except UnsupportedError:
            if tokens == complete:
                raise
            tokens = min(2 * tokens, complete)
        else:
            return attention


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        wait_for_device()


def _allocate_library_buffers(w: Workload) -> None:
    """Call the fused kernel with its largest tiles, and a product that fills MKL's buffers."""
    rows = torch.zeros(torch.get_num_threads(), 2 * WARM_UP_TOKENS, w.head_dim)
    torch.bmm(rows, rows.transpose(1, 2))
    shape = (torch.get_num_threads(), 1, WARM_UP_TOKENS, w.head_dim)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, w.dtype)) for _ in range(3))
    kernel = torch_kernel(Use("cpu", q.dtype, w.head_dim, w.train))
    out, lse = kernel.forward(q, k, v)
    if w.train:
        kernel.backward((out, q, out, lse), (k, v))


class CompileWatch:
    """A context manager. `compiled` is True at its end if anything was compiled inside.

    Triton compiles a kernel for each new combination of types and constants, torch.compile a graph
    for each new shape that its guards refuse. The short warm-up pass meets most of them, but not
    all. A kernel that is loaded from a cache on disk counts too, and so does the import of Triton
    or of torch's compiler, which this class doesn't import.
    """

    def __init__(self) -> None:
        self.compiled = False

    def __enter__(self) -> "CompileWatch":
        self._before = _graphs(), "triton" in sys.modules
        self._knobs: Any = sys.modules.get("triton.knobs")
        if self._knobs:
            self._earlier = self._knobs.runtime.jit_post_compile_hook
            self._knobs.runtime.jit_post_compile_hook = self._hook
        return self

    def _hook(self, *args: Any, **kwargs: Any) -> Any:
        """Notice a compilation by Triton, and call the hook that was set before."""
        self.compiled = True
        return self._earlier(*args, **kwargs) if self._earlier else None

    def __exit__(self, *raised: Any) -> None:
        if self._knobs:
            self._knobs.runtime.jit_post_compile_hook = self._earlier
        if (_graphs(), "triton" in sys.modules) != self._before:
            self.compiled = True


def _graphs() -> int:
    """Return the number of graphs that torch.compile has compiled, later backwards included."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    names = (f"fxgraph_cache_{event}" for event in ("miss", "hit", "bypass"))
    of_inductor = sum(int(dynamo.counters["inductor"][name]) for name in names)
    return int(dynamo.counters["stats"]["unique_graphs"]) + of_inductor
