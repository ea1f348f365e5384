"""The answer of a comparison: PASS, FAIL or TOO NOISY, the regressions, a sentence per question.

The change asked for is the share of --fail-on, else 1 %.
FAIL: a figure is worse by it (a time by the test), or a trial is no longer ok.
TOO NOISY: not FAIL, and a series of trials (one implementation at several lengths) has no length
that could have shown the change in its time; or the machine was not steady, and a trial has no
control; or a search that time limits is shorter by the change, which may be noise; or there is no
figure to compare.
PASS: all else.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Literal

from longseq_bench.analysis.labels import mask_words, mode_words
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.comparison.significance import MAX_ROUNDS, RatioEstimate, find_rounds
from longseq_bench.core.errors import UserError
from longseq_bench.core.masks import FULL
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.groups import describe_outcome, in_brackets, table_key

ComparedRow = SweepRow | SearchRow  # a trial or a search
CONTROL, NOISY, UNSTEADY = "control", "too noisy", "the machine was not steady"


@dataclass(frozen=True)
class Change:
    """The time, the peak memory, the longest length or the status of a trial on both sides.

    a, b: the merged runs of each side; a has the label.
    verdict: of a time "slower", "faster", "same", "undecided", NOISY, CONTROL; of a peak "more",
    "less", "same"; of a length "longer", "shorter", "same", "undecided"; of a status "broken",
    "mended", "otherwise".
    ratio: infinite if no length passed with A.  reason: why it is undecided.
    note: budgets of the two sides that differ and matter, as text.
    a_rounds, b_rounds: of a time, the median pass of each process (s); with a control, over that of
    the control's process of the same round.  control: its name, which is that of a itself for one.
    """

    a: Any
    b: Any
    verdict: str
    ratio: float = math.nan
    reason: str = ""
    note: str = ""
    a_rounds: tuple[float, ...] = ()
    b_rounds: tuple[float, ...] = ()
    estimate: RatioEstimate | None = None
    control: str = ""

    @property
    def is_control(self) -> bool:
        """True of a time with the same code on both sides, by which others are divided."""
        return bool(self.control == self.a.name)

    @property
    def is_raw(self) -> bool:
        """True of a time that was tested as it is, without a control."""
        is_tested = self.estimate is not None and self.verdict != CONTROL
        return is_tested and (not self.control or self.is_control)


@dataclass(frozen=True)
class Comparison:
    """Two sets of results, compared.

    names: of A and B.  level: family-wise error rate of all `slower` and `faster`.
    min_change: the smallest relative difference in time that is reported.
    failed_alike: trials that ended with the same status, not ok, on both sides.
    other_machines: trials of both sides that ran on different machines and are not compared.
    machine_differences: those of the latter, in brackets.
    differences: of machine and software: name, values of A, values of B.
    records: those compared, of A and of B.
    """

    names: tuple[str, str]
    level: float
    min_change: float
    times: Sequence[Change]
    peaks: Sequence[Change]
    maxima: Sequence[Change]
    statuses: Sequence[Change]
    failed_alike: int
    only_a: Sequence[ComparedRow]
    only_b: Sequence[ComparedRow]
    other_machines: Sequence[ComparedRow]
    machine_differences: str
    differences: Sequence[tuple[str, str, str]]
    caveats: Sequence[str]
    records: tuple[Sequence[Record], Sequence[Record]]

    @property
    def judged(self) -> list[Change]:
        """The times of all trials but controls."""
        return [t for t in self.times if t.verdict != CONTROL]

    @property
    def method(self) -> str:
        """The part of the verdict that says how the machine's speed was taken out; else empty."""
        names = dict.fromkeys(t.control for t in self.judged if not t.is_control and t.control)
        words = f"{' and '.join(names)}, which {'are' if len(names) > 1 else 'is'} the same in both"
        return f"; times are over those of {words}" if names else ""


