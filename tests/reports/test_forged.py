"""Records from strangers: valid lines that ask for far more work than their bytes.

Work is counted in function calls where Python makes them, else in CPU time with a wide margin.
"""

import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

from longseq_bench.analysis import short_labels
from longseq_bench.analysis.runs import MAX_RANKS_LISTED, Runs
from longseq_bench.analysis.short_labels import MAX_FITTED, find_short_labels
from longseq_bench.comparison.trial_matching import match_trials
from longseq_bench.core.model import Record
from longseq_bench.core.own_functions import short_names
from longseq_bench.reports import assemble
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Table
from longseq_bench.reports.render import csv
from longseq_bench.reports.sections import ranks
from longseq_bench.reports.sections.failures import failures
from longseq_bench.reports.sections.provenance import hardware
from tests import make
from tests.reports.reading import build, section

MAX_CPU_S = 0.5


def count_calls(work: Callable[..., Any], *given: Any) -> int:
    """Return the number of calls of Python functions that `work(*given)` makes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work(*given)
    finally:
        sys.setprofile(None)
    return calls


def on_hosts(count: int) -> list[Record]:
    return [make.record(where=make.environment(f"host{i}")) for i in range(count)]


def on_few_of(world_size: int, known: int) -> Runs:
    outcome = make.on_ranks(*[{"peak": 1.0}] * known)
    return Runs([make.record(make.trial("ring", world_size=world_size), outcome)])


def test_a_record_that_names_many_ranks_does_not_make_their_figures() -> None:
    assert on_few_of(2**16, 1).each_rank("peak", max) is None
    assert on_few_of(2 * MAX_RANKS_LISTED, 1).each_rank("peak", max) is None
    half = on_few_of(2 * MAX_RANKS_LISTED, MAX_RANKS_LISTED).each_rank("peak", max)
    assert half == [1.0] * MAX_RANKS_LISTED + [None] * MAX_RANKS_LISTED
    few = on_few_of(MAX_RANKS_LISTED, 1).each_rank("peak", max)
    assert few == [1.0] + [None] * (MAX_RANKS_LISTED - 1)


def test_a_cell_has_the_figures_of_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_RANKS", 2)
    record = make.record(make.trial("ring", world_size=4), make.measured(ranks=4))
    cells = {str(cell) for row in section(build([record]), "Ranks").tables[0].rows for cell in row}
    assert "1 MiB · 1 MiB · … 2 more ranks in the CSV" in cells


def test_many_measurements_of_one_name_are_joined_once() -> None:
    many = tuple(make.measurement("time", 0.1) for _ in range(40_000))
    outcome = make.outcome().model_copy(update={"measurements": many})
    record = make.record(came_to=outcome)
    start = process_time()
    assert len(Runs([record]).iterations("time")) == len(many)
    assert process_time() - start < MAX_CPU_S
    source = Source([record])
    assert source.rows
    start = process_time()
    failures(source)
    assert process_time() - start < MAX_CPU_S


def test_names_are_shortened_in_linear_time() -> None:
    start = process_time()
    assert len(short_names(f"implementation{i}" for i in range(6_000))) == 6_000
    assert process_time() - start < MAX_CPU_S


def test_machines_are_described_in_linear_work() -> None:
    few, many = (count_calls(hardware, Source(on_hosts(n))) for n in (100, 200))
    assert many < 2.3 * few


def test_machines_are_matched_in_linear_work() -> None:
    few, many = (count_calls(match_trials, side, side) for side in map(on_hosts, (50, 100)))
    assert many < 2.3 * few


def test_machines_match_if_their_memory_is_similar() -> None:
    sizes = [10**9, int(1.005 * 10**9), int(1.011 * 10**9), 2 * 10**9, int(0.992 * 10**9)]
    a, *others = [
        make.record(where=make.environment(memory_bytes=size, python=f"3.{size}")) for size in sizes
    ]
    alone = [bool(match_trials([a], [b]).pairs) for b in others]
    assert alone == [True, False, False, True]
    empty = make.record(where=make.environment(memory_bytes=0))
    assert not match_trials([empty], [a]).pairs


def test_long_labels_of_many_settings_are_numbered_in_linear_work() -> None:
    def settings(count: int) -> list[Any]:
        return [
            make.trial("ring", options={f"option{i}": f"text{(at >> i) % 2}" for i in range(12)})
            for at in range(count)
        ]

    counts = MAX_FITTED + 1, 2 * MAX_FITTED + 2
    few, many = (count_calls(find_short_labels, settings(n)) for n in counts)
    assert many < 2.3 * few
    assert find_short_labels(settings(MAX_FITTED + 1))[:2] == ["ring #1", "ring #2"]


def test_a_label_of_a_thousand_words_is_not_tried_without_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(short_labels, "combinations", lambda *_: pytest.fail("words were tried"))
    settings = [
        make.trial("ring", options={f"option{i}": i + j for i in range(1000)}) for j in range(2)
    ]
    assert find_short_labels(settings) == ["ring #1", "ring #2"]


def test_a_section_has_a_limited_number_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "MAX_TABLES", 3)
    document = build(on_hosts(4))
    for title in ("Lengths swept", "Hardware and versions"):
        found = section(document, title)
        assert len(found.tables) == 3
        assert found.paragraphs[-1].startswith("The first 3 of 4 tables;")
    assert len({row[1] for row in document.data.rows}) == 4


def test_equal_texts_of_a_csv_column_are_cleaned_once() -> None:
    few, many = (Table("", (Column("Name"),), (("=a",),) * n) for n in (100, 1000))
    assert count_calls(csv.format_lines, many) < 2 * count_calls(csv.format_lines, few)
    assert csv.format_lines(few)[1:3] == ["'=a\n", "'=a\n"]
