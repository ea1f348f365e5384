"""`--submit`: shards as jobs of a Slurm that is made of shell scripts, and of this host."""

import errno
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.core.utils import DelayedSubmission

from longseq_bench.api.grid import sweep
from longseq_bench.cli import run, submission
from tests.api.test_api import Machine
from tests.cli.commands import Capture, refusal

GRID = "tokens: [64, 96, 128]\nimplementations: [sdpa, ring]\nmemory_budget: 64MiB\nrounds: 1\n"
SLURM = ("sweep", "sweep.yaml", "--out", "out", "--submit", "slurm", "--shards", "3")
SCRIPTS = {
    "srun": "exit 1",
    "sbatch": "cat refusal >&2 && exit 1; cp $1 job.sh; echo Submitted batch job $(cat number)",
    "squeue": 'echo $@ | grep -qe "--me .*--states=all" && cat queue || ! echo no controller >&2',
}


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Machine)
    for name, text in SCRIPTS.items():
        Path(name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        Path(name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Path("sweep.yaml").write_text(GRID + "device: cuda\n")
    Path("number").write_text("12")
    queue()


def queue(*states: str) -> None:
    """Let Slurm list job 12 with these states, one for each shard."""
    Path("queue").write_text("".join(f"12_{i}|{state}\n" for i, state in enumerate(states)))


def finish(*shards: int) -> None:
    """Run shards to their end."""
    Path("sweep.yaml").write_text(GRID + "device: cpu\n")
    for shard in shards:
        sweep("sweep.yaml", out="out", shard=f"{shard}/3", progress=False)


def submit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["longseq", *arguments])
    return run(arguments)


def command_of(job: str) -> list[str]:
    """Return what a job runs, without Python."""
    _, command = DelayedSubmission.load(Path(f"out/submitted/{job}_submitted.pkl")).args
    assert command[: len(submission.PROGRAM)] == [*submission.PROGRAM]
    return list(command[len(submission.PROGRAM) :])


def test_an_array_has_a_job_for_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    queue("RUNNING", "PENDING", "PENDING")
    of_job = ("--array-parallelism=2", "--partition", "gpu", "--time=90min", "--gpus-per-task=2")
    assert (
        submit(monkeypatch, "sweep", *SLURM[2:], *of_job, "--rounds", "2", "--", "sweep.yaml") == 0
    )
    lines = Path("job.sh").read_text().splitlines()
    named = "array=0-2%2", "partition=gpu", "time=90", "gpus-per-node=2", "nodes=1", "signal=B:CONT"
    assert {f"#SBATCH --{one}" for one in named} <= {*lines}
    assert "srun" not in lines[-1]
    assert [command_of(f"12_{i}") for i in range(3)] == [
        ["sweep", "--shard", f"{i + 1}/3", "--out", "out", "--rounds", "2", "--", "sweep.yaml"]
        for i in range(3)
    ]


def test_a_job_of_several_hosts_launches_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("queue").write_text("12|PENDING\n")
    searches = ("maxlen", "--impl=ring", "--out=out")
    more = ("--submit=slurm", "--shards=1", "--nodes=2", "--time=7")
    assert submit(monkeypatch, *searches, *more) == 0
    assert command_of("12") == ["launch", "--", "maxlen", "--shard", "1/1", *searches[1:]]
    assert {"#SBATCH --nodes=2", "#SBATCH --time=7"} <= {*Path("job.sh").read_text().splitlines()}


def test_a_shard_with_a_job_is_left(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    queue("RUNNING", "PENDING", "PENDING")
    assert submit(monkeypatch, *SLURM) == 0
    assert "follow them with --wait, end them with scancel 12\n" in capfd.readouterr().err
    finish(1)
    queue("FAILED", "COMPLETING", "CANCELLED")  # 1: a trial failed, and the shard has finished
    Path("out/submitted/12_2_0_log.out").write_text("a\nb\nc\nslurmstepd: CANCELLED AT 21:28\n")
    Path("number").write_text("13")
    assert submit(monkeypatch, *SLURM) == 0
    said = capfd.readouterr().err
    log = "out/submitted/12_2_0_log.out: b | c | slurmstepd: CANCELLED AT 21:28"
    assert f"shard 3 (job 12_2): CANCELLED, 0 trials; the end of {log}\n" in said
    assert command_of("13")[2] == "3/3"
    assert not [*Path("out/submitted").glob("13_*_submitted.pkl")]
    Path("queue").write_text("12_1|RUNNING\n13|PENDING\n")
    Path("refusal").write_text("a job is submitted again")
    assert submit(monkeypatch, *SLURM) == 0
    assert "end them with scancel 12 13\n" in capfd.readouterr().err


def test_a_full_disk_keeps_the_jobs_of_earlier_commands(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    queue("RUNNING", "PENDING", "PENDING")
    submit(monkeypatch, *SLURM)
    queue("RUNNING", "FAILED", "PENDING")
    kept = Path("out/submitted/slurm-3.txt").read_text()

    def write(path: Path, text: str) -> None:
        if path.parent.name == "submitted":
            path.open("w").close()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    assert submit(monkeypatch, *SLURM) == 2
    assert "out/submitted can't be written: No space left" in capfd.readouterr().err
    assert Path("out/submitted/slurm-3.txt").read_text() == kept


def follow(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> int:
    """Submit and follow; each step happens between two looks."""
    left = iter(steps)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: next(left)())
    monkeypatch.setattr(submission, "time", clock)
    return submit(monkeypatch, *SLURM, "--wait")


@pytest.mark.parametrize("is_drawn", [False, True])
def test_the_jobs_are_followed_to_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture, is_drawn: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if is_drawn else "")
    queue("RUNNING", "PENDING", "PENDING")
    steps = (
        lambda: finish(1),
        lambda: queue("COMPLETED", "NODE_FAIL", "RUNNING"),
        lambda: Path("queue").write_text("12_2|RUNNING\n"),  # Slurm forgets jobs after minutes
        lambda: finish(3),
    )
    assert follow(monkeypatch, *steps) == 3
    shown = capfd.readouterr()
    assert "shard 2 (job 12_1): NODE_FAIL, 0 trials" in shown.err.splitlines()[-2]
    assert "the same command submits what is left; so far: longseq report out" in shown.err
    assert (shown.out, "━┳━" in shown.err) == ("", is_drawn)
    changes = re.findall(r"s: shard 3 \(job 12_2\): (.*) trials\n", shown.err)
    assert changes == ([] if is_drawn else ["PENDING, 0", "RUNNING, 0", "finished, 2"])

    Path("number").write_text("13")
    Path("queue").write_text("13|RUNNING\n")
    assert follow(monkeypatch, lambda: finish(2)) == 0
    shown = capfd.readouterr()
    assert "all 3 shards of out have finished" in shown.err
    assert shown.out.count("\nring") == 3


def test_ctrl_c_ends_the_following_alone(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    queue("RUNNING", "PENDING", "PENDING")
    assert follow(monkeypatch, lambda: signal.raise_signal(signal.SIGINT)) == 130
    assert "jobs go on; follow them with --wait, end them with scancel 12" in capfd.readouterr().err


def test_jobs_of_this_host_run_in_turn(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    finish(1, 2)
    places = [Path(f"out/shard-{i}-of-3") for i in (1, 2)]
    for place in places:
        (place / "finished").unlink()
    Path("job").write_text(
        "mkdir busy || echo two > overlap; sleep 0.3; rmdir busy\n"
        'case $3 in 3/3) echo "no GPU" >&2; exit 2;; esac\n'
        "touch out/shard-${3%/3}-of-3/finished\n"
    )
    monkeypatch.setattr(submission, "PROGRAM", ("sh", "job"))
    monkeypatch.setitem(submission.POLL_S, "local", 0.1)
    local = ("local" if word == "slurm" else word for word in SLURM)
    assert submit(monkeypatch, *local, "--wait") == 3
    said = capfd.readouterr().err
    assert ": ended, 0 trials; the end of out/submitted/" in said
    assert " | no GPU\n" in said
    assert all((place / "finished").exists() for place in places)
    assert not Path("overlap").exists()


def test_what_cannot_be_submitted_is_one_sentence(capfd: Capture) -> None:
    Path("refusal").write_text("sbatch: error: invalid partition specified: nowhere\n")
    for arguments, sentence in (
        ((*SLURM[:4], "--wait"), "--wait needs --submit slurm or --submit local"),
        ((*SLURM, "--dry-run"), "--submit and --dry-run exclude each other; leave one out"),
        (SLURM[:6], "--submit needs --shards, the number of jobs, and --out, their folder"),
        ((*SLURM[:2], *SLURM[4:]), "--submit needs --shards, the number of jobs, and --out"),
        ((*SLURM, "--time", "soon"), "--time 'soon' can't be read; write 60s"),
        ((*SLURM, "--partition=nowhere"), "sbatch: error: invalid partition specified: nowhere"),
        ((*SLURM[:5], "local", "--shards=2", "--nodes=2"), "LocalExecutor can use only one node"),
        (("maxlen", "--impl", "rung", *SLURM[2:]), "this sweep: unknown implementation 'rung'"),
    ):
        assert refusal(capfd, *arguments).startswith(sentence)
    finish(1)
    other = "out has another run, or other shards; name another --out"
    assert refusal(capfd, *SLURM[:-1], "2") == other
    assert refusal(capfd, *SLURM[:3], "out/shard-1-of-3", *SLURM[4:]).endswith(other[4:])
    Path("sweep.yaml").write_text(GRID.replace("sdpa", "spda"))
    assert refusal(capfd, *SLURM).startswith("sweep.yaml:2: unknown implementation 'spda'")
    assert not Path("job.sh").exists()


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    queue("RUNNING", "PENDING", "PENDING")
    assert submit(monkeypatch, *SLURM) == 0
    capfd.readouterr()
    Path("queue").unlink()
    assert refusal(capfd, *SLURM).startswith("squeue does not answer: ")
    monkeypatch.setenv("PATH", "nowhere")
    assert refusal(capfd, *SLURM) == "squeue can't be used: No such file or directory"
    assert "on a slurm cluster" in refusal(capfd, *SLURM[:3], "new", *SLURM[4:])
    monkeypatch.setitem(sys.modules, "submitit.helpers", None)
    assert refusal(capfd, *SLURM).endswith("missing: pip install 'longseq-bench[slurm]'")
