"""The answer of `longseq recommend`: an implementation for each length, and how far each one goes.

A figure with ~ is predicted: its pass was not run. It is the prediction of the longest run of the
same implementation, corrected by what that run took.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from longseq_bench.analysis.frames import SCHEMA, finite
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record, TrialPrediction
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import Cell, KeyFigure, Section, format_cell
from longseq_bench.reports.groups import capitalize_first, join_words, table_key

ONE_PASS, PREDICTED = 1.1, 1.3
"""Times whose ratio is less are no reason to prefer one: of single passes, and of predictions."""
SAME_LENGTH = 0.99
"""Predicted lengths were within 1 % of those that searches found."""


class Answer(NamedTuple):
    """What is known of an implementation.

    row: its longest run that passed.  runs: a row for each length that was run.  foreseen: the
    prediction for `row`.  search: for the longest length that fits in memory, if it found one.
    """

    row: SweepRow
    runs: Mapping[int, SweepRow]
    foreseen: TrialPrediction
    search: SearchRow | None

    @property
    def longest(self) -> int:
        """The longest length that fits in memory, found or predicted; 0: unknown."""
        return self.search.max_tokens if self.search else self.foreseen.fits_tokens or 0

    def correct(self, seconds: float | None) -> float | None:
        """Return a predicted time, corrected by what the longest run took."""
        expected, took = self.foreseen.seconds, self.row.time_s
        return seconds * took / expected if seconds and took and expected else None

    def interval(self, tokens: int) -> tuple[float, float, float]:
        """Return low, middle and high of the time at a length; infinite if it can't run."""
        run = self.runs.get(tokens)
        if run is None:
            seconds = self.correct(self.foreseen.asked.get(tokens, (None, None))[0]) or inf
            fits = not self.foreseen.fits_tokens or tokens <= self.foreseen.fits_tokens
            middle, factor = seconds if fits else inf, PREDICTED
        else:
            middle, factor = run.time_s if run.is_ok and run.time_s else inf, ONE_PASS
            if run.samples > 1 and run.time_low_s and run.time_high_s:
                return run.time_low_s, middle, run.time_high_s
        return middle / factor, middle, middle * factor

    def share(self, tokens: int) -> float | None:
        """Return the share of the pairs that it sees at a length; None for exact attention."""
        if not self.row.is_sparse:
            return None
        run = self.runs.get(tokens)
        return run.token_density if run else self.foreseen.asked.get(tokens, (None, None))[1]

    def words(self, tokens: int) -> Cell:
        """Return the measured time at a length, or how that run ended, or the prediction."""
        if run := self.runs.get(tokens):
            return time_or_status(run)
        seconds = self.interval(tokens)[1]
        return f"~{format_seconds(seconds)}" if seconds < inf else "~out of memory"


def find_answers(source: Source) -> list[list[Answer]]:
    """Return the implementations of each workload that were asked for with lengths."""
    searches = {(row.growth_key, row.world_size): row for row in source.maxima}
    found = []
    for pairs in group_by(source.pairs, lambda pair: (pair[0].name, table_key(pair[0]))).values():
        passed = [(row, run.foreseen) for row, (run, *_) in pairs if row.is_ok and run.foreseen]
        row, foreseen = max(passed, key=lambda pair: pair[0].tokens, default=(None, None))
        if row and foreseen and foreseen.asked:
            search = searches.get((replace(row, fit_only=True).growth_key, row.world_size))
            is_found = search and search.max_tokens and search.first_failure
            runs = {one.tokens: one for one, _ in pairs}
            found.append(Answer(row, runs, foreseen, search if is_found else None))
    return list(group_by(found, lambda answer: table_key(answer.row)).values())


