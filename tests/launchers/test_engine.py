"""Trials over several hosts, with a fake of the engine; a real Slurm is in the campaign `slurm`."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Outcome, is_environment_failure
from longseq_bench.core.ranks import versions
from longseq_bench.launchers import engine
from longseq_bench.launchers.base import OnPhase
from longseq_bench.launchers.engine import HostsLauncher, LabelledOutput
from longseq_bench.launchers.hosts import COUNTS, Hosts, find_hosts, refuse_several_tasks
from tests.launchers import fake_engine
from tests.launchers.fake_engine import HOSTS, SLURM
from tests.make import trial

SOON_S = 60


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs srun, mpirun and scontrol that are fakes."""
    fake_engine.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def run_by(engine_name: str) -> Iterator[HostsLauncher]:
    """Yield a launcher; no engine and no rank still runs some seconds after its end."""
    with HostsLauncher(Hosts(engine_name, HOSTS, 1)) as launcher:
        yield launcher
    end = time.monotonic() + SOON_S
    while (left := find_ranks()) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


@pytest.fixture
def by_mpirun(programs: None) -> Iterator[HostsLauncher]:
    yield from run_by("mpirun")


@pytest.fixture
def by_srun(programs: None) -> Iterator[HostsLauncher]:
    yield from run_by("srun")


def find_ranks() -> list[psutil.Process]:
    descendants = psutil.Process().children(recursive=True)
    names = {"srun", "mpirun", "longseq_bench.worker.host_rank"}
    return [p for p in descendants if p.status() != "zombie" and names & {*p.cmdline()[-8:]}]


def let_srun_run(tmp_path: Path, script: str) -> None:
    """Replace srun by a script: of what an engine prints, most needs no ranks."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{script}\n")


def attempt(
    launcher: HostsLauncher, name: str, on_phase: OnPhase = lambda phase, part: None, **fields: Any
) -> Outcome:
    """Return the outcome of one attempt; test_local.py has what makes it try once more."""
    known = {"heads": 1, "head_dim": 16, "repeats": 0, "threads": 1, "world_size": 2, **fields}
    return launcher._attempt(trial(name, 4096, **known), on_phase)[0]


def test_all_ranks_are_measured_whatever_is_printed_before_and_between(
    by_mpirun: HostsLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun cuts long lines. By srun: tests/cli/test_launch.py."""
    (tmp_path / "sitecustomize.py").write_text("print('a module of the site', flush=True)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    phases: list[str] = []
    by_mpirun._rates["cpu", "float32", 2, 1, 0] = {"matmul_rate": 1e9}
    outcome = attempt(by_mpirun, "ring", lambda phase, part: phases.append(phase), repeats=1)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert sorted(m.rank for m in outcome.measurements if m.name == "pass_time") == [0, 1]
    assert outcome.facts["hosts"] == [*HOSTS]
    assert outcome.facts["launcher"] == "mpirun"
    assert outcome.samples("matmul_rate") == (1e9, 1e9)  # of an earlier trial
    assert "forward" in phases


def test_a_rank_that_dies_is_named(by_mpirun: HostsLauncher) -> None:
    """mpirun says so after it has ended the others."""
    outcome = attempt(by_mpirun, "rank-segfaults")
    expected = ("crashed", f"rank 1 (host {HOSTS[1]}): killed by SIGSEGV")
    assert (outcome.status, outcome.reason) == expected
    assert outcome.phase in ("forward", "communication")


NAMED = "echo 'srun: error: n2: task 1: {}' >&2\nexec sleep 60"


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (NAMED.format("Segmentation fault"), "crashed", "rank 1 (host {host}): killed by SIGSEGV"),
        # Slurm kills the ranks of a job that ends, and says so later or never
        (NAMED.format("Killed"), None, f"rank 1 (host {{host}}): {engine.OUTSIDE}"),
        (NAMED.format("Out Of Memory"), "oom", "rank 1 (host {host}): killed by the kernel's out-"),
        (NAMED.format("Exited with exit code 3"), "crashed", "ended with exit code 3"),
        (NAMED.format("Aborted (core dumped)").replace("task 1", "tasks 0-1"), "crashed",
         "every rank: killed by SIGABRT"),
        ("echo 'srun: no such node' >&2; exit 9", None,
         "srun ended with exit code 9: srun: no such node"),
    ],
)  # fmt: skip
def test_an_end_that_srun_names(
    by_srun: HostsLauncher, tmp_path: Path, script: str, status: str | None, reason: str
) -> None:
    """A kill, and the end of the engine, are no failure of the trial."""
    let_srun_run(tmp_path, script)
    outcome = attempt(by_srun, "ring")
    assert is_environment_failure(outcome) == (status is None)
    assert outcome.status == (status or outcome.status)
    assert reason.format(host=HOSTS[1]) in (outcome.reason or "")


