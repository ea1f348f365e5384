"""Every number of every report is computed a second time from the records, and must be the same."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports import documents
from longseq_bench.reports.published_results import Elsewhere
from longseq_bench.reports.render import charts
from longseq_bench.reports.render.markdown import render
from longseq_bench.store import load
from tests import make
from tests.reports import made
from tests.reports.checked import faults, of_part
from tests.reports.oracle import Book
from tests.reports.pages import read

KINDS = ("extreme", "devices", "scaling", "capabilities", "implementations", "summary")
RESULTS = Path(__file__).parents[2] / "results" / "xeon2"
OTHERS = Elsewhere.model_validate(
    {
        "source": "a paper of 2025, table 3",
        "maxima": [
            {"implementation": "ring", "tokens": 3000, "world_size": 1, "mode": "forward"},
            {"implementation": "sdpa", "tokens": 5500},
        ],
    }
)


def variants() -> list[Record]:
    """sdpa as it is in one workload, and twice otherwise in another: which is the baseline?"""
    trials = [make.trial(seq_len=2000, mode="train", keep="inputs")]
    trials.append(make.trial(seq_len=2000, mode="train", allocator="expandable"))
    return [made.on_one("sdpa", 1000, 0.1), *map(make.record, trials)]


def failed_baseline() -> list[Record]:
    """dense has a peak of a failure only, at the length that most ran."""
    failed = made.failed("oom", "dense", 2000, phase="forward", peak=9e6)
    ok = [("dense", 1000), ("ring", 1000), ("ring", 2000), ("ulysses", 2000)]
    return [failed, *(made.on_one(name, tokens, 1e-4 * tokens) for name, tokens in ok)]


def twice_on_one() -> list[Record]:
    """A trial on one rank with few repeats that failed, and with more that did not."""
    few, more = (make.trial("a", 1000, repeats=n) for n in (5, 6))
    two = few.but(world_size=2)
    pairs = [
        (few, make.outcome("oom")),
        (more, made.took(more, 0.1)),
        (two, made.took_on(two, 0.06)),
    ]
    return [make.record(*pair) for pair in pairs]


MADE: dict[str, tuple[list[Record], dict[str, Any]]] = {
    "rich": (made.rich(), {"notes": ["line 7 is not a record and skipped"]}),
    "rich, beside others": (made.rich(), {"baseline": "sdpa", "elsewhere": OTHERS}),
    "sparse": (made.sparser(), {"baseline": "dense"}),
    "odd": (made.odd(), {}),
    "two machines": (made.elsewhere_too([*made.rich(), *made.sparser()]), {}),
    "one row": ([make.record()], {}),
    "one failure": ([make.record(came_to=make.outcome("hang"), command=None)], {}),
    "one step": ([make.step(1024)], {}),
    "not a number": ([make.record(came_to=make.measured(max_error=float("nan")))], {}),
    "no length twice": (
        [made.on_one("a", n, n * 1e-6) for n in (1000, 3000, 9000)]
        + [made.on_one("b", n, n * 1e-6) for n in (1000, 2000)]
        + [made.on_one("near", n, n * 1e-6, mode="train") for n in (1000, 1200, 1900)]
        + [made.on_one("curved", n, n**1.8 * 1e-9, mode="train") for n in (1000, 3500, 20000)],
        {},
    ),
    "no growth": ([made.on_one("flat", n, 1e-3, peak=5e6) for n in (1000, 2000, 4000)], {}),
    "variants of the baseline": (variants(), {}),
    "a failed baseline": (failed_baseline(), {}),
    "twice on one rank": (twice_on_one(), {}),
}
REAL = (
    "quickstart", "hilbert", "ranks", "extreme", "sparse_maxlen", "sparse_train", "parallel",
    "sparsity", "maxlen_train", "ring_transports", "sparse_long",
)  # fmt: skip


@cache
def pages(name: str) -> tuple[Book, dict[str, str]]:
    """The figures of a set of records, and its reports by kind; pictures are not drawn."""
    records, given = MADE[name] if name in MADE else (load(RESULTS / name).records, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "svg", lambda chart: "")
        found = {d.kind: render(d)[f"{d.stem}.md"] for d in documents(records, ["all"], **given)}
    return Book(records, **given), found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MADE, *REAL])
def test_every_number_is_what_the_records_say(name: str, kind: str) -> None:
    book, found = pages(name)
    assert not list(faults(kind, book, read(found[kind])))


FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
FILE = re.compile(r"\]\(\S+\.svg\)")
CHANGES = 60


def changed(markdown: str, some: random.Random) -> tuple[str, str]:
    """The page with one digit of one figure changed, and where. Names of files are no figures."""
    files = [range(*match.span()) for match in FILE.finditer(markdown)]
    figures = [m for m in FIGURE.finditer(markdown) if not any(m.start() in f for f in files)]
    figure = some.choice(figures)
    digits = [i for i in range(*figure.span()) if markdown[i].isdigit()]
    at = some.choice(digits)
    digit = str((int(markdown[at]) + some.randint(1, 9)) % 10)
    return markdown[:at] + digit + markdown[at + 1 :], markdown[at - 40 : at + 20]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rich", "sparse", "ranks"])
def test_a_changed_figure_is_found(name: str, kind: str) -> None:
    book, found = pages(name)
    whole, some = read(found[kind]), random.Random(20)
    for _ in range(CHANGES):
        text, where = changed(found[kind], some)
        others = [p for p, q in zip(read(text), whole, strict=True) if p != q]
        assert others, f"not read: {where!r}"
        assert any(list(of_part(kind, book, p)) for p in others), f"not seen: {where!r}"


SPOILT = {
    "no oracle for column 'Surprise'": ("| Ranks |", "| Surprise |"),
    "no oracle for section 'Surprise'": ("## Ranks\n", "## Surprise\n"),
    "'Ranks' is missing": ("## Ranks\n", "## Surprise\n"),
    "no oracle for the paragraph 'All 7 of them.'": ("## Ranks\n", "## Ranks\n\nAll 7 of them.\n"),
    "'All of them.' has no ground": ("## Ranks\n", "## Ranks\n\n- All of them.\n"),
    "takes 14,995 tokens": ("- ring chunk=64 on 2 ranks takes 14,995", "- ring takes 14,995"),
    "is missing": ("- sdpa gave a wrong output", "sdpa gave a wrong output"),
}


@pytest.mark.parametrize("said", SPOILT)
def test_what_has_no_rule_is_found(said: str) -> None:
    book, found = pages("rich")
    before, after = SPOILT[said]
    assert before in found["summary"]
    spoilt = found["summary"].replace(before, after, 1)
    assert said in "\n".join(faults("summary", book, read(spoilt)))
