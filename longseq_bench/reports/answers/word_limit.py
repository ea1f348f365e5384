"""The limit on the words of a first screen."""

from collections.abc import Iterable

from longseq_bench.reports.base import Source
from longseq_bench.reports.document import MAX_ANSWER_WORDS, Answer
from longseq_bench.reports.sections.provenance import context


def first_that_fits(source: Source, title: str, answers: Iterable[Answer]) -> Answer:
    """Return the first answer of at most MAX_ANSWER_WORDS words; the last one if none is.

    Title, context and notes of the report count, and the answer's figures, findings and the title
    of its chart. Its table does not.
    """
    shared = count_words(title, context(source), *(f"Note: {note}" for note in source.notes))
    answer = Answer()
    for answer in answers:
        texts = [word for f in answer.figures for word in (f.label, f.value, f.words)]
        charts = [answer.chart.title] if answer.chart else []
        if shared + count_words(*texts, *answer.findings, *charts) <= MAX_ANSWER_WORDS:
            break
    return answer


def count_words(*texts: str) -> int:
    """Return the number of words of all texts."""
    return sum(len(text.split()) for text in texts)
