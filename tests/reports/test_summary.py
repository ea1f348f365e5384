"""The summary: its figures are recomputed here from the records, and it changes when they do."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

import pytest

from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UnknownNameError
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_rate, format_seconds, format_share
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.render.markdown import render
from tests import make


def swept() -> list[Record]:
    records = []
    for tokens in (1024, 4096):
        for name, time, options in (
            ("dense", 0.0004, {}),
            ("ring", 0.0002, {"chunk": 64}),
            ("ring", 0.0003, {"chunk": 128}),
        ):
            for i in range(2):
                trial = make.trial(name, tokens, options, round=i, seed=i)
                came_to = make.measured(time * tokens * (1 + i / 100), tokens * 60, flops=tokens**2)
                records.append(make.record(trial, came_to))
    records[-5] = make.record(records[-5].trial, make.outcome("oom", "8 GiB | asked", "forward"))
    return records


def searched() -> list[Record]:
    return [
        make.step(1024, predicted_tokens=9000),
        make.step(9000, "oom"),
        make.step(8000, purpose="edge", peak=7_000_000),
        make.step(8001, "oom", purpose="edge", phase="plan"),
        make.step(8000, purpose="confirm", peak=7_000_100),
    ]


def built(records: list[Record], **given: Any) -> Document:
    return KINDS.get("summary")(Source(records, **given))


def page(records: list[Record], **given: Any) -> str:
    return render(built(records, **given))["report.md"]


def tables(text: str, section: str) -> list[dict[str, str]]:
    """The rows of every table of a section, by the headings; an escaped bar reads as ¦."""
    part = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows: list[dict[str, str]] = []
    names: list[str] = []
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "¦").split("|")[1:-1]]
        if not cells:
            names = []
        elif not names:
            names = cells
        elif set("".join(cells)) > set("-:") or "---" not in cells[0]:
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def test_every_row_of_the_page_can_be_recomputed_from_the_records() -> None:
    records = swept()
    shown = tables(page(records, baseline="dense"), "Lengths swept")
    assert len(shown) == 6
    for row in shown:
        name, *options = row["Implementation"].split()
        chunk = int(options[0].removeprefix("chunk=")) if options else None
        of_row = [
            r
            for r in records
            if (r.trial.implementation, r.trial.options.get("chunk")) == (name, chunk)
            and f"{r.trial.workload.seq_len // 1024}k" == row["Tokens"]
        ]
        assert len(of_row) == 2
        if row["Status"] != "ok":
            assert (row["Time"], row["Tokens/s"], row["Speed"]) == ("—", "—", "—")
            continue
        tokens = of_row[0].trial.workload.seq_len
        times = sorted(s for r in of_row for s in r.outcome.samples("time"))
        middle, off = median(times), max(times[14] - median(times), median(times) - times[5])
        time, spread = row["Time"].split(" ±")
        assert (time, row["Samples"]) == (format_seconds(middle), "20")
        assert float(spread.removesuffix(" %")) == pytest.approx(100 * off / middle, rel=0.05)
        assert row["Peak memory"] == format_bytes(tokens * 60)
        assert row["Tokens/s"] == f"{tokens / middle:,.0f}"
        assert row["Effective FLOP/s"] == format_rate(tokens**2 / middle, "FLOP/s")
        speed = 0.0004 / {"dense": 0.0004, 64: 0.0002, 128: 0.0003}[chunk or name]
        assert row["Speed"] == (f"{speed:.3g}×" if tokens == 1024 else "—")


def test_every_maximum_of_the_page_can_be_recomputed_from_the_records() -> None:
    (row,) = tables(page(searched()), "Longest lengths")
    trial = searched()[0].trial
    needed = floor_bytes(trial.at(8000).workload)
    assert row == {
        "Implementation": "sdpa",
        "Max tokens": "8,000",
        "First failure": "8,001",
        "Limited by": "memory",
        "Phase": "plan",
        "Fraction of floor": format_share(needed / (trial.memory_budget or 0)),
        "Peak memory": format_bytes(7_000_100),
        "Bytes/token": format_bytes(7_000_100 / 8000),
        "Predicted": "9,000",
        "Runs": "5",
        "Confirmations": "1",
    }


def findings(records: list[Record]) -> str:
    return "\n".join(built(records).sections[0].points)


def test_the_sentences_follow_the_rows() -> None:
    def pair(first: float, second: float) -> str:
        records = [
            make.record(make.trial("one"), make.measured(first, 2**20)),
            make.record(make.trial("two"), make.measured(second, 2**21)),
        ]
        return findings(records)

    fastest = r"%s \(100 ms ±0.78 %%\) is the fastest of 2, 3× as fast as the next, %s \(300 ms"
    assert re.search(fastest % ("one", "two"), pair(0.1, 0.3))
    assert re.search(fastest % ("two", "one"), pair(0.3, 0.1))
    assert "one (1 MiB) has the lowest peak memory of 2, the next is two (2 MiB)." in pair(0.1, 0.3)
    alike = pair(0.1, 0.1005)
    assert "can't be told apart: their intervals overlap" in alike
    assert "fastest" not in alike


def test_single_passes_name_no_fastest() -> None:
    once = [
        make.record(make.trial(name, 4096), make.outcome(time=seconds, peak=1.0))
        for name, seconds in (("one", 0.1), ("two", 0.3))
    ]
    said = findings(once)
    assert "one (100 ms) took least of 2, the next is two (300 ms); single passes" in said
    assert "fastest" not in said
    assert "±" not in said


def test_the_sentences_say_how_long_each_got_and_what_was_wrong() -> None:
    wrong = make.measured().model_copy(update={"status": "wrong", "reason": "rows sum to 3"})
    records = [
        make.record(make.trial("one", 1024)),
        make.record(make.trial("one", 2048), make.outcome("oom")),
        make.record(make.trial("one", 4096), make.outcome("timeout")),
        make.record(make.trial("two", 2048), wrong),
    ]
    said = findings(records)
    assert "4 runs in 4 processes took 6 s: 1 ok, 1 oom, 1 timeout, 1 wrong." in said
    assert "one 1k (oom at 2k)" in said
    assert "two gave a wrong output at 2k tokens (rows sum to 3); no speed is shown" in said


def test_the_sentences_of_a_search_say_the_bracket_and_how_sure_it_is() -> None:
    said = findings(searched())
    assert "sdpa takes 8,000 tokens" in said
    assert "97.7 % of the floor, confirmed by 1 further run; limited by memory in plan at" in said
    assert "not confirmed by a second run; limited by time" in findings(
        [make.step(1024), make.step(2048, "timeout")]
    )
    assert "no longer length failed" in findings([make.step(1024)])
    assert "sdpa passed at no length" in findings([make.step(1024, "crashed")])


def test_a_value_that_is_missing_has_its_reason() -> None:
    untimed = make.record(make.trial(repeats=0), make.outcome(pass_time=1.0, flops=1.0))
    blind = make.outcome(time=0.1, flops=1.0, max_error=0.0, facts={"heap": "no clear_refs here"})
    text = page([untimed, make.record(make.trial("ring"), blind), *swept()])
    reasons = [
        (row["Implementation"], row["Not measured"], row["Reason"])
        for row in tables(text, "Failures")
        if "Not measured" in row
    ]
    assert reasons == [
        ("sdpa", "time", "none was asked (repeats 0)"),
        ("sdpa", "peak", "the memory meter gave no peak"),
        ("sdpa", "max_error", "the output's error was not recorded"),
        ("ring", "peak", "no clear_refs here"),
    ]
    failed = [row for row in tables(text, "Failures") if row.get("Status")]
    assert [(f["Status"], f["Phase"], f["Reason"]) for f in failed] == [
        ("oom", "forward", "8 GiB ¦ asked")
    ]


def test_samples_that_are_no_numbers_are_missing_figures() -> None:
    nan, inf = float("nan"), float("inf")
    known = {"flops": 1.0, "max_error": 0.0}
    records = [
        make.record(make.trial("one"), make.outcome(time=[nan, inf], peak=nan, **known)),
        make.record(make.trial("two"), make.outcome(time=[0.1, nan], peak=1e6, **known)),
        make.record(make.trial("three"), make.outcome(time=[0.1, 0.1], peak=inf, **known)),
    ]
    text = page(records)
    rows = [row for row in tables(text, "Failures") if "Not measured" in row]
    assert [(row["Implementation"], row["Not measured"], row["Reason"]) for row in rows] == [
        ("one", "time", "its samples are not finite"),
        ("one", "peak", "its samples are not finite"),
        ("two", "time", "some of its samples are not finite"),
        ("three", "peak", "its samples are not finite"),
    ]
    for row in tables(text, "Lengths swept"):
        gone = [r["Not measured"] for r in rows if r["Implementation"] == row["Implementation"]]
        shown = {"time": row["Time"], "peak": row["Peak memory"]}
        assert {name: shown[name] == "—" for name in shown} == {n: n in gone for n in shown}


def test_machines_are_split_and_said() -> None:
    records = [
        make.record(where=make.environment("alpha")),
        make.record(make.trial("dense"), where=make.environment("alpha", torch="2.12.0")),
        make.record(came_to=make.outcome("hang"), where=make.environment("beta", gpus=("X", "X"))),
    ]
    text = page(records)
    assert "from 3 environments: A (alpha), B (alpha), C (beta)" in text
    assert text.count("### Machine ") == 3
    assert "| GPU | 2 × X |" in text
    assert "torch 2.12.0" in text
    swept = next(s for s in built(records).sections if s.title == "Lengths swept")
    assert len(swept.tables) == 3
    assert tables(text, "Failures")[0]["Machine"] == "C (beta)"
    assert "environments" not in page(records[:1])


def test_how_to_reproduce_comes_from_the_records() -> None:
    records = [
        make.record(make.trial(seed=3), command="longseq sweep a.yaml"),
        make.record(command="longseq sweep a.yaml"),
        make.step(1024, command="longseq maxlen b.yaml", started_at="2026-11-22T01:00:00Z"),
    ]
    text = page(records, notes=["line 7 is not a record and skipped"])
    assert "```\nlongseq sweep a.yaml\nlongseq maxlen b.yaml\n```" in text
    assert "Measured from 2026-11-21T09:00:00Z to 2026-11-22T01:00:00Z." in text
    assert "Note: line 7 is not a record and skipped" in text
    settings = {row["Setting"]: row["Value"] for row in tables(text, "How to reproduce")}
    assert settings["Memory budget a rank"] == "none, 64 MiB"
    assert settings["Seeds"] == "0, 3"
    assert "commit abc1234" in text
    assert "the command was not recorded" in page([make.record(command=None)])


def test_rounds_are_those_of_each_sweep() -> None:
    def swept(command: str, rounds: int, host: str = "alpha") -> list[Record]:
        where = make.environment(host)
        trials = [make.trial(round=i) for i in range(rounds)]
        return [make.record(trial, where=where, command=command) for trial in trials]

    def rounds(records: list[Record]) -> str:
        settings = tables(page(records), "How to reproduce")
        return next(row["Value"] for row in settings if row["Setting"] == "Rounds")

    a, b = "longseq sweep a.yaml", "longseq sweep b.yaml"
    assert rounds([*swept(a, 1), *swept(b, 3)]) == "1 to 3"
    assert rounds([*swept(a, 1), *swept(a, 2, "beta")]) == "1 to 2"
    assert rounds([*swept(a, 2), *swept(b, 2)]) == "2"
    # a trial that failed is not visited again; a search is no round
    failed = make.record(make.trial("ring"), make.outcome("oom"), command=a)
    assert rounds([*swept(a, 2), failed, make.step(1024, command=b)]) == "2"
    assert rounds([make.step(1024)]) == "1"


def test_memory_is_never_zero_point_zero() -> None:
    text = page([make.record(came_to=make.measured(peak=700.0))])
    assert tables(text, "Lengths swept")[0]["Peak memory"] == "700 B"


def test_backends_and_fallbacks_are_shown() -> None:
    came_to = make.outcome(time=0.1, facts={"backend": "math", "pass_s": 1.0, "errors": {"a": 1}})
    assert tables(page([make.record(came_to=came_to)]), "How each ran") == [
        {"Implementation": "sdpa", "What": "backend", "Value": "math"}
    ]


def test_ranks_and_uncovered_have_a_column_only_where_they_say_something() -> None:
    plain = make.record(came_to=make.measured(uncovered=0.0))
    assert not {"Ranks", "Uncovered", "Speed"} & set(tables(page([plain]), "Lengths swept")[0])
    holes = make.record(make.trial("d", world_size=2), make.measured(ranks=2, uncovered=0.25))
    rows = tables(page([plain, holes]), "Lengths swept")
    assert [(row["Ranks"], row["Uncovered"]) for row in rows] == [("1", "—"), ("2", "25.0 %")]


def test_an_unknown_baseline_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown baseline 'dens'.*did you mean 'dense'"):
        page(swept(), baseline="dens")