def test_a_hang_shows_where_each_rank_waits(by_srun: HostsLauncher) -> None:
    outcome = attempt(by_srun, "rank-waits", time_budget=1.0)
    assert outcome.status == "hang", outcome.reason
    assert outcome.facts["stacks"].keys() == {"0", "1"}
    assert "communication" in (outcome.reason or "")


def test_a_host_that_is_stopped_is_no_failure_of_the_trial(
    by_srun: HostsLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SILENT_S", 1.5)
    beat = """echo '{rank}: {{"beat": 1.0}}'; echo '{rank}: '"""
    ranks = [beat.format(rank=rank) for rank in (0, 1)]
    let_srun_run(tmp_path, f"{ranks[1]}\nfor i in $(seq 200); do {ranks[0]}; sleep 0.1; done")
    outcome = attempt(by_srun, "ring")
    assert is_environment_failure(outcome), outcome
    # a loaded machine notices the silence a second later
    silence = rf"no message from host {re.escape(HOSTS[1])} for \d+ s"
    assert re.search(silence, outcome.reason or ""), outcome.reason


@pytest.mark.parametrize(
    "sentence",
    [
        "Unable to create step for job 23: Job/step already completing or completed",
        "Slurm job 23 has expired",
    ],
)
def test_a_job_that_ends_ends_the_command(
    by_srun: HostsLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    """Else each of the remaining trials would fail at once; the requeued job runs them."""
    let_srun_run(tmp_path, f"echo 'srun: error: {sentence}' >&2; exit 1")

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt(number)

    monkeypatch.setattr(engine.signal, "raise_signal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        attempt(by_srun, "ring")


def test_another_version_on_a_host_is_named(by_srun: HostsLauncher, tmp_path: Path) -> None:
    told = json.dumps({"versions": versions() | {"torch": "1.0"}, "step": ""})
    let_srun_run(tmp_path, f"echo '1: {told}'; echo '1: '; exec sleep 60")
    with pytest.raises(UserError, match=rf"host {HOSTS[1]} .*: torch is 1\.0 there and"):
        attempt(by_srun, "ring")


# ---- what an engine prints -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("srun", b" 0: one\n10: two\nsrun: error: n2: 7: no\n 0: \n"),
        ("mpirun", b"[1,0]<stdout>:o[1,10]<stdout>:two\n[1,0]<stdout>:ne\nsrun: error: n2: 7: no\n"
                   b"[prterun-n1-77@1,0]<stdout>:\n"),
    ],
)  # fmt: skip
def test_output_is_split_by_rank_however_it_is_cut(name: str, printed: bytes, size: int) -> None:
    output, found = LabelledOutput(name), dict[int | None, bytes]()
    for i in range(0, len(printed), size):
        for rank, text in output.feed(printed[i : i + size]):
            found[rank] = found.get(rank, b"") + text
    assert found == {0: b"one\n\n", 10: b"two\n", None: b"srun: error: n2: 7: no\n"}


# ---- the hosts -----------------------------------------------------------------------------------


def test_hosts_of_slurm_and_of_mpirun(programs: None) -> None:
    found = find_hosts(SLURM)
    assert found == Hosts("srun", HOSTS, 1, 8)
    assert find_hosts(SLURM, ranks_per_host=4, gpus=2).ranks == 8
    assert find_hosts(SLURM, gpus=2).ranks == 4
    assert find_hosts({}, hosts="127.0.0.1:8,127.0.0.2:8") == Hosts("mpirun", HOSTS, 8)
    assert find_hosts({}, ranks_per_host=2) == Hosts("", ("localhost",), 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": "127.0.0.1:8,127.0.0.2:4"}, "the same number of ranks"),
        ({"hosts": "a:8,a:8"}, "'a:8' can't be read"),
        ({"hosts": "192.0.2.1,127.0.0.1"}, "this host is not 192.0.2.1, the first of the hosts"),
        ({"hosts": "nowhere.invalid,127.0.0.1"}, "the host nowhere.invalid is not known here"),
    ],
)
def test_bad_hosts_are_named(programs: None, given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_hosts({}, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COUNTS)
def test_several_tasks_are_refused(name: str) -> None:
    refuse_several_tasks({name: "1"})
    with pytest.raises(UserError, match=rf"{COUNTS[name]} started several .* longseq launch"):
        refuse_several_tasks({name: "2"})


@pytest.mark.parametrize(("ranks", "taken"), [(1, 1), (4, 1), (8, 2), (12, 3)])
def test_a_smaller_world_takes_the_first_hosts(ranks: int, taken: int) -> None:
    assert Hosts("srun", ("a", "b", "c"), 4).take(ranks) == ("a", "b", "c")[:taken]
    with pytest.raises(ValueError, match="do not fill hosts of 4 ranks"):
        Hosts("srun", ("a", "b", "c"), 4).take(6)
