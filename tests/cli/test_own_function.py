"""Own functions on every command: measured, listed, edited, compared, and refused if mistaken."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longseq_bench.attention.own_source import find_file
from longseq_bench.cli import run
from longseq_bench.store import load
from tests.cli.commands import Capture, document, refusal
from tests.make import write_records

ROOT = Path(__file__).parents[2]
EXAMPLE = "docs/examples/my_attention.py"
SIZES = ["--memory-budget", "64MiB", "--heads", "2", "--head-dim", "16"]

MINE = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v, *, causal, chunk=64):
    return sdpa(q, k, v, is_causal=causal)
"""
SWEEP = """\
tokens: 64
implementations: ["mine.py:mine", sdpa]
memory_budget: 64MiB
workload: {heads: 2, head_dim: 16}
rounds: 1
repeats: 1
"""


@pytest.fixture(autouse=True)
def _mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.py").write_text(MINE)
    Path("sweep.yaml").write_text(SWEEP)


def statuses(folder: str = "out") -> list[tuple[str, str]]:
    return [(r.trial.implementation, r.outcome.status) for r in load(folder).records]


def test_maxlen_measures_it_and_labels_it_by_the_function(capfd: Capture) -> None:
    arguments = ["--impl", "./mine.py:mine", "-o", "chunk=32", "--ceiling", "128", *SIZES]
    (row,) = document(capfd, "maxlen", *arguments, "--causal", "--out", "out")["results"]
    assert row["implementation"] == "mine.py:mine"
    assert (row["options"], row["max_tokens"]) == ({"chunk": 32}, 128)
    source = find_file("mine.py:mine").source
    assert {r.trial.source for r in load("out").records} == {source}
    assert row["source"] == source
    assert run(["show", "out"]) == 0
    assert re.search(r"^mine +128 ", capfd.readouterr().out, re.MULTILINE)


def test_a_workload_that_it_can_t_do_is_unsupported_with_a_reason(capfd: Capture) -> None:
    arguments = ["--impl", "mine.py:mine", "--kv-heads", "1", "--ceiling", "64", *SIZES]
    assert run(["maxlen", *arguments, "--out", "out"]) == 0
    (found,) = load("out").records
    reason = "mine takes no argument `enable_gqa`, needed for fewer kv_heads than heads"
    assert (found.outcome.status, found.outcome.reason) == ("unsupported", reason)
    assert "is unsupported" not in capfd.readouterr().err
    assert refusal(capfd, "maxlen", *arguments[:2], "--world-size", "2", *SIZES) == (
        "mine.py:mine: mine takes no argument `group`, needed for several ranks; it runs on one, "
        "not 2"
    )


def test_an_edited_file_is_measured_anew_and_both_are_shown_and_compared(capfd: Capture) -> None:
    for _ in range(2):
        assert run(["sweep", "sweep.yaml", "--out", "out"]) == 0
        assert statuses() == [("mine.py:mine", "ok"), ("sdpa", "ok")]
    Path("mine.py").write_text(MINE + "# edited\n")
    assert run(["sweep", "sweep.yaml", "--out", "out"]) == 0
    assert statuses() == [("mine.py:mine", "ok"), ("sdpa", "ok"), ("mine.py:mine", "ok")]
    before, _, after = (str(r.trial.source) for r in load("out").records)
    assert before != after
    capfd.readouterr()
    assert run(["show", "out"]) == 0
    labels = re.findall(r"^(mine \w+ \w+) +64 ", capfd.readouterr().out, re.MULTILINE)
    assert labels == [f"mine file {before[:8]}", f"mine file {after[:8]}"]
    records = load("out").records
    sides = write_records("before", records[:2]), write_records("after", records[1:])
    answer = document(capfd, "compare", *sides)
    assert {row["implementation"] for row in answer["times"]} == {"mine.py:mine", "sdpa"}
    caution = f"The file of mine differs: its hash is {before} in A and {after} in B."
    assert caution in answer["notes"]


def test_list_shows_what_its_signature_says(capfd: Capture) -> None:
    answer = document(capfd, "list", "--impl", "mine.py:mine", "--impl", "sdpa")
    assert set(answer["implementations"]) == {"mine.py:mine", "sdpa"}
    mine = answer["implementations"]["mine.py:mine"]
    assert [(o["name"], o["kind"], o["default"]) for o in mine["options"]] == [("chunk", "int", 64)]
    assert mine["source"] == "mine.py:3"
    missing = "mine takes no argument `group`, needed for several ranks"
    assert missing in mine["missing"]
    assert run(["list", "--impl", "mine.py:mine"]) == 0
    assert f"Not supported: {missing}" in capfd.readouterr().out


def test_plan_uses_the_rates_of_this_file_alone(capfd: Capture) -> None:
    Path("sweep.yaml").write_text(SWEEP.replace("tokens: 64", "tokens: 2k"))
    assert run(["sweep", "sweep.yaml", "--out", "results/a"]) == 0
    capfd.readouterr()
    arguments = ["--impl", "mine.py:mine", "--target", "4k", "--heads", "2", "--head-dim", "16"]
    (measured,) = document(capfd, "plan", *arguments)["results"]
    assert "profile" not in measured["rate_source"]
    Path("mine.py").write_text(MINE + "# edited\n")
    (edited,) = document(capfd, "plan", *arguments)["results"]
    assert "profile" in edited["rate_source"]


def test_the_parent_never_runs_the_file() -> None:
    Path("mine.py").write_text(MINE + "import os\nopen('ran', 'a').write(f'{os.getpid()} ')\n")
    assert run(["sweep", "sweep.yaml", "--dry-run"]) == 0
    assert run(["list", "--impl", "mine.py:mine"]) == 0
    # for the catalogue, the check of the options and the estimate of the sweep; and for the list
    children = Path("ran").read_text().split()
    assert len(set(children) - {str(os.getpid())}) == 4


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["maxlen", "plan", "scaling", "list"])
def test_a_function_that_is_not_there_ends_every_command(capfd: Capture, command: str) -> None:
    assert refusal(capfd, command, "--impl", "mine.py:mines") == (
        "mine.py has no function 'mines'; did you mean 'mine'?"
    )


# ---- the page of the docs ----------------------------------------------------------------------


def test_the_example_of_getting_started_runs_as_printed(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    section = page.partition("## Your own function")[2].partition("\n## ")[0]
    blocks: dict[str, str] = dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))
    assert blocks["python"] in (ROOT / EXAMPLE).read_text()
    example = (ROOT / EXAMPLE).read_text()
    window = example.partition("def my_window")[2].strip()
    assert window in (ROOT / "docs/extending.md").read_text()

    (tmp_path / EXAMPLE).parent.mkdir(parents=True)
    (tmp_path / EXAMPLE).write_text(example)
    small = ["--heads", "2", "--head-dim", "16"]
    for line in blocks["sh"].splitlines():
        _, command, *arguments = line.split()
        more = {"maxlen": ["--ceiling", "512", "--out", "out", *small]}.get(command, [])
        assert run([command, *arguments, *more]) == 0, capfd.readouterr().err
    assert set(statuses()) == {(f"{EXAMPLE}:my_attention", "ok"), ("sdpa", "ok")}

    config: dict[str, Any] = yaml.safe_load(blocks["yaml"])
    Path("own.yaml").write_text(yaml.safe_dump(config | {"workload": {"heads": 2}}))
    assert run(["sweep", "own.yaml", "--out", "swept"]) == 0
    assert {status for _, status in statuses("swept")} == {"ok"}
    assert {r.trial.options.get("chunk") for r in load("swept").records} == {128, 256, None}
