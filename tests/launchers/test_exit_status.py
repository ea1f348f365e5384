"""What the end of a process means: memory, a crash, a lost peer; and what its stack looked like."""

import signal

import pytest
import torch.distributed as dist

from longseq_bench.core.model import is_environment_failure
from longseq_bench.core.ranks import CHILD_MAIN
from longseq_bench.launchers.exit_status import may_be_out_of_memory, outcome_of_exit, stack_lines
from longseq_bench.worker.verdicts import outcome_of_exception

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "status", "lost_peer"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:16076"), "error", True),
        (RuntimeError(GLOO + "Timed out waiting 1800000ms for recv operation"), "error", True),
        (RuntimeError("Socket Timeout"), "error", True),
        (dist.DistNetworkError("The client socket has failed to connect to [a]:1"), "error", True),
        (dist.DistBackendError("ncclRemoteError: possibly a network error"), "error", True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error", None),
        (ValueError("Connection closed by peer"), "error", None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom", None),
        (dist.DistBackendError("NCCL Error 5: invalid usage"), "error", None),
        (dist.DistNetworkError("The server socket has failed to listen"), "error", None),
    ],
)
def test_only_what_the_end_of_a_peer_looks_like_is_marked(
    error: Exception, status: str, lost_peer: bool | None
) -> None:
    found = outcome_of_exception(error, "forward")
    assert (found.status, found.facts.get("lost_peer")) == (status, lost_peer)
    if lost_peer:
        assert not may_be_out_of_memory(found, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_that_somebody_sends_is_no_failure_of_the_trial(number: signal.Signals) -> None:
    """Slurm sends SIGTERM to all processes of a job. SIGKILL may be for lack of memory."""
    found = outcome_of_exit(-number, "time", "last words", False)
    is_from_outside = number != signal.SIGKILL
    assert is_environment_failure(found) == is_from_outside
    assert found.status == ("error" if is_from_outside else "crashed")
    assert (found.reason, found.phase) == (f"killed by {number.name}", "time")
    assert found.facts["output"] == ["last words"]


def test_only_an_abort_by_nccl_is_the_end_of_a_peer() -> None:
    printed = "[PG ID 0 Rank 0] ProcessGroupNCCL's watchdog got stuck"
    assert outcome_of_exit(-signal.SIGABRT, "time", printed, False).facts["lost_peer"] is True
    assert "lost_peer" not in outcome_of_exit(-signal.SIGABRT, "time", "free()", False).facts
    assert "lost_peer" not in outcome_of_exit(-signal.SIGSEGV, "time", printed, False).facts


DUMPED = """something it printed
Thread 0x00007f1 (most recent call first):
  File "{lib}/site-packages/torch/helper.py", line 7 in idle
  File "{lib}/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "{src}/longseq_bench/distributed/group.py", line 38 in wait
  File "{lib}/site-packages/torch/autograd/function.py", line 5 in apply
  File "{src}/longseq_bench/core/ranks.py", line 28 in {main}
  File "{src}/longseq_bench/launchers/_child_entry.py", line 38 in enter
  File "{lib}/multiprocessing/process.py", line 108 in run
"""


def test_a_stack_is_short_and_names_no_place_of_this_machine() -> None:
    dumped = DUMPED.format(lib="/opt/python3.11", src="/srv/somebody/longseq", main=CHILD_MAIN)
    assert stack_lines(dumped) == [
        "distributed/group.py:38 wait",
        "torch/autograd/function.py:5 apply",
        "of another thread:",
        "torch/helper.py:7 idle",
        "python3.11/threading.py:982 run",
    ]
    assert stack_lines("nothing of the kind") == []
