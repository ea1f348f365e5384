"""`--submit slurm|local`: the shards of a run as jobs of submitit, each the same command line.

Jobs outlive the command that submits them. The next one finds in the folder of the run which job
each shard had, what it printed, and if the shard has finished; the queue has the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from io import StringIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from longseq_bench.core.errors import StoreError, UserError, one_line
from longseq_bench.core.settings import Setting
from longseq_bench.core.units import MAX_RANKS, format_seconds, parse_seconds

if TYPE_CHECKING:
    from longseq_bench.api.progress import Reporter
    from longseq_bench.api.results import Results

SUBMIT = {
    "submit": Setting(
        Literal["slurm", "local"],
        "Run shards as jobs: an array of Slurm, or in turn in the background here. The same "
        "command again submits those that have not finished. Variables of sbatch, such as "
        "SBATCH_ACCOUNT, set more. Needs longseq-bench[slurm].",
    ),
    "shards": Setting(int, "Shards to submit.", None, 1, 9999),
    "array_parallelism": Setting(int, "Jobs of Slurm at a time.", None, 1, 9999, otherwise="all"),
    "partition": Setting(str, "Partition of Slurm.", otherwise="the cluster's"),
    "time": Setting(str, "Limit of a job of Slurm, 90min or 2h.", "1h"),
    "gpus_per_task": Setting(int, "GPUs of a job on each of its hosts.", None, 1, MAX_RANKS),
    "nodes": Setting(int, "Hosts of a job; on several it runs `longseq launch`.", 1, 1, MAX_RANKS),
    "wait": Setting(bool, "Follow the jobs, and report at their end.", False),
}
PROGRAM = (sys.executable, "-P", "-m", "longseq_bench")
POLL_S = {"slurm": 10.0, "local": 1.0}
LAST_LINES, NO_LIMIT_MIN = 3, 365 * 24 * 60
FINISHED, NEW, ENDED = "finished", "not submitted", "ended"
UNFINISHED = {
    *(NEW, ENDED, "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of a shard that has not finished and has no job in the queue."""


