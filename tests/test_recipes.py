"""The recipes for clusters: each sets the index and number of a shard, from 1, and nothing else."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).parents[1] / "recipes"


def kubernetes() -> tuple[str, list[dict[str, str]]]:
    job = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:2] == ["sh", "-c"]
    count: Any = job["completions"]
    return container["command"][2], [{"JOB_COMPLETION_INDEX": str(i)} for i in range(count)]


def skypilot() -> tuple[str, list[dict[str, str]]]:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    nodes = task["num_nodes"]
    shared = {"SKYPILOT_NUM_NODES": str(nodes)}
    return task["run"], [shared | {"SKYPILOT_NODE_RANK": str(i)} for i in range(nodes)]


def slurm() -> tuple[str, list[dict[str, str]]]:
    text = (RECIPES / "array.sbatch").read_text()
    first, last = map(int, re.findall(r"--array=(\d+)-(\d+)", text)[0])
    return text, [{"SLURM_ARRAY_TASK_ID": str(i)} for i in range(first, last + 1)]


def parallel() -> tuple[str, list[dict[str, str]]]:
    """GNU parallel puts {} into the command itself; a free slot, {%}, may be another one later."""
    command, values = re.findall(r"'(.*)' ::: (.*)", (RECIPES / "parallel.sh").read_text())[0]
    return command.replace("{}", "$I"), [{"I": value} for value in values.split()]


@pytest.mark.parametrize("recipe", [kubernetes, skypilot, slurm, parallel])
def test_a_recipe_runs_each_shard_once(recipe: Any, tmp_path: Path) -> None:
    said = tmp_path / "longseq"
    said.write_text('#!/bin/sh\necho "$@"\n')
    said.chmod(0o755)
    command, variables = recipe()
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    printed = [
        subprocess.run(
            ["sh", "-c", command], env=path | one, capture_output=True, text=True, check=True
        ).stdout.split()
        for one in variables
    ]
    assert [words[:2] for words in printed] == [["sweep", "sweep.yaml"]] * 4
    assert [words[-2:] for words in printed] == [["--shard", f"{i}/4"] for i in (1, 2, 3, 4)]
