"""A launcher for several hosts: srun or mpirun starts the ranks of each trial.

A trial is one command of the engine, whose processes are the ranks (worker/host_rank.py). The
engine starts and kills them and names their exits; this process owns the clock. Ranks speak in
lines on standard output, which the engine labels with the rank. The same RankSupervisor as for one
host decides the outcome. Trials that need one host run here, on the fork server.
"""

import ctypes
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from socket import create_server
from typing import IO, Any

from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.core.ranks import BEAT_S, HOSTS, PORT, RUN, TRIAL, versions
from longseq_bench.launchers.base import OnPhase
from longseq_bench.launchers.exit_status import kernel_kills, stack_lines
from longseq_bench.launchers.hosts import Hosts
from longseq_bench.launchers.interrupts import defer_interrupts
from longseq_bench.launchers.local import WAIT_S, LocalLauncher
from longseq_bench.launchers.process_inspection import STACKS_S
from longseq_bench.launchers.rank_supervisor import PAUSE_S, ProcessSample, RankSupervisor

BEGIN_S, SILENT_S = 60.0, 10 * BEAT_S
"""Time without a message after which the engine has failed; and, once a rank has sent a heartbeat,
after which a host is stopped or gone."""

CAUSE_S, END_S = 10.0, 5.0
"""Time for mpirun, which ends all ranks before it names the one that died; and for the engine to
end after SIGTERM."""

FORWARDED = (
    "PYTHON", "PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "CUDA_", "NCCL_", "GLOO_", "TORCH",
    "PYTORCH_", "OMP_", "MKL_", "TRITON_", "NVIDIA_", "UCX_", "FI_", "LONGSEQ_",
)  # fmt: skip
"""Starts of the variables that mpirun is told to pass on; srun passes on all."""

LABELS = {
    "srun": re.compile(rb"^ *(\d+): "),
    "mpirun": re.compile(rb"\[[^][<>]*?(\d+)\]<std(?:out|err)>:"),
}
"""The label of a piece of output. mpirun also writes one in the middle of a line that it cuts."""

EXITS = re.compile(
    r"srun: error: \S+: tasks? (?P<ranks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<signal>[A-Z][^(\n]*))"
    r"|process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<number>\d+)"
)
"""Sentences of srun and mpirun on ranks that ended."""

OUTSIDE = "killed by SIGKILL: by Slurm or a person, or by the kernel for lack of memory"
"""The reason of a rank that was killed. Slurm kills those of a job that ends, and says so later."""

JOB_ENDS = re.compile("job .*(already completing|has expired|invalid job id)", re.IGNORECASE)
"""Words of srun when its job is preempted or out of time. Slurm first signals the steps."""

OOM_KILL = re.compile("oom.kill|out of memory", re.IGNORECASE)

SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_PR_SET_PDEATHSIG = 1


class HostsLauncher(LocalLauncher):
    """The launcher of the first of several hosts. A smaller world takes the first hosts."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts

    @override
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        return self._hosts.describe_devices(super().catalogue(own))

    @override
    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        hosts = self._hosts
        try:
            names = hosts.take(trial.world_size)
        except ValueError as error:
            return Outcome(status="unsupported", reason=str(error), phase="start"), 0
        if len(names) == 1:
            return super()._attempt(trial, on_phase)
        run = _Run(trial, hosts.engine, names, on_phase)
        command = command_of(hosts.engine, names, hosts.ranks_per_host, hosts.cores)
        run.start(command, json.dumps(self.of_run(trial)))
        try:
            run.follow()
        finally:
            with defer_interrupts():
                run.end()
        outcome = run.supervisor.outcome(time.monotonic())
        facts = {**outcome.facts, "launcher": hosts.engine, "hosts": list(names)}
        return outcome.model_copy(update={"facts": facts}), run.supervisor.signal_number


def command_of(engine: str, names: tuple[str, ...], ranks_per_host: int, cores: int) -> list[str]:
    """Return the engine's command for one trial: ranks in blocks, host by host, not bound."""
    ranks = len(names) * ranks_per_host
    if engine == "srun":
        command = [
            "srun", "--overlap", f"--nodes={len(names)}", f"--nodelist={','.join(names)}",
            f"--ntasks={ranks}", f"--ntasks-per-node={ranks_per_host}", "--distribution=block",
            f"--cpus-per-task={max(1, cores // ranks_per_host)}", "--cpu-bind=none", "--mem=0",
            "--export=ALL", "--label", "--kill-on-bad-exit=0", "--wait=0",
        ]  # fmt: skip
    else:
        passed = [name for name in sorted(os.environ) if name.startswith(FORWARDED)]
        command = [
            "mpirun", "--host", ",".join(f"{name}:{ranks_per_host}" for name in names),
            "-np", str(ranks), "--map-by", f"ppr:{ranks_per_host}:node", "--bind-to", "none",
            "--tag-output", *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
            *(word for name in (*passed, TRIAL, HOSTS, PORT, RUN) for word in ("-x", name)),
        ]  # fmt: skip
    return [*command, sys.executable, "-P", "-m", "longseq_bench.worker.host_rank"]


