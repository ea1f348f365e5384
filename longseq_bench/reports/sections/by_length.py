"""The answer of `longseq recommend`: an implementation for each length, and how far each one goes.

A figure with ~ is predicted, no such pass ran: it is the prediction made for the longest run of the
same implementation, corrected by what that run took.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Status, TrialPrediction
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import Cell, KeyFigure, Section, format_cell
from longseq_bench.reports.groups import SIMILAR_DENSITY, capitalize_first, join_words, table_key

FEW_PASSES, PREDICTED, SAME_LENGTH = 1.1, 1.3, 0.99
"""Ratios of measured times, of predicted ones and of lengths that are no reason to prefer one."""


class Answer(NamedTuple):
    """The figures of one implementation, measured and predicted.

    row: its longest run that passed.  runs: a row for each length that was run.  predicted: one for
    each that was asked for; None beyond a failure.  longest: the longest length that fits in
    memory, 0: unknown.  is_found: by a search with --fit-only.  longest_s: a pass, predicted.
    """

    row: SweepRow
    runs: Mapping[int, SweepRow]
    predicted: Mapping[int, SweepRow | None]
    longest: int
    is_found: bool
    longest_s: float

    def at(self, tokens: int) -> SweepRow | None:
        """Return the row of a length, of a run if it was run."""
        return self.runs.get(tokens) or self.predicted.get(tokens)

    def seconds(self, tokens: int) -> float:
        """Return the time of a pass; infinite if it can't run or is not known."""
        row = self.at(tokens)
        return row.time_s if row and row.is_ok and row.time_s else inf

    def time(self, tokens: int) -> Cell:
        """Return the time of a pass, or how it ends."""
        if (row := self.at(tokens)) is None:
            return None
        cell = time_or_status(row)
        return cell if tokens in self.runs else f"~{format_cell(cell, 'seconds')}"

    def share(self, tokens: int) -> float | None:
        """Return the share of the pairs that it sees at a length; None for exact attention."""
        row = self.at(tokens) or self.row
        share = row.token_density or row.density
        # the longest run may be of a length of which the pattern sees all pairs
        is_sparse = row.is_sparse if tokens in self.runs else share < SIMILAR_DENSITY
        return share if is_sparse else None

    def longest_words(self) -> str | None:
        """Return the longest length that fits in memory."""
        return f"{'~' * (not self.is_found)}{format_tokens(self.longest)}" if self.longest else None


def find_answers(source: Source) -> list[list[Answer]]:
    """Return the implementations of each workload whose records have lengths asked for."""
    searches = {row.growth_key: row.max_tokens for row in source.maxima if row.first_failure}
    answers = []
    for pairs in group_by(source.pairs, lambda pair: (pair[0].name, table_key(pair[0]))).values():
        runs = {row.tokens: row for row, _ in pairs}
        failed = min((row.tokens for row, _ in pairs if not row.is_ok), default=inf)
        passed = [(row, run.foreseen) for row, (run, *_) in pairs if row.is_ok and run.foreseen]
        row, foreseen = max(passed, key=lambda pair: pair[0].tokens, default=(None, None))
        if row and foreseen and foreseen.asked and foreseen.seconds and row.time_s:
            factor = row.time_s / foreseen.seconds
            predicted = {
                n: _predict(row, foreseen, n, factor) if n < failed else None
                for n in foreseen.asked
            }
            found = searches.get(replace(row, fit_only=True).growth_key, 0)
            longest = found or (foreseen.fits_tokens or 0) * (failed == inf)
            longest_s = (foreseen.fits_seconds or inf) * factor
            answers.append(Answer(row, runs, predicted, longest, bool(found), longest_s))
    return list(group_by(answers, lambda answer: table_key(answer.row)).values())


def _lengths(answers: Sequence[Answer]) -> list[int]:
    return sorted({tokens for answer in answers for tokens in answer.predicted})


