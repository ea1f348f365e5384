"""Reports of many rows: as many sentences as somebody reads, and no row lost from the tables."""

from __future__ import annotations

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports import documents
from longseq_bench.reports.base import KINDS
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.render import html as html_format
from longseq_bench.reports.render.html import page
from longseq_bench.reports.sections.findings import first_named, first_said
from tests import make
from tests.reports import made

MOST = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("findings", "ranks"):
        monkeypatch.setattr(f"longseq_bench.reports.{module}.MOST_SAID", MOST)


def summary(records: list[Record]) -> Document:
    (document,) = documents(records)
    return document


def section(document: Document, title: str) -> Section:
    (found,) = [s for s in document.sections if s.title == title]
    return found


def sparse(head_dim: int) -> Record:
    known = {"time": [0.1] * 6, "flops": 1e6, "density_achieved": 0.5, "dense_time": [0.3] * 6}
    trial = make.trial("block-sparse", head_dim=head_dim)
    return make.record(trial, make.outcome(facts={"dense": "measured"}, **known))


def hung(seq_len: int, **fields: int) -> Record:
    facts = {"stacks": {"0": "here", "1": "there"}}
    trial = make.trial("ring", seq_len, world_size=2, **fields)
    return make.record(trial, make.outcome("hang", "no answer", "forward", facts))


def test_as_many_sentences_as_are_read_and_none_is_said_of_few() -> None:
    said = [str(i) for i in range(MOST + 2)]
    assert first_said(said[:MOST]) == said[:MOST]
    more = "… and 2 more of this kind; the tables have them."
    assert first_said(iter(said)) == [*said[:MOST], more]
    assert first_named(said[:MOST], "; ") == "0; 1; 2"
    assert first_named(iter(said)) == "0, 1, 2, … and 2 more"


def test_of_many_workloads_a_few_are_told_and_each_has_its_table() -> None:
    records = [make.record(make.trial(head_dim=8 * (i + 1))) for i in range(MOST + 4)]
    document = summary(records)
    points = section(document, "Summary").points
    assert len(points) == 1 + MOST + 1
    assert points[-1] == "… and 4 more of this kind; the tables have them."
    assert len(section(document, "Lengths swept").tables) == MOST + 4


def on_workloads(n: int) -> list[Record]:
    """All that there are rules for, on so many workloads."""
    known = [*made.rich(), *made.sparser()]
    return [of_batch(record, 1 + i) for i in range(n) for record in known]


def of_batch(record: Record, batch: int) -> Record:
    trial = record.trial
    workload = trial.workload.model_copy(update={"batch": batch})
    return record.model_copy(update={"trial": trial.model_copy(update={"workload": workload})})


@pytest.mark.parametrize("kind", KINDS.names())
def test_twice_as_many_workloads_have_twice_the_tables_and_no_more_sentences(kind: str) -> None:
    (few,), (many,) = (documents(on_workloads(n), [kind]) for n in (MOST + 1, 2 * MOST + 2))
    own = [s for s in many.sections if s.points]
    assert {s.title: len(s.points) for s in own if s.title != "Further hangs"} == {
        s.title: len(s.points) for s in few.sections if s.points and s.title != "Further hangs"
    }
    more = [point for s in own for point in s.points if point.startswith("…")]
    assert more or kind == "capabilities"
    for one, two in ((s, section(many, s.title)) for s in few.sections if len(s.tables) > MOST):
        assert len(two.tables) == 2 * len(one.tables)


def timed(workloads: int) -> list[Record]:
    return [
        made.on_one(name, tokens, tokens * 1e-6, batch=1 + i)
        for i in range(workloads)
        for name in ("sdpa", "ring")
        for tokens in (1024, 2048, 4096)
    ]


@pytest.mark.parametrize("kind", KINDS.names())
def test_a_page_of_many_workloads_is_no_longer_than_one_of_fewer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_format, "MOST_TABLES", 20)
    monkeypatch.setattr(html_format, "MOST_PLAIN", 50)
    (few,), (many,) = (documents(timed(n), [kind]) for n in (21, 121))
    assert abs(len(page(many)) - len(page(few))) < 1000
    if any(section.tables[20:] for section in few.sections):
        assert "There is 1 more table; the report in CSV has it." in page(few)
        assert "There are 101 more tables; the report in CSV has them." in page(many)
    else:
        assert kind in ("capabilities", "devices")


def test_each_kind_of_sentence_is_told_for_itself() -> None:
    wrong = [
        make.record(make.trial(seq_len=1024 * (i + 1)), make.outcome("wrong", "far off"))
        for i in range(MOST + 1)
    ]
    searched = [
        make.step(1000, of=make.trial(head_dim=8 * (i + 1), memory_budget=2**26, repeats=0))
        for i in range(MOST + 2)
    ]
    points = section(summary(wrong + searched), "Summary").points
    more = [point for point in points if point.startswith("…")]
    assert [point.split()[2] for point in more] == ["2", "1"]
    assert sum("gave a wrong output" in point for point in points) == MOST
    assert sum("takes 1,000 tokens" in point for point in points) == MOST


def test_names_in_a_sentence_are_counted_too() -> None:
    trials = [make.trial("ring", options={"chunk": 2**i}) for i in range(MOST + 5)]
    points = section(summary([make.record(trial) for trial in trials]), "Summary").points
    (longest,) = [point for point in points if point.startswith("The longest lengths")]
    assert longest.endswith("; ring chunk=4 4k; … and 5 more.")


def test_sparse_sentences_are_counted_too() -> None:
    found = section(summary([sparse(8 * (i + 1)) for i in range(MOST + 1)]), "Sparse attention")
    assert found.points[-1] == "… and 1 more of this kind; the tables have them."
    assert (len(found.points), len(found.tables)) == (MOST + 1, MOST + 1)


def test_of_many_hangs_the_first_are_shown() -> None:
    records = [hung(1024 * (i + 1), round=i % 2) for i in range(MOST + 2)]
    document = summary([*records, hung(1024, round=1, seed=5)])
    titles = [s.title for s in document.sections if s.title.startswith("Hang: ")]
    assert len(titles) == MOST
    (said,) = section(document, "Further hangs").points
    assert said == "2 more trials hung; the records have where their ranks stood."
    alone = summary(records[:MOST])
    assert "Further hangs" not in [s.title for s in alone.sections]


def test_how_much_longer_is_against_the_first_search_of_one_rank() -> None:
    one, other = (
        make.trial("ring", options={"chunk": chunk}, memory_budget=2**26, repeats=0)
        for chunk in (8, 16)
    )
    records = [
        make.step(1000, of=one),
        make.step(400, of=other),
        make.step(3000, of=one.but(world_size=2)),
        make.step(2000, of=other.but(world_size=2)),
    ]
    said = " ".join(section(summary(records[::-1]), "Summary").points)
    assert "ring chunk=8 on 2 ranks takes 3,000 tokens" in said
    assert ", 3× one rank's" in said
    assert ", 5× one rank's" in said
    assert said.count("one rank's") == 2
