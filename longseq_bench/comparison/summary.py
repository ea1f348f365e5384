"""Summarize a comparison in sentences, and find what its gate (`--fail-on`) asks for."""

from collections import Counter
from collections.abc import Iterator

from longseq_bench.comparison.model import Comparison, TimeComparison
from longseq_bench.comparison.wording import (
    ComparedRow,
    count,
    count_rows,
    count_trials,
    format_detectable,
    format_percent,
    join_words,
    name_row,
)
from longseq_bench.core.errors import UserError
from longseq_bench.reports.outcome_text import describe_outcome

MAX_NAMED = 10
"""Regressions that a report names; the tables have all."""


def summarize(result: Comparison) -> list[str]:
    """Return one sentence per question: times, memory, lengths, statuses, unmatched trials."""
    return [*_times(result), *_memory_and_lengths(result), *_unmatched(result)]


def find_regressions(result: Comparison, share: float) -> Iterator[str]:
    """Yield a clause per new failure, then per figure that is worse by this share, worst first."""
    for change in result.status_changes:
        if change.verdict == "broken" and not change.budgets:
            outcome = describe_outcome(change.b_status, None, change.b_reason)
            yield f"{name_row(change.row)} is no longer ok: {outcome}"
    worse: list[tuple[float, ComparedRow, str, str]] = [
        *((t.ratio - 1, t.row, "is", "slower") for t in result.times if t.verdict == "slower"),
        *(
            (p.ratio - 1, p.row, "takes", "more memory")
            for p in result.peaks if p.verdict == "more"
        ),
        *(
            (1 - m.ratio, m.row, "reaches", "fewer tokens")
            for m in result.maxima if m.verdict == "shorter" and m.ratio is not None
        ),
    ]  # fmt: skip
    for by, row, verb, what in sorted(worse, key=lambda one: -one[0]):
        if by >= share:
            yield f"{name_row(row)} {verb} {format_percent(by)} {what}"


def check_gate(result: Comparison) -> None:
    """Raise UserError if a gate would ignore trials because they ran on different machines."""
    if result.other_machines:
        raise UserError(
            f"{count_rows(result.other_machines)} in both, but on different machines"
            f"{result.machine_differences}; --fail-on would ignore them, --across-machines "
            "compares them"
        )


def describe_gate(result: Comparison, share: float) -> list[str]:
    """Return the regressions as sentences, and the trials that the gate could not check."""
    limit = format_percent(share)
    clauses = list(find_regressions(result, share))
    sentences = [f"{clause}." for clause in clauses[:MAX_NAMED]]
    if (more := len(clauses) - MAX_NAMED) > 0:
        sentences.append(f"{count(more, 'more figure is', 'more figures are')} worse by {limit}.")
    sentences = sentences or [f"Nothing was found to be worse by {limit}."]
    if missing := len(result.only_a):
        verb = "is" if missing == 1 else "are"
        trials = count(missing, "trial or search", "trials and searches")
        sentences.append(f"{trials} of A {verb} not in B and {verb} not checked.")
    if unseen := undetectable(result, share):
        sentences.append(
            f"In {len(unseen)} of {len(result.times)} timed trials a slow-down of {limit} could "
            "not be detected."
        )
    return sentences


def could_show(t: TimeComparison, share: float, min_change: float) -> bool:
    """Return True if the row could have shown a slow-down by this share, or has shown a change."""
    if t.verdict in ("slower", "faster"):
        return True
    return t.estimate is not None and max(t.estimate.detectable, min_change) <= share


def undetectable(result: Comparison, share: float) -> list[TimeComparison]:
    """Return the timed trials that could not have shown a slow-down by this share."""
    return [t for t in result.times if not could_show(t, share, result.min_change)]


def _times(result: Comparison) -> Iterator[str]:
    verdicts = Counter(t.verdict for t in result.times)
    parts = []
    if decided := len(result.times) - verdicts["undecided"]:
        known = [
            max(t.estimate.detectable, result.min_change)
            for t in result.times if t.estimate and t.verdict == "same"
        ]  # fmt: skip
        smallest = ""
        if known:
            low, high = format_detectable(min(known)), format_detectable(max(known))
            span = low if low == high else f"{low.removesuffix(' %')} to {high}"
            smallest = f" (the smallest detectable difference is {span})"
        parts.append(
            f"B is slower in {verdicts['slower'] or 'none'} of {count_trials(decided)}, faster in "
            f"{verdicts['faster'] or 'none'}; {verdicts['same'] or 'none'} the same within noise"
            f"{smallest}"
        )
    if undecided := verdicts["undecided"]:
        reasons = join_words(list(dict.fromkeys(t.reason for t in result.times if t.reason)))
        parts.append(f"{count_trials(undecided)} undecided: {reasons}")
    if parts:
        yield "; ".join(parts) + "."


def _memory_and_lengths(result: Comparison) -> Iterator[str]:
    if result.peaks:
        peaks = Counter(p.verdict for p in result.peaks)
        yield (
            f"Peak memory: more in {peaks['more'] or 'none'} of "
            f"{count_trials(len(result.peaks))}, less in {peaks['less'] or 'none'}."
        )
    if result.maxima:
        maxima = Counter(m.verdict for m in result.maxima)
        undecided = f", {maxima['undecided']} undecided" if maxima["undecided"] else ""
        yield (
            f"Longest lengths: shorter in {maxima['shorter'] or 'none'} of "
            f"{count(len(result.maxima), 'search', 'searches')}, longer in "
            f"{maxima['longer'] or 'none'}{undecided}."
        )


def _unmatched(result: Comparison) -> Iterator[str]:
    changes = Counter(change.verdict for change in result.status_changes)
    if changes:
        words = {
            "no longer ok": changes["broken"],
            "ok only in B": changes["mended"],
            "failed differently": changes["otherwise"],
        }
        parts = ", ".join(f"{n} {word}" for word, n in words.items() if n)
        yield f"Trials with a different status: {parts}."
    if result.failed_alike:
        yield f"{count_trials(result.failed_alike)} failed in the same way in both."
    for name, rows in (("A", result.only_a), ("B", result.only_b)):
        if rows:
            found = count(len(rows), "trial or search is", "trials or searches are")
            yield f"{found} only in {name}."
    if result.other_machines:
        yield (
            f"{count_rows(result.other_machines)} in both, but on different machines"
            f"{result.machine_differences}: not compared; --across-machines compares them."
        )