def take(given: dict[str, Any], out: Path | None, others: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of submission, taken out of those that are given; none without --submit.

    others: options that exclude --submit, by flag.  Raises UserError for what can't be submitted.
    """
    asked = {name: given.pop(name) for name in SUBMIT if name in given}
    if asked and "submit" not in asked:
        flag = f"--{min(asked).replace('_', '-')}"
        raise UserError(f"{flag} needs --submit slurm or --submit local")
    for flag in (flag for flag, value in others.items() if asked and value):
        raise UserError(f"--submit and {flag} exclude each other; leave one out")
    if asked and not (out and "shards" in asked):
        raise UserError("--submit needs --shards, the number of jobs, and --out, their folder")
    return asked and {**asked, "out": out}


def run(asked: Mapping[str, Any], check: Callable[[], object], reporter: Reporter) -> Results:
    """Submit the shards that are left; return the results once all have finished.

    check: raises UserError for a run that can't start anywhere.
    Raises typer.Exit if shards have not finished: with 3 if they have no job in the queue.
    """
    from longseq_bench.api.results import load
    from longseq_bench.cli import FAILED_TRIALS

    try:
        from submitit.helpers import environment_variables
    except ImportError:
        install = "pip install 'longseq-bench[slurm]'"
        raise UserError(f"--submit needs submitit, which is missing: {install}") from None
    with environment_variables(CUDA_VISIBLE_DEVICES=""):  # the check starts no GPU
        check()
    jobs = Jobs(asked["out"], asked["submit"], asked["shards"])
    rows = jobs.look()
    jobs.explain([row for row in rows if row.job], reporter)
    if left := [row.shard for row in rows if row.state in UNFINISHED]:
        jobs.submit(left, asked)
    rows = jobs.follow(reporter, asked.get("wait", False))
    if all(row.state == FINISHED for row in rows):
        reporter.say([f"all {jobs.count} shards of {jobs.out} have finished"])
        return load(jobs.out)
    jobs.explain(rows, reporter)
    reporter.say([f"the same command submits these again; so far: longseq report {jobs.out}"])
    raise typer.Exit(FAILED_TRIALS)


class Row(NamedTuple):
    """A shard, its last job ("" for none), the state of either, and the number of its records."""

    shard: int
    job: str
    state: str
    trials: int

    def __str__(self) -> str:
        return f"shard {self.shard} (job {self.job}): {self.state}"


class Jobs:
    """The jobs of a run's shards, also those of earlier commands.

    ids: the last job of each shard.  states: of jobs, as they were last seen.
    """

    def __init__(self, out: Path, by: str, count: int) -> None:
        self.out, self.by, self.count = out, by, count
        self.folder = out / "submitted"
        self.file = self.folder / f"{by}-{count}.txt"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.ids = {int(shard): job for shard, job in map(str.split, lines)}
        self.states: dict[str, str] = {}

    def look(self) -> list[Row]:
        """Return the shards as they are now. Raises StoreError if the folder has another run."""
        from longseq_bench.api import shards
        from longseq_bench.store import RECORDS

        places = [self.out / f"shard-{i + 1}-of-{self.count}" for i in range(self.count)]
        if (self.out / RECORDS).exists() or {*self.out.glob(shards.FOLDERS)} - {*places}:
            raise StoreError(f"{self.out} has another run, or other shards; name another --out")
        # the queue first: a job that then leaves it has finished its shard
        found = read_queue(self.by) if self.ids else {}
        for job in self.ids.values():
            if job in found or self.states.get(job) not in UNFINISHED:
                self.states[job] = found.get(job, ENDED)
        rows = []
        for shard, place in enumerate(places, 1):
            # a list: NFS remembers for a minute that a file was missing
            names = os.listdir(place) if place.exists() else []
            trials = (place / RECORDS).read_bytes().count(b"\n") if RECORDS in names else 0
            job = self.ids.get(shard, "")
            state = FINISHED if shards.FINISHED in names else self.states.get(job, NEW)
            rows.append(Row(shard, job, state, trials))
        return rows

    def submit(self, shards: Sequence[int], asked: Mapping[str, Any]) -> None:
        """Submit a job for each of these shards. Raises UserError with the sentence of sbatch."""
        from submitit import AutoExecutor

        own = shard_command(sys.argv[1:], asked.get("nodes", 1))
        if self.by == "local":  # in turn, and Ctrl-C is for the command that follows them
            alone = ("flock", "--no-fork", str(self.folder / "lock"))
            own = ["setsid", "env", "--default-signal=INT", *alone, *own]
        commands = [[*own, "--shard", f"{shard}/{self.count}"] for shard in shards]
        limit = asked.get("time", SUBMIT["time"].default)
        # a number alone is minutes, as for sbatch
        limit_s = parse_seconds(f"{limit}min" if limit.isdecimal() else limit, "--time")
        # no Ctrl-C between the jobs and their file; processes of this host inherit that
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            executor = AutoExecutor(self.folder, cluster=self.by)
            executor.update_parameters(
                name="longseq",
                nodes=asked.get("nodes", 1),
                gpus_per_node=asked.get("gpus_per_task"),
                timeout_min=ceil(limit_s / 60) if self.by == "slurm" else NO_LIMIT_MIN,
                stderr_to_stdout=True,
                slurm_partition=asked.get("partition"),
                slurm_array_parallelism=asked.get("array_parallelism", len(shards)),
                slurm_use_srun=False,  # on the first host alone, which starts steps
                # instead of submitit's signal, which would end ranks 90 s before the limit
                slurm_additional_parameters={"signal": "B:CONT"},
            )
            programs = [command[0] for command in commands]
            with redirect_stderr(StringIO()):  # the error that is raised has it, too
                # a job becomes its command, which gets its signals and has its exit code
                jobs = executor.map_array(os.execvp, programs, commands)
            self.ids |= {shard: job.job_id for shard, job in zip(shards, jobs, strict=True)}
            self.file.write_text("".join(f"{shard} {job}\n" for shard, job in self.ids.items()))
        except (RuntimeError, ValueError) as error:
            raise UserError(one_line(str(error))) from None
        finally:
            signal.signal(signal.SIGINT, before)

    def follow(self, reporter: Reporter, wait: bool) -> list[Row]:
        """Show the shards until no job is in the queue; return them. Ctrl-C ends no job.

        Raises typer.Exit at once unless it is to wait.
        """
        from rich.live import Live
        from rich.table import Table

        screen, start_s, last, going = reporter.console, time.monotonic(), list[Row](), ""
        drawn = Live(console=screen, auto_refresh=False) if screen.is_terminal else nullcontext()
        try:
            with drawn as live:
                while rows := self.look():
                    took = format_seconds(time.monotonic() - start_s)
                    if live:
                        table = Table("shard", "job", "state", "trials", title=f"after {took}")
                        for row in rows:
                            table.add_row(*map(str, row))
                        live.update(table, refresh=True)
                    else:
                        changed = [row for row in rows if row not in last]
                        reporter.say(f"{row}, {row.trials} trials after {took}" for row in changed)
                    jobs = [row.job for row in rows if row.state not in {FINISHED, *UNFINISHED}]
                    going = " ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
                    if not (going and wait):
                        break
                    last = rows
                    time.sleep(POLL_S[self.by])
        finally:
            if going:
                end = "scancel" if self.by == "slurm" else "kill"
                reporter.say([f"jobs go on; follow them with --wait, end them with {end} {going}"])
        if going:
            raise typer.Exit
        return rows

    def explain(self, rows: Iterable[Row], reporter: Reporter) -> None:
        """Say which jobs left shards that have not finished, with the end of their output."""
        for row in (row for row in rows if row.state in UNFINISHED):
            log, lines = self.folder / f"{row.job}_0_log.out", ["no output"]
            with suppress(OSError):
                lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            reporter.say([f"{row}; the end of {log}: {' | '.join(lines)}"], "yellow")


def shard_command(arguments: Iterable[str], nodes: int) -> list[str]:
    """Return the command of a job: the same arguments without those of submission."""
    kept, words = [], iter(arguments)
    for word in words:
        name, has_value, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if not word.startswith("--") or name not in SUBMIT:
            kept.append(word)
        elif not has_value and SUBMIT[name].type is not bool:
            next(words, None)
    return [*PROGRAM, *(["launch", "--"] if nodes > 1 else []), *kept]


def read_queue(by: str) -> dict[str, str]:
    """Return the states of the user's jobs that are in the queue, or left it a moment ago."""
    if by == "local":
        import psutil

        found = {p.pid: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
        return {str(pid): "RUNNING" for pid, c in found.items() if "submitit.local._local" in c}
    command = ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"squeue does not answer: {one_line(done.stderr)}")
    return dict(line.split("|") for line in done.stdout.splitlines())
