"""The launcher for one host: each rank is a new child of a fork server that has torch loaded.

A child starts in hundredths of a second and contains nothing of an earlier trial. The parent
enforces the time limits: if a phase takes too long, it kills the child's session. A RankSupervisor
decides the outcome from the messages and exits of all ranks.

Several ranks connect to a socket that the parent opens and rank 0 inherits. So no port is guessed
and no file is needed, and nothing is left when a rank is killed.
"""

import json
import multiprocessing
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from socket import create_server, socket
from typing import Any

import psutil
from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import DryRunEstimate, Outcome, Trial, is_environment_failure
from longseq_bench.core.units import format_bytes
from longseq_bench.launchers import _child_entry, fork_server
from longseq_bench.launchers.base import DRY_RUN_LIMIT_S, LAUNCHERS, Launcher, LaunchResult, OnPhase
from longseq_bench.launchers.exit_status import (
    OutputFile,
    failed_by_device,
    kernel_kills,
    may_be_out_of_memory,
    signal_name,
    with_first_attempt,
)
from longseq_bench.launchers.interrupts import defer_interrupts
from longseq_bench.launchers.process_inspection import kill_orphans, read_stacks, sample_processes
from longseq_bench.launchers.rank_supervisor import GRACE_S, PHASE_LIMIT_S, RankSupervisor

PRELOAD = [
    "longseq_bench.launchers._server_preload",
    "longseq_bench.worker.main",
    "torch.fx.experimental.symbolic_shapes",
]
"""Modules that the fork server imports before any fork, and LOADED. torch's first backward would
import symbolic_shapes (0.2 s)."""

LOADED = "longseq_bench.launchers._server_loaded"
"""The module that the fork server imports last."""

WAIT_S = 1.0
"""The longest wait for events at once: a longer one shows that this process was stopped."""

RATES = ("matmul_rate", "copy_bandwidth", "matmul_sm_clock")
"""Measurements of a device, taken by the first trial of a round that times passes."""

RETRY_FACTOR, RETRY_MIN_BYTES, RETRY_SHARE = 4, 2 * 2**30, 0.9
"""Memory of a retry: the budget times this, or plus this; at most this share of free memory."""


@dataclass(eq=False)
class _Child:
    """A running child process."""

    process: BaseProcess
    pipe: Connection
    output: OutputFile


