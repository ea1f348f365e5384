"""The load of a rank: on CUDA only threads that issue work count."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from longseq_bench.launchers.process_inspection import sample_processes
from longseq_bench.launchers.rank_supervisor import IDLE_SHARE

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the names of threads are read from /proc"
)

SPINS = """
import ctypes, sys, threading, time
def spin():
    if sys.argv[1]:
        ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
    print("ready", flush=True)
    while True:
        pass
sys.setswitchinterval(1e-4)
if sys.argv[1] == "main":
    spin()
threading.Thread(target=spin, daemon=True).start()
time.sleep(60)
"""


@pytest.fixture
def pid_of(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process with a thread of the given name that spins; "main": its main thread."""
    command = [sys.executable, "-c", SPINS, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("pid_of", "device", "is_busy"),
    [
        ("main", "cuda", True),
        ("pt_autograd_0", "cuda", True),
        ("NCCL Progress", "cuda", False),
        ("NCCL Progress", "cpu", True),
    ],
    indirect=["pid_of"],
)
def test_a_thread_that_spins_makes_a_rank_busy_only_if_it_issues_work(
    pid_of: int, device: str, is_busy: bool
) -> None:
    # on a busy machine a thread that spins may have no core for the time of a sample
    samples = (sample_processes({0: pid_of}, True, device)[0] for _ in range(20 if is_busy else 1))
    assert any(sample.busy >= IDLE_SHARE for sample in samples) == is_busy
