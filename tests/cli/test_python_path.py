"""A file in the current folder that is named as a module does not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "memory_budget: 64MiB\ntokens: 64\nimplementations: [sdpa]\nrounds: 1\nrepeats: 1\n"
# the installed script has its own folder first on the path, not the current one
CONSOLE_SCRIPT = "import sys; sys.path.pop(0); from longseq_bench.__main__ import main; main()"


@pytest.mark.timeout(240)
def test_a_module_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    """Neither in the command, nor in the fork server, its resource tracker and the trial."""
    ran = tmp_path / "ran"
    for name in ("psutil", "signal", "socket", "ctypes", "torch", "selectors", "longseq_bench"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__)")
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = subprocess.run(
        [sys.executable, "-c", CONSOLE_SCRIPT, "sweep", "tiny.yaml", "--out", "out"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr
