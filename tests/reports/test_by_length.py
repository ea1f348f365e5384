"""The first table of a summary of several workloads: the best of each length of one shape."""

from statistics import median

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Spread
from longseq_bench.reports.sections.at_a_glance import ALL
from tests import make
from tests.reports.examples import dense_flops, single
from tests.reports.reading import build, rows, titles

TITLE = "Answer"


def sparse(
    name: str, tokens: int, time: float, pairs: float, dense: float, **more: object
) -> Record:

    flops = pairs * dense_flops(make.trial(name, tokens).workload)
    return single(
        name, tokens, time, density_achieved=pairs, density_asked=pairs, flops=flops,
        dense_time=[dense], facts={"dense": "measured"}, **more,
    )  # fmt: skip


def two_sweeps() -> list[Record]:
    """One shape at 1k and 2k under one budget, at 2k and 8k under another; a third one, causal."""
    short, long = {"time_budget": 20.0}, {"time_budget": 30.0}
    return [
        single("sdpa", 1024, 0.1, **short), single("sdpa", 2048, 0.4, **short),
        single("ring", 1024, 0.3, **short), single("ring", 2048, 0.2, **short, peak=1000),
        single("sdpa", 2048, 0.41, **long), single("sdpa", 8192, 6.0, n=1, **long),
        sparse("blocks", 8192, 0.5, 0.1, 4.0, **long), sparse("thin", 8192, 0.4, 0.01, 2.0, **long),
        *(single(name, 1024, 0.05, causal=True) for name in ("sdpa", "ring", "a", "b")),
    ]  # fmt: skip


def over_dense(records: list[Record]) -> str:
    """The speeds of the two sparse rows over dense attention."""
    thick, thin = (
        dense / median(record.outcome.samples("time"))
        for record, dense in zip(records[6:8], (4.0, 2.0), strict=True)
    )
    return f"{thin:.3g}× to {thick:.3g}×"


def test_lines_are_the_lengths_of_the_shape_that_has_most() -> None:
    records = two_sweeps()
    document = build(records)
    lines = rows(document, TITLE)
    assert [line["Tokens"] for line in lines] == [1024, 2048, 8192]
    assert [line["Fastest exact"] for line in lines] == ["sdpa", "ring", "sdpa"]
    assert [line["Fastest sparse"] for line in lines] == [None, None, "thin"]
    for line, record in zip(lines[:2], (records[0], records[3]), strict=True):
        time = line["Time, exact"]
        assert isinstance(time, Spread)
        assert time.value == pytest.approx(median(record.outcome.samples("time")))
    assert str(lines[2]["Time, exact"]).endswith(" s (one pass)")
    assert lines[2]["Pairs seen"] == pytest.approx(0.01)
    assert lines[2]["Over dense"] == over_dense(records)
    assert lines[1]["Least memory"] == "1000 B, ring"
    assert document.paragraphs[1].startswith("Table and chart: not causal")
    assert ALL in titles(document)


def test_an_output_with_zeros_is_not_the_fastest() -> None:
    zeros = sparse("holes", 8192, 0.1, 0.01, 4.0, uncovered=0.5, time_budget=30.0)
    line = rows(build([*two_sweeps(), zeros]), TITLE)[2]
    assert line["Fastest sparse"] == "thin"


def test_times_that_do_not_differ_are_joined() -> None:
    same = single("collective", 1024, 0.1, time_budget=20.0)
    found = rows(build([same, *two_sweeps()]), TITLE)[0]["Fastest exact"]
    assert found == "collective ≈ 1 more"
