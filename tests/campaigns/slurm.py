"""Run `longseq launch` on a real Slurm cluster and by mpirun: cancel, requeue, kill and stop.

    python -m tests.campaigns.slurm
    python -m tests.campaigns.slurm --only scancel --only "n2 dies in a job"
    python -m tests.campaigns.slurm --kills 200 --only kills

It starts munged, slurmctld and two hosts with a slurmd each on this machine
(tests/launchers/slurm_cluster.py), so it needs root and Debian's packages `slurm-wlm munge`, and
`openmpi-bin` for the scenarios of mpirun. A finding is a record that is lost, doubled, torn or
blamed on an implementation, a traceback, a wrong exit code, or a process or file that is left. The
exit code is 1 if there is one.
"""

import argparse
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

import longseq_bench
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record, is_environment_failure
from longseq_bench.launchers.interrupts import interrupt_on_termination
from longseq_bench.store import RECORDS, load, write_line
from tests.campaigns import kills
from tests.campaigns.kills import find_differences
from tests.launchers import slurm_cluster
from tests.launchers.slurm_cluster import NODES, Cluster

SWEEP = kills.SWEEP.replace("512", "2048") + "threads: 1\ndevice: cpu\n"
LAUNCH = ("longseq", "launch", "--nproc-per-node", "1")
RUN = (*LAUNCH, "--", "sweep", "sweep.yaml", "--out", "out")
SALLOC = ("salloc", "--quiet", "--nodes=2", "--exclusive")
END = "code=$?\n[ $code -ne 143 ] || sleep 600\nexit $code\n"
"""How a job ends that is to be requeued: it waits for its preemption."""

JOB = f"#!/bin/sh\n{shlex.join(RUN)}\n{END}"
SUBMIT = ("longseq", *RUN[5:], "--submit", "slurm", "--time", "10min", "--shards")
BATCH = ("--nodes=2", "--exclusive", "--requeue", "--output=out-%j", "--open-mode=append", "job.sh")
DEADLINE_S = 600.0
TRIALS = 16
STOPPED_S = 15.0
"""A host that is stopped is to be named within this time."""


@dataclass
class Scene:
    """One scenario: the cluster, what was seen, and what is wrong."""

    cluster: Cluster
    expected: Counter[str]
    chance: random.Random
    kills: int = 10
    seen: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def check(self, is_right: object, finding: str) -> None:
        """Note a finding, unless all is right."""
        if not is_right:
            self.findings.append(finding)
            print(f"  {finding}", flush=True)

    # ---- files -----------------------------------------------------------------------------------

    def lines(self) -> list[bytes]:
        """Return the complete lines of the records."""
        path = self.cluster.work / "out" / RECORDS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith(b"\n")]

    def records(self) -> list[Record]:
        """Return the records, and note broken lines."""
        loaded = load(self.cluster.work / "out")
        self.check(not loaded.reasons, f"broken lines: {loaded.reasons}")
        return loaded.records

    def check_records(self, before: Sequence[bytes] = ()) -> None:
        """Note records that are lost, doubled or not ok, and lines that changed.

        before: the lines that were there before the last command.
        """
        records = self.records()
        if self.expected:
            self.findings += find_differences(records, self.expected)
        for record in records:
            outcome = record.outcome
            if outcome.status != "ok":
                name = f"{record.trial.implementation}, {outcome.status}: {outcome.reason}"
                not_run = is_environment_failure(outcome)
                self.findings.append(f"{'not run again' if not_run else 'blamed'}: {name}")
        self.check(self.lines()[: len(before)] == list(before), "a line that was written changed")

    def check_rest(self) -> None:
        """Note processes and files that are left, and tracebacks."""
        self.findings += [f"left: {name}" for name in self.cluster.left()]
        for file in self.cluster.work.glob("out*"):
            text = file.read_text(errors="replace") if file.is_file() else ""
            # torchrun reports a process that failed by a traceback of its own
            if "Traceback" in text and "ChildFailedError" not in text:
                self.findings.append(f"traceback in {file.name}: {text[-600:]}")

    # ---- commands --------------------------------------------------------------------------------

    def run(self, *command: str, codes: Sequence[int] = (0,), **variables: str) -> str:
        """Run a command on n1 to its end, check its exit code, and return what it printed."""
        process = self.cluster.start(*command, **variables)
        return self.end_of(process, "out.txt", codes)

    def end_of(
        self, process: subprocess.Popen[bytes], output: str, codes: Sequence[int] = (0,)
    ) -> str:
        """Wait for a command, check its exit code, and return what it printed."""
        start_s = time.monotonic()
        try:
            code: int | str = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = f"none after {DEADLINE_S:.0f} s"
            process.kill()
        text = (self.cluster.work / output).read_text(errors="replace")
        self.check(code in codes, f"exit code {code} of {output}: {text[-500:]}")
        self.seen.append(f"exit code {code} after {time.monotonic() - start_s:.0f} s")
        return text

    def start_job(self) -> str:
        (self.cluster.work / "job.sh").write_text(JOB)
        return self.cluster.submit(*BATCH)

    def wait_for_lines(self, count: int) -> None:
        self.cluster.wait_until(lambda: len(self.lines()) >= count)

    def wait_for_job(self, job: str, *states: str) -> str:
        """Wait until a job is in one of these states, and return it."""
        self.cluster.wait_until(lambda: self.cluster.job_state(job) in states)
        return self.cluster.job_state(job)

    def printed_by(self, job: str) -> str:
        path = self.cluster.work / f"out-{job}"
        return path.read_text(errors="replace") if path.exists() else ""


