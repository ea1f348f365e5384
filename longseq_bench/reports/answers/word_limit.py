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
    texts = title, context(source), *(f"Note: {note}" for note in source.notes)
    room = MAX_ANSWER_WORDS - sum(len(text.split()) for text in texts)
    answer = Answer()
    for answer in answers:
        if answer.word_count <= room:
            break
    return answer
