"""Sections: which exist, the source of their rows and sentences, and missing figures."""

from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports import base, document, groups
from longseq_bench.reports.brief import sweep_brief
from longseq_bench.reports.groups import join_names, limit_findings
from longseq_bench.reports.sections import growth
from tests import make
from tests.reports.examples import BETA, BUDGET, failed, search, single
from tests.reports.reading import build, cells, rows, section, titles, words


def test_what_was_checked_is_a_table_of_every_implementation() -> None:
    numbers = {"max_error": 2e-6, "error_of_allowed": 0.2, "bias": 1e-5}
    first, second = (
        make.outcome(
            time=0.1, checked_rows=rows, checked_passes=passes,
            facts={"every_row_checked": [inputs]}, **numbers,
        )
        for rows, passes, inputs in ((256, 7, "constant values"), (250, 5, "equal scores"))
    )  # fmt: skip
    records = [
        make.record(make.trial("a|b", 1000), first), make.record(make.trial("a|b", 2000), second),
        make.record(make.trial("old", 1000), make.measured(max_error=1e-6)),
    ]  # fmt: skip
    found = [r for r in rows(build(records), "Settings and checks") if "Runs" in r]
    assert found == [{
        "Implementation": "a|b", "Dtype": "float32", "Mode": "forward", "Runs": 2,
        "Rows compared": "250 to 256 of 1,000 to 2,000",
        "Every row with": "constant values, equal scores", "Timed passes": 12, "Max error": 2e-6,
        "Error of allowed": 0.2, "Bias": 1e-5,
    }]  # fmt: skip


# ---- failures ------------------------------------------------------------------------------------


def test_every_failed_run_has_its_reason_and_equal_ones_are_counted() -> None:
    records = [make.record()]
    for status in ("oom", "timeout", "hang", "crashed", "wrong", "error", "limit", "unsupported"):
        outcome = make.outcome(status, f"why {status}", "forward")
        records += [make.record(make.trial("a|b"), outcome)] * 2
    records += [make.step(1010, "oom")]
    document = build(records)
    count, steps = section(document, "Failures").points
    assert count.startswith("17 of 18 runs were not ok: 3 out of memory, 2 timeout, 2 hang, ")
    assert steps == "Steps of searches, which end with a failure: 1 of them."
    shown = [row for row in rows(document, "Failures") if row["Implementation"] == "a|b"]
    assert {row["Status"] for row in shown if "Status" in row} == {
        record.outcome.status for record in records[1:-1]
    }
    for row in (row for row in shown if "Status" in row):
        assert (row["Implementation"], row["Runs"]) == ("a|b", 2)
        assert (row["Reason"], row["Phase"]) == (f"why {row['Status']}", "forward")


@pytest.mark.parametrize(("text", "expected"), [
    ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
     "you tried to allocate 1183744 bytes. Error code 12", "could not allocate 1.13 MiB"),
    ("every rank: [enforce fail] you tried to allocate 1024 bytes",
     "every rank: could not allocate 1 KiB"),
    ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", "could not allocate 2.50 GiB"),
    ("CUDA: tried to allocate 2.50 GiB. GPU 0 has; GPU 0 is in use: process 7 holds 9 GiB",
     "could not allocate 2.50 GiB; GPU 0 is in use: process 7 holds 9 GiB"),
    ("tried to allocate 1,024 bytes too many", "tried to allocate 1,024 bytes too many"),
])  # fmt: skip
def test_of_an_allocators_text_the_ranks_and_the_size_are_shown(text: str, expected: str) -> None:
    document = build([single("sdpa", 1024, 0.1), failed("oom", "sdpa", 2048, text)])
    (row,) = rows(document, "Failures")
    assert row["Reason"] == expected


# ---- machines, commands, settings ----------------------------------------------------------------


def test_machines_are_never_in_one_table() -> None:
    records = [
        make.record(where=make.environment("alpha")),
        make.record(make.trial("dense"), where=make.environment("alpha", torch="2.12.0")),
        make.record(came_to=make.outcome("hang"), where=make.environment("beta", **BETA)),
    ]
    document = build(records)
    assert len(section(document, "Lengths swept").tables) == 3
    assert "3 environments, never compared: A (alpha), B (alpha), 1 more, " in words(document)
    assert [t.title for t in section(document, "Hardware and versions").tables] == [
        "Machine A (alpha)", "Machine B (alpha)", "Machine C (beta)",
    ]  # fmt: skip
    values = [row["Value"] for row in rows(document, "Hardware and versions")]
    assert "2 × X1" in values
    assert any("torch 2.12.0" in value for value in values)
    assert rows(document, "Failures")[0]["Machine"] == "C (beta)"
    assert "A (alpha)" not in words(build(records[:1]))


def test_how_to_reproduce_comes_from_the_records() -> None:
    records = [
        make.record(make.trial(seed=3), command="longseq sweep a.yaml"),
        make.record(command="longseq sweep a.yaml"),
        make.step(1024, command="longseq maxlen b.yaml", started_at="2026-11-22T01:00:00Z"),
        make.record(
            make.trial("ring", 512, repeats=0, time_budget=30.0),
            purpose="edge",
            command="longseq maxlen --impl ring",
        ),
        make.record(where=make.environment(commit="def5678"), command="longseq sweep a.yaml"),
    ]
    document = build(records, notes=["line 7 is not a record and skipped"])
    assert list(section(document, "How to run it again").code) == [
        "# longseq 0.1.0, commit abc1234", "longseq sweep a.yaml", "longseq maxlen b.yaml",
        "longseq maxlen --impl ring --time-budget 30s",
        "", "# longseq 0.1.0, commit def5678", "longseq sweep a.yaml",
    ]  # fmt: skip
    text = " ".join(document.paragraphs)
    for what in ("2026-11-21 to 2026-11-22.", "line 7 is not a record"):
        assert what in text
    settings = {row["Setting"]: row["Value"] for row in rows(document, "Settings and checks")}
    assert settings["Memory budget"] == "none, 64 MiB"
    assert settings["Seeds"] == "0, 3"
    assert settings["Outcomes"] == "5 ok"