# ---- under Slurm ---------------------------------------------------------------------------------


def run_salloc(scene: Scene) -> None:
    """The documented command completes."""
    text = scene.run(*SALLOC, *RUN)
    scene.check_records()
    scene.check(f"1 on each of {', '.join(NODES)} by srun" in text, f"no hosts: {text}")


def run_in_a_step(scene: Scene) -> None:
    """The command runs in a step of one task, as in a shell that srun started."""
    scene.run(*SALLOC, "srun", "--nodes=1", "--ntasks=1", "--nodelist=n1", *RUN)
    scene.check_records()


def run_searches(scene: Scene) -> None:
    """maxlen and scaling over both hosts end at their ceiling."""
    search = (
        "--impl", "ring", "--memory-budget", "4MiB", "--heads", "1", "--head-dim", "16",
        "--threads", "1", "--device", "cpu", "--out", "out",
    )  # fmt: skip
    text = scene.run(*SALLOC, *LAUNCH, "--", "maxlen", "--ceiling", "4k", *search)
    scene.check({r.trial.world_size for r in scene.records()} == {2}, f"not over both: {text}")
    scene.run(*SALLOC, *LAUNCH, "--", "scaling", "--world-sizes", "1,2", *search)
    scene.check({r.trial.world_size for r in scene.records()} == {1, 2}, "not over both")
    scene.check({r.outcome.status for r in scene.records()} <= {"ok", "oom"}, "a trial failed")


def cancel(scene: Scene) -> None:
    """scancel at a random moment, and a second job that goes on; until one completes."""
    cancelled = 0
    for _ in range(20):
        before = scene.lines()
        job = scene.start_job()
        scene.wait_for_job(job, "RUNNING")
        scene.wait_for_lines(min(len(before) + 1, len(scene.expected)))
        time.sleep(scene.chance.uniform(0.0, 0.8))
        scene.cluster.run("scancel", job)
        state = scene.wait_for_job(job, "CANCELLED", "COMPLETED", "FAILED")
        scene.findings += [f"left by scancel: {name}" for name in scene.cluster.left()]
        scene.check(scene.lines()[: len(before)] == before, "a line that was written changed")
        for record in scene.records():
            scene.check(record.outcome.status == "ok" or is_environment_failure(record.outcome),
                        f"blamed: {record.outcome.reason}")  # fmt: skip
        if state == "COMPLETED":
            break
        cancelled += 1
        text = scene.printed_by(job)
        # a sweep whose last trial had ended may have nothing left to interrupt
        is_complete = len(scene.lines()) == len(scene.expected)
        scene.check(is_complete or "interrupted by SIGTERM" in text, f"not named: {text[-300:]}")
    scene.seen.append(f"{cancelled} times cancelled")
    scene.check_records()


def preempt(scene: Scene) -> None:
    """A job of a partition with priority ends this one by SIGTERM; then it runs again."""
    job = scene.start_job()
    scene.wait_for_lines(4)
    before = scene.lines()
    first = scene.cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 2")
    scene.wait_for_job(first, "RUNNING", "COMPLETED")
    scene.check_rest()
    finish_again(scene, job, before)


