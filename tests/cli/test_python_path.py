"""What lies in the current folder is not run."""

import os
import subprocess
import sys
from pathlib import Path

from longseq_bench import __version__

ROOT = Path(__file__).parents[2]


def test_a_module_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    for name in ("typer", "rich", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this ran: ' + __name__)")
    done = subprocess.run(
        [sys.executable, "-m", "longseq_bench", "--version"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"longseq {__version__}\n", "")
