"""One pass of an attention, its random inputs, and the short warm-up pass before it.

Ranks that hold the same part of a tensor draw the same numbers, without communication: the random
generator is seeded by the trial's seed and by the part itself. No budget covers the warm-up.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.attention.one_rank import backward_recompute, forward_inplace
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Keep, OptionValue, Trial, Workload
from longseq_bench.core.ranks import RankInfo
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import all_gather, find_rows, fingerprint
from longseq_bench.distributed.token_order import Positions
from longseq_bench.kernels import host_memory
from longseq_bench.kernels.base import Triple
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.torch_spans import torch_kernel
from longseq_bench.meters.clock import wait_for_device
from longseq_bench.worker.compile_watch import CompileWatch
from longseq_bench.worker.input_changes import InputChanges
from longseq_bench.worker.messages import MeasurementLog, MessageSender

FULL_CHECK_TOKENS, SAMPLED_ROWS = 512, 256
"""Longest sequence of which all rows are checked, and checked rows of a longer one."""

RESIDUES = 128
"""A row of every remainder modulo this number is checked: blocks and tiles are powers of two."""

MAX_PAIRS = 2**24
"""Maximum number of keys times stretches of 128 tokens that have checked rows, of sparse attention.
Beyond 65,536 tokens rows share stretches: those of one stretch see mostly the same keys."""

MIN_STRETCHES = 32
"""Stretches with checked rows at any length."""

BLOCKS = 64, 128
"""Sizes of blocks at whose borders rows are checked, besides those that the options name."""

EDGE_ROWS = 256
"""First and last rows of ranks' shards that are checked; both of each rank up to 128 ranks."""