def requeue(scene: Scene) -> None:
    """`scontrol requeue`; then it runs again."""
    job = scene.start_job()
    scene.wait_for_lines(4)
    before = scene.lines()
    scene.cluster.run("scontrol", "requeue", job)
    finish_again(scene, job, before)


def finish_again(scene: Scene, job: str, before: Sequence[bytes]) -> None:
    state = scene.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    shown = scene.cluster.run("scontrol", "show", "job", job).stdout
    restarts = re.findall(r"Restarts=(\d+)", shown)
    scene.seen.append(f"{state}, restarts: {restarts[0]}, {len(before)} records before")
    scene.check(state == "COMPLETED" and restarts == ["1"], f"{state}: {scene.printed_by(job)}")
    scene.check_records(before)


def kill_other_host(scene: Scene) -> None:
    """Everything on n2 dies in a sweep; then the host is back and the sweep goes on."""
    step = scene.cluster.start(*SALLOC, *RUN)
    scene.wait_for_lines(4)
    scene.cluster.kill_node(1)
    scene.end_of(step, "out.txt", codes=range(256))
    before = scene.lines()
    for record in scene.records():
        is_right = record.outcome.status == "ok" or is_environment_failure(record.outcome)
        scene.check(is_right, f"blamed: {record.outcome.reason}")
    scene.seen.append(f"{len(before)} records before")
    restart_node(scene, 1)
    scene.run(*SALLOC, *RUN)
    scene.check_records(before)


def stop_other_host(scene: Scene) -> None:
    """The ranks on n2 are stopped: the host is named in time, and the trial runs once more."""
    step = scene.cluster.start(*SALLOC, *RUN)
    scene.cluster.wait_until(lambda: find_ranks(scene, 1))
    stopped_s = time.monotonic()
    for process in find_ranks(scene, 1):
        process.send_signal(signal.SIGSTOP)
    scene.cluster.wait_until(lambda: not any(p.status() == "stopped" for p in find_ranks(scene, 1)))
    took_s = time.monotonic() - stopped_s
    scene.seen.append(f"given up after {took_s:.1f} s")
    scene.check(took_s <= STOPPED_S, f"a stopped host is named after {took_s:.1f} s")
    scene.end_of(step, "out.txt")
    scene.check_records()
    reasons = " ".join(r.outcome.reason or "" for r in scene.records())
    scene.check("no message from host n2 for 1" in reasons, f"not named: {reasons}")


def find_ranks(scene: Scene, node: int) -> list[psutil.Process]:
    """Return the ranks on a node that srun or mpirun started."""
    found = []
    for process in scene.cluster.on_node(node):
        with suppress(psutil.Error):
            command = process.cmdline()
            if command[-1:] == ["longseq_bench.worker.host_rank"] and "srun" not in command:
                found.append(process)
    return found


def start_several(scene: Scene) -> None:
    """Several processes of longseq are told the right command, whoever starts them."""
    command = ("longseq", *RUN[5:])
    for started in (
        ("srun", "--nodes=2", "--ntasks=2"),
        ("torchrun", "--nproc-per-node", "2", "--no-python"),
        ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
    ):
        if shutil.which(started[0]):
            text = scene.run(*started, *command, codes=(1, 2))
            scene.check("run it once: longseq launch" in text, f"not refused: {text}")
    scene.check(not scene.lines(), "a trial ran")


def kill_node_in_job(scene: Scene, node: int) -> None:
    """Everything on a node dies in a batch job; Slurm requeues it and it runs again.

    Node 0 writes the records.
    """
    job = scene.start_job()
    scene.wait_for_lines(4)
    scene.cluster.kill_node(node)
    start_s = time.monotonic()
    scene.wait_for_job(job, "PENDING", "FAILED", "NODE_FAIL")
    scene.seen.append(f"ended after {time.monotonic() - start_s:.0f} s")
    before = scene.lines()
    restart_node(scene, node)
    finish_again(scene, job, before)


def restart_node(scene: Scene, node: int) -> None:
    """Start the slurmd of a node that was killed, and wait until jobs can use it."""
    scene.cluster.start_slurmd(node)
    scene.cluster.wait_until(lambda: scene.cluster.states()[node] == "idle")


def lie_about_names(scene: Scene) -> None:
    """The name of n1 means a loopback address there, as on Debian."""
    hosts = scene.cluster.hosts_file(0)
    text = hosts.read_text()
    try:
        hosts.write_text(f"127.0.1.1 n1\n{text}")
        scene.run(*SALLOC, *RUN)
        scene.check_records()
    finally:
        hosts.write_text(text)


