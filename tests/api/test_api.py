"""The Python API without processes: outcomes come by formula."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair
import numpy as np
import pytest

import longseq_bench
from longseq_bench.api.grid import sweep
from longseq_bench.api.length_search import maxlen
from longseq_bench.api.planning import plan
from longseq_bench.api.results import Results
from longseq_bench.cli import maxlen as maxlen_command
from longseq_bench.cli import plan as plan_command
from longseq_bench.cli.submission import SUBMIT
from longseq_bench.config.schema import SweepFile, WorkloadSection
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.errors import StoreError, UnknownNameError, UserError
from longseq_bench.core.options import OptionSpec
from longseq_bench.core.settings import TRIAL, WORKLOAD
from longseq_bench.store import RECORDS
from tests.simulated import SimulatedLauncher

ROOT = Path(__file__).parents[2]
OPTIONS = (
    OptionSpec(name="chunk", kind="int", default=64),
    OptionSpec(name="parts", kind="ints", default=(1,)),
)


class Machine(SimulatedLauncher):
    """SimulatedLauncher with two implementations."""

    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        known = DeviceInfo(name="simulated", dtypes=("float32", "bfloat16"), count=2)
        entries = {"ring": Entry(summary="", options=OPTIONS), "sdpa": Entry(summary="")}
        return Catalogue(implementations=entries, devices={"cpu": known})


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Machine)
    monkeypatch.chdir(tmp_path)


def swept(**more: Any) -> Results:
    given: dict[str, Any] = {
        "tokens": [256, "1k"], "implementations": ["sdpa", "ring"], "rounds": 1,
        "memory_budget": "64MiB", "progress": False,
    }  # fmt: skip
    return sweep(**{**given, **more})


# ---- the same as the command line --------------------------------------------------------------


def options_of(command: Any) -> set[str]:
    return set(inspect.signature(command).parameters)


def test_each_option_is_a_keyword_with_the_same_name() -> None:
    """An option that is added to a command needs its keyword here."""
    of_search = {"implementations", "options", "progress"}
    renamed = {"impl", "option", "as_json", *SUBMIT}
    assert options_of(maxlen) - of_search == options_of(maxlen_command) - renamed
    only_printed = {"output"}
    assert options_of(plan) - of_search == options_of(plan_command) - renamed - only_printed
    keys = set(SweepFile.model_fields) | set(WorkloadSection.model_fields)
    assert options_of(sweep) - {
        "config",
        "options",
        "out",
        "progress",
        "profile",
        "shard",
        "workers",
        "within",
    } == keys - {"workload"}


@pytest.mark.parametrize("function", [maxlen, plan, sweep])
def test_help_describes_each_setting(function: Any) -> None:
    text = inspect.getdoc(function) or ""
    for name in ("kv_heads", "mask", "keep"):
        assert f"    {name}: {(WORKLOAD | TRIAL)[name].text}\n" in text


def test_the_package_exports_what_it_lists() -> None:
    for name in ("maxlen", "sweep", "recommend", "plan", "load", "Results", "UserError"):
        assert name in dir(longseq_bench)
        assert callable(getattr(longseq_bench, name))
    with pytest.raises(AttributeError, match="no attribute 'maxlength'"):
        _ = longseq_bench.maxlength  # type: ignore[attr-defined]


# ---- maxlen ------------------------------------------------------------------------------------


def test_a_search_returns_its_bracket() -> None:
    found = maxlen("ring", memory_budget="64MiB", heads=4, dtype="bfloat16", progress=False)
    (row,) = found.maxima
    assert (row.heads, row.dtype, row.memory_budget) == (4, "bfloat16", 2**26)
    assert row.first_failure
    assert 0 < row.max_tokens < row.first_failure <= 1.01 * row.max_tokens + 64
    assert list(found.to_pandas().max_tokens) == [row.max_tokens]
    assert found.rows == []
    assert f"{row.max_tokens:,}" in str(found)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["sdpa", "ring"], [("sdpa", None), ("ring", 32)]),
        (("ring", {"chunk": 16}), [("ring", 16)]),
        ([("ring", {"chunk": 16}), "ring"], [("ring", 16), ("ring", 32)]),
        ({"ring": {"chunk": "1k"}, "sdpa": None}, [("ring", 1024), ("sdpa", None)]),
    ],
)  # fmt: skip
def test_options_are_for_one_implementation_or_for_all_that_have_them(
    given: Any, expected: Sequence[Any]
) -> None:
    found = maxlen(given, options={"chunk": 32}, memory_budget="8MiB", ceiling=256, progress=False)
    trials = dict.fromkeys(
        (r.trial.implementation, r.trial.options.get("chunk")) for r in found.records
    )
    assert list(trials) == expected


def test_with_a_folder_records_and_report_are_written_and_loaded() -> None:
    found = maxlen("ring", memory_budget="8MiB", out="runs/a", progress=False)
    assert {path.name for path in Path("runs/a").iterdir()} >= {RECORDS, "report.md", "report.csv"}
    loaded = longseq_bench.load("runs/a")
    assert loaded.maxima == found.maxima
    assert loaded.folder == found.folder == Path("runs/a")
    again = maxlen("ring", memory_budget="8MiB", out="runs/a", progress=False)
    assert again.records == found.records


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"implementations": "rign"}, "unknown implementation 'rign' in --impl; did you mean 'ring'?"),
    ({"implementations": 3}, "3 is no implementation; write"),
    ({"options": {"chonk": 3}}, "unknown option 'chonk' in ring; did you mean 'chunk'?"),
    ({"head": 3}, "unknown keyword 'head' in maxlen(); did you mean 'heads'?"),
    ({"heads": 3, "kv_heads": 2}, "heads 3 is not divisible by kv_heads 2"),
    ({"heads": 0}, "heads=0: input should be greater than or equal to 1"),
    ({"mode": "fwd"}, "mode='fwd': input should be 'forward'"),
    ({"memory_budget": "lots"}, "memory budget 'lots' can't be read; write 512MiB or 7.9GiB"),
    ({"device": "cuda"}, "device cuda is not available"),
]


@pytest.mark.parametrize(("given", "sentence"), MISTAKES)
def test_a_mistake_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    given = {"implementations": "ring", "memory_budget": "8MiB", "progress": False, **given}
    with pytest.raises(UserError) as refused:
        maxlen(given.pop("implementations"), **given)
    assert str(refused.value).startswith(sentence)
    assert refused.value._render_traceback_()[0].endswith(str(refused.value))


# ---- sweep -------------------------------------------------------------------------------------


def test_lists_are_axes_and_numbers_may_be_those_of_numpy() -> None:
    found = swept(
        tokens=np.array([128, 256]), implementations=["sdpa", ("ring", {"chunk": [16, 32]})],
        heads=(2, np.int64(4)), causal=True, time_cap=0.5, repeats=2,
    )  # fmt: skip
    assert {row.label for row in found.rows} == {"sdpa", "ring chunk 16", "ring chunk 32"}
    assert {(row.tokens, row.heads) for row in found.rows} == {
        (128, 2), (128, 4), (256, 2), (256, 4)
    }  # fmt: skip
    assert len(found.rows) == 12
    assert all(r.trial.workload.causal and r.trial.repeats == 2 for r in found.records)
    assert list(found.to_pandas().label) == [row.label for row in found.rows]


def test_a_tuple_is_one_value_of_an_option() -> None:
    found = swept(implementations=("ring", {"parts": [(1, 2), (4,)]}))
    assert {r.trial.options["parts"] for r in found.records} == {(1, 2), (4,)}


def test_a_file_gives_the_same_sweep_as_its_keywords() -> None:
    Path("grid.yaml").write_text(
        "tokens: [256, 1k]\nimplementations: [sdpa, ring]\nrounds: 2\nmemory_budget: 64MiB\n"
    )
    from_file = sweep("grid.yaml", rounds=1, out="out", progress=False)
    from_keywords = swept(out="other")
    assert [r.trial for r in from_file.records] == [r.trial for r in from_keywords.records]
    assert (Path("out") / "config.yaml").exists()
    again = sweep("other/config.yaml", out="other", progress=False)
    assert again.records == from_keywords.records


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": None}, "this sweep: tokens is missing; give it, or the path of a sweep file"),
        ({"config": "a.yaml"}, "a sweep file and implementations, memory_budget, tokens exclude"),
        ({"tokens": "4q"}, "this sweep: tokens '4q' can't be read"),
        ({"heads": object}, "this sweep: heads <class 'object'> is not a whole number"),
        ({"mode": "fwd"}, "this sweep: unknown mode 'fwd'"),
        ({"baseline": "dense"}, "unknown baseline 'dense' in the results; known: ring, sdpa"),
    ],
)
def test_a_mistake_in_a_grid_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        swept(**given)
    assert str(refused.value).startswith(sentence)


def test_progress_is_plain_lines_on_stderr_or_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    swept(progress=True)
    printed = capfd.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert [line.split("]")[0] for line in lines if line.startswith("[")] == [
        f"[{i}/4" for i in (1, 2, 3, 4)
    ]
    assert printed.err.isprintable() or all(line.isprintable() for line in lines)
    swept(progress=False)
    assert capfd.readouterr() == ("", "")


# ---- results -----------------------------------------------------------------------------------


def test_results_are_drawn_printed_and_reported() -> None:
    found = longseq_bench.load(ROOT / "results" / "xeon2" / "quickstart")
    chart = found.plot()
    assert isinstance(chart, altair.LayerChart)
    assert chart.to_dict()["title"] == [found.charts[0]]
    memory = found.plot("memory").to_dict()
    assert memory["title"] == ["Peak memory against tokens"]
    assert found.baseline == "sdpa"
    assert "Speed: time of sdpa " in found.report()
    assert "Speed: time of dense " in found.report(baseline="dense")
    assert found.report(format="csv").count("\n") > len(found.rows)
    paths = found.report("out", format=["csv", "json"], kind=["summary", "implementations"])
    names = {"report.csv", "report.json", "implementations.csv", "implementations.json"}
    assert {path.name for path in paths} == names
    with pytest.raises(UnknownNameError, match="unknown chart 'power'"):
        found.plot("power")
    with pytest.raises(UnknownNameError, match="unknown table 'row'"):
        found.to_pandas("row")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give a path"):
        found.report(format=["md", "csv"])


def test_nothing_to_show_is_said() -> None:
    assert str(Results([])) == "no records"
    with pytest.raises(StoreError, match="there is no record"):
        Results([]).report()
    with pytest.raises(StoreError, match="no results are named"):
        longseq_bench.load()


# ---- plan --------------------------------------------------------------------------------------


def test_a_plan_answers_and_is_a_table() -> None:
    found = plan(["ring", "sdpa"], gpu="h100", world_size=4, model="llama-3.1-8b", progress=False)
    assert found.answer.startswith("4 NVIDIA H100")
    assert found.best is found.predictions[0]
    frame = found.to_pandas()
    assert list(frame.tokens) == [one.trial.workload.seq_len for one in found.predictions]
    assert set(frame.implementation) == {"ring", "sdpa"}
    assert found.answer.split(".")[0] in " ".join(str(found).split())