# ---- columns and sections that need rows ---------------------------------------------------------


def test_columns_of_ranks_need_a_trial_on_several_ranks() -> None:
    ranks = {"Ranks", "Exposed", "Speed-up", "Bytes sent per rank", "Imbalance"}
    plain = [make.record(), make.step(1024), make.step(2048, "oom")]
    for title in ("Lengths swept", "Longest lengths"):
        assert not ranks & set(rows(build(plain), title)[0])
    more = make.measured(ranks=2, uncovered=0.25, compute_time=0.08, bytes_sent=3.0)
    both = [*plain, make.record(make.trial("d", world_size=2), more)]
    one, two = rows(build(both), "Lengths swept")
    assert {"Ranks", "Exposed", "Bytes sent per rank", "Imbalance", "Uncovered"} <= set(two)
    assert (one["Ranks"], one["Exposed"], one["Uncovered"]) == (1, None, None)
    assert "Wire error" not in two


# ---- capabilities --------------------------------------------------------------------------------


def tried(name: str, status: Any = "ok", reason: str | None = None, **fields: Any) -> Record:
    outcome = make.measured() if status == "ok" else make.outcome(status, reason, "forward")
    return make.record(make.trial(name, fields.pop("tokens", 1024), **fields), outcome)


def matrix(*records: Record) -> dict[str, dict[str, Any]]:
    table, *_ = section(build(list(records), "capabilities"), "Capabilities").tables
    return {row.pop("Implementation"): row for row in cells(table)}


def test_a_capability_has_the_trials_that_passed() -> None:
    ways = [{"mode": mode, "world_size": n} for mode in ("forward", "train") for n in (1, 2)]
    good = [tried("ring", **way) for way in ways]
    alone = [
        tried("sdpa", "ok" if way["world_size"] == 1 else "unsupported", "one rank only", **way)
        for way in ways
    ]
    found = matrix(*alone, *good)
    assert list(found) == ["ring", "sdpa"]
    assert set(found["ring"].values()) == {"✓"}
    half = dict.fromkeys(("Forward", "Train"), "1 of 2")
    assert found["sdpa"] == {**half, "One rank": "✓", "Several ranks": "✗"}


def test_a_length_that_is_too_long_is_no_missing_capability() -> None:
    too_long = [tried("ring", status, tokens=2048) for status in ("oom", "timeout", "limit")]
    never = tried("dense", "oom", mode="train")
    searched = make.step(4096, of=make.trial("ulysses", 1, mode="train", memory_budget=BUDGET))
    fitting = make.step(4096, of=make.trial("fits", 1, memory_budget=BUDGET, fit_only=True))
    found = matrix(tried("ring"), *too_long, never, searched, fitting)
    assert found == {
        "ring": {"Forward": "✓", "Train": ""},
        "ulysses": {"Forward": "", "Train": "✓"},
        "dense": {"Forward": "", "Train": "✗"},
    }


# ---- first screens -------------------------------------------------------------------------------


def test_growth_with_ranks_is_compared_with_the_floor_and_expectation() -> None:
    records = search("other", 9000, world_size=2) + search("alone", 9500)
    for ranks, best in {2: 15000, 4: 24000, 1: 8000}.items():
        records += search("ring", best, world_size=ranks)
    document = build(records, "scaling")
    (figure,) = document.figures
    assert figure.words == "ring ×4, stopped by memory, not confirmed by a second run"
    answer = section(document, "Answer")
    found = [row["Max tokens"] for row in rows(document, "Answer")]
    assert found == [8000, 15000, 24000, 9500, 9000]
    (chart,) = answer.charts
    assert chart.series == ["other", "ring"]
    assert [p.y for p in chart.guides[0].points] == [8000, 32000]
    assert "Longest lengths over ranks" not in titles(document)


# ---- limits --------------------------------------------------------------------------------------


def test_a_section_has_a_limited_number_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, document, growth):
        monkeypatch.setattr(module, "MAX_TABLES", 3)
    lengths = (1024, 2048, 4096)
    records = [
        make.record(make.trial("sdpa", tokens), make.measured(), make.environment(f"host{i}"))
        for i in range(5)
        for tokens in lengths
    ]
    report, brief = build(records), sweep_brief(records)
    shown = ("Lengths swept", "How time and memory grow", "Hardware and versions")
    for found in (*(section(report, title) for title in shown), brief.sections[0]):
        assert len(found.tables) == 3
        assert (
            found.paragraphs[-1]
            == "The first 3 tables are shown; report.csv has every measurement."
        )
    hosts = [column.name for column in report.data.columns].index("host")
    assert len({row[hosts] for row in report.data.rows}) == 5


def test_sentences_and_names_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_FINDINGS", 3)
    monkeypatch.setattr(groups, "MAX_NAMES", 3)
    names = [str(i) for i in range(5)]
    assert limit_findings(names[:3]) == names[:3]
    assert limit_findings(iter(names)) == ["0", "1", "3 more are in the tables."]
    assert join_names(iter(names)) == "0, 1, 2, 2 more"
