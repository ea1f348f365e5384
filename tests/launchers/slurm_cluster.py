"""A real Slurm cluster on one machine: munged, slurmctld, and two hosts with a slurmd each.

The hosts n1 and n2 are network namespaces with their own names; slurmctld runs on n1.
Files are shared, as on a cluster with a shared home. Needs root and Debian's `slurm-wlm munge
iproute2`.
Everything is in a temporary folder. Nothing outside it changes, and `close` ends every process.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cli.sweep_process import MARK, processes_of

NODES = ("n1", "n2")
PATIENCE_S, SOON_S, START_S = 120.0, 10.0, 20.0
ROOT = Path(__file__).parents[2]

CONFIG = """\
ClusterName=longseq
SlurmctldHost=n1({address[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=30
SlurmdTimeout=10
MessageTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeAddr={address[0]} CPUs={cores}
NodeName=n2 NodeAddr={address[1]} CPUs={cores}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=3
PartitionName=high Nodes=ALL PriorityTier=2
"""
"""cred_expire: a job that was requeued waits for it, by default 120 s."""

ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def unavailable_reason() -> str | None:
    """Return why no cluster can be started here, or None. It tries the namespaces."""
    for program in ("slurmctld", "slurmd", "munged", "srun", "ip"):
        if not shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
            return f"no {program} here (Debian: slurm-wlm munge iproute2)"
    try:
        Hosts().close()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return None


class Hosts:
    """Two hosts made of network namespaces: an interface `eth` each, and a cable between them.

    Only the network is of its own: files and processes are this machine's.
    """

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        subnet = f"10.77.{int(tag[:2], 16)}"
        self.names = [f"longseq-{tag}-{i}" for i in range(2)]
        self.addresses = [f"{subnet}.1", f"{subnet}.2"]
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            _do(
                "ip", "link", "add", "eth", "netns", self.names[0], "type", "veth",
                "peer", "name", "eth", "netns", self.names[1],
            )  # fmt: skip
            for name, address in zip(self.names, self.addresses, strict=True):
                _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth")
                _do("ip", "-n", name, "link", "set", "lo", "up")
                _do("ip", "-n", name, "link", "set", "eth", "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove both, and what still runs on them."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Cluster:
    """A running cluster.

    work: the jobs' working folder. Their home is `folder / "home"`.
    tree: the checkout whose longseq runs.
    """

    def __init__(self, tree: Path = ROOT) -> None:
        self._tree = tree
        # the path of a Unix socket may have 107 characters
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._mark = uuid.uuid4().hex
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.hosts = Hosts()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munged refuses a socket that others can't reach
        home = folder / "home"
        for name in ("home", "state", "bin", "tmp", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        self.new_work()
        names = zip(self.hosts.addresses, NODES, strict=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in names)]
        for node in range(2):
            self.hosts_file(node).write_text("\n".join(lines) + "\n")
        cores = len(os.sched_getaffinity(0))
        (folder / "slurm.conf").write_text(
            CONFIG.format(folder=folder, address=self.hosts.addresses, cores=cores)
        )
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        longseq = folder / "bin" / "longseq"
        longseq.write_text(f'#!/bin/sh\nexec {sys.executable} -m longseq_bench "$@"\n')
        longseq.chmod(0o755)
        path = [str(folder / "bin"), os.environ.get("PATH", ""), "/usr/sbin"]
        python_path = [str(self._tree), str(ROOT / "tests/plugins"), os.environ.get("PYTHONPATH")]
        self.environ = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.pathsep.join(path),
            "HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            "TMPDIR": str(folder / "tmp"),
        }  # fmt: skip
        self.environ.pop("XDG_CONFIG_HOME", None)
        munge = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log",
                 "pid-file": "munge.pid", "seed-file": "munge.seed"}  # fmt: skip
        files = [f"--{option}={folder / name}" for option, name in munge.items()]
        self._start_daemon("munged", "munged", "--foreground", "--force", *files)
        self.wait_until(lambda: (folder / "munge.socket").exists(), START_S)
        self._start_daemon("slurmctld", *self.on(0, ["slurmctld", "-D"]))
        for node in range(2):
            self.start_slurmd(node)
        self.wait_until(lambda: self.states() == ["idle", "idle"], START_S)

    def _start_daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )
            )  # fmt: skip

    def start_slurmd(self, node: int) -> None:
        """Start the slurmd of a node."""
        command = ["slurmd", "-D", "-N", NODES[node]]
        self._start_daemon(f"slurmd-{NODES[node]}", *self.on(node, command))

    def hosts_file(self, node: int) -> Path:
        """Return the file that is /etc/hosts on a node. It may be written while the node runs."""
        return self.folder / f"hosts-{NODES[node]}"

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node."""
        names = [str(self.hosts_file(node)), NODES[node]]
        inner = ["unshare", "--uts", "--mount", "sh", "-c", ENTER, "sh", *names, *command]
        # not `ip netns exec`: it hides /sys/fs/cgroup, without which slurmd does not start
        return ["nsenter", f"--net=/run/netns/{self.hosts.names[node]}", *inner]

    def states(self) -> list[str]:
        """Return the state of each node, such as idle."""
        return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").stdout.split()

    def new_work(self) -> None:
        """Let jobs and commands work in a new folder."""
        self.work = Path(tempfile.mkdtemp(prefix="work-", dir=self.folder))

    # ---- what a user does ------------------------------------------------------------------------

    def start(
        self, *command: str, node: int = 0, output: str = "out.txt", **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command of a user on a node, in `work`, with its output in that file there."""
        environ = self.environ | {MARK: self._mark} | variables
        with (self.work / output).open("wb") as out:
            return subprocess.Popen(
                self.on(node, command), cwd=self.work, env=environ, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a short command of a user on n1."""
        return subprocess.run(
            self.on(0, command), cwd=self.work, env=self.environ | {MARK: self._mark}, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip

    def submit(self, *arguments: str) -> str:
        """Submit a job with sbatch, and return its number."""
        done = self.run("sbatch", "--parsable", *arguments)
        if done.returncode:
            raise RuntimeError(f"sbatch: {done.stderr}")
        return done.stdout.strip()

    def job_state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        shown = self.run("scontrol", "show", "job", job).stdout
        words = [word for word in shown.split() if word.startswith("JobState=")]
        return words[0].partition("=")[2] if words else "UNKNOWN"

    def wait_until(self, happened: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Wait for an event. Raises TimeoutError with what the daemons and the jobs printed."""
        end = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() >= end:
                raise TimeoutError(f"nothing happened in {timeout_s:.0f} s\n{self.printed()}")
            time.sleep(0.1)

    def printed(self) -> str:
        """Return the ends of all outputs."""
        files = sorted([*self.folder.glob("*.out"), *self.work.glob("*out*")])
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}"
            for file in files
            if file.is_file()
        )

    # ---- processes -------------------------------------------------------------------------------

    def on_node(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node, its slurmd included."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.hosts.names[node]], capture_output=True, text=True
        )
        processes = []
        for pid in found.stdout.split():
            with suppress(psutil.Error):
                processes.append(psutil.Process(int(pid)))
        return processes

    def left(self) -> list[str]:
        """Return the processes of jobs that still run some seconds later, and temporary files."""
        end = time.monotonic() + SOON_S
        while processes_of(self._mark) and time.monotonic() < end:
            time.sleep(0.1)
        left = [" ".join(process.cmdline()) for process in processes_of(self._mark)]
        # torch leaves folders of its own, and the folder of a user stays, empty
        tmp, known = self.folder / "tmp", ("torchelastic_", "torchinductor_", "longseq-")
        files = [file for file in tmp.iterdir() if not file.name.startswith(known)]
        return left + [str(file) for file in [*files, *tmp.glob("longseq-*/*")]]

    def kill_node(self, node: int) -> None:
        """Kill everything on a node: slurmd, slurmstepd and the tasks, as a power failure does."""
        # the daemons first: they would report the end of the tasks
        for is_daemon in (True, False):
            for process in self.on_node(node):
                with suppress(psutil.Error):
                    name = process.name()
                    is_other = name in ("slurmctld", "srun", "sbatch", "salloc")
                    if not is_other and ("slurm" in name) == is_daemon:
                        process.kill()

    def clear(self) -> None:
        """End all jobs and commands of users, and remove their temporary files."""
        self.run("scancel", "--user=root")
        for process in processes_of(self._mark):
            with suppress(psutil.Error):
                process.kill()
        for node, state in enumerate(self.states()):
            if state.startswith("down"):
                self.start_slurmd(node)
        self.wait_until(lambda: self.states() == ["idle", "idle"])
        for file in (self.folder / "tmp").iterdir():
            shutil.rmtree(file, ignore_errors=True)

    def close(self) -> None:
        """End all processes and remove all files."""
        for process in processes_of(self._mark):
            with suppress(psutil.Error):
                process.kill()
        if hasattr(self, "hosts"):
            self.hosts.close()
        for daemon in self._daemons:
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