def name_row(row: ComparedRow) -> str:
    """Return the name of a trial or a search: "ring chunk 1k ×2 at 4k (train)"."""
    tokens = f" at {format_tokens(row.tokens)}" if isinstance(row, SweepRow) else ""
    workload = [
        mode_words(row.mode, row.new_tokens, row.kv_dtype) if row.mode != "forward" else "",
        row.dtype if row.dtype != "float32" else "",
        mask_words(row.mask) if row.mask != FULL else "",
        "sinks" if row.sink else "",
    ]
    words = ", ".join(filter(None, workload))
    return f"{row.name}{tokens}{in_brackets(words)}"


def format_percent(share: float) -> str:
    """Format a relative difference as a percentage with two digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.2g} %"


def count(n: int, one: str, several: str = "") -> str:
    """Return a number with the singular or the plural, which has an s if it is not given."""
    return f"{n} {one if n == 1 else several or f'{one}s'}"


MIN_ROUNDS = 3  # that are proposed where one process a side shows no noise at all
MAX_CLAUSE = 90  # letters of the worst figure in the verdict; the reason of a failure may be long
_WORSE = {"slower": "is {} slower", "more": "takes {} more memory"}
_WORSE["shorter"] = "reaches {} fewer tokens"


@dataclass(frozen=True)
class Verdict:
    """The answer of a comparison.

    rounds: if too noisy, the rounds per side that would be enough; None: unknown or too many.
    """

    word: Literal["PASS", "FAIL", "TOO NOISY"]
    reason: str
    rounds: int | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def decide(result: Comparison, fail_on: float | None = None) -> Verdict:
    """Return the verdict; fail_on: the share that fails, else any change that was detected.

    Raises UserError if fail_on would ignore trials because they ran on different machines.
    """
    if fail_on and result.other_machines:
        ignored = "--fail-on would ignore them, --across-machines compares them"
        raise UserError(f"{_on_other_machines(result)}; {ignored}")
    if worse := find_regressions(result, fail_on or 0.0):
        rest = count(len(worse) - 1, "more figure is worse", "more figures are worse")
        worst = shorten(worse[0], MAX_CLAUSE, placeholder=" …")
        rest = f", and {rest}" if len(worse) > 1 else ""
        return Verdict("FAIL", f"{worst}{rest}{result.method}.")
    if doubtful := [name_row(t.a) for t in result.judged if t.verdict == NOISY]:
        rest = f" and {count(len(doubtful) - 1, 'more trial')}" if len(doubtful) > 1 else ""
        reason = f"{UNSTEADY} (see Cautions), and no control corrects {doubtful[0]}{rest}"
        return Verdict("TOO NOISY", f"{reason}; use compare --run, or sweep with sdpa too.")
    share = fail_on or result.min_change
    unseen = [t for t in result.judged if not could_show(result, share, t)]
    series = group_by(
        result.judged, lambda t: (table_key(t.a), t.a.implementation, t.a.label, t.a.world_size)
    ).values()
    noisy = [some for some in series if not any(could_show(result, share, t) for t in some)]
    if noisy:
        part = f"{len(unseen)} of {count(len(result.judged), 'trial')}"
        reason = f"{part} could not have shown a slow-down of {format_percent(share)}"
        return _too_noisy(result, share, noisy, reason)
    for one in result.maxima:
        if one.verdict == "undecided" and 1 - one.ratio >= share:
            drop = f"reaches {format_percent(1 - one.ratio)} fewer tokens"
            return Verdict("TOO NOISY", f"{name_row(one.a)} {drop}; {one.reason}.")
    trials, searches = len(result.judged or result.peaks), len(result.maxima)
    counts = [count(trials, "trial")] if trials else []
    counts += [count(searches, "search", "searches")] if searches else []
    if not counts and not result.statuses:
        failed = count(result.failed_alike, "trial")
        return Verdict("TOO NOISY", f"there is no figure to compare; {failed} failed in both.")
    reason = f"nothing is worse{f' by {format_percent(share)} or more' if fail_on else ''}"
    reason += f" in {' and '.join(counts)}" if counts else ""
    reason += f"; {len(unseen)} of them could not have shown it" if unseen else ""
    reason += f"; {len(result.only_a)} of A not in B" if result.only_a else ""
    return Verdict("PASS", f"{reason}{result.method}.")


def _too_noisy(
    result: Comparison, share: float, series: Sequence[Sequence[Change]], reason: str
) -> Verdict:
    """Return the verdict with the rounds with which each series shows the change at one length."""
    if not any(t.estimate for some in series for t in some):
        advice = f"{MIN_ROUNDS} or more rounds per side show the noise"
        return Verdict("TOO NOISY", f"{reason}; {advice}.")
    tested = [t for t in result.judged if t.estimate]
    found = find_rounds([(t.a_rounds, t.b_rounds) for t in tested], share, result.level)
    rounds = dict(zip(map(id, tested), found, strict=True))
    known = [[rounds[id(t)] for t in some if t.estimate] for some in series]
    least = [min(filter(None, some), default=0) for some in known if some]
    if not all(least):
        return Verdict("TOO NOISY", f"{reason}, nor could {MAX_ROUNDS:,} rounds per side.")
    enough = max(MIN_ROUNDS, *least)
    return Verdict("TOO NOISY", f"{reason}; {enough} rounds per side would be enough.", enough)


def could_show(result: Comparison, share: float, t: Change) -> bool:
    """Return True if a time could have shown a slow-down by this share, or has shown a change."""
    if t.verdict in ("slower", "faster"):
        return True
    return t.estimate is not None and max(t.estimate.detectable, result.min_change) <= share


def find_regressions(result: Comparison, share: float) -> list[str]:
    """Return a clause per new failure, then per figure worse by this share, the worst first."""
    broken = [
        f"{name_row(one.a)} is no longer ok: {describe_outcome(one.b.status, None, one.b.reason)}"
        for one in result.statuses
        if one.verdict == "broken" and not one.note
    ]
    figures: list[Change] = [*result.judged, *result.peaks, *result.maxima]
    worse = [
        (by, f"{name_row(one.a)} {_WORSE[one.verdict].format(format_percent(by))}")
        for one in figures
        if one.verdict in _WORSE and (by := abs(one.ratio - 1)) >= share
    ]
    return broken + [clause for _, clause in sorted(worse, key=lambda one: -one[0])]


def mark_noisy(result: Comparison, share: float, times: Iterable[Change]) -> list[Change]:
    """Return times of which those that could not have shown a change by this share are noisy."""
    return [
        t if t.verdict != "same" or could_show(result, share, t) else replace(t, verdict=NOISY)
        for t in times
    ]


def summarize(result: Comparison, share: float) -> Iterator[str]:
    """Yield a sentence per question: times, memory, lengths, statuses, unmatched trials.

    share: the change that a time must have been able to show to be the same.
    """
    for name, changes in (
        ("Times", mark_noisy(result, share, result.judged)),
        ("Peak memory", result.peaks),
        ("Longest lengths", result.maxima),
        ("Different status", result.statuses),
    ):
        if verdicts := Counter(one.verdict for one in changes):
            yield f"{name}: {', '.join(f'{n} {word}' for word, n in verdicts.most_common())}."
    same = [t.estimate for t in result.times if t.estimate and t.verdict == "same"]
    if seen := sorted(max(one.detectable, result.min_change) for one in same):
        ends = (">100 %" if x > 1 else format_percent(x) for x in (seen[0], seen[-1]))
        yield f"Smallest detectable difference in time: {' to '.join(dict.fromkeys(ends))}."
    if result.failed_alike:
        yield f"{count(result.failed_alike, 'trial')} failed in the same way in both."
    for name, rows in (("A", result.only_a), ("B", result.only_b)):
        if rows:
            found = count(len(rows), "trial or search is", "trials or searches are")
            yield f"{found} only in {name}."
    if result.other_machines:
        yield f"{_on_other_machines(result)}: not compared; --across-machines compares them."


def _on_other_machines(result: Comparison) -> str:
    rows = count(len(result.other_machines), "trial or search is", "trials or searches are")
    return f"{rows} in both, but on different machines{result.machine_differences}"
