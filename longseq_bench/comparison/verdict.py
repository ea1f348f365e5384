"""The verdict of a comparison, PASS, FAIL or TOO NOISY: the one place that defines the words.

The change asked for is the share of --fail-on; without it, the smallest difference that is
reported (--min-difference).

FAIL: a figure is worse by at least that change: a time by the test, a peak, a longest length; or a
trial is no longer ok.
TOO NOISY: not FAIL, and a series of trials (one implementation at several lengths) has no length
that could have shown the change in its time; or a search that time limits is shorter by the
change, which may be noise; or there is no figure to compare.
PASS: all else. Trials that could not have shown the change are counted, if their series has another
length that could.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

from longseq_bench.analysis.runs import group_by
from longseq_bench.comparison.model import Comparison, LengthComparison, TimeComparison
from longseq_bench.comparison.significance import MAX_ROUNDS, find_rounds
from longseq_bench.comparison.summary import could_show, find_regressions, undetectable
from longseq_bench.comparison.wording import count, count_trials, format_percent, name_row
from longseq_bench.reports.groups import table_key

MIN_ROUNDS = 3
"""Rounds that are proposed where one process a side shows no noise at all."""

MAX_CLAUSE = 90
"""Letters of the worst figure in the verdict; the reason of a failure may be long."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a comparison.

    reason: a short sentence without its first capital.
    rounds: if too noisy, the rounds per side that would be enough; None: unknown or too many.
    """

    word: Literal["PASS", "FAIL", "TOO NOISY"]
    reason: str
    rounds: int | None = None

    @property
    def line(self) -> str:
        """The first line of every rendering."""
        return f"{self.word}: {self.reason}"


def decide(result: Comparison, fail_on: float | None = None) -> Verdict:
    """Return the verdict; fail_on: the share that fails, else any change that was detected."""
    if worse := list(find_regressions(result, fail_on or 0.0)):
        others = count(len(worse) - 1, "more figure is", "more figures are")
        rest = f", and {others} worse" if len(worse) > 1 else ""
        return Verdict("FAIL", f"{shorten(worse[0], MAX_CLAUSE, placeholder=' …')}{rest}.")
    share = fail_on or result.min_change
    series = _unseen_series(result, share)
    if series:
        return _too_noisy(result, share, series)
    if shorter := _undecided_searches(result, share):
        one = shorter[0]
        drop = format_percent(1 - (one.ratio or 0))
        return Verdict(
            "TOO NOISY", f"{name_row(one.row)} reaches {drop} fewer tokens; {one.reason}."
        )
    if not (result.times or result.peaks or result.maxima or result.status_changes):
        trials = count_trials(result.failed_alike)
        return Verdict("TOO NOISY", f"there is no figure to compare; {trials} failed in both.")
    return Verdict("PASS", _passed(result, fail_on))


def _passed(result: Comparison, fail_on: float | None) -> str:
    timed, searched = len(result.times), len(result.maxima)
    parts = [count_trials(timed or len(result.peaks))] if timed or result.peaks else []
    parts += [count(searched, "search", "searches")] if searched else []
    limit = f" by {format_percent(fail_on)} or more" if fail_on else ""
    where = f" in {' and '.join(parts)}" if parts else ""
    reason = f"nothing is worse{limit}{where}"
    unseen = len(undetectable(result, fail_on or result.min_change))
    reason += f"; {unseen} of them could not have shown it" if unseen else ""
    missing = f"; {len(result.only_a)} of A not in B" if result.only_a else ""
    return f"{reason}{missing}."


def _unseen_series(result: Comparison, share: float) -> list[list[TimeComparison]]:
    """Return the series in which no length could have shown the change.

    A series has the trials that differ in length only.
    """

    def key(t: TimeComparison) -> object:
        return table_key(t.row), t.row.implementation, t.row.label, t.row.world_size

    series = group_by(result.times, key).values()
    return [one for one in series if not any(could_show(t, share, result.min_change) for t in one)]


def _undecided_searches(result: Comparison, share: float) -> list[LengthComparison]:
    return [
        m for m in result.maxima
        if m.verdict == "undecided" and m.ratio is not None and 1 - m.ratio >= share
    ]  # fmt: skip


def _too_noisy(
    result: Comparison, share: float, series: Sequence[Sequence[TimeComparison]]
) -> Verdict:
    change = f"a slow-down of {format_percent(share)}"
    unseen = f"{len(undetectable(result, share))} of {count_trials(len(result.times))}"
    reason = f"{unseen} could not have shown {change}"
    known = [one for one in series if any(t.estimate for t in one)]
    if not known:
        advice = f"{MIN_ROUNDS} or more rounds per side show the noise"
        return Verdict("TOO NOISY", f"{reason}; {advice}.")
    rounds = find_enough_rounds(result, share, known)
    if rounds is None:
        return Verdict("TOO NOISY", f"{reason}, nor could {MAX_ROUNDS:,} rounds per side.")
    rounds = max(rounds, MIN_ROUNDS)
    return Verdict("TOO NOISY", f"{reason}; {rounds} rounds per side would be enough.", rounds)


def find_enough_rounds(
    result: Comparison, share: float, series: Sequence[Sequence[TimeComparison]]
) -> int | None:
    """Return the rounds per side with which each series shows the change at one length.

    None: more than MAX_ROUNDS, or the noise of a series is not known.
    """
    tested = [t for t in result.times if t.estimate]
    pairs = [(t.a_rounds, t.b_rounds) for t in tested]
    rounds = dict(zip(map(id, tested), find_rounds(pairs, share, result.level), strict=True))
    least = [min(filter(None, (rounds.get(id(t)) for t in one)), default=0) for one in series]
    return max(least) if all(least) else None