_SEED_STEP = 1_000_003  # between the seeds of two rounds
_DIGEST_ROWS = 2**16
_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclass
class Pass:
    """Inputs and results of a pass: q (B, Hq, N, D), k (B, Hk, M, D), v (B, Hk, M, Dv).

    The output is (B, Hq, N, Dv).

    original_q: a copy of q on the host, for a pass that overwrites q.
    redraw: draws such inputs again, in place.  changes: of inputs since they were drawn.
    digests: of the inputs as they were drawn (`digest`), for those that no pass may change.
    keep_output: copy an output that the pass itself drops to the host, so that it can be checked.
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

    def protect_inputs(self) -> None:
        """Remember the inputs as they are; with keep=nothing a pass may overwrite q."""
        spent = {"q"} if self.keep == "nothing" else set()
        self.digests = {n: digest(t) for n, t in self._named_inputs.items() if n not in spent}

    def changed_inputs(self) -> list[str]:
        """Return the names of the inputs that differ from what `protect_inputs` saw."""
        now = self._named_inputs
        return [n for n, seen in self.digests.items() if not torch.equal(digest(now[n]), seen)]

    @property
    def _named_inputs(self) -> dict[str, Tensor]:
        tensors = dict(zip("qkv", self.inputs, strict=True))
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


def checked_rows(
    seq_len: int,
    seed: int,
    ends: Tensor | None = None,
    blocks: Iterable[int] = (),
    share_stretches: bool = False,
) -> Tensor:
    """Return the query positions to check, ascending; others for another seed.

    All of a short sequence. Else half of them have every remainder modulo 128 once, a quarter are
    both sides of borders of blocks, and the rest are random; the first and the last are added.

    ends: the first and last position of each rank's queries, (ranks, 2); some are added.
    blocks: sizes of the implementation's blocks, tiles or segments.
    share_stretches: of a long sequence, choose rows from few stretches of 128 tokens.
    """
    if seq_len <= FULL_CHECK_TOKENS:
        return torch.arange(seq_len)
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    stretches = max(MIN_STRETCHES, MAX_PAIRS // seq_len) if share_stretches else SAMPLED_ROWS
    is_shared = stretches < SAMPLED_ROWS
    # a quarter of the stretches have borders; a border may touch two
    starts = draw(seq_len // RESIDUES, stretches // 2 if is_shared else RESIDUES) * RESIDUES
    borders = min(stretches, SAMPLED_ROWS) // 8

    def draw_starts(count: int) -> Tensor:
        return starts[torch.arange(count) % len(starts)]

    residues = torch.randperm(RESIDUES, generator=generator)
    rows = [torch.tensor([0, seq_len - 1]), draw_starts(RESIDUES) + residues]
    sizes = sorted({size for size in (*BLOCKS, *blocks) if 1 < size < seq_len})
    for size in sizes:
        at = (1 + draw((seq_len - 1) // size, max(1, borders // len(sizes)))) * size
        rows += [at - 1, at.clamp(max=seq_len - 1)]
    known = torch.unique(torch.cat(rows))
    # more than are missing, since some are known already
    others = draw(seq_len, 4 * SAMPLED_ROWS)
    if is_shared:
        others = draw_starts(len(others)) + others % RESIDUES
    others = torch.unique(others)
    others = others[~torch.isin(others, known)]
    missing = max(0, SAMPLED_ROWS - len(known))
    others = others[torch.randperm(len(others), generator=generator)[:missing]]
    edges = torch.tensor([]) if ends is None else ends.flatten()
    # an odd step takes the first of one rank, the last of another
    edges = edges[:: -(-len(edges) // EDGE_ROWS) | 1]
    return torch.unique(torch.cat([known, others, edges.long()]))  # type: ignore[no-any-return]


def select_checked_rows(
    attention: Attention,
    seed: int,
    round_: int = 0,
    options: Mapping[str, OptionValue] | None = None,
) -> Tensor:
    """Return the query positions to check, the same on all ranks. All ranks must call it.

    Each round has others. Numbers among the options count as sizes of blocks.
    """
    queries = attention.shard.queries
    blocks = []
    for value in (options or {}).values():
        blocks += [n for n in (value if isinstance(value, tuple) else (value,)) if type(n) is int]
    first, count = attention.workload.queries.start, len(attention.workload.queries)
    ends = torch.tensor(all_gather(attention.group, [int(queries[0]), int(queries[-1])])) - first
    return first + checked_rows(
        count, seed + _SEED_STEP * round_, ends, blocks, share_stretches=not attention.is_exact
    )


def digest(tensor: Tensor) -> Tensor:
    """Return numbers (2, B, H) that change if a row of a tensor (B, H, N, D) changes or moves.

    They are sums of the rows' bits, and the same weighted by position, modulo 2^64.
    """
    # a sum of int64 makes no copy
    row_bytes = tensor.shape[3] * tensor.element_size()
    bits = tensor.detach().view(next(t for t in _INTEGERS if row_bytes % t.itemsize == 0))
    found = torch.zeros(2, *tensor.shape[:2], dtype=torch.int64, device=tensor.device)
    step = max(1, _DIGEST_ROWS // found[0].numel())
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

    def empty(shape: tuple[int, ...]) -> Tensor:
        if attention.on_host:
            return host_memory.zeros(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)

    parts = ("q", shard.heads, shard.queries), *((n, shard.kv_heads, shard.keys) for n in "kv")
    shapes = [
        (len(shard.batch), len(heads), len(tokens), w.v_head_dim if name == "v" else w.head_dim)
        for name, heads, tokens in parts
    ]

    def draw(inputs: Triple) -> Fill:
        fill = _make_filler(attention, place, seed)
        with torch.no_grad():
            for tensor, part in zip(inputs, parts, strict=True):
                fill(tensor, *part)
        return fill

    q, k, v = (empty(shape).requires_grad_(w.train) for shape in shapes)
    fill = draw((q, k, v))
    original_q = host_memory.copy(q, device) if keep == "nothing" else None
    changes = InputChanges(attention, seed or 0)
    pass_ = Pass((q, k, v), None, keep=keep, original_q=original_q, redraw=draw, changes=changes)
    if not w.train:
        return pass_
    # in memory (B, N, Hq, D), as the next layer of a model returns it: fused kernels make no copy
    (b, h, n, _), d = q.shape, w.v_head_dim
    pass_.grad_out = empty((b, n, h, d)).zero_().transpose(1, 2)
    local, _ = find_rows(shard.queries, rows)
    own = torch.empty((b, h, len(local), d), dtype=dtype, device=place)
    fill(own, "grad_out", shard.heads, shard.queries)
    pass_.grad_out[:, :, local.to(place)] = own
    return pass_


Fill = Callable[[Tensor, str, range, Positions], object]


def _make_filler(attention: Attention, device: str, seed: int | None) -> Fill:
    """Return a function that fills a tensor (B, H, tokens, D), given its name and part.

    No seed: equal numbers. On several ranks each (batch row, head) has a generator of its own.
    """
    if device == "meta" or seed is None:
        return lambda tensor, *_: tensor.fill_(0.5)
    if attention.group.size == 1:
        generator = torch.Generator(device).manual_seed(seed)
        return lambda tensor, *_: tensor.normal_(generator=generator)

    def fill(tensor: Tensor, name: str, heads: range, tokens: Positions) -> None:
        token_set = fingerprint(tokens)
        for i, b in enumerate(attention.shard.batch):
            for j, head in enumerate(heads):
                part_seed = _hash(seed, name, b, head, token_set)
                generator = torch.Generator(device).manual_seed(part_seed)
                tensor[i, j].normal_(generator=generator)

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
    """

    trial: Trial
    attention: Attention
    rows: Tensor
    sender: MessageSender
    log: MeasurementLog
    place: RankInfo = field(default_factory=RankInfo)

    @property
    def seed(self) -> int:
        """The seed of the inputs, which are others in each round and at each length."""
        return _hash(self.trial.seed, self.trial.round, self.trial.workload.seq_len)

    def time_pass(self, pass_: Pass, log: MeasurementLog | None = None, part: str = "") -> None:
        """Run a pass that all ranks begin together; its time is that of the slowest rank."""
        log = log or self.log
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

    The output and the gradients of q, k, v are stored in `pass_`, those of a module's matrices in
    `.grad`. part: a detail of the phase, for progress output.
    """
    for matrix in attention.projections().values():
        matrix.grad = None
    if sender:
        sender.start_phase("forward", part)
    if pass_.keep == "all":
        pass_.out = attention(*pass_.inputs)
    else:
        run_forward(attention, pass_)
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
        found = torch.autograd.grad(pass_.out, pass_.inputs, grad_out, allow_unused=True)
        pairs = zip(found, pass_.inputs, strict=True)
        dq, dk, dv = (torch.zeros_like(t) if grad is None else grad for grad, t in pairs)
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
