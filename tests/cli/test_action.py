"""The GitHub Action for regression checks: its inputs, its options, and its steps, run here."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from longseq_bench.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "compare"
ACTION: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


def test_it_is_a_composite_action_whose_expressions_are_known() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert all({"name", "shell", "run"} <= step.keys() for step in STEPS)
    assert all("description" in one for one in ACTION["inputs"].values())
    outputs = {step["id"]: set(re.findall(r'echo "([\w-]+)=', step["run"])) for step in STEPS[1:]}
    known = {f"inputs.{name}" for name in ACTION["inputs"]}
    known |= {f"steps.{step}.outputs.{name}" for step, names in outputs.items() for name in names}
    used = EXPRESSION.findall((FOLDER / "action.yml").read_text(encoding="utf-8"))
    assert set(used) <= known
    assert {f"inputs.{name}" for name in ACTION["inputs"]} <= set(used)


def test_values_reach_the_shell_as_variables_only() -> None:
    """Text of an input inside a script would run as a command."""
    assert not any("${{" in step["run"] for step in STEPS)


def test_the_options_that_it_passes_exist() -> None:
    group = typer.main.get_command(app)
    used = 0
    for step in STEPS:
        script = step["run"].replace("\\\n", " ")
        for name, line in re.findall(r"-m longseq_bench (\w+)(.*)", script):
            known = {o for p in group.commands[name].params for o in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]
            passed = set(re.findall(r"(?<!\S)--[\w-]+", line))
            assert passed <= known
            used += len(passed)
    assert used == 6


# ---- the steps, run as a runner does -----------------------------------------------------------


@dataclass
class Job:
    """What the steps left: exit code, printed text, outputs of the action, and job summary."""

    code: int
    printed: str
    outputs: dict[str, str]
    summary: str


def run_action(repository: Path, temporary: Path, tools: str = "", **inputs: str) -> Job:
    """Run the steps of the action in a checkout, until one fails.

    tools: a folder whose programs are used instead of the usual ones.
    """
    given = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    values = {f"inputs.{name}": value for name, value in given.items()}
    summary, temp = temporary / "summary.md", temporary / "temp"
    temp.mkdir(parents=True)
    programs = [tools or str(Path(sys.executable).parent), os.environ["PATH"]]
    summary.touch()
    job = Job(0, "", {}, "")
    for step in STEPS:
        outputs = temporary / "outputs"
        outputs.write_text("")
        environment = os.environ | {
            "RUNNER_TEMP": str(temp), "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTION_PATH": str(FOLDER),
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            **{name: fill_in(text, values) for name, text in step.get("env", {}).items()},
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=repository, env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        job.code, job.printed = done.returncode, job.printed + done.stdout + done.stderr
        found = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
        values |= {f"steps.{step.get('id')}.outputs.{name}": v for name, v in found.items()}
        if done.returncode:
            break
    job.outputs = {n: fill_in(one["value"], values) for n, one in ACTION["outputs"].items()}
    job.summary = summary.read_text()
    return job


def fill_in(text: str, values: Mapping[str, str]) -> str:
    return EXPRESSION.sub(lambda found: values.get(found[1], ""), text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout of two commits, of which the second changes nothing that is measured."""
    folder = tmp_path / "repository"
    folder.mkdir()

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    (folder / "small.yaml").write_text("tokens: 64\n")
    for message in ("first", "second"):
        (folder / "README").write_text(message)
        git("add", "--all")
        git("commit", "--quiet", "--message", message)
    return folder


STAND_IN = """\
#!/bin/bash
# A python that notes where it is called, and ends as a file says.
echo "$(cat README)|$PYTHONPATH|$*" >> "$RUNNER_TEMP/calls"
out=$(sed 's/.*--out //; s/ .*//' <<< "$*")
mkdir -p "$out"
if [ "$3" = compare ]; then
  echo "# FAIL: ring at 4k is 10 % slower." > "$out/compare.md"
  exit 4
fi
exit "$(cat "$RUNNER_TEMP/../code")"
"""


def calls(
    repository: Path, temporary: Path, code: int = 0, **inputs: str
) -> tuple[Job, list[list[str]]]:
    """Run the action with a stand-in for python; return its calls: revision, path, arguments."""
    tools = temporary / "tools"
    tools.mkdir(parents=True)
    (tools / "python").write_text(STAND_IN)
    (tools / "python").chmod(0o755)
    (temporary / "code").write_text(str(code))
    settings = {"config": "small.yaml", "install": "false"} | inputs
    job = run_action(repository, temporary, str(tools), **settings)
    made = (temporary / "temp" / "calls").read_text().splitlines()
    return job, [line.split("|") for line in made]


def test_the_sides_take_turns_and_change_their_order(repository: Path, tmp_path: Path) -> None:
    job, made = calls(repository, tmp_path / "job", rounds="3", path="src", fail_on="7%")
    *sweeps, (_, path, compared) = made
    assert [revision for revision, *_ in sweeps] == [
        "first", "second", "second", "first", "first", "second",
    ]  # fmt: skip
    results = job.outputs["results"]
    for i, (revision, imported, arguments) in enumerate(sweeps):
        side, tree = ("a", f"{results}/tree") if revision == "first" else ("b", str(repository))
        assert imported.startswith(f"{tree}/src:")
        assert arguments == (
            f"-m longseq_bench sweep {repository}/small.yaml --rounds {1 + i // 2} "
            f"--out {results}/{side}"
        )
    assert path.startswith(f"{repository}/src:")
    assert compared.startswith(f"-m longseq_bench compare {results}/a {results}/b --fail-on 7% ")
    assert (job.code, job.outputs["exit-code"], job.outputs["verdict"]) == (4, "4", "FAIL")
    assert job.summary == "# FAIL: ring at 4k is 10 % slower.\n"
    assert job.printed.splitlines()[-1] == "::error::FAIL: ring at 4k is 10 % slower."


def test_earlier_results_replace_the_measurement_of_the_baseline(
    repository: Path, tmp_path: Path
) -> None:
    job, made = calls(repository, tmp_path / "job", rounds="2", baseline_results="before")
    assert [revision for revision, *_ in made] == ["second"] * 3
    assert f"compare before {job.outputs['results']}/b " in made[-1][2]


@pytest.mark.parametrize(("code", "ends"), [(3, 4), (2, 2), (130, 130)])
def test_a_failed_trial_is_compared_and_a_failed_sweep_ends_the_job(
    code: int, ends: int, repository: Path, tmp_path: Path
) -> None:
    job, made = calls(repository, tmp_path / "job", code, rounds="1")
    assert job.code == ends
    assert len(made) == (3 if code == 3 else 1)


def test_an_unknown_baseline_is_an_error_that_says_what_to_do(
    repository: Path, tmp_path: Path
) -> None:
    job = run_action(
        repository, tmp_path / "job", config="small.yaml", baseline="v9", install="false"
    )
    assert job.code == 2
    assert "::error::v9 is not in this clone; set fetch-depth: 2 (or 0)" in job.printed
    assert (job.summary, job.outputs["verdict"]) == ("", "")
