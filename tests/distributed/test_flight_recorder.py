"""The collective in which a rank's device waits, from recorded operations and from a process."""

import json
import subprocess
import sys
from typing import Any

import pytest

from longseq_bench.core.ranks import COLLECTIVE, COLLECTIVE_WAITS
from longseq_bench.distributed.flight_recorder import describe
from longseq_bench.launchers.exit_status import OutputFile
from longseq_bench.launchers.process_inspection import read_stacks


def entry(number: int, state: str, name: str = "all_reduce") -> Any:
    """An operation as in torch 2.13 (FlightRecorderDetail.hpp, dump_json)."""
    return {
        "record_id": number, "profiling_name": f"nccl:{name}", "state": state, "is_p2p": False,
        "collective_seq_id": 10 + number, "p2p_seq_id": 0, "pg_id": 0,
    }  # fmt: skip


def step(number: int, state: str) -> list[Any]:
    """A step of a ring: a send and a receive, launched together, and the entry with their state."""
    one = {"is_p2p": True, "p2p_seq_id": 20 + number, "collective_seq_id": 5}
    return [
        {**entry(number, "scheduled", "send 0->1"), **one},
        {**entry(number + 1, "scheduled", "recv 0<-1"), **one},
        {**entry(number + 2, state, "coalesced"), **one},
    ]


DONE = entry(1, "completed")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([], [], "none"),
        ([DONE], [DONE, entry(2, "completed")], "none"),
        ([DONE, entry(2, "started")], [DONE, entry(2, "started"), entry(3, "scheduled")],
         f"all_reduce #12 {COLLECTIVE_WAITS}"),
        ([entry(2, "scheduled")], [entry(2, "started")], "all_reduce #12 makes progress"),
        (step(2, "started"), step(2, "started"), f"send 0->1 and recv 0<-1 #22 {COLLECTIVE_WAITS}"),
        (step(2, "started"), [*step(2, "completed"), *step(5, "started")],
         "send 0->1 and recv 0<-1 #25 makes progress"),
    ],
)  # fmt: skip
def test_the_oldest_unfinished_collective_is_described(
    before: list[Any], after: list[Any], text: str
) -> None:
    """It waits for other ranks if it has started, and is the same in both readings."""
    assert describe(before, after) == text


RANK = """
import faulthandler, json, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
from longseq_bench.distributed import flight_recorder
entries = json.loads(sys.argv[1])
def read():
    if not entries:
        raise RuntimeError("no recorder")
    return entries
flight_recorder.answer_signal(read)
import os, threading
lock = threading.Lock()
lock.acquire()
def in_a_wait():
    os.write(1, b"ready\\n")
    os.read(0, 1) if sys.argv[2] == "read" else lock.acquire()
in_a_wait()
"""


@pytest.mark.parametrize("waits_in", ["read", "lock"])
def test_a_waiting_process_writes_its_stack_and_then_its_collective(waits_in: str) -> None:
    """Its main thread runs no Python meanwhile."""
    output = OutputFile()
    entries = json.dumps([DONE, entry(2, "started")])
    command = [sys.executable, "-c", RANK, entries, waits_in]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output.fileno()
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        lines = read_stacks({0: process.pid}, {0: output})[0]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        output.close()
    assert lines[0].endswith(" in_a_wait")
    assert lines[-1] == f"{COLLECTIVE}all_reduce #12 {COLLECTIVE_WAITS}"
