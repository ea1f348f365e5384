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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
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
    "time": Setting(str, "Limit of a job of Slurm: 2h, or minutes.", "1h"),
    "gpus_per_task": Setting(int, "GPUs of a job on each of its hosts.", None, 1, MAX_RANKS),
    "nodes": Setting(int, "Hosts of a job; on several it runs `longseq launch`.", 1, 1, MAX_RANKS),
    "wait": Setting(bool, "Follow the jobs, and report at their end.", False),
}
PROGRAM = (sys.executable, "-P", "-m", "longseq_bench")
POLL_S = {"slurm": 10.0, "local": 1.0}
LAST_LINES, YEAR_MIN = 3, 365 * 24 * 60
FINISHED = "finished"
OVER = {
    *("not submitted", "ended", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of a shard that has not finished, without a job in the queue."""


def run(
    given: dict[str, Any], out: Path | None, others: Mapping[str, object], check: Callable[[], None]
) -> Results | None:
    """Submit the shards that are left; return the results once all have finished.

    given: options, of which those of submission are taken out. Without any, return None.
    others: options that exclude --submit, by flag.  check: raises UserError for other mistakes.
    Raises typer.Exit for shards that have not finished, with 3 if no job is in the queue.
    """
    from longseq_bench.api.results import load
    from longseq_bench.cli import FAILED_TRIALS, session

    asked = {name: given.pop(name) for name in SUBMIT if name in given}
    if not asked:
        return None
    if "submit" not in asked:
        flag = f"--{min(asked).replace('_', '-')}"
        raise UserError(f"{flag} needs --submit slurm or --submit local")
    for flag in (flag for flag, value in others.items() if value):
        raise UserError(f"--submit and {flag} exclude each other; leave one out")
    if not out or "shards" not in asked:
        raise UserError("--submit needs --shards, the number of jobs, and --out, their folder")
    try:
        from submitit.helpers import environment_variables
    except ImportError:
        install = "pip install 'longseq-bench[slurm]'"
        raise UserError(f"--submit needs submitit, which is missing: {install}") from None
    with environment_variables(CUDA_VISIBLE_DEVICES=""):  # the check starts no GPU
        check()
    jobs, reporter = Jobs(out, asked["submit"], asked["shards"]), session.make_reporter()
    reporter.say((jobs.describe(row) for row in jobs.unfinished if row.job), "yellow")
    if jobs.unfinished:
        jobs.submit([row.shard for row in jobs.unfinished], asked)
    try:
        jobs.follow(reporter, asked.get("wait", False))
    finally:
        if jobs.queued:
            end = f"{'scancel' if jobs.by == 'slurm' else 'kill'} {jobs.queued}"
            reporter.say([f"jobs go on; follow them with --wait, end them with {end}"])
    if jobs.queued or jobs.unfinished:
        reporter.say(map(jobs.describe, jobs.unfinished), "yellow")
        reporter.say([f"the same command submits what is left; so far: longseq report {out}"])
        raise typer.Exit(0 if jobs.queued else FAILED_TRIALS)
    reporter.say([f"all {jobs.count} shards of {out} have finished"])
    return load(out)


class Row(NamedTuple):
    """A shard, its last job ("" for none), the state of either, and the number of its records."""

    shard: int
    job: str
    state: str
    trials: int


class Jobs:
    """The jobs of a run's shards, also those of earlier commands.

    ids: the last job of each shard.  rows, states: of shards and jobs, as they were last seen.
    """

    def __init__(self, out: Path, by: str, count: int) -> None:
        self.out, self.by, self.count = out, by, count
        self.folder = out / "submitted"
        self.file = self.folder / f"{by}-{count}.txt"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.ids = {int(shard): job for shard, job in map(str.split, lines)}
        self.states = {"": "not submitted"}
        self.look()

    def look(self) -> None:
        """See where the shards are. Raises StoreError if the folder has another run."""
        from longseq_bench.api.shards import FOLDERS
        from longseq_bench.store import RECORDS

        places = [self.out / f"shard-{i + 1}-of-{self.count}" for i in range(self.count)]
        if (self.out / RECORDS).exists() or {*self.out.glob(FOLDERS)} - {*places}:
            raise StoreError(f"{self.out} has another run, or other shards; name another --out")
        # the queue first: a job that then leaves it has finished its shard
        found = read_queue(self.by) if self.ids else {}
        for job in self.ids.values():
            if job in found or self.states.get(job) not in OVER:  # Slurm forgets it after minutes
                self.states[job] = found.get(job, "ended")
        self.rows: list[Row] = []
        for shard, place in enumerate(places, 1):
            # a list: NFS remembers for a minute that a file was missing
            names = os.listdir(place) if place.exists() else []
            trials = (place / RECORDS).read_bytes().count(b"\n") if RECORDS in names else 0
            job = self.ids.get(shard, "")
            state = FINISHED if FINISHED in names else self.states[job]
            self.rows.append(Row(shard, job, state, trials))

    @property
    def unfinished(self) -> list[Row]:
        """The shards that have not finished, and have no job in the queue."""
        return [row for row in self.rows if row.state in OVER]

    @property
    def queued(self) -> str:
        """The ids of the jobs in the queue; an array has one."""
        jobs = [row.job for row in self.rows if row.state not in {FINISHED, *OVER}]
        return " ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))

    def submit(self, shards: Sequence[int], asked: Mapping[str, Any]) -> None:
        """Submit a job for each of these shards. Raises UserError with the sentence of sbatch."""
        from submitit import AutoExecutor

        from longseq_bench.store import unwritable

        first: list[str] = []
        if self.by == "local":  # in turn, and Ctrl-C is for the command that follows them
            alone = ("flock", "--no-fork", str(self.folder / "lock"))
            first = ["setsid", "env", "--default-signal=INT", *alone]
        names, nodes = [f"{shard}/{self.count}" for shard in shards], asked.get("nodes", 1)
        commands = [[*first, *shard_command(sys.argv[1:], nodes, name)] for name in names]
        limit = asked.get("time", SUBMIT["time"].default)
        minutes = limit if limit.isdecimal() else parse_seconds(limit, "--time") / 60
        # no Ctrl-C between the jobs and their file; processes of this host inherit that
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            executor = AutoExecutor(self.folder, cluster=self.by)
            executor.update_parameters(
                name="longseq",
                nodes=asked.get("nodes", 1),
                gpus_per_node=asked.get("gpus_per_task"),
                timeout_min=YEAR_MIN if self.by == "local" else ceil(float(minutes)),
                stderr_to_stdout=True,
                slurm_partition=asked.get("partition"),
                slurm_array_parallelism=asked.get("array_parallelism", len(shards)),
                slurm_use_srun=False,  # on the first host alone, which starts steps
                # instead of submitit's signal, which would end ranks 90 s before the limit
                slurm_additional_parameters={"signal": "B:CONT"},
            )
            with redirect_stderr(StringIO()):  # the error that is raised has it, too
                # a job becomes its command, which gets its signals and has its exit code
                jobs = executor.map_array(os.execvp, [one[0] for one in commands], commands)
            self.ids |= {shard: job.job_id for shard, job in zip(shards, jobs, strict=True)}
            new = self.file.with_suffix(".new")
            new.write_text("".join(f"{shard} {job}\n" for shard, job in self.ids.items()))
            new.replace(self.file)  # on a full disk the ids of earlier jobs are kept
        except OSError as error:
            raise unwritable(self.folder, error) from None
        except (RuntimeError, ValueError) as error:
            raise UserError(one_line(str(error))) from None
        finally:
            signal.signal(signal.SIGINT, before)

    def follow(self, reporter: Reporter, wait: bool) -> None:
        """Show the shards, until no job is in the queue if it is to wait."""
        from rich.live import Live
        from rich.table import Table

        screen, start_s, last = reporter.console, time.monotonic(), list[Row]()
        drawn = Live(console=screen, auto_refresh=False) if screen.is_terminal else nullcontext()
        with drawn as live:
            while True:
                self.look()
                took = format_seconds(time.monotonic() - start_s)
                if live:
                    table = Table("shard", "job", "state", "trials", title=took)
                    for row in self.rows:
                        table.add_row(*map(str, row))
                    live.update(table, refresh=True)
                else:
                    new = [row for row in self.rows if row not in last]
                    reporter.say(f"{took}: {self.describe(row)}" for row in new)
                if not (wait and self.queued):
                    return
                last = self.rows
                time.sleep(POLL_S[self.by])

    def describe(self, row: Row) -> str:
        """Return a sentence on a shard; if its job failed, with the end of what it printed."""
        words = f"shard {row.shard} (job {row.job}): {row.state}, {row.trials} trials"
        log = self.folder / f"{row.job}_0_log.out"
        if row.state not in OVER or not log.exists():
            return words
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f"{words}; the end of {log}: {' | '.join(lines)}"


def shard_command(arguments: Sequence[str], nodes: int, shard: str) -> list[str]:
    """Return the command of a job: the same arguments, with its shard for those of submission."""
    kept, words = [*arguments[:1], "--shard", shard], iter(arguments[1:])
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
