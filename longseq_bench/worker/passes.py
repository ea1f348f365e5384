"""One pass of an attention, its random inputs, and the short warm-up pass before it.

Ranks that hold the same part of a tensor draw the same numbers, without communication: the random
generator is seeded by the trial's seed and by the part itself. No budget covers the warm-up.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Self, cast

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.attention.one_rank import backward_recompute, forward_inplace
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Keep, OptionValue, Trial, Workload
from longseq_bench.core.ranks import RankInfo
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import find_rows, fingerprint
from longseq_bench.distributed.token_order import count_tokens
from longseq_bench.kernels import host_memory
from longseq_bench.kernels.base import Triple
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.quantised import Quantised
from longseq_bench.kernels.torch_spans import torch_kernel
from longseq_bench.meters.clock import wait_for_device
from longseq_bench.patterns import Tokens
from longseq_bench.worker.checked_rows import select_checked_rows
from longseq_bench.worker.compile_watch import CompileWatch
from longseq_bench.worker.input_changes import InputChanges
from longseq_bench.worker.messages import MeasurementLog, MessageSender

_DIGEST_ROWS = {"cpu": 2**13, "cuda": 2**16}  # on a CPU their sums count for the memory budget
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass
class Pass:
    """Inputs and results of a pass: q (B, Hq, N, D), k (B, Hk, M, D), v (B, Hk, M, Dv).

    The output is (B, Hq, N, Dv).

    original_q: a copy of q on the host, for a pass that overwrites q.
    redraw: draws such inputs again, in place.  changes: of inputs since they were drawn.
    digests: of the inputs as they were drawn (`digest`), for those that no pass may change.
    keep_output: copy an output that the pass itself drops to the host, so that it can be checked.
    others: the further layers of a model, which run after this one, each with its own cache.
    """

    inputs: Triple
    grad_out: Tensor | None
    out: Tensor | None = None
    grads: Triple | None = None
    keep: Keep = "all"
    original_q: Tensor | None = None
    keep_output: bool = True
    redraw: Callable[[Triple], object] | None = None
    changes: InputChanges | None = None
    digests: dict[str, Tensor] = field(default_factory=dict)
    others: Sequence[tuple[Attention, "Pass"]] = ()

    def draw_again(self) -> None:
        """Draw q, k and v again, in place."""
        assert self.redraw
        assert self.changes
        self.redraw(self.inputs)
        for name in "qkv":
            self.changes.made.pop(name, None)

    def change_inputs(self, new_scores: bool = False) -> None:
        """Give all inputs other bytes, and restore a q that the last pass has overwritten."""
        assert self.changes
        if self.original_q is not None:
            self.inputs[0].detach().copy_(self.original_q)
            self.changes.made.pop("q", None)
        self.changes.make(self._named_inputs, new_scores)
        for _, other in self.others:
            other.change_inputs(new_scores)

    def protect_inputs(self) -> None:
        """Remember the inputs as they are; with keep=nothing a pass may overwrite q."""
        spent = {"q"} if self.keep == "nothing" else set()
        self.digests = {n: digest(t) for n, t in self._named_inputs.items() if n not in spent}
        for _, other in self.others:
            other.protect_inputs()

    def changed_inputs(self) -> list[str]:
        """Return the names of the inputs that differ from what `protect_inputs` saw."""
        now = self._named_inputs
        return [n for n, seen in self.digests.items() if not torch.equal(digest(now[n]), seen)]

    @property
    def _named_inputs(self) -> dict[str, Tensor]:
        tensors = dict(zip("qkv", self.inputs, strict=True))
        if tensors["v"]._base is tensors["k"]:  # of a latent
            del tensors["v"]
        return tensors if self.grad_out is None else tensors | {"grad_out": self.grad_out}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Those of q, k and v by name; empty if there are none."""
        return dict(zip(("dq", "dk", "dv"), self.grads or (), strict=False))

    @property
    def original_inputs(self) -> Triple:
        """The inputs as they were before the first pass."""
        q, k, v = self.inputs
        return (q if self.original_q is None else self.original_q), k, v