@LAUNCHERS.register("local")
class LocalLauncher(Launcher):
    """Launcher for one host: every rank is a child of a fork server.

    context: the multiprocessing context that starts children; a subclass may set another one.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, LOADED])
        self._catalogue: Catalogue | None = None
        self._rates: dict[Hashable, dict[str, float]] = {}

    @override
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        if self._catalogue is None or own:
            try:
                self._catalogue = Catalogue.model_validate(
                    self._request("catalogue", own=list(own))
                )
            except LauncherError as error:
                while_importing = f"; it was to import {', '.join(own)}" if own else ""
                raise LauncherError(f"{error}{while_importing}") from None
        return self._catalogue

    @override
    def check(self, trials: Sequence[Trial]) -> None:
        # one trial per combination: lengths, budgets and rounds do not change the answer
        same = Trial.model_fields.keys() - {"implementation", "options", "workload", "world_size"}
        distinct = {t.key_without("seq_len", *sorted(same)): t for t in trials}
        for problem in self._request("check", list(distinct.values())):
            raise UserError(problem)

    @override
    def dry_run(
        self,
        trials: Sequence[Trial],
        limit: float = DRY_RUN_LIMIT_S,
        capability: tuple[int, int] | None = None,
    ) -> list[DryRunEstimate]:
        try:
            answers = self._request("dry_run", trials, limit, capability=capability)
        except LauncherError as error:
            # an implementation that crashes or hangs does so in a dry run too
            last = str(error).split(": ", 1)[-1]
            reason = f"the dry run died, or did not end within {limit:.0f} s ({last})"
            return [DryRunEstimate(unsupported=reason)] * len(trials)
        return [DryRunEstimate.model_validate(answer) for answer in answers]

    @override
    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        outcome, signal_number = self._attempt(trial, on_phase)
        first, attempts = None, 1
        if failed_by_device(outcome) or is_environment_failure(outcome):
            first, attempts = outcome, 2
            outcome, signal_number = self._attempt(trial, on_phase)
        if trial.memory_budget and may_be_out_of_memory(outcome, signal_number):
            outcome, retries = self._retry_with_more_memory(trial, outcome, on_phase)
            attempts += retries
        outcome = with_first_attempt(outcome, first) if first else outcome
        rates = self._rates.setdefault(_device_of(trial), {})
        self.profile = "" if "profile" in outcome.facts else self.profile
        if outcome.status == "ok" and "throttled" not in outcome.facts:
            rates |= {m.name: m.samples[0] for m in outcome.measurements if m.name in RATES}
        return LaunchResult(outcome, attempts * trial.world_size)

    def of_run(self, trial: Trial) -> dict[str, Any]:
        """Return what the run of the tool has for a trial's RankInfo."""
        return {"rates": self._rates.get(_device_of(trial), {}), "profile": self.profile}

    def _retry_with_more_memory(
        self, trial: Trial, first: Outcome, on_phase: OnPhase
    ) -> tuple[Outcome, int]:
        """Run a failed trial again with more memory: out of memory if it passes, else as it was.

        Fused kernels do not check every allocation, so lack of memory can crash them or make their
        output wrong. The second run is complete, timed passes included: it passes only if they do.
        An output that stays wrong has another cause, so its reason does not name the memory.
        A crash must also repeat with the memory as it was, because a signal may come from outside.
        Returns the outcome and the number of runs.
        """
        assert trial.memory_budget
        larger = max(RETRY_FACTOR * trial.memory_budget, trial.memory_budget + RETRY_MIN_BYTES)
        if trial.device == "cpu":
            available = int(psutil.virtual_memory().available * RETRY_SHARE / trial.world_size)
            larger = max(trial.memory_budget, min(larger, available))
        retry, _ = self._attempt(trial.replace(memory_budget=larger), on_phase)
        if retry.status == first.status == "wrong":
            return first, 1
        if retry.status != "ok":
            reason = f"{first.reason}; with {format_bytes(larger)} it ended with {retry.status} too"
            return first.model_copy(update={"reason": reason}), 1
        retries = 1
        if first.status == "crashed":
            retries = 2
            again, _ = self._attempt(trial, on_phase)
            if again.status == "ok":
                reason = f"{first.reason}; a second process passed with the same memory"
                return first.model_copy(update={"reason": reason}), retries
        reason = (
            f"{first.reason} under {format_bytes(trial.memory_budget)}, passes under "
            f"{format_bytes(larger)}: an unchecked allocation failed"
        )
        return first.model_copy(update={"status": "oom", "reason": reason}), retries

    def _request(
        self, request: str, trials: Sequence[Trial] = (), limit: float = PHASE_LIMIT_S, **data: Any
    ) -> Any:
        """Return a child's answer to a request with this data.

        Raises LauncherError if no answer arrives in time.
        """
        data["trials"] = [trial.model_dump(mode="json") for trial in trials]
        children, message = list[_Child](), None
        try:
            child = self._start(children, request, json.dumps(data))
            end = time.monotonic() + limit
            while child.pipe.poll(max(0.0, end - time.monotonic())):
                message = fork_server.receive(child.pipe)
                if message is None or "answer" in message:
                    break
            is_late = time.monotonic() >= end
        finally:
            with defer_interrupts():
                outputs = _end(children, children if message else [])
        if message and "answer" in message:
            return message["answer"]
        code = child.process.exitcode or 0
        last = f"it was killed by {signal_name(-code)}" if code < 0 else "it printed nothing"
        last, *_ = outputs[0].strip().splitlines()[-1:] or [last]
        last = f"it did not answer within {limit:.0f} s" if is_late else last
        raise LauncherError(f"a child process can't be started here: {last}")

    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        """Run the ranks once. Returns the outcome, and the signal that killed the blamed rank."""
        supervisor = RankSupervisor(trial, time.monotonic())
        children: list[_Child] = []
        try:
            self._start_ranks(trial, children)
            _follow(supervisor, children, on_phase)
            if supervisor.is_late(time.monotonic()):
                pids = {rank: children[rank].process.pid or 0 for rank in supervisor.running}
                samples = sample_processes(pids, trial.world_size > 1, trial.device)
                outputs = {rank: children[rank].output for rank in pids}
                supervisor.diagnose(
                    samples, read_stacks(pids, outputs) if supervisor.is_hang(samples) else {}
                )
        finally:
            running = supervisor.running
            reported = [child for rank, child in enumerate(children) if rank not in running]
            with defer_interrupts():
                _end(children, reported)
        return supervisor.outcome(time.monotonic()), supervisor.signal_number

    def _start_ranks(self, trial: Trial, children: list[_Child]) -> None:
        """Start a child for every rank."""
        size, of_run = trial.world_size, self.of_run(trial)
        listener = create_server(("127.0.0.1", 0), backlog=size) if size > 1 else None
        try:
            port = listener.getsockname()[1] if listener else 0
            for rank in range(size):
                place = {"rank": rank, "size": size, "local_rank": rank, "port": port} | of_run
                payload = json.dumps({"trial": trial.model_dump(mode="json"), "place": place})
                self._start(children, "trial", payload, None if rank else listener)
        finally:
            if listener:
                listener.close()

    def _start(
        self, children: list[_Child], request: str, payload: str, listener: socket | None = None
    ) -> _Child:
        """Start a child and add it to `children`; Ctrl-C is deferred until then."""
        fork_server.ready()
        with defer_interrupts():
            output = OutputFile()
            receiver, sender = self.context.Pipe(duplex=False)
            arguments = (request, payload, sender, output, listener)
            process = self.context.Process(target=_child_entry.enter, args=arguments)
            try:
                fork_server.start(process)
            except LauncherError:
                output.close()
                raise
            finally:
                sender.close()
            children.append(_Child(process, receiver, output))
        return children[-1]


