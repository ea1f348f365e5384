"""The first screen: how much it holds."""

import pytest

from tests.reports.test_figures import EXAMPLES, REAL, reports


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_a_first_screen_has_five_figures_a_short_table_and_a_chart(name: str) -> None:
    for document in reports(name)[1]:
        first = document.sections[0]
        assert len(document.figures) <= 5
        assert len(first.charts) <= 1
        assert len(first.tables) <= 1
        assert sum(len(table.rows) for table in first.tables) <= 8
        for section in document.sections:
            assert len(section.points) <= 5
            assert all(chart.points for chart in section.charts)