def by_length(source: Source) -> Section:
    """Build a table per workload: the time at each length that was asked for, and the longest."""
    tables, groups = [], find_answers(source)
    for answers in groups:
        lengths = sorted({n for answer in answers for n in answer.foreseen.asked})
        answers.sort(key=lambda answer: [answer.interval(n)[1] for n in reversed(lengths)])
        memory = format_bytes(answers[0].row.memory_budget or 0)
        columns = [
            ValueColumn("Implementation", "text", lambda one: one.row.name),
            ValueColumn(
                f"Pairs seen at {format_tokens(lengths[-1])}", "share", partial(_share, lengths[-1])
            ),
            *(ValueColumn(format_tokens(n), "seconds", partial(_time, n)) for n in lengths),
            ValueColumn(f"Longest in {memory}", "tokens", _longest),
            ValueColumn("A pass there", "seconds", _time_of_longest),
        ]
        where = source.workload(answers[0].row) if len(groups) > 1 else ""
        words = join_words(where, "time of a pass by tokens")
        title = f"{capitalize_first(words)}; ~ is predicted from shorter runs, not run"
        tables.append(build_table(title, columns, answers))
    return Section("Answers by length", tables=tables)


def _share(tokens: int, answer: Answer) -> float | None:
    return answer.share(tokens)


def _time(tokens: int, answer: Answer) -> Cell:
    return answer.words(tokens)


def _longest(answer: Answer) -> str | None:
    mark = "" if answer.search else "~"
    return f"{mark}{format_tokens(answer.longest)}" if answer.longest else None


def _time_of_longest(answer: Answer) -> str | None:
    seconds = answer.correct(answer.foreseen.fits_seconds)
    return f"~{format_seconds(seconds)}" if seconds else None


# ---- the answer in words -------------------------------------------------------------------------


def answer_figures(source: Source) -> Iterator[KeyFigure]:
    """Yield what to use at each length that was asked for, and the longest that memory allows."""
    groups = find_answers(source)
    if not groups:
        return
    answers = groups[0]
    sparse, exact = ([a for a in answers if a.row.is_sparse == is_] for is_ in (True, False))
    for tokens in sorted({n for answer in answers for n in answer.foreseen.asked}):
        label = f"At {format_tokens(tokens)} tokens"
        yield _figure(label, _fastest(sparse, tokens), _fastest(exact, tokens))
    memory = format_bytes(answers[0].row.memory_budget or 0)
    yield _figure(f"Longest in {memory}", _farthest(sparse), _farthest(exact))


def _figure(label: str, sparse: str, exact: str) -> KeyFigure:
    more = f"exact: {exact}" if sparse and exact else ""
    return KeyFigure(label, sparse or exact or "nothing fits in memory", more)


def _fastest(answers: Sequence[Answer], tokens: int) -> str:
    """Return the fastest at a length, with those that may be as fast; "" if none can run."""
    known = sorted(answers, key=lambda answer: answer.interval(tokens)[1])
    if not known or known[0].interval(tokens)[1] == inf:
        return ""
    best = known[0]
    ties = [a for a in known if a.interval(tokens)[0] <= best.interval(tokens)[2]]
    first, *others = [answer.row.claim_name for answer in ties]
    names = first + (
        f" or {others[0]}" if len(others) == 1 else f" or {len(others)} more" * bool(others)
    )
    share = best.share(tokens)
    seen = f"sees {format_share(share)} of the pairs" if share else ""
    return join_words(names, format_cell(best.words(tokens), "seconds"), seen)


def _farthest(answers: Sequence[Answer]) -> str:
    """Return the longest length in memory, and the fastest implementation that reaches it."""
    longest = max((answer.longest for answer in answers), default=0)
    if not longest:
        return ""
    known = [answer for answer in answers if answer.longest >= SAME_LENGTH * longest]
    best = min(known, key=lambda a: a.correct(a.foreseen.fits_seconds) or inf)
    return join_words(f"{_longest(best)} tokens", best.row.name, f"{_time_of_longest(best)} a pass")


def answers_json(records: Sequence[Record]) -> dict[str, Any]:
    """Return the document {"schema", "answers"}: times by tokens (s), and the longest lengths."""
    found = [answer for group in find_answers(Source(records)) for answer in group]
    answers = [
        {
            "implementation": one.row.name,
            "time_s": {n: one.interval(n)[1] for n in one.foreseen.asked},
            "measured": [n for n in one.foreseen.asked if n in one.runs],
            "max_tokens": one.longest,
            "is_max_measured": one.search is not None,
        }
        for one in found
    ]
    return {"schema": SCHEMA, "answers": finite(answers)}