# ---- --submit ------------------------------------------------------------------------------------


def submit_shards(scene: Scene) -> None:
    """Of an array of shards one job is cancelled, one requeued, and one loses its node.

    The same command again completes, and on equal figures its report is that without shards.
    """
    cluster, command = scene.cluster, (*SUBMIT, "4", "--rounds", "3")
    following = cluster.start(*command, "--wait", output="out.wait")
    cluster.wait_until(lambda: len(jobs_with_records(scene)) == 2)
    jobs = jobs_with_records(scene)
    requeued, cancelled = jobs["n1"], jobs["n2"]
    cluster.run("scontrol", "requeue", requeued)
    cluster.run("scancel", cancelled)
    cluster.wait_until(lambda: jobs_with_records(scene).get("n2", cancelled) != cancelled)
    lost = jobs_with_records(scene)["n2"]
    cluster.kill_node(1)
    cluster.wait_until(lambda: cluster.states()[1].startswith("down"))
    restart_node(scene, 1)
    text = scene.end_of(following, "out.wait", codes=(3,))
    scene.check(f"(job {cancelled}): CANCELLED, " in text, f"not named: {text[-500:]}")
    for job in (requeued, lost):
        shown = cluster.run("scontrol", "show", "job", job).stdout
        scene.check("Restarts=1" in shown, f"{job} did not start again: {shown}")
    scene.seen.append(f"requeued {requeued}, cancelled {cancelled}, lost {lost}")

    text = scene.run(*command, "--wait")
    scene.check("all 4 shards of out have finished" in text, f"not complete: {text[-500:]}")
    scene.run(*RUN[:1], *RUN[5:-1], "whole", "--rounds", "3")
    check_report(scene)
    for folder in (cluster.folder / "tmp").glob("pymp-*"):
        shutil.rmtree(folder)  # left by the interpreters that were killed with their node


def jobs_with_records(scene: Scene) -> dict[str, str]:
    """Return the job of each node on which the shard of a job has records."""
    listed = scene.cluster.run("squeue", "--array", "-h", "--states=R", "-o", "%N %i").stdout
    jobs = dict(line.split() for line in listed.splitlines())
    out = scene.cluster.work / "out"
    files = {
        node: out / f"shard-{int(job.partition('_')[2]) + 1}-of-4" / RECORDS
        for node, job in jobs.items()
    }
    return {node: jobs[node] for node, f in files.items() if f.exists() and f.stat().st_size}


def check_report(scene: Scene) -> None:
    """Compare the shards with the whole sweep: their records, and reports of equal figures."""
    out, whole = scene.cluster.work / "out", longseq_bench.load(scene.cluster.work / "whole")
    expected = Counter(record.key for record in whole.records)
    records = longseq_bench.load(out).records
    scene.findings += find_differences({r.key: r for r in records}.values(), expected)
    # a shard that goes on on another host measures its trials there again, and keeps both
    distinct = {(record.key, record.environment.host) for record in records}
    scene.check(len(distinct) == len(records), "doubled on a host")
    fixed = {record.key: write_line(record) for record in whole.records}
    for path in out.glob(f"*/{RECORDS}"):
        lines = dict.fromkeys(fixed[record.key] for record in load(path.parent).records)
        path.write_bytes(b"".join(lines))
    shards, path = longseq_bench.load(out), str(whole.folder)
    is_same = shards.report() == str(whole.report()).replace(path, str(out))
    scene.check(is_same and not shards.notes, "another report than without shards")
    scene.seen.append(f"{len(records)} records of {len(fixed)} trials, the same report")


def submit_over_hosts(scene: Scene) -> None:
    """A job of two hosts runs `longseq launch` over them."""
    text = scene.run(*SUBMIT, "1", "--nodes", "2", "--wait")
    log = "".join(path.read_text() for path in scene.cluster.work.glob("out/submitted/*.out"))
    scene.check(f"1 on each of {', '.join(NODES)} by srun" in log, f"no hosts: {log}")
    scene.check("all 1 shards of out have finished" in text, f"not complete: {text[-500:]}")


# ---- mpirun --------------------------------------------------------------------------------------


