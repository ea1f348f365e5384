"""The fork server: started in a folder that is not trusted, killed, left by a parent that dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

from longseq_bench.core.model import ENVIRONMENT_FAILURE
from longseq_bench.launchers.local import SERVER_ENDED

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20

HOSTILE = ("psutil", "signal", "socket", "ctypes", "torch", "selectors", "longseq_bench")
"""Modules that the server or its children import, or the resource tracker does."""


def environment(temporary: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def test_a_server_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Its death is not blamed on the trial, and nothing of the current folder runs."""
    folder, temporary, ran = tmp_path / "cloned", tmp_path / "temporary", tmp_path / "ran"
    for made in (folder, temporary):
        made.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__)")
    command = [sys.executable, str(ROOT / "tests/launchers/killed_server.py")]
    done = subprocess.run(
        command, cwd=folder, env=environment(temporary), timeout=PATIENCE_S,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not ran.exists(), ran.read_text()
    seen = json.loads(done.stdout)
    assert (seen["outcome"]["status"], seen["outcome"]["reason"]) == ("error", SERVER_ENDED)
    assert seen["outcome"]["facts"] == {ENVIRONMENT_FAILURE: True}
    assert seen["restarted"]
    # exit code 255 of a child is not taken for the death of its server
    assert (seen["code"], seen["lost"]) == (255, False)
    # a folder of multiprocessing would stay after a kill, and nobody would know whose it was
    assert [name for name in seen["files"] if name.startswith("pymp-")] == []
