"""The ranks of one host, started by torch's elastic agent, as torchrun starts them.

The agent meets the agents of the other hosts, forks the ranks from this process (which has torch
loaded), and ends all of them when one dies. Each rank reads its place from the environment, like
any process of torchrun, and reports to the host's parent over a pipe that it inherits.

Different from torch's defaults: no folder of logs, no look-up of host names (ten seconds each
without a name server), and a short wait for the other agents at the end (instead of five minutes).
"""

import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed.elastic.agent.server.api as agents
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from longseq_bench.core.cluster_env import LOOPBACK, RankInfo
from longseq_bench.core.crash_stacks import write_stacks
from longseq_bench.core.model import Trial
from longseq_bench.core.stack_markers import longseq_child_main
from longseq_bench.worker.main import run_rank
from longseq_bench.worker.messages import MessageSender

MONITOR_S = 0.05
EXIT_BARRIER_S = 2.0
"""Seconds that an agent waits for the other hosts' agents after its own ranks have ended."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def run_agent(
    job_json: str,
    events: Connection,
    pipes: list[Connection],
    outputs: list[int],
    temporary: str,
) -> None:
    """Start this host's ranks and return when they have ended.

    It sends over `events`:

    {"started": [pid, ...]}                        the ranks run: all hosts are connected
    {"exit": -9, "local_rank": 1, "at": 17...}     a rank ended; when it was seen, ns since 1970
    {"failed": "..."}                              the ranks could not be started
    {"failed": "...", "environment": true}         a signal ended the agent

    Args:
        job_json: a HostJob of launchers/host_agent.py.
        events: to the parent.
        pipes: for the messages of each rank.
        outputs: the file descriptor that each rank prints to.
        temporary: the parent's folder for temporary files. torch makes a file for the errors of
            each rank; if this process is killed, a later run deletes it with the folder.
    """
    job = json.loads(job_json)
    tempfile.tempdir = temporary
    _silence_logging()
    _select_interface(job["address"])
    # number the ranks host by host, without asking the other hosts for their number of ranks
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    handler = _Rendezvous(
        job["host"], job["port"], job["node"], job["nodes"], job["run_id"],
        math.ceil(job["timeout_s"]),
    )  # fmt: skip
    spec = WorkerSpec(
        role="rank", local_world_size=job["ranks_per_node"], rdzv_handler=handler,
        entrypoint=_run_rank, args=(json.dumps(job["trial"]), events, pipes, outputs),
        max_restarts=0, monitor_interval=MONITOR_S,
        master_addr=job["host"], master_port=job["port"], local_addr=job["address"],
    )  # fmt: skip
    agent = _Agent(spec, events, pipes)
    try:
        agent.run()
    except SignalException as signalled:
        name = signal.Signals(signalled.sigval).name
        agent.send({"failed": f"torch's agent was ended by {name}", "environment": True})
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        agent.send({"failed": f"{type(error).__name__}: {first}"})


class _Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, but its store listens at one address instead of all."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and not self._store:
            family = socket.AF_INET6 if ":" in self.master_addr else socket.AF_INET
            listener = socket.create_server((self.master_addr, self.master_port), family=family)
            self._store = TCPStore(
                self.master_addr, self.master_port, self.world_size, True, self.timeout,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return super().next_rendezvous()


class _Agent(LocalElasticAgent):
    """torch's agent; it also reports to the parent which ranks started, and how each one ended."""

    def __init__(self, spec: WorkerSpec, events: Connection, pipes: Sequence[Connection]) -> None:
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        super().__init__(spec, logs, start_method="fork", exit_barrier_timeout=EXIT_BARRIER_S)
        self._events, self._pipes = events, pipes
        # ranks whose end is not reported yet, by local rank
        self._pids: dict[int, int] = {}

    def send(self, message: dict[str, Any]) -> None:
        self._events.send_bytes(json.dumps(message).encode())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # ranks begin with the agent's handlers, which raise: signals wait until they have their own
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for pipe in self._pipes:
            pipe.close()
        self._pids = dict(sorted(pids.items()))
        self.send({"started": list(self._pids.values())})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report the ranks that ended, then let torch check them. Called every MONITOR_S.

        The order matters. When torch finds a dead rank, it reaps it, so that its exit code is no
        longer known here, and ends the others, whose ends are consequences.
        """
        for local_rank, pid in list(self._pids.items()):
            # WNOWAIT: leave it for torch to reap
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                is_exit = found.si_code == os.CLD_EXITED
                self._report_exit(local_rank, found.si_status if is_exit else -found.si_status)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            # the one that torch found dead first: it may have died since the check above
            causes = {failure.local_rank for failure in result.failures.values()}
            context: Any = self._pcontext
            for local_rank in sorted(self._pids, key=lambda rank: rank not in causes):
                self._report_exit(local_rank, context._pc.processes[local_rank].exitcode)
        return result

    def _report_exit(self, local_rank: int, code: int) -> None:
        del self._pids[local_rank]
        self.send({"exit": code, "local_rank": local_rank, "at": time.time_ns()})


def _run_rank(
    trial: str, events: Connection, pipes: Sequence[Connection], outputs: list[int]
) -> None:
    """Run one rank, forked from the agent: as `main.serve`, with its place in the environment."""
    tempfile.tempdir = None  # caches, such as the compiler's, outlive the parent's folder
    try:
        place = _place_of_rank()
        _become_a_child(outputs[place.local_rank])
        events.close()
        for other, pipe in enumerate(pipes):
            if other != place.local_rank:
                pipe.close()
        sender = MessageSender(pipes[place.local_rank])
        outcome = longseq_child_main(run_rank, Trial.model_validate_json(trial), place, sender)
        sender.send_outcome(outcome)
        if outcome.status == "ok":
            sender.wait_until_closed()
            return
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # exit at once, because peers wait at open connections; and with code 0, because at any other
    # the agent would kill the peers before they report
    os._exit(0)


def _place_of_rank() -> RankInfo:
    """Return the place that torch's agent wrote into the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    rank, size, local_rank, local_ranks, port = (int(os.environ[name]) for name in names)
    store_is_up = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"]
    return RankInfo(rank, size, local_rank, address, port, store_is_up, local_ranks)


def _become_a_child(output: int) -> None:
    """Undo the agent's signal handlers, end with the agent, and print to the rank's own file."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    write_stacks()


def _silence_logging() -> None:
    """Skip torch's log format, which takes 0.9 s to import, and look-ups of the host's name."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
    logging.root.handlers[:] = [logging.StreamHandler()]
    agents._get_fq_hostname = socket.gethostname
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def _select_interface(address: str) -> None:
    """Make gloo use the interface with this address.

    By default gloo uses the address of the host's name, which often is the loopback.
    """
    if address != LOOPBACK:
        for name, addresses in psutil.net_if_addrs().items():
            if address in [one.address for one in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
