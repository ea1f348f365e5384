"""`longseq launch`: on this host, and over two hosts by a fake of srun."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import load
from tests.cli.commands import Capture
from tests.cli.sweep_process import PATIENCE_S, Sweep, start_sweep
from tests.launchers import fake_engine
from tests.worker.test_own_function import GATHERS

TINY = """\
memory_budget: 64MiB
workload: {heads: 1, head_dim: 16}
tokens: 256
implementations: ring
rounds: 1
repeats: 1
threads: 1
"""
WAITS = TINY.replace("256", "4k").replace(": ring", ": rank-waits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor"], "unknown command 'doctor' in longseq launch; known: maxlen, scaling, sweep"),
        (["--nproc-per-node", "0", "sweep", "c"], "--nproc-per-node"),
        (["--hosts", "a:x", "--", "maxlen", "--impl", "ring"], "write a:8,b:8"),
        ([], "COMMAND"),
        (["--", "sweep"], "tokens is missing"),
        (["--", "maxlen", "--impl", "ring", "--heads", "many"], "--heads"),
        (["--", "sweep", "nowhere.yaml"], "there is no config nowhere.yaml"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capfd: Capture) -> None:
    assert run(["launch", *arguments]) == 2
    shown = capfd.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "launch -- sweep CONFIG in an allocation"),
        ({"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"},
         "launch --nproc-per-node 8 -- sweep CONFIG"),
    ],
)  # fmt: skip
def test_several_tasks_are_told_the_right_command(
    variables: dict[str, str], command: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["maxlen", "--impl", "ring"]) == 2
    assert f"run it once: longseq {command}" in " ".join(capfd.readouterr().err.split())


def test_one_host_needs_no_engine(capfd: Capture) -> None:
    Path("sweep.yaml").write_text(TINY + "world_size: [2, 3]\n")
    assert run(["launch", "--nproc-per-node", "2", "sweep", "sweep.yaml", "--out", "out"]) == 0
    found = {r.trial.world_size: r.outcome for r in load("out").records}
    statuses = {ranks: outcome.status for ranks, outcome in found.items()}
    assert statuses == {2: "ok", 3: "unsupported"}
    assert "more than the 2 of this launch" in (found[3].reason or "")


# ---- two hosts -----------------------------------------------------------------------------------


@contextmanager
def start(folder: Path, **variables: str) -> Iterator[Sweep]:
    """Start `longseq launch` on two hosts, with `sweep.yaml` in the current folder."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    fake_engine.install(programs)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    before = ("launch", "--nproc-per-node", "1", "--")
    sweep = start_sweep(folder / "said", before, PATH=path, **fake_engine.SLURM, **variables)
    yield sweep
    sweep.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_command_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """An own function runs before, unless the command is killed."""
    Path("mine.py").write_text(GATHERS)
    names = "rank-waits" if number == signal.SIGKILL else "['mine.py:f', rank-waits]"
    Path("sweep.yaml").write_text(WAITS.replace("rank-waits", names))
    waits = tmp_path / "waits"
    with start(tmp_path, LONGSEQ_TEST_WAITS=str(waits)) as sweep:
        sweep.wait_until(waits.exists)
        sweep.process.send_signal(number)
        code = sweep.process.wait(PATIENCE_S)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        assert sweep.left() == []
    said = sweep.said.read_text()
    assert "Traceback" not in said
    if number == signal.SIGKILL:
        return
    assert "longseq: interrupted" in said.splitlines()[-1]
    assert "ranks: 1 on each of 127.0.0.1, 127.0.0.2 by srun" in said
    (found,) = load("out").records
    assert (found.trial.implementation, found.outcome.status) == ("mine.py:f", "ok")
    assert (found.trial.world_size, found.processes) == (2, 2)
    assert found.outcome.facts["hosts"] == [*fake_engine.HOSTS]
