"""What a sweep survives: its own death at any moment, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from longseq_bench.cli import run
from longseq_bench.core.model import Record
from longseq_bench.store import RECORDS, load
from tests.cli.sweep_process import SOON_S, Sweep, start_sweep

TAIL = "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\nrounds: 1\nrepeats: 1\n"
SLEEPS_LAST = TAIL + "time_budget: 5min\ntokens: [64, 2k]\nimplementations: [sdpa, bad-sleeps]\n"
"""Three trials that pass, and one that sleeps in its pass: whatever comes meets it there."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Sweep]]:
    """Starts `longseq sweep sweep.yaml --out out`; ends what is left of it after the test."""
    started: list[Sweep] = []

    def begin() -> Sweep:
        started.append(start_sweep(tmp_path / f"said-{len(started)}"))
        return started[-1]

    yield begin
    for sweep in started:
        sweep.end()


def lines() -> list[bytes]:
    path = Path("out") / RECORDS
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def asleep_in_a_pass(sweep: Sweep) -> bool:
    """Those that pass are on disk, and the last trial's process no longer computes."""
    if len(lines()) < len(PASSED):
        return False
    leaders = [p for p in sweep.processes() if _leads(p)]
    trials = [p for p in leaders if p.pid != sweep.process.pid]
    return len(trials) == 1 and _is_idle(trials[0])


def commands(sweep: Sweep) -> list[list[str]]:
    found = []
    for process in sweep.processes():
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def _leads(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:  # it has ended since
        return False


def _is_idle(process: psutil.Process) -> bool:
    try:
        before = sum(process.cpu_times()[:2])
        time.sleep(0.3)
        return sum(process.cpu_times()[:2]) == before and process.status() == "sleeping"
    except psutil.Error:
        return False


def what(records: list[Record]) -> list[tuple[str, int, str]]:
    return [(r.trial.implementation, r.trial.workload.seq_len, r.outcome.status) for r in records]


PASSED = [("sdpa", 64, "ok"), ("bad-sleeps", 64, "ok"), ("sdpa", 2048, "ok")]


@pytest.mark.slow
def test_kill_9_and_ctrl_c_lose_nothing_and_leave_nothing_running(
    start: Callable[[], Sweep],
) -> None:
    """Not even the trial in a long pass. What is on disk is not run again.

    A terminal sends Ctrl-C to the whole group, to whatever serves the trials too.
    """
    Path("sweep.yaml").write_text(SLEEPS_LAST)
    sweep = start()
    sweep.wait_until(lambda: asleep_in_a_pass(sweep))
    sweep.process.kill()
    assert sweep.process.wait() == -signal.SIGKILL
    assert sweep.left() == []
    assert what(load("out").records) == PASSED
    kept = lines()

    again = start()
    again.wait_until(lambda: asleep_in_a_pass(again))
    os.killpg(again.process.pid, signal.SIGINT)
    assert again.process.wait(timeout=SOON_S) == 130
    assert again.left() == []
    assert lines() == kept
    said = again.said.read_text()
    assert "Traceback" not in said
    assert len(re.findall(r"^\[\d/4\] .*\(from an earlier run\)$", said, re.MULTILINE)) == 3
    assert said.splitlines()[-2:] == [
        "records: out/records.jsonl; the same command with --out out continues",
        "longseq: interrupted; every finished record is on disk",
    ]

    Path("sweep.yaml").write_text(SLEEPS_LAST.replace("2k", "96"))
    assert run(["sweep", "sweep.yaml", "--out", "out"]) == 0
    assert lines()[: len(kept)] == kept
    assert what(load("out").records) == [*PASSED, ("sdpa", 96, "ok"), ("bad-sleeps", 96, "ok")]
    assert (Path("out") / "report.md").exists()


@pytest.mark.parametrize(("seconds", "number"), [(0.0, signal.SIGINT), (0.7, signal.SIGTERM)])
def test_ctrl_c_while_the_fork_server_is_still_importing(
    start: Callable[[], Sweep], seconds: float, number: signal.Signals
) -> None:
    """The first seconds of every command: nobody has to look at a traceback of it.

    Slurm sends SIGTERM to all processes of a job.
    """
    Path("sweep.yaml").write_text(SLEEPS_LAST)
    sweep = start()
    sweep.wait_until(lambda: any("forkserver" in " ".join(c) for c in commands(sweep)))
    time.sleep(seconds)
    os.killpg(sweep.process.pid, number)
    assert sweep.process.wait(timeout=SOON_S) == 128 + number
    assert sweep.left() == []
    said = sweep.said.read_text()
    assert "Traceback" not in said
    by = " by SIGTERM" if number == signal.SIGTERM else ""
    assert said.splitlines()[-1] == f"longseq: interrupted{by}; every finished record is on disk"


def test_an_interrupt_inside_an_exec_ends_with_130(tmp_path: Path) -> None:
    """A dataclass is made by exec. Python would end by the signal, whatever the exit code."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'longseq_bench.cli':\n"
        "            exec('import signal; signal.raise_signal(signal.SIGINT)')\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "longseq_bench", "models", "--json"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert ended.returncode == 130, ended.stderr
