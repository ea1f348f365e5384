"""Where Python code runs: a script from stdin, a script without a guard, a notebook.

Each measures with real processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "getting-started.ipynb"

SIZES = '"memory_budget": "16MiB", "heads": 2, "head_dim": 16, "device": "cpu"'
SEARCH = f"""
import longseq_bench as longseq
found = longseq.maxlen("ring", ceiling=256, **{{{SIZES}}})
print(found.maxima[0].max_tokens)
"""
SWEEP = f"""
import longseq_bench as longseq
print("once")

def mine(q, k, v):
    import torch
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[3] ** -0.5, 3) @ v

timed = longseq.sweep(
    tokens=64, implementations=["sdpa", mine], rounds=1, repeats=1, **{{{SIZES}}}
)
print(*(record.outcome.status for record in timed.records))
"""


def run_in(folder: Path, *command: str, script: str | None = None) -> str:
    """Run Python in a folder and return its stdout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        input=script, capture_output=True, text=True, cwd=folder, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "\x1b" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_script_from_stdin(tmp_path: Path) -> None:
    assert run_in(tmp_path, "-", script=SEARCH) == "256\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(SWEEP)
    assert run_in(tmp_path, "bench.py") == "once\nok ok\n"


@pytest.mark.slow
def test_the_notebook_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "CI" not in os.environ:
        pytest.importorskip("ipykernel")
        pytest.importorskip("nbclient")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path[1:]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"] for output in outputs if output.output_type == "execute_result"]
    printed = [output.text for output in outputs if output.output_type == "stream"]
    assert not [text for text in printed if "\x1b" in text or "\r" in text]
    assert "ring takes" in shown[0]["text/plain"]
    assert eval(shown[1]["text/plain"])[1] == "memory"
    assert int(shown[2]["text/plain"]) == 512
    assert "my_attention chunk 32" in shown[4]["text/html"]
    assert '"title": ["Time against tokens"]' in shown[5]["text/html"]
    assert "8 NVIDIA H100" in shown[6]["text/plain"]
    assert not list(tmp_path.iterdir())


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
