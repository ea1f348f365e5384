"""The number of kernel calls of a pass on a GPU, where small calls take as long as large ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launches import GOALS, count

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_ring_makes_few_calls_on_a_gpu(ranks: int) -> None:
    """The tiles of a CPU, which are small for its caches, would make thousands."""
    found = count("ring", 2**20, ranks, "forward")
    assert 2 * ranks <= found <= GOALS["ring", 2**20, ranks]
    assert count("ring", 2**20, ranks, "forward", "cpu") > 10 * found


def test_segments_need_a_launch_per_group_of_heads() -> None:
    """In its own process, which stays in meta mode."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.launches"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("dil", "hil"))]
    assert [row[0] for row in rows] == ["dilated", "hilbert"]
    for row in rows:
        forward, train = int(row[3]), int(row[4])
        # eight heads with eight different sets of segments
        assert (forward, train) == (8, 16)
