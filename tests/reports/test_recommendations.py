"""Which rows are compared, and from which length a verdict holds."""

import pytest

from longseq_bench.analysis.searches import search_rows
from longseq_bench.core.model import Record, Status
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.brief import search_brief, sweep_brief
from longseq_bench.reports.sections import at_a_glance
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.ranks import find_gains
from tests import make
from tests.reports.examples import single, timing, timings
from tests.reports.reading import cells

TOKENS = 8192


def keeping(name: str, density: float, time: float, **more: object) -> Record:
    """A sparse trial with this achieved density."""
    return single(name, TOKENS, time, density_achieved=density, **more)


def describe_fastest(*records: Record) -> str:
    return at_a_glance.describe_fastest(Source(list(records)).rows)[1]


def test_the_fastest_of_several_densities_is_compared_with_those_of_its_own() -> None:
    half = keeping("a", 0.5, 0.9)
    quick, tied, slow = (keeping(n, 0.1, t) for n, t in (("b", 0.1), ("c", 0.1001), ("d", 0.2)))
    tie = describe_fastest(half, quick, tied)
    assert tie.startswith("b, c")
    assert tie.endswith(" at 8k: no significant difference")
    assert describe_fastest(half, quick, slow).endswith(" at 8k, 2× as fast as d")
    assert describe_fastest(half, quick).endswith(" at 8k, the only one timed at this density")


SKIPPED = {
    "every_row_checked": ["matching scores"], "every_row_skipped": {"equal scores": "much work"},
}  # fmt: skip


def test_a_claim_says_what_the_check_left_out_and_tables_have_a_column() -> None:
    unseen = {"every_row_checked": [], "every_row_skipped": {"equal scores": "much work"}}
    records = [
        single("a", TOKENS, 0.1, facts=SKIPPED),
        single("b", TOKENS, 0.2, facts={"judged_as": "bfloat16"}),
        single("c", TOKENS, 0.3, facts=unseen),
        single("d", TOKENS, 0.4, facts={"every_row_checked": ["equal scores"]}),
    ]
    source = Source(records)
    limits = ["without equal scores", "judged as bfloat16", "not every row", None]
    assert [row.check_limits for row in source.rows] == limits
    assert describe_fastest(*records).startswith("a (check: without equal scores) at 8k, ")
    for found in (at_a_glance.all_implementations(source), lengths(source)):
        assert [row["Check"] for row in cells(found.tables[0])] == limits
    table, points = sweep_brief([*records, single("c", 4096, 0.1, facts=unseen)]).sections
    assert [row["Check"] for row in cells(table.tables[0])] == [*["in part"] * 3, None, "in part"]
    assert list(points.points) == [
        "a at 8k: checked in part, without equal scores",
        "b at 8k: checked in part, judged as bfloat16",
        "c at 8k and 1 more: checked in part, not every row",
    ]


def test_the_longest_says_what_the_check_left_out_and_where_outputs_are_wrong() -> None:
    passed = make.outcome(peak=1.0, pass_time=0.1, facts=SKIPPED)
    of = make.trial("a", memory_budget=2**26, repeats=0)
    runs = [make.record(of.at(1024).replace(round=n), passed, purpose="confirm") for n in (0, 1)]
    longer = make.step(2048, "wrong", "edge", "row 0 is NaN", "check", of=of)
    assert search_brief(runs).sections[-1].points == [
        "a (check: without equal scores) takes 1k tokens, 12.5 % of the floor, confirmed by 1 "
        "further run; no longer length failed: this is where the search stopped, not a limit."
    ]
    found = search_brief([*runs, longer])
    assert [row["Check"] for row in cells(found.sections[0].tables[0])] == ["in part"]
    assert found.sections[-1].points == [
        "WRONG from 2k tokens on: a, right up to 1k tokens, confirmed by 1 further run; "
        "row 0 is NaN."
    ]
    (figure,) = at_a_glance.longest(Source([*runs, longer]))
    assert figure.words == "a (check: without equal scores), WRONG from 2k tokens on"
    later = make.record(of.at(4096), passed, purpose="probe")
    (row,) = search_rows([*runs, longer, later])
    assert (row.max_tokens, row.wrong_tokens) == (1024, 2048)  # a pass above a wrong output


def on_two_ranks(name: str, tokens: int, end: float | Status, n: int = 9) -> list[Record]:
    """A trial of 1 s on one rank, and one on two with this speed-up or failure."""
    one = make.trial(name, tokens)
    two = one.replace(world_size=2)
    outcome = make.outcome(end) if isinstance(end, str) else timings(two, 1 / end, n)
    return [make.record(one, timing(one, 1.0, n)), make.record(two, outcome)]


def begins_to_pay(*ends: tuple[float | Status, int] | float | Status) -> int | None:
    """The length (k) from which two ranks are faster.

    ends: speed-ups, with the number of samples if not 9, or failures at 1k, 2k, 4k, ...
    """
    found = []
    for i, end in enumerate(ends):
        found += on_two_ranks("a", 1024 * 2**i, *(end if isinstance(end, tuple) else (end,)))
    (gain,) = find_gains(Source(found).rows)
    return gain.since // 1024 if gain.since and gain.verdict == "faster" else None


def test_ranks_pay_from_the_length_above_which_they_are_always_faster() -> None:
    assert begins_to_pay(0.5, 1.5, 1.8) == 2
    assert begins_to_pay(1.5, 0.5, 1.8) == 4
    assert begins_to_pay(1.5, 1.8, 1.9) == 1
    assert begins_to_pay(1.5, 1.8, 0.5) is None


def test_ranks_do_not_pay_below_a_length_that_failed() -> None:
    assert begins_to_pay(2.0, "wrong", 2.0) == 4
    assert begins_to_pay("unsupported", 2.0, 2.0) == 2
    assert begins_to_pay(2.0, 2.0, "oom", "wrong") == 1
    # a single pass in between is no failure
    assert begins_to_pay(2.0, (2.0, 1), 2.0) == 1


@pytest.mark.parametrize("kind", ["devices", "scaling"])
def test_a_kind_without_rows_names_a_command_to_run(kind: str) -> None:
    failed = make.record(make.trial("one", TOKENS), make.outcome("crashed"))
    document = KINDS.get(kind)(Source([failed, make.step(TOKENS, "oom")]))
    assert not document.has_rows
    (command,) = document.sections[0].code
    assert command.startswith("longseq ")