class LabelledOutput:
    """Splits what an engine prints into the output of each rank, and its own."""

    def __init__(self, engine: str) -> None:
        self._label, self._rest = LABELS[engine], b""

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return pieces of output with their ranks, None for the engine's own lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        pieces: list[tuple[int | None, bytes]] = []
        for line in lines:
            own, *labelled = self._label.split(line)
            found = list(zip(map(int, labelled[::2]), labelled[1::2], strict=True))
            pieces += found if found and not own else [(None, own), *found]
            pieces[-1] = pieces[-1][0], pieces[-1][1] + b"\n"
        return pieces


class _Run:
    """One trial over hosts: the engine's process, and what its ranks have sent."""

    def __init__(
        self, trial: Trial, engine: str, names: tuple[str, ...], on_phase: OnPhase
    ) -> None:
        self._trial, self._engine, self._on_phase = trial, engine, on_phase
        self._names, now = names, time.monotonic()
        self.supervisor = RankSupervisor(
            trial, now, lambda rank: f"rank {rank} (host {self._host_of(rank)})", CAUSE_S
        )
        # by rank, None: the engine itself
        self._printed: dict[int | None, str] = defaultdict(str)
        self._messages: dict[int | None, bytes] = defaultdict(bytes)
        self._seen_s = dict.fromkeys(range(trial.world_size), now)
        self._beats: dict[int, tuple[float, float, float]] = {}
        self._step, self._kills_before = "", kernel_kills()

    def _host_of(self, rank: int) -> str:
        return self._names[rank * len(self._names) // self._trial.world_size]

    def start(self, command: list[str], of_run: str) -> None:
        """Start the engine, which ends when this process ends."""
        with create_server(("", 0)) as listener:
            port = listener.getsockname()[1]
        trial = {TRIAL: self._trial.model_dump_json(), HOSTS: ",".join(self._names), RUN: of_run}
        library: Any = ctypes.CDLL(None)
        with defer_interrupts():
            self._process = subprocess.Popen(
                command, env={**os.environ, **trial, PORT: str(port)}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
                preexec_fn=partial(library.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        for stream in filter(None, (self._process.stdout, self._process.stderr)):
            self._selector.register(stream, selectors.EVENT_READ, LabelledOutput(self._engine))

    def follow(self) -> None:
        """Pass events to the supervisor until the trial is done or diagnosed."""
        while not self.supervisor.is_done(now := time.monotonic()):
            self._read(min(WAIT_S, max(0.0, self.supervisor.deadline - now)))
            if not self._selector.get_map():
                self._note_end_of_engine()
                return
            self._fail_silent_hosts()
            if self.supervisor.is_late(time.monotonic()):
                self._diagnose()
                return

    def _read(self, timeout_s: float) -> None:
        """Read what the engine prints; wait for it at most this time."""
        start_s = time.monotonic()
        ready = self._selector.select(timeout_s)
        took_s = time.monotonic() - start_s
        self.supervisor.add_wait(timeout_s, took_s)
        if took_s - timeout_s > PAUSE_S:  # this process was stopped, so the ranks were not silent
            self._seen_s = dict.fromkeys(self._seen_s, time.monotonic())
        for key, _ in ready:
            stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
            data = os.read(stream.fileno(), 2**16)
            if not data:
                self._selector.unregister(stream)
            for rank, text in key.data.feed(data or b"\n"):
                if rank in self._seen_s and stream is self._process.stdout:
                    self._add_lines(rank, text)
                    continue
                self._printed[rank] += text.decode(errors="replace")
                if rank is None:
                    self._note_exits(text.decode(errors="replace"))

    def _add_lines(self, rank: int, text: bytes) -> None:
        """Pass on the messages in a rank's standard output, each of which an empty line ends."""
        *messages, self._messages[rank] = (self._messages[rank] + text).split(b"\n\n")
        for message in messages:
            # another program may print something before the first message
            _, brace, rest = message.replace(b"\n", b"").partition(b"{")
            with suppress(ValueError):
                self._add_message(rank, json.loads(brace + rest))

    def _add_message(self, rank: int, message: dict[str, Any]) -> None:
        """Process a message. Raises UserError if its host has other versions than this one."""
        now = time.monotonic()
        self._seen_s[rank] = now
        if "versions" in message:
            self._step, host = message["step"], self._host_of(rank)
            for name, here in versions().items():
                if (there := message["versions"].get(name)) != here:
                    raise UserError(
                        f"host {host} has another version than this host: {name} is {there} there "
                        f"and {here} here; install the same on all hosts"
                    )
        elif "beat" in message:
            if not self._beats:  # the engine works: from now on every host is expected to speak
                self._seen_s = dict.fromkeys(self._seen_s, now)
            before_s, cpu_s, _ = self._beats.get(rank, (now - BEAT_S, 0.0, 0.0))
            busy = (message["beat"] - cpu_s) / max(now - before_s, BEAT_S / 2)
            self._beats[rank] = now, message["beat"], busy
        else:
            # one clock for all ranks: those of the hosts may differ
            self.supervisor.add_message(rank, message | {"at": time.time_ns()}, now)
            if "phase" in message and rank == 0:
                self._on_phase(message["phase"], message["part"])

    def _fail_silent_hosts(self) -> None:
        """Fail the ranks of a host that is stopped or gone: none of them sends a heartbeat."""
        now, answering = time.monotonic(), set()
        limit_s = SILENT_S if self._beats else BEGIN_S
        for rank in self.supervisor.running:
            if now - self._seen_s[rank] < limit_s:
                answering.add(self._host_of(rank))
        for rank in self.supervisor.running:
            if (host := self._host_of(rank)) not in answering:
                what = f"no message from host {host}"
                what = what if self._beats else f"{self._engine} started no rank"
                self._fail(rank, f"{what} for {now - self._seen_s[rank]:.0f} s")

    def _fail(self, rank: int, reason: str) -> None:
        """Note a failure that is no part of the trial."""
        self.supervisor.add_environment_failure(rank, reason, time.monotonic(), time.time_ns())

    def _note_exits(self, text: str) -> None:
        """Note the exits that the engine names in this text."""
        own = self._printed[None]
        is_short = bool(OOM_KILL.search(own)) or kernel_kills() > self._kills_before
        for found in EXITS.finditer(text):
            number = int(found["number"] or SIGNALS.get((found["signal"] or "").strip(), 0))
            if OOM_KILL.search(found[0]):
                number = signal.SIGKILL
            code = -number if number else int(found["code"] or 1)
            for rank in _parse_ranks(found["ranks"] or found["rank"]):
                now, at = time.monotonic(), time.time_ns()
                if number == signal.SIGKILL and not is_short:
                    self._fail(rank, OUTSIDE)
                else:
                    self.supervisor.add_exit(rank, code, self._printed[rank], is_short, now, at)

    def _note_end_of_engine(self) -> None:
        """Give ranks without an outcome the end of the engine as their reason."""
        code, lines = self._process.wait(), self._printed[None].splitlines()
        if JOB_ENDS.search(self._printed[None]):
            signal.raise_signal(signal.SIGTERM)  # as Slurm does a moment later
        said = [line.strip() for line in lines if line.strip(" -")][:1]
        reason = ": ".join([f"{self._engine} ended with exit code {code}", *said])
        is_named = bool(self.supervisor.failed)
        peer = Outcome(status="error", reason=f"ended by {self._engine}", facts={"lost_peer": True})
        for rank in self.supervisor.running:
            if is_named:
                self.supervisor.add_outcome(rank, peer, time.monotonic(), time.time_ns())
            else:
                self._fail(rank, reason)

    def _diagnose(self) -> None:
        """Diagnose a trial that is late, by heartbeats and, for a hang, by the ranks' stacks."""
        now, samples, stacks = time.monotonic(), {}, {}
        for rank in self.supervisor.running:
            *_, busy = self._beats.get(rank, (0.0, 0.0, 0.0))
            samples[rank] = ProcessSample(now - self._seen_s[rank] > SILENT_S / 2, busy)
        if self.supervisor.is_hang(samples):
            starts = {rank: len(self._printed[rank]) for rank in samples}
            self._process.send_signal(signal.SIGUSR1)  # the engine passes it on
            while self._selector.get_map() and (left_s := now + STACKS_S - time.monotonic()) > 0:
                self._read(left_s)
            stacks = {r: stack_lines(self._printed[r][starts[r] :]) for r in samples}
        self.supervisor.diagnose(samples, stacks)

    def end(self) -> None:
        """End the engine, and with it the ranks; ranks that passed end by themselves."""
        if self.supervisor.running or self.supervisor.failed:
            self._process.terminate()
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=END_S)
        if self._process.returncode != 0 and self._step:
            # Slurm goes on with a step whose srun was killed
            command = ["scancel", self._step]
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, check=False, timeout=END_S)
        self._selector.close()


def _parse_ranks(text: str) -> list[int]:
    """Return the ranks of a text such as 0,2-4."""
    ranges = [item.partition("-") for item in text.split(",")]
    return [r for first, _, last in ranges for r in range(int(first), int(last or first) + 1)]
