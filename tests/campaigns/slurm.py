"""Run `longseq launch` on a real Slurm cluster: cancel, preempt and requeue jobs, and kill nodes.

    python -m tests.campaigns.slurm
    python -m tests.campaigns.slurm --only scancel --only "a node dies"

It starts munged, slurmctld and two hosts with a slurmd each on this machine
(tests/launchers/slurm_cluster.py), so it needs root and Debian's packages `slurm-wlm munge`;
`openmpi-bin` for the scenarios of mpirun, and a C compiler for that of clocks. A finding is a
record that is lost, doubled, torn or blamed on an implementation, a traceback, a wrong exit code,
or a process or file that is left. The exit code is 1 if there is one.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from longseq_bench.core.environment_failure import is_environment_failure
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.launchers.interrupts import interrupt_on_termination
from longseq_bench.launchers.launch_key import KEY_VARIABLE
from longseq_bench.store import RECORDS, TORN, load
from tests.campaigns.kills import find_differences
from tests.launchers import slurm_cluster
from tests.launchers.slurm_cluster import NODES, Cluster

SWEEP = """\
memory_budget: 64MiB
workload: {heads: 2, head_dim: 16}
tokens: [64, 128, 256, 2048]
world_size: [1, 2]
implementations: [ring, collective]
rounds: 1
repeats: 1
threads: 1
device: cpu
"""
RUN = ("longseq", "launch", "--nproc-per-node", "1", "--", "sweep", "sweep.yaml", "--out", "out")
CORES = str(len(os.sched_getaffinity(0)))
SRUN = ("srun", "--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", CORES)
END = "code=$?\n[ $code -ne 143 ] || sleep 600\nexit $code\n"
"""How a job ends that `longseq plan --sbatch` writes: it waits for its preemption."""

JOB = f"#!/bin/sh\n{shlex.join(['srun', *RUN])}\n{END}"
BATCH = ("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--requeue", "--output=out-%j",
         "--open-mode=append", "job.sh")  # fmt: skip
DEADLINE_S = 120.0
TRIALS = 16
KEY = "the key of the campaign"


@dataclass
class Scene:
    """One scenario: the cluster, what was seen, and what is wrong."""

    cluster: Cluster
    expected: Counter[str]
    chance: random.Random
    seen: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def check(self, is_right: object, finding: str) -> None:
        """Note a finding, unless all is right."""
        if not is_right:
            self.findings.append(finding)

    # ---- files -----------------------------------------------------------------------------------

    def lines(self) -> list[bytes]:
        """Return the complete lines of the records."""
        path = self.cluster.work / "out" / RECORDS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith(b"\n")]

    def records(self) -> list[Record]:
        """Return the records, and note broken lines."""
        loaded = load(self.cluster.work / "out")
        self.check(not loaded.broken, f"broken lines: {loaded.reasons}")
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
        self.check(not (self.cluster.work / "out" / TORN).exists(), "a line was torn")

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

    def start_on_both(self, *command: str, **variables: str) -> list[subprocess.Popen[bytes]]:
        """Start a command on both nodes, without Slurm. {node} in a word is the node's number."""
        return [
            self.cluster.start(
                *(word.replace("{node}", str(node)) for word in command),
                node=node, output=f"out{node}.txt", **variables,
            )
            for node in range(2)
        ]  # fmt: skip

    def end_of_both(
        self, processes: Sequence[subprocess.Popen[bytes]], codes: Sequence[int] = (0,)
    ) -> list[str]:
        return [self.end_of(p, f"out{node}.txt", codes) for node, p in enumerate(processes)]


# ---- under Slurm ---------------------------------------------------------------------------------


def run_srun(scene: Scene) -> None:
    """The documented command completes; the key is in the shared home folder."""
    text = scene.run(*SRUN, *RUN)
    scene.check_records()
    scene.check(f"2 nodes, 1 rank(s) on each: {', '.join(NODES)}" in text, f"no nodes: {text}")
    key = scene.cluster.folder / "home/.config/longseq/launch.key"
    scene.check(stat.S_IMODE(key.stat().st_mode) == 0o600, "others can read the key")


def run_srun_twice(scene: Scene) -> None:
    """A second job finds all records and runs nothing."""
    scene.run(*SRUN, *RUN)
    before = scene.lines()
    scene.run(*SRUN, *RUN)
    scene.check_records(before)


