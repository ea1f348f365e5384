"""The dense baseline of a sparse attention: same inputs, same process, one pass per repeat.

It is computed by the same kernel as the sparse attention, if that one computes exact attention too:
then their ratio shows the pattern, not a kernel.

If a complete dense pass would take too long, its time is computed from a part, scaled by the
visible pairs: some query rows against all keys. With a mask, which changes the rate of a kernel,
the part has it too: it is the first tokens, as many as give about the same number of pairs. The
baseline runs after the pass under the budget, so it is not in the measured peak.

Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.attention.base import Attention
from longseq_bench.attention.decode import CacheAttention, choose_kernel, seen_keys
from longseq_bench.attention.one_rank import exact_call, visible_pairs_of
from longseq_bench.attention.projections import projection_flops
from longseq_bench.core.cost import attention_flops, mask_pairs
from longseq_bench.core.errors import LongseqError, UnsupportedError
from longseq_bench.core.masks import CAUSAL, FULL
from longseq_bench.core.model import SAME_KERNEL, SDPA
from longseq_bench.kernels.base import attend
from longseq_bench.kernels.decode import SeenKeys
from longseq_bench.kernels.exact.base import AUTO, KERNELS, ExactKernel, select
from longseq_bench.meters.clock import clock_for
from longseq_bench.patterns.visible_keys import visible_keys
from longseq_bench.worker.messages import MeasurementLog, MessageSender, samples_of
from longseq_bench.worker.passes import Pass, TrialRun
from longseq_bench.worker.verdicts import is_device_error

MAX_TIME_RATIO = 4.0
"""A complete dense pass runs if it should take at most this many times the sparse pass, or at most
the trial's time cap."""

MIN_ROWS = 1024
"""Query rows of a part: torch's CPU kernel uses its largest tiles from 768 rows up."""

USUAL_SHARE = 0.9
"""Keys that a row of a masked part sees, at least, relative to a row of the whole."""

TILE_ROWS = {"cpu": 256, "cuda": 128}
TILES_PER_WORKER = 2
"""Tiles of a part per core or multiprocessor, so that none is idle for long."""

CALIBRATION_KEYS = 4096
NOT_RUN_ON_RANKS = "not run: over several ranks each holds only a part of the inputs"


def dense_flops(attention: Attention, rows: int | None = None, keys: int | None = None) -> float:
    """Return the FLOPs of dense attention for the same workload, projections included.

    rows, keys: of a part; the complete workload if None. A square part has the workload's mask, as
    if its first tokens were all; in any other part every row sees every key.
    """
    w, matrices = attention.workload, attention.projections()
    if rows is None or keys is None or w.decode:
        pairs = mask_pairs(w)
    else:
        pairs = w.visibility.visible_pairs(rows) if rows == keys else rows * keys
    of_q, of_k = ((w.seq_len if tokens is None else tokens) for tokens in (rows, keys))
    shapes = {"q": (w.heads, of_q), "k": (w.kv_heads, of_k), "v": (w.kv_heads, of_k)}
    shapes["out"] = shapes["q"]
    elements = sum(heads * tokens for name, (heads, tokens) in shapes.items() if name in matrices)
    projecting = projection_flops(w, w.batch * elements * w.head_dim)
    return attention_flops(w, pairs) + projecting


