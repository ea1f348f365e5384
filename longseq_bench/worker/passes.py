"""One pass, and the short one before it that no trial is charged for."""

from __future__ import annotations

import torch

from longseq_bench.attention.base import Attention
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Trial, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import host_memory, torch_fused
from longseq_bench.worker.inputs import Pass, draw
from longseq_bench.worker.messages import MessageSender

WARM_UP_TOKENS = 1024
"""Of each rank. From 768 query rows up torch's CPU kernel multiplies its largest tiles: MKL then
holds the buffers (4 MiB a thread) that it keeps for good. The tail modulo this goes with it,
because oneDNN compiles a kernel for every shape it meets, and keeps that too. So do connections
and their threads. None is charged to the trial."""


def run_pass(
    attention: Attention, one: Pass, sender: MessageSender | None = None, part: str = ""
) -> None:
    """Forward, and in train backward; leaves the output and the gradients in `one`, those of a
    module's matrices in `.grad`."""
    matrices = attention.projections()
    for matrix in matrices.values():
        matrix.grad = None
    if sender:
        sender.start_phase("forward", part)
    if one.keep == "all":
        one.out = attention(*one.inputs)
    else:
        _forward_alone(attention, one)
    if one.grad_out is None:
        return
    if sender:
        sender.start_phase("backward", part)
    if one.keep != "all":
        one.grads = attention.backward_recompute(one.grad_out, *one.inputs, one.keep == "nothing")
        if one.grads is not None:
            return
        one.out = attention(*one.inputs)
    assert one.out is not None
    if matrices:
        # the hooks that sum gradients over ranks run in a backward that accumulates
        torch.autograd.backward(one.out, one.grad_out)
        dq, dk, dv = (t.grad for t in one.inputs)
        assert dq is not None
        assert dk is not None
        assert dv is not None
        for t in one.inputs:
            t.grad = None
    else:
        dq, dk, dv = torch.autograd.grad(one.out, one.inputs, one.grad_out)
    one.grads = dq, dk, dv
    one.out = one.out.detach()


def _forward_alone(attention: Attention, one: Pass) -> None:
    """A forward of which nothing is kept for a backward; what comes out is put aside where there
    is one, as whoever asked for it has used it by then."""
    if one.keep == "nothing" and one.grad_out is None:
        one.out = attention.forward_inplace(*one.inputs)
        return
    with torch.no_grad():
        out = attention(*one.inputs)
    if one.grad_out is None:
        one.out = out
    elif one.aside:
        one.out = host_memory.copy(out, out.device.type)


def unsupported_setting(trial: Trial) -> str | None:
    """Which setting has no meaning for such a trial."""
    if trial.keep == "inputs" and not trial.workload.train:
        return "keep=inputs is of mode=train; a forward alone keeps nothing more"
    if trial.allocator != "default" and trial.device != "cuda":
        return f"allocator={trial.allocator} is of device=cuda"
    return None


def bytes_sent_by_formula(attention: Attention, trial: Trial) -> int:
    """What a rank sends in a pass, by formula: where nothing is kept, forward is run twice."""
    sent = attention.cost().bytes_sent
    if trial.keep == "all" or not trial.workload.train or attention.group.size == 1:
        return sent
    alone = trial.workload.model_copy(update={"mode": "forward"})
    forward = type(attention)(alone, attention.group, **trial.options)
    forward.prepare(trial.device)
    return sent + forward.cost().bytes_sent


def wait_for_all_ranks(group: Group, sender: MessageSender | None = None) -> None:
    """Wait until every rank is here, so that what follows begins together. Never timed."""
    if group.size == 1:
        return
    if sender:
        sender.start_phase("communication", "waiting for all ranks")
    group.barrier()


def warm_up(make: type[Attention], trial: Trial, group: Group) -> None:
    """A short pass of the same kind: threads, libraries, connections and caches come before the
    budget."""
    attention = _short(make, trial, group)
    rows = torch.zeros(1, dtype=torch.long)
    one = draw(attention, trial.device, trial.seed, rows, trial.keep)
    run_pass(attention, one)
    if trial.device == "cpu":
        _hold_library_buffers(attention.workload)
    synchronize(trial.device)
    attention.multiplicity(torch.arange(1).numpy(), torch.arange(1).numpy(), 0)
    group.all_sum(torch.zeros(group.size, dtype=torch.float64))
    group.all_max(0.0)


def _short(make: type[Attention], trial: Trial, group: Group) -> Attention:
    """The trial's attention, planned, at the shortest length at which its options make sense: a
    block, a window or global tokens may be longer than a warm-up has to be. Raises
    UnsupportedError where they don't at the trial's own."""
    shape = trial.workload.model_dump() | {"batch": min(trial.workload.batch, group.size)}
    tokens = warm_up_tokens(trial.workload.seq_len, group.size)
    while True:
        small = Workload.model_validate(shape | {"seq_len": tokens})
        try:
            attention = make(small, group, **trial.options)
            attention.prepare(trial.device)
        except UnsupportedError:
            if tokens == trial.workload.seq_len:
                raise
            tokens = min(2 * tokens, trial.workload.seq_len)
        else:
            return attention


def warm_up_tokens(tokens: int, ranks: int) -> int:
    """Of all ranks together: where tokens are shared evenly, each has 1024 and its own tail."""
    short = ranks * WARM_UP_TOKENS
    return min(tokens, short + tokens % short)


def synchronize(device: str) -> None:
    """Wait for what the device still does."""
    if device == "cuda":
        torch.cuda.synchronize()


def _hold_library_buffers(w: Workload) -> None:
    """One call of the fused kernel at its largest tiles, and a matrix product as large as makes MKL
    take its own, whatever the implementation calls."""
    rows = torch.zeros(torch.get_num_threads(), 2 * WARM_UP_TOKENS, w.head_dim)
    torch.bmm(rows, rows.transpose(1, 2))
    shape = (torch.get_num_threads(), 1, WARM_UP_TOKENS, w.head_dim)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, w.dtype)) for _ in range(3))
    out, lse = torch_fused.forward(q, k, v)
    if w.train:
        torch_fused.backward(out, q, k, v, out, lse)
