"""`longseq show`: which rows are chosen, in which order, what they look like, and that it fits."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from longseq_bench.analysis.frames import rows_json
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.cli import run
from longseq_bench.cli.row_filter import filter_rows
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from tests import make
from tests.cli.commands import Capture, document, refusal
from tests.make import write_records

MIB = 2**20
ROOT = Path(__file__).parents[2]
REAL = ("quickstart", "parallel", "extreme", "hilbert")


def mixed() -> list[Record]:
    """Two lengths, two dtypes, two worlds, options, a failure and a row without a time."""
    ring = {"order": "zigzag", "chunk": 64}
    at = {"flops": 1e9, "own_tokens": 2048}
    return [
        make.record(make.trial("sdpa", 1024), make.measured(0.004, MIB // 2, **at)),
        make.record(make.trial("sdpa", 4096), make.measured(0.08, 3 * MIB, **at)),
        make.record(make.trial("ring", 4096, ring), make.measured(0.1, 2 * MIB, **at)),
        make.record(
            make.trial("ring", 4096, ring | {"chunk": 128}, world_size=2),
            make.measured(0.0625, 2 * MIB, ranks=2, compute_time=0.05, **at),
        ),
        make.record(make.trial("sdpa", 1024, dtype="bfloat16"), make.measured(0.003, MIB)),
        make.record(make.trial("ring", 8192, ring), make.outcome("oom", "no memory", "forward")),
        make.record(make.trial("ring", 1024, ring, repeats=0), make.outcome(peak=4 * MIB)),
    ]


def shown(capfd: Capture, *arguments: str | Path) -> list[str]:
    code = run(["show", *map(str, arguments)])
    said = capfd.readouterr()
    assert (code, said.err) == (0, ""), said.err
    return said.out.splitlines()


# ---- which rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "places"),
    [
        ("implementation=ring", [2, 3, 5, 6]),
        ("label~chunk 128", [3]),
        ("status!=ok", [5]),
        ("tokens>=4k", [1, 2, 3, 5]),
        ("time<10ms", [0, 4]),
        ("time=none", [5, 6]),
        ("peak>1MiB", [1, 2, 3, 6]),
        ("ranks=2", [3]),
        ("dtype=bf16", [4]),
        ("causal=no", [0, 1, 2, 3, 4, 5, 6]),
        ("efficiency>=80%", [0, 1, 2, 4]),
        ("max_error<1e-5", [0, 1, 2, 3, 4]),
        ("option.chunk=64", [2, 5, 6]),
        ("option.order~zag", [2, 3, 5, 6]),
        ("option.order!=zigzag", [0, 1, 4]),
        ("option.chunk<zigzag", []),
        ("tokens >= 4k and status != ok", None),
        ("label='ring chunk 128'", [3]),
        ("tokens > own_tokens", None),
        ("(tokens>=4k", None),
        ("1<tokens<4k", None),
    ],
)
def test_a_condition_selects_rows(expression: str, places: list[int] | None) -> None:
    rows = sweep_rows(mixed())
    if places is None:
        with pytest.raises(UserError, match="can't be read"):
            filter_rows(rows, rows, [expression], [])
        return
    found = filter_rows(rows, rows, [expression], [])
    assert [rows.index(row) for row in found] == places


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--where", "tokns=4k"], "unknown field 'tokns' in --where; did you mean 'tokens'?"),
        (["--sort", "-pek"], "unknown field 'pek' in --sort; did you mean 'peak'?"),
        (["--columns", "time,statsu"],
         "unknown field 'statsu' in --columns; did you mean 'status'?"),
        (["--where", "option.chnk=1"], "unknown option 'chnk' in --where; did you mean 'chunk'?"),
        (["--where", "tokens"], "--where 'tokens' can't be read; write FIELD=VALUE, tokens>=4k, "
         "label~ring"),
        (["--where", "tokens=4q"], "--where 'tokens=4q': tokens '4q' can't be read; write 4096, 4k "
         "or 1M"),
        (["--where", "exposed>much"], "--where 'exposed>much': 'much' can't be compared with "
         "exposed_share; write 0.5, 50% or 1e-6"),
        (["--where", "status=okay"],
         "unknown status 'okay' in --where 'status=okay'; did you mean 'ok'?"),
        (["--where", "dtype=bfloat"],
         "unknown dtype 'bfloat' in --where 'dtype=bfloat'; did you mean 'bfloat16'?"),
        (["--where", "causal=maybe"], "--where 'causal=maybe': 'maybe' can't be compared with "
         "causal; write yes or no"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capfd: Capture, arguments: list[str], sentence: str
) -> None:
    assert refusal(capfd, "show", write_records(tmp_path, mixed()), *arguments) == sentence


def test_all_conditions_must_hold_and_rows_are_counted(tmp_path: Path, capfd: Capture) -> None:
    folder = write_records(tmp_path, mixed())
    both = ["--where", "impl=ring", "--where", "tokens>4k"]
    (row,) = document(capfd, "show", folder, *both)["rows"]
    assert (row["implementation"], row["tokens"]) == ("ring", 8192)
    told = " ".join(" ".join(shown(capfd, folder, *both)).split())
    counts = "7 records read: 6 ok, 1 oom. 7 rows, of which 1 matches impl=ring and tokens>4k."
    assert told.startswith(counts)
    assert "• ring chunk 64 at 8k: out of memory in forward" in told


def test_json_is_that_of_the_report_filtered_and_sorted(tmp_path: Path, capfd: Capture) -> None:
    records = mixed()
    folder = write_records(tmp_path, records)
    whole = json.loads(json.dumps(rows_json(sweep_rows(records), "rows")))
    assert document(capfd, "show", folder) == {**whole, "results": []}
    some = document(
        capfd, "show", folder, "--where", "impl=sdpa", "--sort", "-time", "--limit", "2"
    )
    assert some["rows"] == [whole["rows"][1], whole["rows"][0]]


# ---- searches ----------------------------------------------------------------------------------


def searched() -> list[Record]:
    short = make.trial("ring", memory_budget=64 * MIB, repeats=0)
    return [
        make.step(1024), make.step(2048, "oom"),
        make.step(4096, of=short), make.step(8192, "timeout", of=short),
    ]  # fmt: skip


def test_searches_have_a_table_of_their_own(tmp_path: Path, capfd: Capture) -> None:
    folder = write_records(tmp_path, [*mixed(), *searched()])
    told = shown(capfd, folder, "--where", "tokens>=4k")
    counts = "7 rows, of which 4 match tokens>=4k. 2 searches, of which 1 matches tokens>=4k."
    assert counts in " ".join(" ".join(told).split())
    (at,) = [i for i, line in enumerate(told) if line == "Longest lengths"]
    assert any({"ring", "4k", "8k", "time"} <= set(line.split()) for line in told[at:])
    found = document(capfd, "show", folder, "--where", "limited_by=memory")
    assert [row["max_tokens"] for row in found["results"]] == [1024]
    assert found["rows"] == []


def test_a_field_that_searches_lack_excludes_them(tmp_path: Path, capfd: Capture) -> None:
    folder = write_records(tmp_path, [*mixed(), *searched()])
    told = shown(capfd, folder, "--where", "status!=ok")
    assert "2 searches, of which none matches status!=ok." in " ".join(told)
    assert not any(line.startswith("Longest") for line in told)


# ---- order -------------------------------------------------------------------------------------


def test_missing_values_come_last_either_way() -> None:
    rows = sweep_rows(mixed())
    for name in ("time", "-time"):
        times = [row.time_s for row in filter_rows(rows, rows, [], [name])]
        known = [row.time_s for row in rows if row.time_s is not None]
        assert times == [*sorted(known, reverse=name[0] == "-"), None, None]


@pytest.mark.parametrize(
    ("keys", "places"),
    [(["-tokens"], [5, 1, 2, 3, 0, 4, 6]), (["-option.chunk"], [3, 2, 5, 6, 0, 1, 4])],
)
def test_equal_rows_keep_their_order_and_a_second_field_breaks_ties(
    keys: list[str], places: list[int]
) -> None:
    rows = sweep_rows(mixed())
    assert [rows.index(row) for row in filter_rows(rows, rows, [], keys)] == places


def test_a_limit_says_how_many_are_left(tmp_path: Path, capfd: Capture) -> None:
    told = shown(capfd, write_records(tmp_path, mixed()), "--sort", "-time", "--limit", "2")
    assert told[0].endswith("7 rows. 5 rows more not shown (--limit).")
    labels = [line.split()[0] for line in told if "±" in line]
    assert labels == ["ring", "sdpa"]


# ---- what it looks like ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("name", REAL)
def test_lines_fit_the_terminal_and_figures_are_complete(
    name: str, width: int, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    folder = ROOT / "results" / "xeon2" / name
    told = shown(capfd, folder, "--limit", "40")
    assert max(map(cell_len, told)) <= width
    assert not any("…" in line for line in told)
    assert any(line.startswith("no room for") for line in told) or width > 60 or name == "extreme"
    if name != "quickstart":
        return
    medians = [f"{row['time_s'] * 1e3:.3g} ms" for row in document(capfd, "show", folder)["rows"]]
    times = [line for line in told if "k  " in line and " ms" in line]
    assert len(times) == len(medians) == 21
    assert all(median in line for median, line in zip(medians, times, strict=True))


def test_requested_columns_are_shown(tmp_path: Path, capfd: Capture) -> None:
    folder = write_records(tmp_path, mixed())
    told = shown(capfd, folder, "--columns", "tokens,causal,option.chunk,time",
                 "--where", "tokens>=4k", "--where", "ranks=1", "--where", "impl=ring")  # fmt: skip
    at = next(i for i, line in enumerate(told) if "option.chunk" in line)
    assert told[at].split() == ["Implementation", "tokens", "causal", "option.chunk", "time"]
    ring = "ring", "chunk", "64"
    assert told[at + 1].split() == [*ring, "4k", "no", "64", "100", "ms", "±0.78", "%"]
    assert told[at + 2].split() == [*ring, "8k", "no", "64", "out", "of", "memory"]
