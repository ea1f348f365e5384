"""The fork server: killed, and replaced."""

import json
import subprocess
import sys
from pathlib import Path

from longseq_bench.core.model import ENVIRONMENT_FAILURE
from longseq_bench.launchers.local import SERVER_ENDED

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20


def test_a_server_that_is_killed_is_replaced() -> None:
    """Its death is not blamed on the trial."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.launchers.killed_server"],
        cwd=ROOT,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["outcome"]["status"], seen["outcome"]["reason"]) == ("error", SERVER_ENDED)
    assert seen["outcome"]["facts"] == {ENVIRONMENT_FAILURE: True}
    assert seen["restarted"]
    # exit code 255 of a child is not taken for the death of its server
    assert (seen["code"], seen["lost"]) == (255, False)