def mpirun_agent(scene: Scene) -> dict[str, str]:
    """Return variables with which mpirun reaches the nodes as by ssh."""
    agent = scene.cluster.folder / "bin" / "on-node"
    names = dict(zip(NODES, range(2), strict=True))
    cases = "".join(
        f'{name}) exec {shlex.join(scene.cluster.on(node, []))} sh -c "$*" ;;\n'
        for name, node in names.items()
    )
    agent.write_text(f'#!/bin/sh\nname="$1"; shift\ncase "$name" in\n{cases}esac\n')
    agent.chmod(0o755)
    return {"OMPI_MCA_plm_rsh_agent": str(agent), "OMPI_MCA_plm": "rsh"}


def run_mpirun(scene: Scene) -> None:
    """mpirun over both nodes, without Slurm."""
    launch = ("longseq", "launch", "--hosts", "n1:1,n2:1")
    text = scene.run(*launch, *RUN[4:], **mpirun_agent(scene))
    scene.check("by mpirun" in text, f"no engine: {text}")
    scene.check_records()


def run_mpirun_in_slurm(scene: Scene) -> None:
    """mpirun in an allocation of Slurm."""
    launch = ("longseq", "launch", "--hosts", "n1:1,n2:1")
    scene.run(*SALLOC, *launch, *RUN[4:], **mpirun_agent(scene))
    scene.check_records()


def miss_a_host(scene: Scene) -> None:
    """A host that mpirun can't reach is a failure of the environment with mpirun's words."""
    (scene.cluster.work / "sweep.yaml").write_text(SWEEP.replace("[64, 128, 256, 2048]", "64"))
    variables = mpirun_agent(scene)
    agent = Path(variables["OMPI_MCA_plm_rsh_agent"])
    refused = "ssh: connect to host n2 port 22: No route to host"
    text = agent.read_text().replace("n2)", "other)")
    agent.write_text(f"{text}echo '{refused}' >&2\nexit 255\n")
    launch = ("longseq", "launch", "--hosts", "n1:1,n2:1")
    scene.run(*launch, *RUN[4:], codes=(3,), **variables)
    reasons = {r.outcome.reason or "" for r in scene.records() if r.trial.world_size == 2}
    scene.seen.append(min(reasons, default=""))
    scene.check(reasons and all("mpirun ended with" in r for r in reasons), f"{reasons}")


# ---- random kills --------------------------------------------------------------------------------


def kill_at_random(scene: Scene) -> None:
    """Kill and stop ranks, engines, slurmds and parents; resume until the sweep is complete."""
    strikes = 0
    while strikes < scene.kills:
        shutil.rmtree(scene.cluster.work / "out", ignore_errors=True)
        allowed: set[str] = set()
        for _ in range(12):
            before = scene.lines()
            command = scene.cluster.start(*SALLOC, *RUN)
            for _ in range(scene.chance.randint(1, 4)):
                strikes += strike(scene, command, allowed)
            with suppress(subprocess.TimeoutExpired):
                command.wait(DEADLINE_S)
            scene.check(command.poll() is not None, "the command does not end")
            scene.cluster.run("scancel", "--user=root")
            for node in range(2):
                if not any(p.name() == "slurmd" for p in scene.cluster.on_node(node)):
                    scene.cluster.start_slurmd(node)
            scene.cluster.wait_until(lambda: scene.cluster.states() == ["idle", "idle"])
            for name in scene.cluster.left():
                # a parent that was killed leaves its folder
                is_folder = Path(name).parent.name.startswith("longseq-")
                scene.check(is_folder, f"left: {name}")
            scene.check(scene.lines()[: len(before)] == before, "a line that was written changed")
            if len(scene.lines()) >= TRIALS:
                break
        scene.run(*SALLOC, *RUN, codes=(0, 3))
        scene.findings += find_differences(scene.records(), scene.expected)
        for record in scene.records():
            reason = record.outcome.reason or ""
            is_named = any(f"killed by {name}" in reason for name in allowed)
            is_right = record.outcome.status == "ok" or is_named
            scene.check(is_right, f"blamed: {record.outcome.status}: {reason}")
        print(f"  {strikes} strikes, {len(scene.findings)} findings", flush=True)
    scene.seen.append(f"{strikes} strikes")


