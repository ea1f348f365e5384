"""Judge a trial by its checks, the same on all ranks, or by the error that ended it.

torch raises most errors of allocators, CUDA and NCCL as a RuntimeError, so only the text tells them
apart: data/errors.yaml has the texts. Errors of Triton are plain Exceptions.
launchers/exit_status.py judges a process that dies without an exception, and selects the failures
that are run again with more memory.

Two facts of an error are for the launcher. `lost_peer`: the end of another rank caused it, so it is
never reported as the cause if another cause is known. `device_error`: the GPU or NCCL failed, so
the trial runs once more in a fresh process.
"""

import re
import subprocess
import traceback
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.attention.own_function import find_place
from longseq_bench.core.errors import KernelLimitError, OwnFunctionError, UnsupportedError, shorten
from longseq_bench.core.files import load_table
from longseq_bench.core.gpus import explain_broken_gpu, python_header
from longseq_bench.core.model import Device, Outcome, Phase, Status
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import all_gather
from longseq_bench.kernels.quantised import before_quantisation
from longseq_bench.worker.check import UNIT, check, count_zero_rows, is_finite, row_slices
from longseq_bench.worker.messages import samples_of
from longseq_bench.worker.passes import Pass, TrialRun, run_forward, run_pass
from longseq_bench.worker.repeat_check import RepeatCheck, find_invalid
from longseq_bench.worker.row_check import EveryRowCheck

_TRACE_LINES, _MAX_REASON = 12, 300
"""Lines of a traceback and letters of a reason; of a longer one the end is kept too, because NCCL
names the cause last."""

MIN_VALUES = 4
"""Of a row that may not be zero."""

MIN_CPU_S, MAX_CPU_SHARE = 5e-3, 1.5
"""CPU time of a pass that is compared with its time on each thread, and how much more it may be."""

_TEXTS = load_table("errors.yaml")
OUT_OF_MEMORY, KERNEL_LIMIT, LOST_PEER = (
    re.compile("|".join(_TEXTS[kind])) for kind in ("out_of_memory", "kernel_limit", "lost_peer")
)


def is_device_error(error: BaseException) -> bool:
    """Return True for an error of a GPU or of NCCL, after which a process can't use the GPU.

    Out of memory does not count: the process can go on.
    """
    if OUT_OF_MEMORY.search(str(error)):
        return False
    if isinstance(error, (torch.AcceleratorError, dist.DistBackendError)):
        return True
    return isinstance(error, RuntimeError) and "Triton Error [CUDA]" in str(error)


def explain_unusable(error: BaseException) -> str | None:
    """Return what is missing and what to do if an error shows that this machine can't run it."""
    # torch.compile wraps the errors of the compilers that it calls
    error = getattr(error, "inner_exception", error)
    if isinstance(error, subprocess.CalledProcessError) and "-shared" in error.cmd:
        header = python_header()
        if not header.is_file():
            return f"Triton needs Python's headers, and there is no {header}; install python3-dev"
        return f"Triton's C compiler failed: {error.cmd[0]}; its messages are in the trial's output"
    if not isinstance(error, (RuntimeError, AssertionError)):
        return None
    found = (words for text, words in _TEXTS["unusable"].items() if re.search(text, str(error)))
    return next((words.format(cuda=torch.version.cuda) for words in found), None)


def outcome_of_exception(error: BaseException, phase: Phase) -> Outcome:
    """Return the outcome of a trial that raised `error` in a phase."""
    status = _status_of(error)
    text = " ".join(str(error).split()) or type(error).__name__
    reason = shorten(text, _MAX_REASON)
    if status in ("oom", "unsupported", "limit"):
        return Outcome(status=status, reason=reason, phase=phase)
    facts: dict[str, Any] = {"exception": reason}
    if sentence := explain_broken_gpu(text):
        facts["device_error"] = True
        return Outcome(status="error", reason=sentence, phase=phase, facts=facts)
    if sentence := explain_unusable(error):
        return Outcome(status="unsupported", reason=sentence, phase=phase, facts=facts)
    lines = "".join(traceback.format_exception(error)).splitlines()
    facts = {"traceback": [shorten(line, _MAX_REASON) for line in lines[-_TRACE_LINES:]]}
    if _is_lost_peer(error):
        facts["lost_peer"] = True
    if is_device_error(error):
        facts["device_error"] = True
    if not isinstance(error, OwnFunctionError):
        reason = shorten(f"{type(error).__name__}: {text}", _MAX_REASON)
        reason += f" ({place})" if (place := find_place(error)) else ""
    return Outcome(status="error", reason=reason, phase=phase, facts=facts)


def _status_of(error: BaseException) -> Status:
    if isinstance(error, UnsupportedError):
        return "unsupported"
    if isinstance(error, KernelLimitError):
        return "limit"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    # by name, because triton is not installed everywhere
    of_library = isinstance(error, RuntimeError) or type(error).__module__.startswith("triton.")
    if of_library and not _is_lost_peer(error):
        if OUT_OF_MEMORY.search(str(error)):
            return "oom"
        if KERNEL_LIMIT.search(str(error)):
            return "limit"
    return "error"


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and bool(LOST_PEER.search(str(error)))


