"""The report on extreme lengths: its table and its bars, recomputed from the records."""

import re
from typing import Any

import pytest

from tests.reports.oracle import Search, by
from tests.reports.reading import rows
from tests.reports.test_figures import reports

CONFIRMED = re.compile("Longest lengths(, the longest 8)?(:|$)")


def limit_of(one: Search) -> tuple[Any, ...]:
    t = one.trial
    return one.fingerprint, one.workload.mode, t.device, t.memory_budget, t.time_budget


@pytest.mark.parametrize("name", ["rich", "sparse", "extreme", "sparsity"])
def test_the_longest_full_pass_is_first_and_bars_are_the_longest_of_each_limit(name: str) -> None:
    """Bars: sorted, of one limit per chart, with the floor; the longest 8 of each limit."""
    book, documents = reports(name)
    document = next(document for document in documents if document.kind == "extreme")
    full = [s for s in book.searches if not s.trial.fit_only and s.trial.keep != "nothing"]
    found = [s for s in full if s.tokens]
    if found:
        longest = max(s.tokens for s in found)
        assert rows(document, "Longest lengths")[0]["Max tokens"] == longest

    expected = [
        sorted((s.tokens for s in group), reverse=True)[:8] for group in by(limit_of, found)
    ]
    charts = [c for section in document.sections for c in section.charts if c.name == "maxima"]
    drawn = [c for c in charts if CONFIRMED.match(c.title)]
    shown = [[p.y for p in chart.points] for chart in drawn]
    assert shown == sorted(expected, key=lambda tokens: -tokens[0])
    floors = {(s.tokens, s.floor_tokens) for s in found}
    for chart in drawn:
        own = {p.series: p.y for p in chart.points}
        for guide in chart.guides:
            assert {(own[p.series], p.y) for p in guide.points} <= floors