def digest(tensor: Tensor) -> Tensor:
    """Return numbers (2, B, H) that change if a row of a tensor (B, H, N, D) changes or moves.

    They are sums of the rows' bits, and the same weighted by position, modulo 2^64.
    """
    # a sum of int64 makes no copy
    row_bytes = tensor.shape[3] * tensor.element_size()
    bits = tensor.detach().view(next(t for t in _INTEGERS if row_bytes % t.itemsize == 0))
    found = torch.zeros(2, *tensor.shape[:2], dtype=torch.int64, device=tensor.device)
    step = max(1, _DIGEST_ROWS[tensor.device.type] // found[0].numel())
    for start in range(0, tensor.shape[2], step):
        rows = bits[:, :, start : start + step].sum(-1, dtype=torch.int64)
        positions = torch.arange(start + 1, start + 1 + rows.shape[2], device=tensor.device)
        found += torch.stack([rows.sum(-1), (rows * positions).sum(-1)])
    return found


def draw_inputs(
    attention: Attention, device: str, seed: int | None, rows: Tensor, keep: Keep = "all"
) -> Pass:
    """Draw this rank's q, k, v from a seeded normal distribution; constants without a seed.

    In train mode the output gradient is zero outside `rows`, so that few rows determine dk and dv.
    """
    w, shard = attention.workload, attention.shard
    dtype = getattr(torch, w.dtype)
    # tensors in mapped files are filled on the host
    place = "cpu" if attention.on_host and device != "meta" else device

    def empty(shape: tuple[int, ...], name: str = "") -> Tensor:
        if attention.on_host:
            return host_memory.zeros(shape, dtype, device)
        if w.kv_dtype and name in ("k", "v"):
            return Quantised.empty(shape, w.kv_dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)

    of_keys = ((n, shard.kv_heads, shard.key_tokens) for n in ("k" if w.latent else "kv"))
    parts = ("q", shard.heads, shard.query_tokens), *of_keys
    widths = {"q": w.head_dim, "k": w.head_dim, "v": w.v_head_dim}
    shapes = [
        (len(shard.batch), len(heads), count_tokens(tokens), widths[name])
        for name, heads, tokens in parts
    ]

    def draw(inputs: Triple) -> Fill:
        fill = _make_filler(attention, place, seed)
        with torch.no_grad():
            for tensor, part in zip(inputs, parts, strict=False):
                fill(tensor, *part)
        return fill

    q, k, *values = (empty(*s).requires_grad_(w.train) for s in zip(shapes, "qkv", strict=False))
    v = values[0] if values else k[..., : w.v_head_dim]
    fill = draw((q, k, v))
    original_q = host_memory.copy(q, device) if keep == "nothing" else None
    changes = InputChanges(attention, seed or 0)
    pass_ = Pass((q, k, v), None, keep=keep, original_q=original_q, redraw=draw, changes=changes)
    if not w.train:
        return pass_
    # in memory (B, N, Hq, D), as the next layer of a model returns it: fused kernels make no copy
    (b, h, n, _), d = q.shape, w.v_head_dim
    pass_.grad_out = empty((b, n, h, d)).zero_().transpose(1, 2)
    local, _ = find_rows(shard.query_tokens, rows)
    own = torch.empty((b, h, len(local), d), dtype=dtype, device=place)
    fill(own, "grad_out", shard.heads, shard.query_tokens)
    pass_.grad_out[:, :, local.to(place)] = own
    return pass_


def build_layers(
    make: Callable[..., Attention],
    workload: Workload,
    group: Group,
    options: Mapping[str, OptionValue],
) -> list[Attention]:
    """Build the attention of each layer: one, or all of a model. Those of one kind are the same."""
    kinds = [(layers, make(one, group, **options)) for layers, one in workload.of_kinds()]
    return [attention for layers, attention in kinds for _ in range(layers)]


def draw_layers(
    layers: Sequence[Attention], device: str, seed: int | None, rows: Tensor, keep: Keep = "all"
) -> Pass:
    """Draw the inputs of each layer as `draw_inputs` does; return the first pass with the others.

    Every layer has other numbers.
    """
    first, *others = (
        draw_inputs(one, device, None if seed is None else seed + i, rows, keep)
        for i, one in enumerate(layers)
    )
    first.others = list(zip(layers[1:], others, strict=True))
    return first


Fill = Callable[[Tensor, str, range, Tokens], object]


def _make_filler(attention: Attention, device: str, seed: int | None) -> Fill:
    """Return a function that fills a tensor (B, H, tokens, D), given its name and part.

    No seed: equal numbers. On several ranks each (batch row, head) has a generator of its own.
    """
    if device == "meta" or seed is None:
        return lambda tensor, *_: tensor.fill_(0.5)
    shared = torch.Generator(device).manual_seed(seed) if attention.group.size == 1 else None

    def fill(tensor: Tensor, name: str, heads: range, tokens: Tokens) -> None:
        batch, token_set = attention.shard.batch, fingerprint(tokens)

        def draw(numbers: Tensor, i: int, j: int, *start: int) -> None:
            part_seed = _hash(seed, name, batch[i], heads[j], token_set, *start)
            numbers.normal_(generator=torch.Generator(device).manual_seed(part_seed))

        if isinstance(tensor, Quantised):
            tensor.fill_from(draw, attention.torch_dtype)
        elif shared is not None:
            tensor.normal_(generator=shared)
        else:
            for i, j in product(range(len(batch)), range(len(heads))):
                draw(tensor[i, j], i, j)

    return fill


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())