SHORT_S = 1.0
"""Longest pass, without its compilation, that is timed again."""

MAX_EXTRA_FLOPS: dict[Device, tuple[float, float]] = {"cpu": (1e11, 2e11), "cuda": (2e15, 1e14)}
"""Most FLOPs of a pass, by formula, after which further passes check every row: in 16 bits and in
float32, of a thread of a CPU or of a GPU. They take some seconds. With a limit in seconds other
processes would decide what is checked (docs/decisions/0004)."""


class Verdicts(TrialRun):
    """Judges the time of passes, sampled rows, every row, and the results of timed passes."""

    def must_time_again(self) -> bool:
        """Return True if the time of the one pass counts, and is not that of the attention.

        It was over the time budget, but slowed by exact accounting of the heap, or by a rank that
        compiled something; or it is short without its compilation. A long one within the budget
        keeps its time, an upper bound: a device works on while the host compiles, so nothing can
        be subtracted. With timed passes it does not count: they follow a warm-up of the same shape.
        """
        trial, log = self.trial, self.log
        if trial.repeats:
            return False
        is_late = trial.time_budget is not None and log.pass_s > trial.time_budget
        if not log.compile_s:
            return is_late and log.exact and trial.device == "cpu"
        if is_late or log.pass_s - log.compile_s < SHORT_S:
            log.facts["timed_again"] = "the first pass compiled a kernel or a graph"
            return True
        log.facts["compiled"] = f"up to {log.compile_s:.3g} s of pass_time are compilation"
        return False

    def judge_pass_time(self) -> Outcome | None:
        """Log the time of the one pass; return a timeout if it is over the budget."""
        self.log.add("pass_time", "s", self.log.own_pass_s)
        return self.over_time_budget()

    def over_time_budget(self) -> Outcome | None:
        """Return a timeout if the median timed pass, or a search's one pass, was too slow."""
        trial, log = self.trial, self.log
        if trial.repeats and not log.slowest:
            return None
        seconds = median(log.slowest) if log.slowest else log.pass_s
        if trial.time_budget is None or seconds <= trial.time_budget:
            return None
        reason = f"one pass took {seconds:.3g} s of {trial.time_budget:.3g} s allowed"
        return Outcome(status="timeout", reason=reason, phase=self.sender.phase)

    def check(self, pass_: Pass) -> Outcome | None:
        """Compare the pass with the reference; return the outcome `wrong` on all ranks, or None."""
        figures: dict[str, float] = {}
        reason = None
        for run, layer in self.layers(pass_):
            self.sender.start_phase("check")
            if reason := run.find_wrong(layer, figures):
                tokens = f"{run.attention.workload.seq_len:,} tokens"
                reason += f", in a layer with {tokens}" if pass_.others else ""
                break
        for name, figure in figures.items():
            self.log.add(name, "1", figure)
        return _wrong(reason)

    def find_wrong(self, pass_: Pass, figures: dict[str, float]) -> str | None:
        """Compare a layer with the reference; return what is wrong, the same on all ranks.

        figures: of the check by name, the largest of the layers so far.
        """
        assert pass_.out is not None
        group = self.attention.group

        def note(name: str, figure: float) -> None:
            figures[name] = max(figure, figures.get(name, 0.0))

        changed = " and ".join(pass_.changed_inputs())
        invalid = f"a pass changed its input {changed}" if changed else find_invalid(pass_)
        if reason := agree(invalid, group):
            return reason
        zeros, output_rows = count_zero_rows(pass_.out, group)
        is_exact = self.attention.is_exact
        note("zero_rows", zeros / output_rows)
        uncovered = self.attention.measures().get("uncovered", 0.0 if is_exact else 1.0)
        # a few values may cancel
        is_judged = self.attention.workload.v_head_dim >= MIN_VALUES
        if is_judged and zeros > round(uncovered * output_rows):
            found = f"{zeros:,} of {output_rows:,} output rows are zero"
            return f"{found}; the pattern leaves {uncovered:.2%}"
        own = check(
            self.attention, pass_.original_inputs, pass_.out, self.rows, pass_.grad_out, pass_.grads
        )
        errors = own.largest_over_ranks(group)
        if self.attention.workload.kv_dtype and self.trial.repeats:
            before = before_quantisation(pass_.inputs)
            of_full = check(self.attention, before, pass_.out, self.rows).largest_over_ranks(group)
            note("quantisation_error", of_full.worst)
        dtype = self.attention.coarsest_dtype
        if UNIT[dtype] > UNIT[self.attention.workload.dtype]:
            self.log.facts["judged_as"] = dtype
        note("max_error", errors.worst)
        note("error_of_allowed", errors.share_of_allowed(dtype))
        note("bias", errors.worst_bias)
        note("checked_rows", len(self.rows))
        largest = self.log.facts.setdefault("errors", {})
        largest |= {n: max(error, largest.get(n, 0.0)) for n, error in errors.largest.items()}
        results = {"the output": pass_.out, **pass_.gradients}.items()
        sentences = (_find_not_finite(self.attention, name, result) for name, result in results)
        reason = agree(next(filter(None, sentences), None), group)
        return reason or errors.over_tolerance(dtype)

    def check_repeats(self, repeats: RepeatCheck) -> Outcome | None:
        """Return `wrong` on all ranks if a timed pass had other results than the checked one."""
        self.log.add("checked_passes", "1", repeats.passes)
        self.log.facts["passes_with_new_scores"] = repeats.judged
        if repeats.sums:
            self.log.facts["gradient_sums"] = repeats.sums
        own = repeats.over_tolerance(self.attention.coarsest_dtype) or self._find_hidden_work()
        return _wrong(agree(own, self.attention.group))

    def _find_hidden_work(self) -> str | None:
        """Return a sentence if passes took more CPU time than their threads have in that time."""
        group = self.attention.group
        # a function may have set another number
        threads = self.trial.threads or torch.get_num_threads()
        if self.trial.device != "cpu" or group.size > 1:
            return None  # connections between ranks have threads of their own
        wall, cpu = (median(samples_of(self.log.measurements, n)) for n in ("time", "cpu_time"))
        if cpu < MIN_CPU_S or cpu <= MAX_CPU_SHARE * threads * wall:
            return None
        return (
            f"passes of {wall:.2g} s took {cpu:.2g} s of CPU time on {threads} thread"
            f"{'s' * (threads > 1)}: other threads help (`threads` says how many may), "
            "or the clock is wrong"
        )

    def check_every_row(self, rows: EveryRowCheck, pass_: Pass) -> Outcome | None:
        """Check every row with special inputs, unless a search runs a length for the first time.

        Passes of their own run only if their work is little. The inputs are lost.
        The fact `every_row_skipped` has the inputs that were left out, each with the reason.
        """
        attention, trial = self.attention, self.trial
        if not (trial.repeats or trial.round):
            return None
        self.sender.start_phase("check", "every row")
        pass_.out = pass_.grads = None
        if not attention.is_softmax:
            of_softmax = "their results are those of a softmax"
            self.log.facts["every_row_skipped"] = dict.fromkeys(rows.not_done, of_softmax)
            return None
        if trial.device == "cuda":
            torch.cuda.empty_cache()
        if reason := self._too_much_work():
            if skipped := rows.not_done:
                self.log.facts["every_row_skipped"] = dict.fromkeys(skipped, reason)
        else:
            for run, layer in self.layers(pass_):
                of_layer = rows if layer is pass_ else EveryRowCheck(run.attention)
                run.check_special_inputs(of_layer, layer)
                rows.reason = rows.reason or of_layer.reason
        self.log.facts["every_row_checked"] = rows.done
        return _wrong(agree(rows.reason, attention.group))

    def check_special_inputs(self, rows: EveryRowCheck, pass_: Pass) -> None:
        """Run passes of a layer with the inputs that were not tried."""
        if not rows.done:
            with rows.warm_up(pass_):
                run_forward(self.attention, pass_)
        for inputs in rows.remaining:
            # the time limit of a phase is for one pass
            self.sender.start_phase("check", "every row")
            with rows.check(pass_, inputs):
                run_pass(self.attention, pass_)

    def _too_much_work(self) -> str | None:
        """Return why no further passes run, the same on all ranks, or None."""
        attention, group, device = self.attention, self.attention.group, self.trial.device
        limit = MAX_EXTRA_FLOPS[device][attention.workload.dtype == "float32"]
        limit *= torch.get_num_threads() if device == "cpu" else 1
        # hosts may have unlike numbers of cores
        share = group.all_max(attention.cost().flops / group.size / limit)[0]
        return f"its FLOPs are {share:.2g} times the limit" if share > 1 else None