def _device_of(trial: Trial) -> Hashable:
    """Return a key that is equal for trials with the same rates of their devices."""
    # each round anew, since other work may slow one measurement; a row has the largest
    return trial.device, trial.workload.dtype, trial.world_size, trial.threads, trial.round


def _follow(supervisor: RankSupervisor, children: Sequence[_Child], on_phase: OnPhase) -> None:
    """Pass events to the supervisor until the trial is done or late. Progress is that of rank 0."""
    kills_before = kernel_kills()
    while not supervisor.is_done(time.monotonic()):
        running = [(rank, children[rank]) for rank in supervisor.running]
        handles = [handle for _, c in running for handle in (c.pipe, c.process.sentinel)]
        start_s = time.monotonic()
        timeout_s = min(WAIT_S, max(0.0, supervisor.deadline - start_s))
        ready = wait(handles, timeout=timeout_s)
        supervisor.add_wait(timeout_s, time.monotonic() - start_s)
        if not ready and supervisor.is_late(time.monotonic()):
            return
        for rank, child in running:
            if child.pipe in ready and (message := fork_server.receive(child.pipe)):
                supervisor.add_message(rank, message, time.monotonic())
                if "phase" in message and rank == 0:
                    on_phase(message["phase"], message["part"])
            elif child.pipe in ready or child.process.sentinel in ready:
                at = time.time_ns()
                fork_server.end(child.process, GRACE_S)
                now, code = time.monotonic(), child.process.exitcode or 0
                killed = kernel_kills() > kills_before
                supervisor.add_exit(rank, code, child.output.tail(), killed, now, at)


def _end(children: Sequence[_Child], reported: Sequence[_Child]) -> list[str]:
    """Wait for the children that reported, kill the others, and all that they left behind.

    Returns the end of each child's output.
    """
    for child in children:
        child.pipe.close()
    for child in children:
        if child not in reported:
            fork_server.end(child.process)
    end = time.monotonic() + GRACE_S
    for child in reported:
        fork_server.end(child.process, max(0.0, end - time.monotonic()))
    kill_orphans()
    outputs = [child.output.tail() for child in children]
    for child in children:
        child.output.close()
    return outputs
