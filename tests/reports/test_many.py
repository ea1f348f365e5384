"""Reports of many rows: limited sentences and complete tables."""

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.render import html as html_format
from longseq_bench.reports.render.html import page
from longseq_bench.reports.wording import join_names, limit_findings
from tests import make
from tests.reports import examples
from tests.reports.reading import build, section

LIMIT = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wording.MAX_FINDINGS", "wording.MAX_NAMES", "sections.ranks.MAX_HANGS"):
        monkeypatch.setattr(f"longseq_bench.reports.{name}", LIMIT)


def hung(seq_len: int, **fields: int) -> Record:
    facts = {"stacks": {"0": "here", "1": "there"}}
    trial = make.trial("ring", seq_len, world_size=2, **fields)
    return make.record(trial, make.outcome("hang", "no answer", "forward", facts))


def test_sentences_and_names_are_limited() -> None:
    names = [str(i) for i in range(LIMIT + 2)]
    assert limit_findings(names[:LIMIT]) == names[:LIMIT]
    *first, last = limit_findings(iter(names))
    assert (first, last) == (names[: LIMIT - 1], "3 more are in the tables.")
    assert join_names(names[:LIMIT], "; ") == "0; 1; 2"
    assert join_names(iter(names)) == "0, 1, 2, 2 more"


def timed(workloads: int) -> list[Record]:
    return [
        examples.single(name, 1024, 1e-3, batch=1 + i)
        for i in range(workloads)
        for name in ("sdpa", "ring")
    ]


def test_the_page_of_many_workloads_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(html_format, "MAX_TABLES", 20)
    monkeypatch.setattr(html_format, "MAX_PLAIN_ROWS", 50)
    few, many = (build(timed(n)).without_charts() for n in (21, 41))
    of_fastest_by_length = 20 * 400
    assert abs(len(page(many)) - len(page(few))) < of_fastest_by_length + 500
    assert "There is 1 more table" in page(few)
    assert "There are 21 more tables" in page(many)


def test_only_the_first_of_many_hangs_are_shown() -> None:
    records = [hung(1024 * (i + 1), round=i % 2) for i in range(LIMIT + 2)]
    document = build([*records, hung(1024, round=1, seed=5)])
    titles = [s.title for s in document.sections if s.title.startswith("Hang: ")]
    assert len(titles) == LIMIT
    assert "2 more" in section(document, "Further hangs").points[0]