def _wrong(reason: str | None) -> Outcome | None:
    return Outcome(status="wrong", reason=reason, phase="check") if reason else None


def agree(own: str | None, group: Group) -> str | None:
    """Return the sentence of the lowest rank that has one, or None. All ranks must call it."""
    if group.size == 1:
        return own
    for rank, sentence in enumerate(all_gather(group, own)):
        if sentence:
            return f"{sentence} (on rank {rank})"
    return None


def _find_not_finite(attention: Attention, name: str, result: Tensor) -> str | None:
    """Return a sentence about the first value of a result (B, H, N, D) that is not finite."""
    shard, start = attention.shard, 0
    of_keys, of_queries = (shard.kv_heads, shard.keys), (shard.heads, shard.queries)
    heads, positions = of_keys if name in ("dk", "dv") else of_queries
    if is_finite(result):
        return None
    for rows in row_slices(result):
        if len(bad := (~rows.isfinite()).nonzero()):
            row, column = bad[0].tolist()
            b, head, token = np.unravel_index(start + row, result.shape[:3])
            where = f"row {positions[token]:,} of head {heads[head]} (batch row {shard.batch[b]})"
            value = str(float(rows[row, column])).replace("nan", "NaN")
            return f"{name} is not finite: {where} is {value}; the reference is finite"
        start += len(rows)
    return None