WARM_UP_TOKENS = 1024
"""Tokens of each rank in a warm-up pass.

Libraries keep memory that they allocate in the first pass: MKL 4 MiB per thread from 768 query rows
up, oneDNN a compiled kernel per shape (so the warm-up has the same remainder modulo this number),
connections their threads. The warm-up allocates it, so that no trial is charged for it."""


@dataclass
class TrialRun:
    """A trial on this rank, and what was measured of it.

    rows: global query positions that are checked, the same on all ranks.
    others: the attention of the further layers of a model.
    """

    trial: Trial
    attention: Attention
    rows: Tensor
    sender: MessageSender
    log: MeasurementLog
    place: RankInfo = field(default_factory=RankInfo)
    others: Sequence[Attention] = ()

    def layers(self, pass_: Pass) -> Iterator[tuple[Self, Pass]]:
        """Yield the run of each layer with its pass, this one first. All ranks must call it."""
        yield self, pass_
        for attention, other in pass_.others:
            trial = self.trial
            rows = select_checked_rows(attention, trial.seed, trial.round, trial.options)
            yield replace(self, attention=attention, rows=rows, others=()), other

    @property
    def seed(self) -> int:
        """The seed of the inputs, which are others in each round and at each length."""
        return _hash(self.trial.seed, self.trial.round, self.trial.workload.seq_len)

    def time_pass(self, pass_: Pass, part: str) -> None:
        """Run a pass that all ranks begin together; its time is that of the slowest rank."""
        log = self.log
        wait_for_all_ranks(self.attention.group, self.sender)
        with CompileWatch() as watch:
            start = time.perf_counter()
            run_pass(self.attention, pass_, self.sender, part)
            synchronize(self.trial.device)
            log.own_pass_s = time.perf_counter() - start
        log.pass_s, log.compile_s = self.attention.group.all_max(log.own_pass_s, watch.seconds)


def run_pass(
    attention: Attention, pass_: Pass, sender: MessageSender | None = None, part: str = ""
) -> None:
    """Run forward, and in train mode backward.

    The output and the gradients of q, k, v are stored in `pass_`, those of a module's matrices and
    of sinks in `.grad`. part: a detail of the phase, for progress output.
    """
    for matrix in attention.projections().values():
        matrix.grad = None
    if attention.sinks is not None:
        attention.sinks.grad = None
    if sender:
        sender.start_phase("forward", part)
    if pass_.keep == "all":
        pass_.out = attention(*pass_.inputs)
    else:
        run_forward(attention, pass_)
    for other, its_pass in pass_.others:
        run_pass(other, its_pass)
    if pass_.grad_out is None:
        return
    if pass_.keep != "all":
        # in a model the next layer has used the output by then; the check has a copy on the host
        assert pass_.out is not None
        pass_.out = (
            host_memory.copy(pass_.out, pass_.out.device.type) if pass_.keep_output else None
        )
    if sender:
        sender.start_phase("backward", part)
    _run_backward(attention, pass_, pass_.grad_out)


def _run_backward(attention: Attention, pass_: Pass, grad_out: Tensor) -> None:
    if pass_.keep != "all":
        pass_.grads = backward_recompute(
            attention, grad_out, *pass_.inputs, pass_.keep == "nothing"
        )
        if pass_.grads is not None:
            return
        pass_.out = attention(*pass_.inputs)
    assert pass_.out is not None
    if attention.projections():
        # the hooks that sum gradients over ranks run in a backward that accumulates
        torch.autograd.backward(pass_.out, grad_out)
        dq, dk, dv = (cast("Tensor", t.grad) for t in pass_.inputs)
        for t in pass_.inputs:
            t.grad = None
    else:
        if not pass_.out.requires_grad:
            raise UnsupportedError("its output has no gradient, which mode=train needs")
        leaves = [*pass_.inputs, *([] if attention.sinks is None else [attention.sinks])]
        found = torch.autograd.grad(pass_.out, leaves, grad_out, allow_unused=True)
        pairs = zip(found[:3], pass_.inputs, strict=True)
        dq, dk, dv = (torch.zeros_like(t) if grad is None else grad for grad, t in pairs)
        for sinks, grad in zip(leaves[3:], found[3:], strict=True):
            sinks.grad = sinks.grad if grad is None else grad  # a kernel may have set it
    pass_.grads = dq, dk, dv
    pass_.out = pass_.out.detach()


def run_forward(attention: Attention, pass_: Pass) -> None:
    """Run a forward that keeps nothing for a backward, and store its output."""
    with torch.no_grad():
        if pass_.keep == "nothing" and pass_.grad_out is None:
            pass_.out = forward_inplace(attention, *pass_.inputs)
        else:
            pass_.out = attention(*pass_.inputs)


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
    pass_ = draw_inputs(attention, trial.device, _hash(trial.key), rows, trial.keep)
    if trial.device == "cuda":
        # a kernel takes device memory from its first use on; those of the check are not the trial's
        pass_.protect_inputs()
    run_pass(attention, pass_)
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
