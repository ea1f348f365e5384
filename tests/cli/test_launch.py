"""`longseq launch`: on this host, and over two hosts by a fake of srun."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import RECORDS, load
from tests.cli.commands import Capture
from tests.cli.sweep_process import PATIENCE_S, Sweep, start_sweep
from tests.launchers import fake_engine

TINY = """\
memory_budget: 64MiB
workload: {heads: 1, head_dim: 16}
tokens: 256
implementations: ring
rounds: 1
repeats: 1
threads: 1
"""
WAITS = TINY.replace("256", "[256, 4k]").replace(": ring", ": rank-waits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor"], "unknown command 'doctor' in longseq launch; known: maxlen, scaling, sweep"),
        (["--nnodes", "2", "sweep", "c"], "--nnodes 2, but there are 1 host(s)"),
        (["--nnodes", "0", "sweep", "c"], "--nnodes"),
        (["--engine", "ray", "sweep", "c"], "--engine"),
        (["--hosts", "a:x", "--", "maxlen", "--impl", "ring"], "write a:8,b:8"),
        ([], "COMMAND"),
        (["--", "sweep"], "Missing argument"),
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
    "command", [["launch", "--", "sweep", "c.yaml"], ["maxlen", "--impl", "ring"]]
)
def test_several_tasks_are_told_the_right_command(
    command: list[str], capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert run(command) == 2
    assert "run it once: longseq launch -- sweep CONFIG in an allocation" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--", "sweep", "--help"]])
def test_help(arguments: list[str], capfd: Capture) -> None:
    assert run(["launch", *arguments]) == 0
    assert "--" in capfd.readouterr().out


def test_one_host_needs_no_engine(capfd: Capture) -> None:
    Path("sweep.yaml").write_text(TINY + "world_size: [1, 2, 3]\n")
    assert run(["launch", "--nproc-per-node", "2", "sweep", "sweep.yaml", "--out", "out"]) == 0
    found = {r.trial.world_size: r.outcome for r in load("out").records}
    assert {ranks: outcome.status for ranks, outcome in found.items()} == {
        1: "ok", 2: "ok", 3: "unsupported",
    }  # fmt: skip
    assert "more than the 2 of this launch" in (found[3].reason or "")


# ---- two hosts -----------------------------------------------------------------------------------

GATHERS = """\
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
def mine(q, k, v, *, group, world_size):
    every = [[torch.empty_like(x) for _ in range(world_size)] for x in (k, v)]
    for parts, x in zip(every, (k, v)):
        dist.all_gather(parts, x.contiguous(), group=group)
    return sdpa(q, *(torch.cat(parts, 2) for parts in every))
"""


@contextmanager
def start(folder: Path) -> Iterator[Sweep]:
    """Start `longseq launch` on two hosts, with `sweep.yaml` in the current folder."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    fake_engine.install(programs)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    before = ("launch", "--nproc-per-node", "1", "--")
    sweep = start_sweep(folder / "said", before, PATH=path, **fake_engine.SLURM)
    yield sweep
    sweep.end()


def test_an_own_function_runs_over_two_hosts(tmp_path: Path) -> None:
    Path("mine.py").write_text(GATHERS)
    Path("sweep.yaml").write_text(TINY.replace("ring", "[ring, 'mine.py:mine']"))
    with start(tmp_path) as sweep:
        assert sweep.process.wait(PATIENCE_S) == 0, sweep.said.read_text()
    found = load("out").records
    assert [(r.trial.implementation, r.outcome.status) for r in found] == [
        ("ring", "ok"), ("mine.py:mine", "ok"),
    ]  # fmt: skip
    assert {(r.trial.world_size, r.processes) for r in found} == {(2, 2)}
    assert [r.outcome.facts["hosts"] for r in found] == 2 * [[*fake_engine.HOSTS]]
    assert "ranks: 1 on each of 127.0.0.1, 127.0.0.2 by srun" in sweep.said.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_command_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    Path("sweep.yaml").write_text(WAITS)
    with start(tmp_path) as sweep:
        records = Path("out") / RECORDS
        sweep.wait_until(lambda: records.exists() and records.read_text().count("\n") == 1)
        sweep.wait_until(
            lambda: sum("host_rank" in " ".join(p.cmdline()) for p in sweep.processes()) >= 2
        )
        time.sleep(0.5)
        sweep.process.send_signal(number)
        code = sweep.process.wait(PATIENCE_S)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        assert sweep.left() == []
    said = sweep.said.read_text()
    assert "Traceback" not in said
    assert number == signal.SIGKILL or "longseq: interrupted" in said.splitlines()[-1]
    assert [r.outcome.status for r in load("out").records] == ["ok"]


def _count_ranks(sweep: Sweep) -> int:
    return sum("host_rank" in " ".join(process.cmdline()) for process in sweep.processes())
