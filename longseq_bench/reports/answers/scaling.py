"""The first screen of the kind `scaling`."""

from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Answer


def answer(source: Source) -> Answer:
    """Return the first screen."""
    return Answer()