def run_maxlen(scene: Scene) -> None:
    """A search over both nodes ends at its ceiling."""
    text = scene.run(
        *SRUN, "longseq", "launch", "--nproc-per-node", "1", "--", "maxlen", "--impl", "ring",
        "--memory-budget", "4MiB", "--ceiling", "4k", "--heads", "1", "--head-dim", "16",
        "--threads", "1", "--device", "cpu", "--out", "out",
    )  # fmt: skip
    scene.check({r.trial.world_size for r in scene.records()} == {2}, f"not over both: {text}")
    scene.check({r.outcome.status for r in scene.records()} <= {"ok", "oom"}, "a trial failed")


def run_sbatch_of_plan(scene: Scene) -> None:
    """The file of `longseq plan --sbatch` runs as it is."""
    scene.run("longseq", "plan", "--impl", "ring", "--gpu", "cpu", "--world-size", "2",
              "--gpus-per-node", "1", "--heads", "2", "--head-dim", "16", "--target", "2k",
              "--sbatch", "job.sh")  # fmt: skip
    job = scene.cluster.submit("job.sh")
    state = scene.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    (printed,) = scene.cluster.work.glob("*.out")
    scene.seen.append(state)
    scene.check(state == "COMPLETED", f"{state}: {printed.read_text()[-600:]}")
    results = scene.cluster.work / "results"
    records = [r for file in results.glob(f"**/{RECORDS}") for r in load(file).records]
    scene.check({r.trial.world_size for r in records} == {2}, "no records of both nodes")


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


def kill_other_node(scene: Scene) -> None:
    """Everything on n2 dies in a sweep of srun; then the node is back and the sweep goes on."""
    step = scene.cluster.start(*SRUN, *RUN)
    scene.wait_for_lines(4)
    scene.cluster.kill_node(1)
    text = scene.end_of(step, "out.txt", codes=range(1, 256))
    before = scene.lines()
    scene.check("lost node 1" in text or "node 1 (n2) is gone" in text,
                f"not named: {text[-600:]}")  # fmt: skip
    scene.seen.append(f"{len(before)} records before")
    restart_node(scene, 1)
    scene.run(*SRUN, *RUN)
    scene.check_records(before)


def kill_task(scene: Scene) -> None:
    """The command on n2 is killed, which Slurm does not mind; a second one runs what is missing."""
    step = scene.cluster.start(*SRUN, *RUN[:2], "--rdzv-timeout", "3", *RUN[2:])
    scene.wait_for_lines(4)
    before = scene.lines()
    for process in scene.cluster.on_node(1):
        if "launch" in process.cmdline():
            process.kill()
    text = scene.end_of(step, "out.txt", codes=(3, 137))
    scene.check("node 1 (n2) is gone" in text, f"not named: {text[-600:]}")
    scene.run(*SRUN, *RUN)
    scene.check_records(before)


def kill_node_of_job(scene: Scene) -> None:
    """Everything on n2 dies in a batch job; Slurm requeues it and it runs again."""
    kill_node_in_job(scene, 1)


def kill_node_0_of_job(scene: Scene) -> None:
    """The same with n1, which writes the records."""
    kill_node_in_job(scene, 0)


def kill_node_in_job(scene: Scene, node: int) -> None:
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


def see_cores(scene: Scene) -> None:
    """A step of srun alone has one core, and says so; with the documented options it has all."""
    bare = ("srun", "--nodes", "2", "--ntasks-per-node", "1")
    (scene.cluster.work / "job.sh").write_text("#!/bin/sh\nsrun nproc\n")
    job = scene.cluster.submit(*BATCH)
    scene.wait_for_job(job, "COMPLETED")
    found = {
        "srun alone": scene.run(*bare, "nproc").split(),
        "srun --cpus-per-task": scene.run(*SRUN, "nproc").split(),
        "sbatch --exclusive": scene.printed_by(job).split(),
    }
    scene.seen.append(str(found))
    scene.check(found["srun --cpus-per-task"] == [CORES, CORES], f"cores: {found}")
    scene.check(found["sbatch --exclusive"] == [CORES, CORES], f"cores: {found}")
    text = scene.run(*bare, *RUN)
    few = f"1 rank(s) have 1 of the {os.cpu_count()} cores of this host"
    scene.check(CORES == "1" or text.count(few) == 2, f"not told: {text}")