def strike(scene: Scene, command: subprocess.Popen[bytes], allowed: set[str]) -> int:
    """Send one signal to one process of the sweep; return 1 if it hit."""
    target = scene.chance.choice(("rank", "rank", "engine", "slurmd", "parent"))
    number = scene.chance.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
    if target == "slurmd":
        number = signal.SIGKILL
    time.sleep(scene.chance.uniform(0, 6))
    end_s = time.monotonic() + 30
    while command.poll() is None and time.monotonic() < end_s:
        if found := find_target(scene, target):
            chosen = scene.chance.choice(found)
            with suppress(psutil.Error):
                chosen.send_signal(number)
                if target == "rank":
                    allowed.add(number.name)
                if number == signal.SIGSTOP:
                    time.sleep(scene.chance.choice((1, 12)))
                    chosen.send_signal(scene.chance.choice((signal.SIGCONT, signal.SIGKILL)))
                    allowed |= {"SIGKILL"} if target == "rank" else set()
                return 1
        time.sleep(0.02)
    return 0


def find_target(scene: Scene, target: str) -> list[psutil.Process]:
    """Return the processes of a kind on both nodes."""
    if target == "rank":
        return find_ranks(scene, 0) + find_ranks(scene, 1)
    found = []
    for process in (p for node in range(2) for p in scene.cluster.on_node(node)):
        with suppress(psutil.Error):
            if target == "parent":
                is_right = {"launch", "sweep.yaml"} <= {*process.cmdline()[1:]}
                is_right = is_right and process.name() != "salloc"
            else:
                is_right = process.name() == {"engine": "srun", "slurmd": "slurmd"}[target]
            found += [process] if is_right else []
    return found


SCENARIOS: dict[str, Callable[[Scene], None]] = {
    "salloc": run_salloc,
    "in a step": run_in_a_step,
    "maxlen and scaling": run_searches,
    "scancel": cancel,
    "preemption": preempt,
    "requeue": requeue,
    "n2 dies": kill_other_host,
    "n2 stops": stop_other_host,
    "n2 dies in a job": partial(kill_node_in_job, node=1),
    "n1 dies in a job": partial(kill_node_in_job, node=0),
    "several tasks": start_several,
    "n1 is a loopback name": lie_about_names,
    "submit": submit_shards,
    "submit over hosts": submit_over_hosts,
    "mpirun": run_mpirun,
    "mpirun in Slurm": run_mpirun_in_slurm,
    "mpirun without n2": miss_a_host,
    "kills": kill_at_random,
}


def run_scenario(
    name: str, cluster: Cluster, expected: Counter[str], seed: int, kills: int
) -> Scene:
    """Run a scenario in a new folder, and end what it left."""
    cluster.new_work()
    (cluster.work / "sweep.yaml").write_text(SWEEP)
    scene = Scene(cluster, expected, random.Random(f"{seed}/{name}"), kills)
    try:
        SCENARIOS[name](scene)
        scene.check_rest()
    except (TimeoutError, RuntimeError, OSError, UserError) as error:
        scene.findings.append(f"{type(error).__name__}: {error}")
    cluster.clear()
    return scene


def find_missing(name: str) -> str:
    """Return the program that a scenario needs and that is missing here, or an empty string."""
    needed = {"mpirun": "mpirun"}.get(name.split()[0])
    return "" if not needed or shutil.which(needed) else needed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="default: random")
    parser.add_argument("--kills", type=int, default=10, help="strikes of the last scenario")
    parser.add_argument("--tree", type=Path, default=slurm_cluster.ROOT, help="checkout to run")
    asked = parser.parse_args()
    if reason := slurm_cluster.unavailable_reason():
        sys.exit(f"no Slurm cluster can be started here: {reason}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt_on_termination()
    print(f"seed {asked.seed}", flush=True)
    rows, findings = [("scenario", "s", "findings", "seen")], 0
    with closing(Cluster(asked.tree)) as cluster:
        expected: Counter[str] = Counter()
        for name in ["salloc", *(n for n in asked.only or SCENARIOS if n != "salloc")]:
            if missing := find_missing(name):
                rows.append((name, "-", "-", f"skipped: no {missing} here"))
                continue
            start_s = time.monotonic()
            scene = run_scenario(name, cluster, expected, asked.seed, asked.kills)
            if name == "salloc" and scene.lines():
                expected = Counter(record.key for record in scene.records())
                scene.check(len(expected) == TRIALS, f"{len(expected)} of {TRIALS} trials")
            for finding in scene.findings:
                print(f"FINDING in {name}: {finding}", flush=True)
            findings += len(scene.findings)
            took_s = f"{time.monotonic() - start_s:.0f}"
            rows.append((name, took_s, str(len(scene.findings)), "; ".join(scene.seen)[:150]))
            print(" | ".join(rows[-1]), flush=True)
    print()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"seed {asked.seed}: {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
