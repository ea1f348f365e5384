"""Growth, least sparsities, figures of others, and settings that set a maximum apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longseq_bench.core.errors import ConfigError
from longseq_bench.core.model import Record, Trial
from longseq_bench.reports import documents
from longseq_bench.reports.published_results import Elsewhere, read
from longseq_bench.reports.render.markdown import render
from tests import make
from tests.reports.test_summary import page, tables

BUDGET = 64 * 2**20


def found(tokens: int, of: Trial) -> list[Record]:
    """A search that ends there."""
    purposes = (("probe", "ok"), ("confirm", "ok"))
    steps = [make.step(tokens, status, purpose, of=of) for purpose, status in purposes]  # type: ignore[arg-type]
    return [*steps, make.step(tokens + 64, "oom", of=of)]


def ring(**fields: Any) -> Trial:
    return make.trial("ring", memory_budget=BUDGET, repeats=0, **fields)


def test_maxima_over_ranks_stand_beside_theory_and_expectation() -> None:
    records = [r for p, n in ((1, 8000), (2, 15000)) for r in found(n, ring(world_size=p))]
    one, two = tables(page(records), "Longest lengths over ranks")
    assert (one["Expected"], one["Of expected"], one["Theory"]) == ("8,000", "100.0 %", "8k")
    assert (two["Ranks"], two["Expected"], two["Found"]) == ("2", "16,000", "15,000")
    assert two["Of expected"] == "93.8 %"


def test_one_world_alone_is_no_growth() -> None:
    assert "Longest lengths over ranks" not in page(found(8000, ring()))


def test_the_exponent_of_time_is_fitted_where_three_lengths_are_known() -> None:
    records = [
        make.record(
            make.trial("ring", n),
            make.measured(1e-9 * n**1.9, 10.0 * n, flops=float(n * n), samples=3),
        )
        for n in (1000, 2000, 4000, 8000)
    ]
    row, held = tables(page(records), "How time and memory grow")
    assert row["Tokens ^"].startswith("1.90 (")
    assert (row["Of"], row["Ranks ^"], row["Points"]) == ("time", "—", "4")
    assert (held["Of"], held["Tokens ^"][:5]) == ("memory", "1.00 ")
    assert "How time and memory grow" not in page(records[:2])


def doubled(*lengths: int) -> str:
    records = [make.record(make.trial("ring", n), make.measured(1e-9 * n**1.9)) for n in lengths]
    (extreme,) = documents(records, ["extreme"])
    return render(extreme)["extreme.md"]


def test_where_no_length_is_twice_another_the_fit_tells_what_doubling_takes() -> None:
    text = doubled(4096, 32768, 131072)
    (row,) = tables(text, "Time a doubling")
    assert (row["Tokens"], row["Twice"], row["Which is"]) == ("—", "—", "fitted")
    assert (row["Time is"], row["Exponent of tokens"][:5]) == ("3.73×", "1.90 ")
    assert "fitted from 4k to 128k tokens, twice the tokens take 3.73× the time" in text
    both = tables(doubled(4096, 8192, 131072), "Time a doubling")
    assert [row["Which is"] for row in both] == ["measured"]


def test_lengths_that_are_close_tell_nothing_of_twice_the_tokens() -> None:
    for lengths in ((4096, 5000, 8000), (4096, 131072)):
        assert "There is no length timed together with twice that" in doubled(*lengths)


def test_a_search_for_the_least_sparsity_has_its_section_and_names() -> None:
    def one(sparsity: float, status: Any, purpose: Any = "density") -> Record:
        of = make.trial("block-sparse", 2**20, {"sparsity": sparsity}, memory_budget=BUDGET)
        return make.step(2**20, status, purpose, of=of, reason="too late")

    text = page([one(0.99, "ok"), one(0.9, "timeout"), one(0.99, "ok")])
    (row,) = tables(text, "Least sparsities")
    assert (row["Least sparsity"], row["Too dense"], row["Limited by"]) == (
        "0.99000", "0.90000", "time",
    )  # fmt: skip
    assert (row["Tokens"], row["Runs"], row["Confirmations"]) == ("1M", "3", "1")
    assert "block-sparse" in text.split("## Failures")[1]


@pytest.mark.parametrize(
    ("fields", "label", "said"),
    [
        ({"fit_only": True}, "ring (fits only)", "nothing was checked or timed"),
        ({"keep": "inputs", "mode": "train"}, "ring (recomputed)", "only q, k and v are kept"),
        ({"keep": "nothing"}, "ring (over its inputs)", "less than the floor"),
        ({"allocator": "expandable"}, "ring (expandable segments)", ""),
    ],
)
def test_settings_set_a_maximum_apart(fields: dict[str, Any], label: str, said: str) -> None:
    """In the table, in the sentence, in what failed; the plain one beside it keeps its name."""
    text = page([*found(8000, ring(**fields)), *found(4000, ring())])
    by_name = {row["Implementation"]: row["Max tokens"] for row in tables(text, "Longest lengths")}
    assert by_name == {label: "8,000", "ring": "4,000"}
    assert said in text
    names = {row["Implementation"] for row in tables(text, "Failures")}
    assert names == {label, "ring"}


def test_memory_alone_stands_beside_what_was_confirmed() -> None:
    timed = found(4000, ring(time_budget=30.0))
    text = page([*found(8000, ring(fit_only=True)), *timed])
    rows = {row["Implementation"]: row for row in tables(text, "Longest lengths")}
    assert rows["ring"]["Memory alone"] == "8,000"
    other = page([*found(8000, ring(fit_only=True, causal=True)), *timed])
    assert "Memory alone" not in other


def test_figures_of_others_stand_beside_ours_with_their_source() -> None:
    beside = Elsewhere.model_validate({
        "source": "a report of 2025",
        "maxima": [{"implementation": "ring", "tokens": 2000, "dtype": "bfloat16"},
                   {"implementation": "ring", "tokens": 4000, "options": {"chunk": 64}}],
    })  # fmt: skip
    of = make.trial("ring", 1, {"chunk": 64}, memory_budget=BUDGET)
    other = make.trial("ring", 1, {"chunk": 32}, memory_budget=BUDGET)
    text = page([*found(8000, of), *found(9000, other)], elsewhere=beside)
    rows = tables(text, "Longest lengths")
    assert [(r["Elsewhere"], r["Times that"]) for r in rows] == [("4,000", "2×"), ("—", "—")]
    assert "Elsewhere: a report of 2025." in text
    assert "Elsewhere" not in page(found(8000, of))


def test_the_file_beside_is_one() -> None:
    known = read(Path("results/figures-2025.yaml"))
    assert {one.implementation: one.tokens for one in known.maxima} == {
        "ring": 40960, "block-sparse": 483328, "hilbert": 204800,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source: x\n", "maxima: field required"),
        ("source: x\nmaxima: []\n", "maxima: "),
        ("source: x\nmaxima: [{implementation: ring}]\n", "maxima.0.tokens: field required"),
        ("source: [\n", "not valid YAML"),
        ("just words\n", "the file: "),
    ],
)
def test_a_bad_file_beside_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "beside.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_thrashing_allocator_is_said() -> None:
    slow = make.record(make.trial("ring", 4096), make.measured(alloc_retries=3))
    calm = make.record(make.trial("sdpa", 4096), make.measured(alloc_retries=0))
    text = page([slow, calm])
    assert (
        "ring at 4k tokens made the allocator give back its cached memory and ask again 3" in text
    )
    assert text.count("thrashing") == 1
