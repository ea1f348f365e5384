"""Every report is short where it is read first: published, generated, and large sets of records."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from longseq_bench.core.model import Record, Status, Trial
from longseq_bench.reports import assemble
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import (
    Axis,
    Chart,
    Column,
    Document,
    KeyFigure,
    Point,
    Section,
    Table,
)
from longseq_bench.store import load
from tests import make
from tests.reports import examples, limits
from tests.reports.limits import mixed_limits, violations

XEON2 = Path(__file__).parents[2] / "results" / "xeon2"
FOLDERS = sorted(path.parent.name for path in XEON2.glob("*/records.jsonl"))
ALL = ["extreme", "devices", "scaling", "capabilities", "implementations", "summary"]


def build(source: Source, kind: str) -> Document:
    return KINDS.get(kind)(source)


def check(source: Source, kind: str) -> None:
    document = build(source, kind)
    found = violations(document) + mixed_limits(document, source.rows, source.maxima)
    assert not found, "\n".join(found)


# ---- the checker ---------------------------------------------------------------------------------

LINE = Axis("Tokens", "tokens"), Axis("Time", "seconds")
POINTS = tuple(Point(f"s{i}", x, 1.0) for i in range(40) for x in (1, 2))
TABLE = Table("", (Column("Implementation"),), (("a",),) * 9)
BAD = {
    "words": Section("x", ["many words " * 61]),
    "key figures": Section("x"),
    "2 tables": Section("x", tables=[TABLE, TABLE]),
    "9 rows": Section("x", tables=[TABLE]),
    "6 findings": Section("x", points=["a"] * 6),
    "26 words": Section("x", points=["word " * 26]),
    "3 sentences": Section("x", ["One. Two. Three."]),
    "letters": Section("x", tables=[Table("", (Column("Implementation"),), (("a" * 41,),))]),
    "empty value": Section("x", points=["globals=null"]),
    "alternative text": Section("x", charts=[Chart("", "", "word " * 26, *LINE, POINTS)]),
    "no points": Section("x", charts=[Chart("", "", "", *LINE, ())]),
}


@pytest.mark.parametrize("limit", BAD)
def test_each_limit_is_found(limit: str) -> None:
    figures = [KeyFigure("a", "b")] * 6 if limit == "key figures" else []
    document = Document("summary", "", [], [BAD[limit]], figures=figures)
    found = violations(document)
    assert any(limit in text for text in found), found
    assert len(found) <= 2


def test_too_many_colours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    chart = Chart("", "", "", *LINE, POINTS)
    document = Document("summary", "", [], [Section("x", charts=[chart])])
    assert not violations(document)
    monkeypatch.setattr(limits, "colours", lambda chart: {name: name for name in chart.series})
    assert "40 series in colour" in violations(document)[0]


@pytest.mark.parametrize("field", ["time_budget", "mode"])
def test_mixed_limits_are_found(field: str) -> None:
    """Two searches with other limits, in one bar chart and in one table."""
    fields = {"time_budget": (30.0, 600.0), "mode": ("forward", "train")}[field]
    of = (make.trial(name, 1, **{field: one}) for name, one in zip("ab", fields, strict=True))
    source = Source([r for trial in of for r in searched(trial, "ok", len(trial.implementation))])
    points = [Point(row.name, 0, row.max_tokens) for row in source.maxima]
    rows = tuple((row.name, row.max_tokens) for row in source.maxima)

    def found(title: str) -> int:
        chart = Chart("", title, "", *LINE, tuple(points), shape="bars")
        table = Table(title, (Column("Implementation"), Column("Tokens", "tokens")), rows)
        section = Section("x", tables=[table], charts=[chart])
        return len(mixed_limits(Document("x", "", [], [section]), source.rows, source.maxima))

    assert found("") == 2
    assert found("30 s and 10 min limit, forward and train") == 0


# ---- published records ---------------------------------------------------------------------------


@cache
def published(folder: str) -> Source:
    """The records of a folder, or of all of them."""
    if folder == "all":
        return Source([record for name in FOLDERS for record in published(name).records])
    loaded = load(XEON2 / folder)
    return Source(loaded.records, notes=loaded.notes)


@pytest.mark.parametrize("folder", ["all", *FOLDERS])
@pytest.mark.parametrize("kind", ALL)
def test_published_reports_are_short(kind: str, folder: str) -> None:
    check(published(folder), kind)


def test_every_kind_is_checked() -> None:
    assert {*ALL} == {name for name in KINDS.names() if "longseq" in KINDS.get(name).__module__}


# ---- generated records ---------------------------------------------------------------------------

MIB = 2**20
HOSTILE = "<b>|`x`|\n#a_*name*_of_\u202e_forty_letters,and_then_many_more"
LONG = {"order": "zigzag", "transport": "p2p", "queries": "partitioned", "wire_dtype": "bfloat16",
        "overlap": False, "backend": "gloo", "inner": "flash", "chunk": 4096}  # fmt: skip
Variant = tuple[str, dict[str, Any]]
VARIANTS: list[Variant] = [
    ("dense", {}), ("sdpa", {}), ("ulysses", {}), ("ring", {"chunk": 1024, "wire_dtype": None}),
    ("ring", LONG), ("ring", {**LONG, "chunk": 512}), (HOSTILE, {}), ("y" * 60, {"z" * 30: "long"}),
    ("dilated", {"segments": (2048, 4096), "dilation": (1, 2)}),
    ("dilated", {"segments": (2048, 4096), "dilation": (1, 1)}),
    *(("block-sparse", {"pattern": pattern, "sparsity": sparsity})
      for pattern in ("local-window", "hilbert-window") for sparsity in (0.5, 0.9, 0.99)),
]  # fmt: skip
_FIELDS = "mode", "time_budget", "memory_budget", "dtype", "where"
WORKLOADS: list[dict[str, Any]] = [
    dict(zip(_FIELDS, values, strict=True))
    for values in [
        ("forward", 30.0, 64 * MIB, "float32", "alpha"),
        ("forward", 600.0, 64 * MIB, "float32", "alpha"),
        ("train", 30.0, 64 * MIB, "float32", "alpha"),
        ("forward", 30.0, 2 * MIB, "bfloat16", "alpha"),
        ("forward", None, None, "float32", "beta"),
        ("forward", 30.0, 64 * MIB, "float32", "beta"),
    ]
]
FAILED: list[Status] = [
    "oom", "timeout", "wrong", "crashed", "hang", "limit", "unsupported", "error",
]  # fmt: skip
FATES = ["ok", "ok", "ok", "wide", "single", "missing", *FAILED]
SEARCHES = [
    "ok", "ok", "timeout", "none", "ceiling", "missing", "fit only", "in place", "recomputed",
]  # fmt: skip
SPECIAL = {"fit only": {"fit_only": True}, "in place": {"keep": "nothing"},
           "recomputed": {"keep": "inputs"}}  # fmt: skip


def swept(trial: Trial, fate: str, scale: int) -> Iterator[Record]:
    tokens, options = trial.workload.seq_len, trial.options
    if fate in FAILED:
        yield make.record(trial, make.outcome(fate, f"reason of {fate}", "forward"))  # type: ignore[arg-type]
        return
    time, n = 1e-6 * tokens * (1 + scale / 5), 1 if fate == "single" else 6
    more: dict[str, Any] = {}
    if "sparsity" in options or "segments" in options:
        kept = 1 - float(options.get("sparsity", 0.8))  # type: ignore[arg-type]
        more = {"density_achieved": kept, "density_asked": kept, "uncovered": 0.0,
                "flops": kept * examples.dense_flops(trial.workload)}  # fmt: skip
        if trial.world_size == 1:
            more["dense_time"] = examples.spread(1e-6 * tokens * 2, n)
    measure = examples.timings if trial.world_size > 1 else examples.timing
    outcome = measure(trial, time, n, **more)
    yield make.record(trial, examples.widen(outcome, 0.5) if fate == "wide" else outcome)


def searched(of: Trial, fate: str, scale: int) -> Iterator[Record]:
    of = of.replace(repeats=0, **SPECIAL.get(fate, {}))
    best = 5000 * (1 + scale)
    if fate != "none":
        density = 1 - float(of.options.get("sparsity", 0))  # type: ignore[arg-type]
        samples = {"pass_time": 0.2, "peak": best * 1024.0, "density_achieved": density}
        yield make.record(of.at(best), make.on_ranks(*[samples] * of.world_size), purpose="probe")
    if fate != "ceiling":
        yield make.step(best + 40, "timeout" if fate == "timeout" else "oom", of=of, purpose="edge")


def several(items: Sequence[Any], most: int) -> st.SearchStrategy[list[Any]]:
    return st.integers(1, most).flatmap(
        lambda n: st.lists(st.sampled_from(items), min_size=n, max_size=n, unique_by=repr)
    )


def fates(of: list[str], most: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    one = st.tuples(st.sampled_from(of), st.integers(0, 4))
    return st.sampled_from([0, most // 2, most]).flatmap(
        lambda n: st.lists(one, min_size=n, max_size=n)
    )


@st.composite
def record_sets(draw: st.DrawFn) -> list[Record]:
    """Up to 24 trials and 8 searches of some variants, on some workloads, lengths and ranks."""
    variants, workloads = draw(several(VARIANTS, 6)), draw(several(WORKLOADS, 3))
    lengths, worlds = draw(several((1024, 4096, 131072), 3)), draw(several((1, 2, 4), 2))
    records: list[Record] = []
    for build, known, most, tokens in ((swept, FATES, 24, lengths), (searched, SEARCHES, 8, [1])):
        grid = product(workloads, tokens, worlds, variants)
        for (workload, *rest), (fate, scale) in zip(grid, draw(fates(known, most)), strict=False):
            if fate != "missing":
                where = {"environment": make.environment(workload["where"])}
                found = build(make_trial(workload, *rest), fate, scale)
                records += [one.model_copy(update=where) for one in found]
    return records or [make.record()]


def make_trial(workload: dict[str, Any], tokens: int, world: int, variant: Variant) -> Trial:
    fields = {name: value for name, value in workload.items() if name != "where"}
    return make.trial(variant[0], tokens, variant[1], world_size=world, **fields)


@settings(max_examples=50, derandomize=True, database=None, phases=[Phase.generate])
@given(record_sets())
def test_reports_of_any_records_are_short(records: list[Record]) -> None:
    source = Source(records)
    for kind in ALL:
        check(source, kind)


# ---- many workloads ------------------------------------------------------------------------------


@cache
def many() -> Source:
    """20 records on each of 1,000 workloads: 7 trials of 2 rounds, and 3 searches of 2 steps."""
    first, (_, sdpa, _, ring, long, *_), sparse = WORKLOADS[0], VARIANTS, VARIANTS[11]
    trials = [make_trial(first, n, 1, variant) for variant in (sdpa, ring) for n in (1024, 4096)]
    trials += [make_trial(first, 4096, n, one) for n, one in ((1, sparse), (1, long), (2, ring))]
    rounds = [trial.replace(round=i) for trial in trials for i in range(2)]
    of = [make_trial(first, 1, 1, variant) for variant in (ring, long, sparse)]
    records = [r for i, trial in enumerate(rounds) for r in swept(trial, "ok", i // 2 % 4)]
    records += [r for i, trial in enumerate(of) for r in searched(trial, "ok", i)]
    assert len(records) == 20
    found = []
    for batch, mode, dtype in product(range(1, 251), ("forward", "train"), ("float32", "bfloat16")):
        fields = {"batch": batch, "mode": mode, "dtype": dtype}
        for record in records:
            workload = record.trial.workload.model_copy(update=fields)
            trial = record.trial.model_copy(update={"workload": workload})
            found.append(record.model_copy(update={"trial": trial}))
    source = Source(found)
    assert len(source.rows) + len(source.maxima) == 10_000
    return source


@pytest.mark.parametrize("kind", ALL)
def test_reports_of_many_workloads_are_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "summary":  # sections that all kinds share are built once
        for name in ("how_it_ran", "failures"):
            monkeypatch.setattr(assemble, name, lambda source: Section(""))
    assert not violations(build(many(), kind))