def _predict(row: SweepRow, foreseen: TrialPrediction, tokens: int, factor: float) -> SweepRow:
    """Return the row of a length that was not run. factor: of predicted times."""
    seconds, share = foreseen.asked[tokens]
    status: Status = "ok" if tokens <= (foreseen.fits_tokens or tokens) else "oom"
    time_s = seconds * factor
    return replace(row, tokens=tokens, status=status, time_s=time_s, samples=0, token_density=share)


def by_length(source: Source) -> Section:
    """Build a table per workload: the time at each length that was asked for, and the longest."""
    tables, groups = [], find_answers(source)
    for answers in groups:
        first = answers[0]
        *_, last = lengths = _lengths(answers)
        columns = [
            ValueColumn("Implementation", "text", lambda one: one.row.name),
            ValueColumn(
                f"Pairs seen at {format_tokens(last)}", "share", partial(Answer.share, tokens=last)
            ),
            *(
                ValueColumn(format_tokens(n), "seconds", partial(Answer.time, tokens=n))
                for n in lengths
            ),
            ValueColumn(f"Longest in {_memory(first)}", "tokens", Answer.longest_words),
            ValueColumn("A pass there", "seconds", _time_of_longest),
        ]
        words = join_words(source.workload(first.row) if len(groups) > 1 else "", "time of a pass")
        title = f"{capitalize_first(words)}; ~ is predicted from shorter runs, not run"
        answers.sort(key=lambda answer: answer.seconds(last))
        tables.append(build_table(title, columns, answers))
    return Section("Answers by length", tables=tables)


def _time_of_longest(answer: Answer) -> str | None:
    return f"~{format_seconds(answer.longest_s)}" if answer.longest_s < inf else None


def _memory(answer: Answer) -> str:
    return format_bytes(answer.row.memory_budget or 0)


def answer_figures(source: Source) -> Iterator[KeyFigure]:
    """Yield what to use at each length that was asked for, and how far it goes in memory."""
    for answers in find_answers(source)[:1]:
        for tokens in _lengths(answers):
            exact = [answer for answer in answers if answer.share(tokens) is None]
            sparse = [answer for answer in answers if answer.share(tokens) is not None]
            ends = {row.status for answer in answers if (row := answer.at(tokens))}
            none = "nothing fits in memory" if ends == {"oom"} else "no implementation passed"
            found = _fastest(sparse, tokens), _fastest(exact, tokens)
            yield _figure(f"At {format_tokens(tokens)} tokens", *found, none)
        found = _farthest(sparse), _farthest(exact)
        yield _figure(f"Longest in {_memory(answers[0])}", *found, "not known")


def _figure(label: str, sparse: str, exact: str, none: str) -> KeyFigure:
    # exact attention first: the other leaves pairs out, which nobody has asked for
    more = f"sparse: {sparse}" if sparse and exact else ""
    return KeyFigure(label, exact or sparse or none, more)


def _fastest(answers: Sequence[Answer], tokens: int) -> str:
    """Name the fastest at a length, and those that may be as fast; "" if none can run."""
    known = sorted(answers, key=lambda answer: answer.seconds(tokens))
    if not known or (least := known[0].seconds(tokens)) == inf:
        return ""
    factor = FEW_PASSES if tokens in known[0].runs else PREDICTED
    ties = [one.row.claim_name for one in known if one.seconds(tokens) <= factor * least]
    more = f" or {ties[1] if len(ties) == 2 else f'{len(ties) - 1} more'}" if ties[1:] else ""
    share = known[0].share(tokens)
    seen = f"sees {format_share(share)} of the pairs" if share else ""
    late = "over the time limit" if least > (known[0].row.time_budget or inf) else ""
    return join_words(ties[0] + more, format_cell(known[0].time(tokens), "seconds"), late, seen)


def _farthest(answers: Sequence[Answer]) -> str:
    """Name the fastest of those that reach the longest length in memory; "" if none is known."""
    most = max((answer.longest for answer in answers), default=0)
    near = [answer for answer in answers if most and answer.longest >= SAME_LENGTH * most]
    if not near:
        return ""
    best = min(near, key=lambda answer: answer.longest_s)
    return join_words(
        f"{best.longest_words()} tokens", best.row.name, f"{_time_of_longest(best)} a pass"
    )
