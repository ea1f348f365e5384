"""Context is stated once: at the top what all rows share, in titles and sentences what differs."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.core.model import Record
from longseq_bench.reports.base import Source
from longseq_bench.reports.groups import group_by_workload
from tests import make
from tests.reports.reading import build, section

MIB = 2**20


def ran(name: str = "ring", tokens: int = 1024, **fields: Any) -> Record:
    fields = {"memory_budget": 64 * MIB, "time_budget": 30.0, "threads": 2, **fields}
    trial = make.trial(name, tokens, **fields)
    outcome = make.measured(tokens * 1e-6, MIB, n=6) if not trial.fit_only else make.outcome(peak=1)
    return make.record(trial, outcome)


def test_what_all_rows_share_is_the_first_line_and_nowhere_else() -> None:
    document = build([ran(), ran("sdpa"), ran(tokens=2048)])
    assert document.paragraphs[0] == (
        "Test CPU, 2 cores (alpha), 2026-11-21. "
        "Forward, float32, not causal, batch 1, 8 heads of 64, cpu, 2 threads, "
        "64 MiB, 30 s limit; all outputs checked against float64."
    )
    assert [table.title for table in section(document, "Lengths swept").tables] == [""]
    assert section(document, "Answer").charts[0].title == "Time against tokens"
    points = [p for s in document.sections for p in s.points]
    sentences = " ".join([*points, *(f.words for f in document.figures)])
    for words in ("float32", "8 heads", "limit", "a rank", "()"):
        assert words not in sentences


def test_titles_and_sentences_have_what_differs() -> None:
    records = [ran(), ran("sdpa"), ran(dtype="bfloat16", time_budget=600.0),
               ran("sdpa", dtype="bfloat16", time_budget=600.0),
               ran(dtype="bfloat16", time_budget=None)]  # fmt: skip
    document = build(records)
    assert " Forward, not causal, batch 1, 8 heads of 64, cpu, 2" in document.paragraphs[0]
    assert "limit" not in document.paragraphs[0]
    swept = section(document, "Lengths swept")
    assert [table.title for table in swept.tables] == [
        "Float32, 30 s limit", "Bfloat16, 10 min limit", "Bfloat16, no time limit",
    ]  # fmt: skip
    assert swept.charts[0].title == "Time: float32, 30 s limit, 1k tokens"
    assert document.paragraphs[1:] == []
    assert document.figures[0].words == "ring, sdpa (float32, 30 s limit); the longest tried"
    assert not section(document, "Answer").points


def test_the_check_is_stated_only_if_every_output_was_checked() -> None:
    checked = "all outputs checked against float64"
    failed = make.record(make.trial(memory_budget=64 * MIB), make.outcome("oom"))
    assert checked in Source([ran(), failed]).context
    assert checked not in Source([failed]).context
    assert checked not in Source([ran(), ran("sdpa", fit_only=True)]).context


FIELDS = {
    "mode": ["forward", "train"], "dtype": ["float32", "bfloat16"], "causal": [False, True],
    "batch": [1, 2], "heads": [8, 4], "kv_heads": [2, 4], "head_dim": [64, 32],
    "threads": [None, 1, 2], "memory_budget": [None, MIB, 2 * MIB],
    "time_budget": [None, 30.0, 600.0], "fit_only": [False, True],
}  # fmt: skip
RECORDS = st.lists(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()}),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(deadline=None)
@given(RECORDS)
def test_each_group_of_rows_has_its_own_title(found: list[dict[str, Any]]) -> None:
    """No two tables of a section look like one, and no title repeats what all rows share."""
    source = Source([ran(**fields) for fields in found])
    groups = group_by_workload(source.rows)
    titles = [source.title(group[0]) for group in groups]
    assert len(set(titles)) == len(groups)
    for words in source.context.rstrip(".").lower().partition("; ")[0].split(", "):
        assert not words or all(words not in title.lower().split(", ") for title in titles)