@dataclass
class DenseBaseline:
    """Timed dense passes over a trial's inputs, one after each pass of the sparse attention.

    before: called before each timed pass, as before one of the sparse attention.
    kernel: computes them; None: torch's scaled_dot_product_attention. If it can't run, the log has
    the reason. The trial fails only if the GPU itself failed.
    """

    attention: Attention
    pass_: Pass
    device: str
    warm_ups: int
    time_cap: float
    before: Callable[[], object] = list
    kernel: ExactKernel | None = None
    _shape: tuple[int, int] | None = None
    _failure: str | None = None

    def __post_init__(self) -> None:
        w = self.attention.workload
        self._complete = len(w.queries), w.seq_len
        self._clock = clock_for(self.device)

    def run(self, sender: MessageSender, sparse_s: float) -> float:
        """Run one timed dense pass. Before the first, choose between a complete pass and a part.

        sparse_s: seconds of the sparse pass just before. Returns the seconds spent here.
        """
        if self._failure:
            return 0.0
        start = time.perf_counter()
        # a phase that the time budget does not cover: the budget is the sparse attention's
        sender.start_phase("check", f"dense pass {len(self._clock.wall) + 1}")
        try:
            if self._shape is None:
                self._shape = self._choose_shape(sparse_s)
                for _ in range(self.warm_ups):
                    self._run(*self._shape)
            self.before()
            with self._clock:
                self._run(*self._shape)
        except (RuntimeError, MemoryError, LongseqError) as error:
            if is_device_error(error):
                raise  # the sparse attention could not go on, and would be blamed
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._failure = f"not run: {lines[0]}"
        return time.perf_counter() - start

    def add_to(self, log: MeasurementLog) -> None:
        """Log the samples, in seconds of a complete dense pass, and their source."""
        source = "measured"
        if self._shape and self._shape != self._complete:
            source = f"computed from {self._shape[0]:,} of {self._complete[1]:,} rows"
        log.facts["dense"] = self._failure or source
        log.facts["dense_kernel"] = self.kernel.name if self.kernel else SDPA
        if not self._failure and self._shape is not None and self._clock.wall:
            part = dense_flops(self.attention, *self._shape)
            share = part / dense_flops(self.attention)
            log.add("dense_time", "s", *(seconds / share for seconds in self._clock.wall))

    def _choose_shape(self, sparse_s: float) -> tuple[int, int]:
        """Return the query rows and keys of a pass: all of them if that is quick enough."""
        if self.attention.workload.decode:
            return self._complete
        part = self._part_shape(self._complete[1])
        if part == self._complete:
            return part
        short = self._part_shape(min(self._complete[1], CALIBRATION_KEYS))
        clock = clock_for(self.device)
        for _ in range(2):
            with clock:
                self._run(*short)
        rate = dense_flops(self.attention, *short) / clock.wall[-1]
        complete_s = dense_flops(self.attention) / rate
        max_s = max(MAX_TIME_RATIO * sparse_s, self.time_cap)
        return self._complete if complete_s <= max_s else part

    def _part_shape(self, keys: int) -> tuple[int, int]:
        """Return the rows and keys of a part whose rows see at most the first `keys` tokens.

        It has as many rows as keep all threads or multiprocessors busy. With a causal mask it is
        square, and has about as many pairs as these rows with all keys; with another mask it is
        square, and a row sees about as many keys as in the whole.
        """
        w, workers = self.attention.workload, torch.get_num_threads()
        if self.device == "cuda":
            workers = torch.cuda.get_device_properties(0).multi_processor_count
        tiles = -(-TILES_PER_WORKER * workers // (w.batch * w.heads))
        side = rows = min(max(MIN_ROWS, tiles * TILE_ROWS[self.device]), keys)
        mask = w.visibility
        if mask.kind == FULL:
            return rows, keys
        if mask.kind == CAUSAL:
            side = math.ceil(math.sqrt(2 * rows * keys))
        else:
            usual = mask.visible_pairs(keys) / keys
            while side < keys and mask.visible_pairs(side) < USUAL_SHARE * usual * side:
                side *= 2
        return min(side, keys), min(side, keys)

    def _run(self, rows: int, keys: int) -> None:
        w, pass_ = self.attention.workload, self.pass_
        matrices = self.attention.projections()
        with torch.set_grad_enabled(w.train):
            tensors = {
                name: t if w.decode else t.detach()[:, :, :count].requires_grad_(w.train)
                for name, t, count in zip("qkv", pass_.inputs, (rows, keys, keys), strict=True)
            }
            q, k, v = (t @ matrices[n] if n in matrices else t for n, t in tensors.items())
            out = self._attend(q, k, v)
            if "out" in matrices:
                out = out @ matrices["out"]
            if pass_.grad_out is not None:
                leaves = [*tensors.values(), *matrices.values()]
                torch.autograd.grad(out, leaves, pass_.grad_out[:, :, :rows])

    @cached_property
    def _seen(self) -> tuple[SeenKeys]:
        """The keys that new tokens see, in one object, for which a kernel prepares its steps."""
        w = self.attention.workload
        return (seen_keys(visible_keys(w), w.queries, (range(w.seq_len),)),)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w, rows, keys = self.attention.workload, q.shape[2], k.shape[2]
        if w.decode and self.kernel is not None:
            kernel, _ = choose_kernel(self.kernel.name, self.attention.kernel_use, w)
            step = CacheAttention(kernel, self._seen, self.attention.group)
            return attend(q, k, v, self.attention.add_sinks(step), train=False)
        shape = {"seq_len": rows} if rows == keys else {"mask": None, "causal": False}
        part = w if w.decode else w.model_copy(update=shape)
        if self.kernel is not None:
            own = self.attention.add_sinks(exact_call(self.kernel, part))
            return attend(q, k, v, own, q.requires_grad)
        needs_mask = part.causal and part.new_tokens > 1 if w.decode else part.mask is not None
        visible = visible_pairs_of(part, q.device) if needs_mask else None
        is_causal = part.causal and visible is None and not w.decode
        return scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def choose_dense_kernel(attention: Attention, requested: str) -> ExactKernel | None:
    """Return the kernel of the dense baseline; None for torch's scaled_dot_product_attention.

    requested: as in Trial.dense_kernel. `same` means the fastest kernel if the attention's own one
    does not compute exact attention on its device.
    """
    if requested == SDPA:
        if attention.workload.soft_cap:
            raise UnsupportedError("dense_kernel=sdpa computes no soft_cap; use same or auto")
        return None
    use = attention.kernel_use
    if requested == SAME_KERNEL:
        own = attention.comparable_kernel
        is_exact = own in KERNELS.names() and KERNELS.get(own).device == use.device
        requested = own if is_exact else AUTO
    return select(requested, use)[0]


def dense_baseline_for(
    run: TrialRun, pass_: Pass, warm_ups: int, before: Callable[[], object]
) -> DenseBaseline | None:
    """Return the baseline of an attention that is sparse according to the log, else None."""
    attention, trial, log = run.attention, run.trial, run.log
    if min(samples_of(log.measurements, "density_achieved"), default=1.0) >= 1:
        return None
    if attention.group.size > 1:
        log.facts["dense"] = NOT_RUN_ON_RANKS
        return None
    if trial.timing == "graph":
        log.facts["dense"] = "not run: without a CUDA graph it would not compare"
        return None
    if pass_.others:
        log.facts["dense"] = "not run: a step is over all layers of a model"
        return None
    try:
        kernel = choose_dense_kernel(attention, trial.dense_kernel)
    except UnsupportedError as error:
        log.facts["dense"] = f"not run: {error}"
        return None
    return DenseBaseline(attention, pass_, trial.device, warm_ups, trial.time_cap, before, kernel)