def start_several(scene: Scene) -> None:
    """Two processes on a host are refused, whoever starts them."""
    text = scene.run("srun", "--nodes", "1", "--ntasks", "2", *RUN, codes=(2,))
    scene.check(text.count("--ntasks-per-node=1") == 2, f"not refused: {text}")
    text = scene.run("torchrun", "--nproc-per-node", "2", "--no-python", *RUN, codes=(1,))
    # torchrun ends the other process as soon as one has refused
    scene.check("(--nproc-per-node 1)" in text, f"not refused: {text}")
    text = scene.run("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RUN,
                     codes=(2,))  # fmt: skip
    scene.check("--map-by ppr:1:node" in text, f"not refused: {text}")
    scene.check(not scene.lines(), "a trial ran")


def lie_about_names(scene: Scene) -> None:
    """The name of n1 means a loopback address there, as on Debian."""
    hosts = scene.cluster.hosts_file(0)
    text = hosts.read_text()
    try:
        hosts.write_text(f"127.0.1.1 n1\n{text}")
        scene.run(*SRUN, *RUN)
        scene.check_records()
    finally:
        hosts.write_text(text)


# ---- without Slurm -------------------------------------------------------------------------------


def run_torchrun(scene: Scene) -> None:
    """torchrun on both nodes."""
    processes = scene.start_on_both(
        "torchrun", "--nnodes", "2", "--node-rank", "{node}", "--nproc-per-node", "1",
        "--master-addr", "n1", "--master-port", "29511", "--no-python", *RUN,
    )  # fmt: skip
    scene.end_of_both(processes)
    scene.check_records()


def run_mpirun(scene: Scene) -> None:
    """mpirun over both nodes."""
    agent = scene.cluster.folder / "bin" / "on-node"
    names = dict(zip(NODES, range(2), strict=True))
    cases = "".join(
        f'{name}) exec {shlex.join(scene.cluster.on(node, []))} sh -c "$*" ;;\n'
        for name, node in names.items()
    )
    agent.write_text(f'#!/bin/sh\nname="$1"; shift\ncase "$name" in\n{cases}esac\n')
    agent.chmod(0o755)
    scene.run(
        "mpirun", "--allow-run-as-root", "--host", "n1,n2", "--map-by", "ppr:1:node",
        "--mca", "plm_rsh_agent", str(agent), "--mca", "plm", "rsh", "-x", "MASTER_ADDR=n1",
        "-x", "PATH", "-x", "PYTHONPATH", *RUN,
    )  # fmt: skip
    scene.check_records()


def run_mpirun_in_slurm(scene: Scene) -> None:
    """mpirun in an allocation of Slurm."""
    scene.run(
        "salloc", "--nodes=2", "--ntasks-per-node=1", "mpirun", "--allow-run-as-root",
        "--map-by", "ppr:1:node", "-x", "MASTER_ADDR=n1", *RUN,
    )  # fmt: skip
    scene.check_records()


