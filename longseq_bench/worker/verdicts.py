"""Verdicts on a trial, on which all ranks agree: too slow, or wrong results."""

from statistics import median

import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.worker.check import all_finite, check, count_zero_rows
from longseq_bench.worker.inputs import Pass
from longseq_bench.worker.passes import TrialRun, run_forward, run_pass
from longseq_bench.worker.repeat_check import RepeatCheck
from longseq_bench.worker.row_check import MATCHING, EveryRowCheck
from longseq_bench.worker.shard_coverage import all_gather

MAX_EXTRA_PASS_S = 1.0
"""Longest pass after which further passes check every row, so that they cost little."""


class Verdicts(TrialRun):
    """Judges the time of passes, sampled rows, every row, and the results of timed passes."""

    def must_time_again(self) -> bool:
        """Return True if the time of the one pass counts, and is not that of the attention.

        A rank compiled something; or it was over the time budget, but slowed by exact accounting of
        the heap. With timed passes it does not count: they follow a warm-up of the same shape.
        """
        trial, log = self.trial, self.log
        if trial.repeats:
            return False
        if log.compiled:
            log.facts["timed_again"] = "the first pass compiled a kernel or a graph"
        is_late = trial.time_budget is not None and log.pass_s > trial.time_budget
        return log.compiled or (is_late and log.exact and trial.device == "cpu")

    def judge_pass_time(self) -> Outcome | None:
        """Log the time of the one pass; return a timeout if it is over the budget."""
        self.log.add("pass_time", "s", self.log.own_pass_s)
        self.log.facts["pass_s"] = self.log.pass_s
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

    def check(self, one: Pass) -> Outcome | None:
        """Compare the pass with the reference; return the outcome `wrong` on all ranks, or None."""
        self.sender.start_phase("check")
        assert one.out is not None
        group = self.attention.group
        if reason := agree(_find_invalid(one), group):
            return _wrong(reason)
        zeros, output_rows = count_zero_rows(one.out, group)
        self.log.add("zero_rows", "1", zeros / output_rows)
        uncovered = self.attention.measures().get("uncovered", 0.0)
        if zeros > round(uncovered * output_rows):
            found = f"{zeros:,} of {output_rows:,} output rows are zero"
            return _wrong(f"{found}; the pattern leaves {uncovered:.2%}")
        own = check(
            self.attention, one.original_inputs, one.out, self.rows, one.grad_out, one.grads
        )
        errors = own.largest_over_ranks(group)
        dtype = self.attention.coarsest_dtype
        self.log.add("max_error", "1", errors.worst)
        self.log.add("error_of_allowed", "1", errors.share_of_allowed(dtype))
        self.log.add("bias", "1", errors.worst_bias)
        self.log.add("checked_rows", "1", len(self.rows))
        self.log.facts["errors"] = errors.largest
        if not all_finite([one.out], group):
            reason = "the output has values that are not finite"
        elif not all_finite(list(one.grads or ()), group):
            reason = "a gradient has values that are not finite"
        else:
            reason = errors.over_tolerance(dtype)
        return _wrong(reason)

    def check_repeats(self, repeats: RepeatCheck) -> Outcome | None:
        """Return `wrong` on all ranks if a timed pass had other results than the checked one."""
        attention = self.attention
        own = repeats.over_tolerance(attention.coarsest_dtype)
        self.log.add("checked_passes", "1", repeats.passes)
        if repeats.sums:
            self.log.facts["gradient_sums"] = repeats.sums
        return _wrong(agree(own, attention.group))

    def check_every_row(self, rows: EveryRowCheck, one: Pass) -> Outcome | None:
        """Check every row with special inputs, unless a search runs a length for the first time.

        Passes of their own run only if they are short. The inputs are lost.
        """
        attention, trial = self.attention, self.trial
        if not (trial.repeats or trial.round):
            return None
        self.sender.start_phase("check", "every row")
        one.out = one.grads = None
        if trial.device == "cuda":
            torch.cuda.empty_cache()
        if self.log.pass_s <= MAX_EXTRA_PASS_S:
            if not rows.done:
                with rows.warm_up(one):
                    run_forward(attention, one)
            if rows.can_have_equal_scores:
                with rows.equal_scores(one):
                    run_pass(attention, one)
            if rows.can_have_matching_scores and MATCHING not in rows.done:
                with rows.matching_scores(one):
                    run_pass(attention, one)
        self.log.facts["every_row_checked"] = rows.done
        return _wrong(agree(rows.reason, attention.group))


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


def _find_invalid(one: Pass) -> str | None:
    """Return which input a pass changed, or which result has another shape or dtype, or None."""
    if changed := one.changed_inputs():
        return f"a pass changed its input {' and '.join(changed)}"
    (q, _, v), dtype = one.inputs, str(one.inputs[0].dtype)[6:]
    assert one.out is not None
    names, results = ("the output", "dq", "dk", "dv"), (one.out, *(one.grads or ()))
    shapes = (*q.shape[:3], v.shape[3]), *(tuple(t.shape) for t in one.inputs)
    for name, got, shape in zip(names, results, shapes, strict=False):
        found = str(got.dtype)[6:], tuple(got.shape)
        if found != (dtype, shape):
            return f"{name} is {found[0]} {found[1]}; expected {dtype} {shape}"
    return None
