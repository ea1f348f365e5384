"""Run a case of `flex` in a process of its own, as every trial does.

torch 2.13 cannot compile FlexAttention with a mask's tensors on a CPU in a process that has
compiled some other variants: its C++ code names a variable that does not exist.
"""

import subprocess
import sys
from pathlib import Path

from longseq_bench.core.model import Workload
from longseq_bench.testing.contract import assert_equals_reference

ROOT = Path(__file__).parents[2]


def assert_flex_equals_reference(w: Workload) -> None:
    """Compare the output of `flex` with the definition, in a new process."""
    command = [sys.executable, "-m", __name__, w.model_dump_json()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    assert_equals_reference("flex", {}, Workload.model_validate_json(sys.argv[1]))