def launch_on_both(
    scene: Scene, endpoint: str, *options: str, before: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    launch = (
        "longseq", "launch", "--nnodes", "2", "--node-rank", "{node}", "--rdzv-endpoint",
        endpoint, *options, *RUN[2:],
    )  # fmt: skip
    return scene.start_on_both(*before, *launch, **{KEY_VARIABLE: KEY})


def run_ipv6(scene: Scene) -> None:
    """The nodes meet at an IPv6 address."""
    text = scene.end_of_both(launch_on_both(scene, f"[{scene.cluster.ipv6[0]}]:29400"))[1]
    scene.check(f"at [{scene.cluster.ipv6[0]}]:29400" in text, text)
    scene.check_records()


def name_nobody(scene: Scene) -> None:
    """A name that does not resolve is a sentence and exit code 2, with and without Slurm."""
    launched = launch_on_both(scene, "nowhere.invalid:29400", "--rdzv-timeout", "2")
    texts = scene.end_of_both(launched, codes=(2,))
    variables = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29400"}
    timed = [*RUN[:2], "--rdzv-timeout", "2", *RUN[2:]]
    texts.append(scene.run(*SRUN, *timed, codes=(2,), **variables))
    for text in texts:
        scene.check("nowhere.invalid:29400" in text and "name" in text, f"not named: {text}")
    scene.seen.append(texts[0].strip().splitlines()[-1])


LATE = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
enum { SHIFT_S = 3600 };

int clock_gettime(clockid_t clock, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += SHIFT_S;
    return code;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""Sets the wall clock of a process. (faketime makes Python's time.sleep fail.)"""


def shift_clock(scene: Scene) -> None:
    """The clock of n2 is an hour ahead; a rank there dies and is blamed."""
    (scene.cluster.work / "sweep.yaml").write_text(
        SWEEP.replace("[ring, collective]", "[rank-kills-itself, ring]")
        .replace("[1, 2]", "2")
        .replace("2048", "4k")
    )
    (scene.cluster.work / "late.c").write_text(LATE)
    shared = ("cc", "-shared", "-fPIC", "-o", "late.so", "late.c")
    subprocess.run(shared, cwd=scene.cluster.work, check=True)
    (scene.cluster.work / "late").write_text(
        '[ "$1" = 1 ] && export LD_PRELOAD="$PWD/late.so"\nshift\nexec "$@"\n'
    )
    processes = launch_on_both(scene, "n1:29400", before=("sh", "late", "{node}"))
    scene.end_of_both(processes, codes=(0, 3))
    for record in scene.records():
        outcome, name = record.outcome, record.trial.implementation
        dies = name == "rank-kills-itself" and record.trial.workload.seq_len > 1024
        expected = "rank 1 (host n2): killed by SIGKILL" if dies else None
        scene.check(outcome.reason == expected, f"{name}, {outcome.status}: {outcome.reason}")


def share_folder(scene: Scene) -> None:
    """Two sweeps on two nodes write to one folder: the second is refused."""
    alone = ("longseq", *RUN[5:])
    first = scene.cluster.start(*alone, node=1, output="out1.txt")
    scene.wait_for_lines(2)
    text = scene.run(*alone, codes=(2,))
    scene.check("in use by another process" in text, f"not refused: {text}")
    scene.seen.append(text.strip().splitlines()[-1])
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = scene.lines()
    scene.run(*alone)
    scene.check(scene.lines()[: len(before)] == before, "a line that was written changed")
    of_n1 = Counter(r.key for r in scene.records() if r.environment.host == "n1")
    scene.check(of_n1 == scene.expected, "n1 did not run every trial once")


SCENARIOS: dict[str, Callable[[Scene], None]] = {
    "srun": run_srun,
    "srun again": run_srun_twice,
    "maxlen": run_maxlen,
    "plan --sbatch": run_sbatch_of_plan,
    "scancel": cancel,
    "preemption": preempt,
    "requeue": requeue,
    "n2 dies under srun": kill_other_node,
    "a task dies": kill_task,
    "n2 dies in a job": kill_node_of_job,
    "n1 dies in a job": kill_node_0_of_job,
    "cores": see_cores,
    "several on a host": start_several,
    "n1 is a loopback name": lie_about_names,
    "torchrun": run_torchrun,
    "mpirun": run_mpirun,
    "mpirun in Slurm": run_mpirun_in_slurm,
    "IPv6": run_ipv6,
    "an unknown name": name_nobody,
    "clocks an hour apart": shift_clock,
    "one folder, two nodes": share_folder,
}


def run_scenario(name: str, cluster: Cluster, expected: Counter[str], seed: int) -> Scene:
    """Run a scenario in a new folder, and end what it left."""
    cluster.new_work()
    (cluster.work / "sweep.yaml").write_text(SWEEP)
    scene = Scene(cluster, expected, random.Random(f"{seed}/{name}"))
    try:
        SCENARIOS[name](scene)
        scene.check_rest()
    except (TimeoutError, RuntimeError, OSError, UserError) as error:
        scene.findings.append(f"{type(error).__name__}: {error}")
    cluster.clear()
    return scene


def find_missing(name: str) -> str:
    """Return the program that a scenario needs and that is missing here, or an empty string."""
    needed = {"mpirun": "mpirun", "clocks": "cc", "several": "mpirun"}.get(name.split()[0])
    return "" if not needed or shutil.which(needed) else needed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="default: random")
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
        for name in ["srun", *(n for n in asked.only or SCENARIOS if n != "srun")]:
            if missing := find_missing(name):
                rows.append((name, "-", "-", f"skipped: no {missing} here"))
                continue
            start_s = time.monotonic()
            scene = run_scenario(name, cluster, expected, asked.seed)
            if name == "srun" and scene.lines():
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
